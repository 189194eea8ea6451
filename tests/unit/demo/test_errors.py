"""The text that the demo prints if a package is missing."""

from __future__ import annotations

from pathlib import Path
from typing import NoReturn

import pytest
import typer

from magnetar.demo import __main__ as demo
from magnetar.demo.flights import FlightsMissing


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
