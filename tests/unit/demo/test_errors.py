"""The text that the demo prints if a package is missing, or if the picture cannot be written."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any, NoReturn

import pytest
import typer
from typer.testing import CliRunner

from magnetar.demo import __main__ as demo
from magnetar.demo.delays import Delays
from magnetar.demo.flights import FlightsMissing
from magnetar.demo.hours import WATERMARK_FLIGHTS, YEAR_DAYS
from magnetar.spark.pipelines import incremental


def test_the_advice_names_the_package_with_its_extra(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Square brackets are markup for the console."""

    def load_flights(limit: int | None) -> NoReturn:
        raise FlightsMissing

    monkeypatch.setattr(demo, "load_flights", load_flights)
    with pytest.raises(typer.Exit):
        demo.main(None, Path("delays.png"))
    assert "pip install 'magnetar[demo]'" in capsys.readouterr().out


def test_a_picture_that_cannot_be_written_fails_the_demo_after_its_results(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    hours = {("AA", 0): Delays(1, 1, 1)}
    found = SimpleNamespace(hours=hours, messages=0, equals=lambda file: True)
    archived = SimpleNamespace(new=0, compared=[])
    monkeypatch.setattr(demo, "create_namespace", lambda url: None)
    monkeypatch.setattr(demo, "stream_delays", lambda *_, **given: found)
    monkeypatch.setattr(demo, "hours_in_file", lambda table: {})
    monkeypatch.setattr(incremental, "archive_new", lambda *_, **given: archived)
    server: Any = SimpleNamespace(ports={"http": 1, "grpc": 2})
    nothing: Any = []
    picture = tmp_path / "missing" / "delays.png"
    assert demo._stream(nothing, server, tmp_path, nothing, picture) is False
    assert "no picture" in capsys.readouterr().out


def test_the_fewest_flights_give_results_of_the_streaming_query() -> None:
    watermark_days = YEAR_DAYS * WATERMARK_FLIGHTS // demo.FLIGHTS_MIN + 1
    assert watermark_days < YEAR_DAYS * 3 / 4 + 1
    result = CliRunner().invoke(_app(), ["--flights", "3000"])
    assert result.exit_code == 2
    assert str(demo.FLIGHTS_MIN) in result.output


def _app() -> typer.Typer:
    app = typer.Typer()
    app.command()(demo.main)
    return app
