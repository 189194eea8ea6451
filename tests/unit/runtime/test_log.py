"""Logs: JSON lines when configured, plain logging when not."""

from __future__ import annotations

import io
import json
import logging
import subprocess
import sys
from typing import TYPE_CHECKING, Any

from magnetar.runtime.log import configure_logging, get_logger

if TYPE_CHECKING:
    import pytest


def lines(stream: io.StringIO) -> list[dict[str, Any]]:
    return [json.loads(line) for line in stream.getvalue().splitlines()]


def test_a_line_is_one_json_object_with_the_fields() -> None:
    stream = io.StringIO()
    configure_logging(stream=stream)
    get_logger("magnetar.broker").info("topic opened", topic="t\n1", epoch=3, reason=KeyError("x"))
    (line,) = lines(stream)
    assert line.pop("timestamp").endswith("Z")
    assert line == {
        "event": "topic opened",
        "level": "info",
        "logger": "magnetar.broker",
        "topic": "t\n1",
        "epoch": 3,
        "reason": "'x'",
    }


def test_a_traceback_is_a_field_of_the_same_line() -> None:
    stream = io.StringIO()
    configure_logging(stream=stream)
    try:
        raise ZeroDivisionError("secret local values stay out")
    except ZeroDivisionError as error:
        get_logger("x").error("failed", exc_info=error)
    (line,) = lines(stream)
    assert line["exception"].startswith("Traceback")
    assert line["exception"].endswith("ZeroDivisionError: secret local values stay out")


def test_other_libraries_lines_look_the_same() -> None:
    stream = io.StringIO()
    configure_logging(stream=stream)
    logging.getLogger("grpc").warning("lost %s", "connection")
    (line,) = lines(stream)
    assert (line["event"], line["level"], line["logger"]) == (
        "lost connection",
        "warning",
        "grpc",
    )


def test_retries_of_libraries_are_logged_only_at_level_debug() -> None:
    for level, heard in (("INFO", ["died"]), ("DEBUG", ["again", "died"])):
        stream = io.StringIO()
        configure_logging(stream=stream, level=level)
        logging.getLogger("kazoo.client").warning("again")
        logging.getLogger("kazoo.client").error("died")
        assert [line["event"] for line in lines(stream)] == heard


def test_a_level_below_the_limit_is_not_written() -> None:
    stream = io.StringIO()
    configure_logging(stream=stream, level="WARNING")
    get_logger("x").info("quiet")
    get_logger("x").warning("loud")
    assert [line["event"] for line in lines(stream)] == ["loud"]


def test_a_terminal_gets_colour() -> None:
    stream = io.StringIO()
    configure_logging(stream=stream, colour=True)
    get_logger("x").info("hello", port=1)
    assert "\x1b[" in stream.getvalue()
    assert "hello" in stream.getvalue()


def test_a_terminal_line_quotes_values_and_appends_the_traceback() -> None:
    stream = io.StringIO()
    configure_logging(stream=stream, colour=True)
    get_logger("x").error("failed", exc_info=KeyError("k"), topic="a\x1b[2J b", port=1)
    first, *rest = stream.getvalue().splitlines()
    assert first.endswith(r"topic='a\x1b[2J b' port=1")
    assert rest == ["KeyError: 'k'"]


def test_configuring_logs_imports_only_the_standard_library() -> None:
    script = (
        "import sys, magnetar.runtime.log as log; log.configure_logging();"
        " log.get_logger('x').info('hello');"
        " print([name for name in ('structlog', 'rich', 'grpc') if name in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "[]"


def test_configuring_again_replaces_the_handlers(capsys: pytest.CaptureFixture[str]) -> None:
    first, second = io.StringIO(), io.StringIO()
    configure_logging(stream=first)
    configure_logging(stream=second)
    get_logger("x").info("once")
    assert first.getvalue() == ""
    assert len(lines(second)) == 1


def test_an_application_with_its_own_logging_sees_plain_lines(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with caplog.at_level(logging.INFO):
        get_logger("magnetar.client").info("connected", broker="b1", tries=2)
    assert caplog.messages == ["connected broker=b1 tries=2"]
    assert caplog.records[0].funcName == "test_an_application_with_its_own_logging_sees_plain_lines"
