"""The operating errors of this package.

`definite` says of each whether what failed has certainly had no effect. Reading has none, so here
it says whether trying again is pointless.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

if TYPE_CHECKING:
    from pathlib import Path


class SparkError(Exception):
    """Something a user of the connector can act on."""

    definite: ClassVar[bool] = True


class InvalidOption(SparkError):
    """An option of `spark.read.format("magnetar")` that is unknown, missing or impossible."""

    def __init__(self, option: str, reason: str) -> None:
        super().__init__(f"option {option!r}: {reason}")
        self.option = option
        self.reason = reason

    def __reduce__(self) -> tuple[type[InvalidOption], tuple[str, str]]:
        return type(self), (self.option, self.reason)


class InvalidSchema(SparkError):
    """A schema given by the user names what a topic does not have."""

    def __init__(self, column: str, reason: str) -> None:
        super().__init__(f"column {column!r}: {reason}")
        self.column = column
        self.reason = reason

    def __reduce__(self) -> tuple[type[InvalidSchema], tuple[str, str]]:
        return type(self), (self.column, self.reason)


class TopicNotFound(SparkError):
    """Nobody has ever written to this topic or subscribed to it."""

    def __init__(self, topic: str) -> None:
        super().__init__(f"there is no topic {topic}: nothing was ever published to it")
        self.topic = topic

    def __reduce__(self) -> tuple[type[TopicNotFound], tuple[str]]:
        return type(self), (self.topic,)


class ReadRefused(SparkError):
    """The broker says that what was planned cannot be read: it is gone, or was never there."""

    def __init__(self, topic: str, ledger: int, entry: int, reason: str) -> None:
        super().__init__(f"{topic}, entry {ledger}:{entry}: {reason}")
        self.topic = topic
        self.ledger = ledger
        self.entry = entry
        self.reason = reason

    def __reduce__(self) -> tuple[type[ReadRefused], tuple[str, int, int, str]]:
        return type(self), (self.topic, self.ledger, self.entry, self.reason)


class UnreadableEntry(ReadRefused):
    """An entry came whole but cannot be turned into rows: damaged, encrypted, or of a kind that is
    not supported."""


class OutOfOrder(ReadRefused):
    """A broker sent something else than the entry that follows."""


class ReadStalled(SparkError):
    """No broker could be reached, or none served the topic, for the whole of `readTimeoutMs`."""

    definite = False

    def __init__(self, topic: str, waited_s: float, reason: str) -> None:
        super().__init__(f"{topic}: nothing came for {waited_s:.1f} s; last failure: {reason}")
        self.topic = topic
        self.waited_s = waited_s
        self.reason = reason

    def __reduce__(self) -> tuple[type[ReadStalled], tuple[str, float, str]]:
        return type(self), (self.topic, self.waited_s, self.reason)


class JavaMissing(SparkError):
    """Spark runs on Java, and there is none."""

    def __init__(self, home: str = "") -> None:
        found = f"JAVA_HOME is {home}, and has no bin/java" if home else "no `java` on the PATH"
        super().__init__(
            f"Spark needs Java 17 or newer: {found}. On Debian and Ubuntu: apt-get install"
            " openjdk-17-jre-headless"
        )


class SparkMissing(SparkError):
    """PySpark is not installed."""

    def __init__(self, reason: str) -> None:
        super().__init__(f"PySpark is not installed ({reason}): pip install 'magnetar[spark]'")
        self.reason = reason


class JobFailed(SparkError):
    """Spark gave a job up. The reason is the first that it names."""

    definite = False


class TargetNotEmpty(SparkError):
    """An archive is there already, or something else is."""

    def __init__(self, path: Path) -> None:
        super().__init__(f"{path} is not empty; to replace an archive there, say --overwrite")
        self.path = path


class TargetBusy(SparkError):
    """Another run is writing the same archive."""

    definite = False

    def __init__(self, path: Path) -> None:
        super().__init__(f"another run is writing the archive {path}: wait for it, or stop it")
        self.path = path


class TargetForeign(SparkError):
    """What is there is not an archive, so it is never replaced."""

    def __init__(self, path: Path, reason: str) -> None:
        super().__init__(f"{path} is not replaced: {reason}")
        self.path = path
        self.reason = reason
