"""Structured logs on the standard library's `logging`.

A server or a command configures its logs once. An application that uses the client has its own
configuration of `logging`.
"""

from __future__ import annotations

import json
import logging
import sys
from datetime import UTC, datetime
from typing import Any, Final, TextIO

# These libraries log each attempt: some twenty lines before one error of Magnetar. Magnetar logs
# the outcome.
_TALKATIVE: Final = {"kazoo": logging.ERROR, "py4j": logging.WARNING}

_EVENT = "magnetar_event"  # attributes of a log record
_FIELDS = "magnetar_fields"

_RESET: Final = "\x1b[0m"
_BOLD: Final = "\x1b[1m"
_DIM: Final = "\x1b[2m"
_COLOURS: Final = {
    logging.DEBUG: _DIM,
    logging.INFO: "\x1b[32m",  # green
    logging.WARNING: "\x1b[33m",  # yellow
    logging.ERROR: "\x1b[31m",  # red
    logging.CRITICAL: "\x1b[31m",
}
_EVENT_COLUMNS: Final = 30  # the fields of most lines then begin in the same column


class Logger:
    """Logs an event and its fields: `log.info("listening", port=6650)`.

    An event is a constant text; variable values go into fields. The record goes to the standard
    library's logger of the same name, as text `listening port=6650`.
    """

    def __init__(self, name: str) -> None:
        self._logger = logging.getLogger(name)

    def debug(self, event: str, **fields: object) -> None:
        self._log(logging.DEBUG, event, None, fields)

    def info(self, event: str, **fields: object) -> None:
        self._log(logging.INFO, event, None, fields)

    def warning(self, event: str, **fields: object) -> None:
        self._log(logging.WARNING, event, None, fields)

    def error(self, event: str, *, exc_info: BaseException | None = None, **fields: object) -> None:
        """`exc_info` adds the traceback of an unexpected error."""
        self._log(logging.ERROR, event, exc_info, fields)

    def _log(
        self, level: int, event: str, exc_info: BaseException | None, fields: dict[str, object]
    ) -> None:
        if not self._logger.isEnabledFor(level):
            return
        line = " ".join([event, *(f"{key}={value}" for key, value in fields.items())])
        extra = {_EVENT: event, _FIELDS: fields}
        self._logger.log(level, "%s", line, exc_info=exc_info, extra=extra, stacklevel=3)


def get_logger(name: str) -> Logger:
    """Return the logger of a module: `log = get_logger(__name__)`."""
    return Logger(name)


def configure_logging(
    *, level: str = "INFO", stream: TextIO | None = None, colour: bool | None = None
) -> None:
    """Send all logs of this process to `stream` (default: standard error).

    Lines on a terminal are coloured text. Elsewhere each line is one JSON object: the fields of the
    event, `event`, `level`, `logger`, `timestamp` (ISO 8601, UTC), and `exception` if there is a
    traceback. `colour` overrides the check for a terminal. Of libraries that log each attempt, only
    problems are logged, unless `level` is DEBUG. Only a main program may call this function: it
    replaces all existing handlers.
    """
    stream = sys.stderr if stream is None else stream
    colour = stream.isatty() if colour is None else colour
    handler = logging.StreamHandler(stream)
    handler.setFormatter(_TerminalFormatter() if colour else _JsonFormatter())
    root = logging.getLogger()
    for old in root.handlers[:]:
        root.removeHandler(old)
    root.addHandler(handler)
    root.setLevel(level)
    for name, least in _TALKATIVE.items():
        logging.getLogger(name).setLevel(logging.NOTSET if level == "DEBUG" else least)


_ENCODE: Final = json.JSONEncoder(default=str).encode


class _JsonFormatter(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, Any] = {
            **_fields(record),
            "event": _event(record),
            "level": record.levelname.lower(),
            "logger": record.name,
            "timestamp": _timestamp(record),
        }
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return _ENCODE(line)


class _TerminalFormatter(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        colour = _COLOURS.get(record.levelno, "")
        level = f"{colour}{record.levelname.lower():<8}{_RESET}"
        event = f"{_BOLD}{_event(record):<{_EVENT_COLUMNS}}{_RESET}"
        fields = " ".join(f"{key}={_shown(value)}" for key, value in _fields(record).items())
        line = f"{_DIM}{_timestamp(record)}{_RESET} {level} {event} {fields}".rstrip()
        if record.exc_info:
            line = f"{line}\n{self.formatException(record.exc_info)}"
        return line


def _event(record: logging.LogRecord) -> str:
    """Return the event of a record of Magnetar, or the whole message of a record of a library."""
    event: str | None = getattr(record, _EVENT, None)
    return record.getMessage() if event is None else event


def _fields(record: logging.LogRecord) -> dict[str, object]:
    fields: dict[str, object] = getattr(record, _FIELDS, {})
    return fields


def _timestamp(record: logging.LogRecord) -> str:
    at = datetime.fromtimestamp(record.created, UTC)
    return at.isoformat(timespec="microseconds").removesuffix("+00:00") + "Z"


def _shown(value: object) -> str:
    """Return the value as text, quoted if the text is empty or has spaces or control characters."""
    text = str(value)
    return text if text.isprintable() and " " not in text and text else repr(text)
