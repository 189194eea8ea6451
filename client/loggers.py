"""The parameter `logger=` of a client: the destination of the client's logs.

The client logs through Python's `logging`, below the logger `magnetar.client`. As in Apache's
client, the parameter applies to all clients of the process: the newest client's logger is used.
"""

from __future__ import annotations

import logging
import sys
from typing import Final

from magnetar.client.enums import NamedEnum
from magnetar.client.errors import WrongType

LOGGER_NAME: Final = "magnetar.client"


class LoggerLevel(NamedEnum):
    """The lowest level that a logger writes."""

    Debug = 0
    Info = 1
    Warn = 2
    Error = 3


class ConsoleLogger:
    """Writes the logs of the client to standard output.

    `log_level`: the lowest level that the logger writes.
    """

    def __init__(self, log_level: LoggerLevel = LoggerLevel.Info) -> None:
        _check("log_level", log_level, LoggerLevel)
        self.log_level = log_level


class FileLogger:
    """Appends the logs of the client to a file.

    `log_level`: the lowest level that the logger writes. `log_file`: the path of the file.
    """

    def __init__(self, log_level: LoggerLevel, log_file: str) -> None:
        _check("log_level", log_level, LoggerLevel)
        _check("log_file", log_file, str)
        self.log_level = log_level
        self.log_file = log_file


ClientLogger = logging.Logger | ConsoleLogger | FileLogger


def install(logger: ClientLogger | None) -> None:
    """Send the logs of all clients to `logger`. None changes nothing.

    Raises OSError if the log file cannot be opened.
    """
    if logger is None:
        return
    handler, level = _handler(logger)
    ours = logging.getLogger(LOGGER_NAME)
    for old in [it for it in ours.handlers if isinstance(it, _Chosen)]:
        ours.removeHandler(old)
        old.close()
    ours.addHandler(_Chosen(handler))
    ours.propagate = False
    ours.setLevel(level)


class _Chosen(logging.Handler):
    """The handler that a client installed. Other handlers belong to the program."""

    def __init__(self, target: logging.Handler | logging.Logger) -> None:
        super().__init__()
        self._target = target

    def emit(self, record: logging.LogRecord) -> None:
        self._target.handle(record)

    def close(self) -> None:
        if isinstance(self._target, logging.Handler):
            self._target.close()
        super().close()


def _handler(logger: ClientLogger) -> tuple[logging.Handler | logging.Logger, int]:
    if isinstance(logger, logging.Logger):
        return logger, logger.getEffectiveLevel()
    handler: logging.Handler
    if isinstance(logger, FileLogger):
        handler = logging.FileHandler(logger.log_file)
    else:
        handler = logging.StreamHandler(sys.stdout)
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)-5s %(name)s | %(message)s"))
    return handler, _LEVELS[logger.log_level]


def _check(name: str, value: object, kind: type) -> None:
    if not isinstance(value, kind):
        raise WrongType(f"{name} must be {kind.__name__}, not {type(value).__name__}")


_LEVELS: Final = {
    LoggerLevel.Debug: logging.DEBUG,
    LoggerLevel.Info: logging.INFO,
    LoggerLevel.Warn: logging.WARNING,
    LoggerLevel.Error: logging.ERROR,
}
