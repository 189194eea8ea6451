"""Publishes the rows of one task: a thin shell around Encoder and Cutter.

All entries go through one asyncio client. At most `pendingBytes` bytes of rows are in open entries
or wait for a receipt. A larger entry is sent when no other one waits for a receipt. The task ends
when every row has a receipt, or with the first error. After an error the task shuts the client down
at once, and the client sends nothing more. The broker stores nothing after an entry that it refused
(`stops_at_refusal`). So a topic always holds the first entries of a task, without a gap. A repeated
task gets the last stored sequence id from the broker, and continues after it.
"""

from __future__ import annotations

import asyncio
from functools import partial
from typing import TYPE_CHECKING, Final, TypeVar

from magnetar.client.asyncio import Client
from magnetar.client.enums import CompressionType
from magnetar.client.environment import Environment
from magnetar.client.errors import ProducerBusy, PulsarException, Timeout, is_retriable
from magnetar.client.options import ProducerOptions
from magnetar.client.producing.hashing import java_string_hash
from magnetar.client.producing.publisher import Publisher
from magnetar.spark.errors import (
    DeduplicationOff,
    RowsChanged,
    SparkError,
    WriteRefused,
    WriteStalled,
)
from magnetar.spark.sink.batches import Cutter, Entry
from magnetar.spark.sink.columns import Encoder, Target
from magnetar.spark.sink.identity import MESSAGE_BITS, MESSAGES_MAX
from magnetar.spark.sink.notes import Digest, behind, is_stored
from magnetar.spark.sink.options import Batching

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable

    import pyarrow as pa

    from magnetar.client.message import MessageId
    from magnetar.spark.sink.columns import Addressed
    from magnetar.spark.sink.identity import Identity
    from magnetar.spark.sink.options import WriteOptions
    from magnetar.spark.sink.policies import Policies

T = TypeVar("T")

YIELD_ROWS: Final = 500  # rows between two turns of the loop: some milliseconds
# The pause between two attempts to reach a broker or to take a producer's name.
RETRY_DELAY_S: Final = 0.2
UNLIMITED: Final = 1 << 62


