"""The operating errors of this package.

`definite` says whether the failed operation certainly had no effect. A read never has an effect:
for a read, `definite` says that another attempt would fail in the same way.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

if TYPE_CHECKING:
    from pathlib import Path


class SparkError(Exception):
    """The base class of the connector's errors. Each error tells the user what to change."""

    definite: ClassVar[bool] = True


class InvalidOption(SparkError):
    """An option of the source or the sink is unknown, missing or invalid."""

    def __init__(self, option: str, reason: str) -> None:
        super().__init__(f"option {option!r}: {reason}")
        self.option = option
        self.reason = reason

    def __reduce__(self) -> tuple[type[InvalidOption], tuple[str, str]]:
        return type(self), (self.option, self.reason)


class InvalidSchema(SparkError):
    """A column of the schema that the user gave, or of the rows to write, is not valid."""

    def __init__(self, column: str, reason: str) -> None:
        super().__init__(f"column {column!r}: {reason}")
        self.column = column
        self.reason = reason

    def __reduce__(self) -> tuple[type[InvalidSchema], tuple[str, str]]:
        return type(self), (self.column, self.reason)


class TopicNotFound(SparkError):
    """A topic to read does not exist."""

    def __init__(self, topic: str) -> None:
        super().__init__(f"topic {topic} does not exist: check its name, or publish to it first")
        self.topic = topic

    def __reduce__(self) -> tuple[type[TopicNotFound], tuple[str]]:
        return type(self), (self.topic,)


class InvalidOffsets(SparkError):
    """A checkpoint holds offsets that this source did not write."""

    def __init__(self, reason: str) -> None:
        super().__init__(f"the checkpoint holds offsets that this source did not write: {reason}")
        self.reason = reason

    def __reduce__(self) -> tuple[type[InvalidOffsets], tuple[str]]:
        return type(self), (self.reason,)


class DataLost(SparkError):
    """Messages that the query has not read were deleted. `failOnDataLoss` is true."""

    def __init__(self, topic: str, what: str) -> None:
        super().__init__(
            f"{topic}: {what}; set failOnDataLoss to false to continue without these messages, and"
            " keep unread messages with the option subscription or a retention policy"
        )
        self.topic = topic
        self.what = what

    def __reduce__(self) -> tuple[type[DataLost], tuple[str, str]]:
        return type(self), (self.topic, self.what)


