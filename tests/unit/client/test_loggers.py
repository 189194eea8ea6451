"""`logger=`: where the logs of the client go."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

import pytest

from magnetar.client.loggers import (
    LOGGER_NAME,
    ConsoleLogger,
    FileLogger,
    LoggerLevel,
    install,
)
from magnetar.runtime.log import get_logger

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

log = get_logger("magnetar.client.session.pool")


@pytest.fixture(autouse=True)
def restored() -> Iterator[None]:
    ours = logging.getLogger(LOGGER_NAME)
    yield
    ours.handlers.clear()
    ours.propagate = True
    ours.setLevel(logging.NOTSET)


def test_a_file_logger_writes_its_level_and_above(tmp_path: Path) -> None:
    install(FileLogger(LoggerLevel.Warn, str(tmp_path / "log")))
    log.info("too low")
    log.warning("session ended", broker="a")
    text = (tmp_path / "log").read_text()
    assert "session ended broker=a" in text
    assert "too low" not in text


def test_a_console_logger_writes_to_standard_output(capsys: pytest.CaptureFixture[str]) -> None:
    install(ConsoleLogger())
    log.info("session ended")
    log.debug("too low")
    assert "session ended" in capsys.readouterr().out


def test_a_client_without_a_logger_keeps_the_newest_one(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    install(FileLogger(LoggerLevel.Info, str(tmp_path / "log")))
    mine = logging.getLogger("mine")
    mine.setLevel(logging.INFO)
    install(mine)
    install(None)
    with caplog.at_level(logging.INFO, logger="mine"):
        log.info("session ended")
    assert caplog.messages == ["session ended"]
    assert (tmp_path / "log").read_text() == ""


def test_wrong_types_are_refused() -> None:
    with pytest.raises(ValueError, match="log_level"):
        ConsoleLogger(5)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="log_file"):
        FileLogger(LoggerLevel.Info, 5)  # type: ignore[arg-type]