class TaskWriter:
    """Writes one task. `run` is called once."""

    def __init__(
        self,
        options: WriteOptions,
        identity: Identity | None,
        partition: int,
        *,
        policies: Callable[[str], Awaitable[Policies]],
        environment: Environment | None = None,
        chunks: bool = False,
    ) -> None:
        """`identity` None: at least once. `partition`: number of the task, for errors.

        `policies` asks the owner of a topic, and raises SparkError. `chunks`: whether the task
        sends a row that is too large for one message in chunks. False: the task refuses the row.
        """
        assert identity is None or not chunks
        self._chunks = chunks
        self._options = options
        self._identity = identity
        self._policies = policies
        world = Environment(pending_bytes_max=UNLIMITED) if environment is None else environment
        self._client = Client.in_environment(
            options.access.client_options(
                options.service_url, operation_timeout_s=max(1, int(options.send_timeout_s))
            ),
            world,
        )
        topic = None if options.topic is None else str(options.topic)
        self._encoder = Encoder(topic, partition)
        self._cutter = Cutter(
            first_sequence_id=None if identity is None else identity.first_sequence_id,
            by_key=options.batching is Batching.KEY,
            open_bytes_max=options.pending_bytes // 2,
        )
        # The partitions of a topic; empty: it has none.
        self._partitions: dict[str, list[Target]] = {}
        self._among: dict[Target, int] = {}  # for a partition: the number of its topic's partitions
        self._sends: dict[Target, _Send] = {}
        self._pending_bytes = 0  # without a receipt
        self._pending_messages = 0
        self._changed = asyncio.Event()
        self._failure: SparkError | None = None
        self._is_shut_down = False
        self.skipped = 0  # messages that an earlier attempt has stored
        self.digests: dict[str, Digest] = {}  # the digest of each topic; only with an identity

    @property
    def rows(self) -> int:
        return self._encoder.rows

    async def run(self, batches: AsyncIterator[pa.RecordBatch]) -> None:
        """Write all rows. Raises SparkError."""
        try:
            async for batch in batches:
                await self._write(batch)
            for entry in self._cutter.cut_all():
                await self._submit(entry)
            await self._wait(lambda: not self._pending_messages)
        except BaseException:
            self._shut_down()
            raise
        await self._close()

    async def _write(self, batch: pa.RecordBatch) -> None:
        for at, addressed in enumerate(self._encoder.messages(batch)):
            target = addressed.target
            if target.topic not in self._partitions:
                await self._look_up(target)
            partitions = self._partitions[target.topic]
            if partitions:
                target = partitions[_partition_of(addressed, len(partitions))]
            message, size, row = addressed.message, addressed.size, addressed.row
            if row >= MESSAGES_MAX:
                raise self._encoder.refused(
                    row, "value", f"is one row too many: a task writes at most {MESSAGES_MAX}"
                )
            for entry in self._cutter.add(target, message, size, row):
                await self._submit(entry)
            if at % YIELD_ROWS == YIELD_ROWS - 1:
                await asyncio.sleep(0)

    async def _look_up(self, target: Target) -> None:
        """Find out how many partitions the topic has. Each partition becomes a separate target."""
        names = await self._insist(
            target.topic, lambda: self._client.get_topic_partitions(target.topic)
        )
        alone = names == [target.topic]
        partitions = [] if alone else [Target(name) for name in names]
        self._partitions[target.topic] = partitions
        self._among |= dict.fromkeys(partitions, len(partitions))

    async def _insist(self, topic: str, attempt: Callable[[], Awaitable[T]]) -> T:
        """Call `attempt` again while brokers restart, or while the producer of an earlier run of
        this task is connected. A broker accepts only one producer of each name at a time.

        Raises WriteStalled, WriteRefused.
        """
        loop = asyncio.get_running_loop()
        began_at = loop.time()
        while True:
            try:
                return await attempt()
            except PulsarException as error:
                if self._failure is not None:  # the failure has shut the client down
                    raise self._failure from None
                if not (isinstance(error, (ProducerBusy, Timeout)) or is_retriable(error)):
                    raise WriteRefused(topic, _reason(error)) from error
                waited_s = loop.time() - began_at
                if waited_s >= self._options.send_timeout_s:
                    raise WriteStalled(topic, waited_s, _reason(error)) from error
            await asyncio.sleep(RETRY_DELAY_S)

    async def _submit(self, entry: Entry) -> None:
        """Send an entry when there is room for it, unless it is stored already."""
        send = self._sends.get(entry.target) or await self._open(entry.target)
        if self._identity is not None:
            self.digests[entry.target.topic].add(entry.messages)
            if send.is_whole or entry.last_sequence_id <= send.stored:
                self.skipped += len(entry.messages)
                return
            if entry.first_sequence_id <= send.stored:
                raise RowsChanged(
                    entry.target.topic,
                    f"row {entry.first_row} of {self._identity.producer_name()!r}, batch"
                    f" {self._identity.batch}, begins an entry that an earlier attempt has stored"
                    " in part: the batch holds other rows than before, or in another order",
                )
            sent_bytes = self._sent_bytes_min(entry) if send.bytes_max else 0
            if sent_bytes > send.bytes_max:
                raise WriteRefused(
                    entry.target.topic,
                    f"rows {entry.first_row} to {entry.last_row} have {sent_bytes} bytes; the"
                    f" topic's limit for a message is {send.bytes_max} bytes",
                )
        most = self._options.pending_bytes
        room = most - self._cutter.open_bytes - entry.bytes
        await self._wait(lambda: not self._pending_messages or self._pending_bytes <= room)
        self._pending_bytes += entry.bytes
        self._pending_messages += len(entry.messages)
        send.publisher.submit_entry(entry.messages, entry.bytes, partial(self._on_outcome, entry))
        if self._failure is not None:
            raise self._failure

    def _sent_bytes_min(self, entry: Entry) -> int:
        """Return a lower limit of the bytes that the broker compares with the topic's limit. The
        broker compares the compressed payload, so it may refuse an entry that passes here."""
        if self._options.compression is not CompressionType.NONE:
            return 0
        return sum(len(message.payload) for message in entry.messages)

    async def _open(self, target: Target) -> _Send:
        """Attach a producer, and find out which entries an earlier attempt has stored."""
        send = _Send(await self._insist(target.topic, lambda: self._attached(target)))
        if self._identity is not None:
            policies = await self._policies(target.topic)
            if not policies.deduplication:
                raise DeduplicationOff(target.topic)
            send.bytes_max = policies.message_bytes_max
            send.stored = send.publisher.last_sequence_id
            send.is_whole = is_stored(target.topic, self._identity, policies.note)
            batch = send.stored >> MESSAGE_BITS
            if batch > self._identity.batch:
                raise behind(target.topic, self._identity, batch)
            self.digests[target.topic] = Digest()
        self._sends[target] = send
        return send

    async def _attached(self, target: Target) -> Publisher:
        name = None
        if self._identity is not None:
            name = self._identity.producer_name(self._among.get(target, 0))
        publisher = await self._client.publisher(
            ProducerOptions(
                target.topic,
                producer_name=name,
                chunking_enabled=self._chunks,
                send_timeout_millis=0,  # an entry that is given up would leave a gap
                stops_at_refusal=True,
                max_pending_messages=0,
                max_pending_messages_across_partitions=0,
                compression_type=self._options.compression,
            )
        )
        assert isinstance(publisher, Publisher), "a partition has no partitions"
        publisher.producer = _Unlimited()
        await self._client.opened(publisher)
        return publisher

    def _on_outcome(self, entry: Entry, error: PulsarException | None, _: MessageId | None) -> None:
        self._pending_messages -= len(entry.messages)
        self._pending_bytes -= entry.bytes
        self._changed.set()
        if error is not None and self._failure is None:
            rows = f"rows {entry.first_row} to {entry.last_row}" if len(entry.messages) > 1 else ""
            self._failure = (
                WriteRefused(entry.target.topic, f"{rows}: {_reason(error)}")
                if rows
                else self._encoder.refused(entry.first_row, "value", _reason(error))
            )
            # Do not wait until the task checks for a failure: it may wait for rows. On a new
            # connection the client would send the entries after the refused one.
            self._shut_down()

    async def _wait(self, until: Callable[[], bool]) -> None:
        """Wait for receipts. Raises the first failure, and WriteStalled if no receipt comes."""
        while True:
            if self._failure is not None:
                raise self._failure
            if until():
                return
            self._changed.clear()
            try:
                async with asyncio.timeout(self._options.send_timeout_s):
                    await self._changed.wait()
            except TimeoutError:
                topics = sorted({target.topic for target in self._sends})
                reason = f"{self._pending_messages} messages wait for {self._options.service_url}"
                raise WriteStalled(
                    ", ".join(topics[:3]), self._options.send_timeout_s, reason
                ) from None

    def _shut_down(self) -> None:
        # The shutdown fails the remaining entries, and their outcomes call this method again.
        if not self._is_shut_down:
            self._is_shut_down = True
            self._client.shutdown()

    async def _close(self) -> None:
        try:
            await self._client.close()
        except PulsarException:  # every row has its receipt
            self._shut_down()


class _Send:
    """A producer of this task."""

    def __init__(self, publisher: Publisher) -> None:
        self.publisher = publisher
        self.stored = -1  # the last sequence id stored under the producer's name; -1: none
        self.bytes_max = 0  # the limit of an entry's payload; 0: the limit in CONNECTED
        self.is_whole = False  # the topic holds the whole batch already


class _Unlimited:
    """The limit of a single producer: none. The task limits all its producers together."""

    def on_released(self, messages: int, message_bytes: int) -> None:
        pass

    def on_burst_end(self) -> None:
        pass


def _partition_of(addressed: Addressed, count: int) -> int:
    """The partition of a message. The key decides it, as in this client's producers. Without a key,
    the number of the row decides it, so that a repeated task chooses the same partition."""
    key = addressed.message.partition_key
    return (addressed.row if key is None else java_string_hash(key)) % count


def _reason(error: PulsarException) -> str:
    return f"{type(error).__name__}: {error}"