class QueryFenced(SparkError):
    """A newer query holds the subscription of this query."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason

    def __reduce__(self) -> tuple[type[QueryFenced], tuple[str]]:
        return type(self), (self.reason,)


class ReadRefused(SparkError):
    """The broker refuses to read planned entries, or a whole topic: then `ledger` and `entry` are
    -1."""

    def __init__(self, topic: str, ledger: int, entry: int, reason: str) -> None:
        place = topic if entry < 0 else f"{topic}, entry {ledger}:{entry}"
        super().__init__(f"{place}: {reason}")
        self.topic = topic
        self.ledger = ledger
        self.entry = entry
        self.reason = reason

    def __reduce__(self) -> tuple[type[ReadRefused], tuple[str, int, int, str]]:
        return type(self), (self.topic, self.ledger, self.entry, self.reason)


class EntriesDeleted(ReadRefused):
    """Planned entries were deleted, with their ledger or their topic."""


class UnreadableEntry(ReadRefused):
    """The connector cannot convert an entry to rows: it is damaged, encrypted or not supported."""


class BadRecord(UnreadableEntry):
    """The payload of a message does not fit valueFormat or valueSchema; the mode is failfast."""


class OutOfOrder(ReadRefused):
    """A broker sent an entry that is not the next one in order."""


class ReadStalled(SparkError):
    """No broker was reachable or served the topic within `readTimeoutMs`."""

    definite = False

    def __init__(self, topic: str, waited_s: float, reason: str) -> None:
        super().__init__(f"{topic}: no data for {waited_s:.1f} s; last failure: {reason}")
        self.topic = topic
        self.waited_s = waited_s
        self.reason = reason

    def __reduce__(self) -> tuple[type[ReadStalled], tuple[str, float, str]]:
        return type(self), (self.topic, self.waited_s, self.reason)


class RowRefused(SparkError):
    """The sink cannot write a row as it is. `row` counts the rows of one task from 0."""

    def __init__(self, partition: int, row: int, column: str, reason: str) -> None:
        super().__init__(f"row {row} of partition {partition}, column {column!r}: {reason}")
        self.partition = partition
        self.row = row
        self.column = column
        self.reason = reason

    def __reduce__(self) -> tuple[type[RowRefused], tuple[int, int, str, str]]:
        return type(self), (self.partition, self.row, self.column, self.reason)


class WriteRefused(SparkError):
    """A broker refuses to take messages for a topic."""

    def __init__(self, topic: str, reason: str) -> None:
        super().__init__(f"{topic}: {reason}")
        self.topic = topic
        self.reason = reason

    def __reduce__(self) -> tuple[type[WriteRefused], tuple[str, str]]:
        return type(self), (self.topic, self.reason)


class DeduplicationOff(WriteRefused):
    """The sink must write exactly once, but the topic's brokers do not drop duplicates."""

    def __init__(self, topic: str, reason: str = "") -> None:
        super().__init__(
            topic,
            reason
            or "deliveryGuarantee dedup needs deduplication, which is off for this topic: switch it"
            " on (magnetar namespaces set-deduplication NAMESPACE --enable) or write at-least-once",
        )


class RowsChanged(WriteRefused):
    """A repeated batch holds other rows than before, or the same rows in another order. The sink
    cannot tell which of the rows are stored."""


class CheckpointRefused(WriteRefused):
    """The topic holds batches that the query's checkpoint does not contain: the checkpoint was lost
    or replaced, or is an older copy. Rows would be stored twice, or dropped as duplicates of other
    rows."""


class WriteStalled(SparkError):
    """No broker confirmed a message within `sendTimeoutMs`."""

    definite = False

    def __init__(self, topic: str, waited_s: float, reason: str) -> None:
        super().__init__(f"{topic}: no receipt for {waited_s:.1f} s; {reason}")
        self.topic = topic
        self.waited_s = waited_s
        self.reason = reason

    def __reduce__(self) -> tuple[type[WriteStalled], tuple[str, float, str]]:
        return type(self), (self.topic, self.waited_s, self.reason)


class JavaMissing(SparkError):
    """Spark needs Java, and no Java was found."""

    def __init__(self, home: str = "") -> None:
        found = f"JAVA_HOME is {home}, without bin/java" if home else "no `java` on the PATH"
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
    """A Spark job failed. The reason is the first one that Spark names."""

    definite = False


class NothingToReplay(SparkError):
    """The directory to replay has no Parquet file."""

    def __init__(self, path: Path) -> None:
        super().__init__(f"{path} has no Parquet files")
        self.path = path


class PlotMissing(SparkError):
    """Matplotlib, which draws pictures, is not installed."""

    def __init__(self) -> None:
        super().__init__("a picture needs matplotlib: pip install 'magnetar[demo]'")


class TargetNotEmpty(SparkError):
    """The target directory is not empty."""

    def __init__(self, path: Path) -> None:
        super().__init__(f"{path} is not empty; --overwrite replaces an archive there")
        self.path = path


class TargetBusy(SparkError):
    """Another run is writing the same archive."""

    definite = False

    def __init__(self, path: Path) -> None:
        super().__init__(f"another run is writing the archive {path}: wait for it, or stop it")
        self.path = path


class TargetForeign(SparkError):
    """The target is not an archive, so the command does not replace it."""

    def __init__(self, path: Path, reason: str) -> None:
        super().__init__(f"cannot replace {path}: {reason}")
        self.path = path
        self.reason = reason
