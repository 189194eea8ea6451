"""Structured logs. A process configures them once; a library that uses us sees ordinary `logging`.

structlog does the formatting and is imported only by a process that configures its logs: it brings
rich with it, a tenth of a second that importing the client should not cost.
"""

from __future__ import annotations

import logging
import sys
from typing import TYPE_CHECKING, Any, Final, TextIO

if TYPE_CHECKING:
    from structlog.typing import EventDict, Processor

# Libraries that log each attempt, twenty of them before one error of ours: we log what comes of it.
_TALKATIVE: Final = {"kazoo": logging.ERROR, "py4j": logging.WARNING}

_EVENT = "magnetar_event"  # attributes of a log record
_FIELDS = "magnetar_fields"


class Logger:
    """Takes an event and its fields: `log.info("listening", port=6650)`.

    It feeds the standard library's logger of the same name, so that an application that uses the
    client decides with its own `logging` configuration what it sees: there the fields follow the
    event as `key=value`. An event is a constant text; what varies goes into fields.
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
        """`exc_info` adds that error's traceback; it is for what nobody expected."""
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
    """The logger of a module: `log = get_logger(__name__)`."""
    return Logger(name)


def configure_logging(
    *, level: str = "INFO", stream: TextIO | None = None, colour: bool | None = None
) -> None:
    """Send all logging of this process to `stream` (default: standard error), replacing what was.

    On a terminal lines are coloured, elsewhere each is one JSON object with `timestamp` (ISO 8601,
    UTC), `level`, `logger`, `event` and the event's fields; `colour` decides instead of the stream.
    Libraries that tell of each attempt are heard at level DEBUG only.
    Called by mains only, never by a library.
    """
    import structlog

    stream = sys.stderr if stream is None else stream
    colour = stream.isatty() if colour is None else colour
    renderers: list[Processor] = (
        [
            structlog.dev.ConsoleRenderer(
                colors=True, exception_formatter=structlog.dev.plain_traceback
            )
        ]
        if colour
        else [
            structlog.processors.format_exc_info,
            structlog.processors.JSONRenderer(default=str),
        ]
    )
    handler = logging.StreamHandler(stream)
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(
            foreign_pre_chain=[_fields_of_record],
            processors=[
                structlog.processors.TimeStamper(fmt="iso", utc=True),
                structlog.stdlib.ProcessorFormatter.remove_processors_meta,
                *renderers,
            ],
        )
    )
    root = logging.getLogger()
    for old in root.handlers[:]:
        root.removeHandler(old)
    root.addHandler(handler)
    root.setLevel(level)
    for name, least in _TALKATIVE.items():
        logging.getLogger(name).setLevel(logging.NOTSET if level == "DEBUG" else least)


def _fields_of_record(_logger: Any, _method: str, event: EventDict) -> EventDict:
    record: logging.LogRecord = event["_record"]
    event.update(getattr(record, _FIELDS, {}))
    event["event"] = getattr(record, _EVENT, event["event"])
    event["level"] = record.levelname.lower()
    event["logger"] = record.name
    if record.exc_info:
        event["exc_info"] = record.exc_info
    return event
