"""The core of a producer: it sends messages and handles receipts.

The publisher stays usable when the topic moves to another broker. It gathers messages in batches
(batching.py) and encodes each batch as an entry. It keeps the entries in order until their receipts
arrive (pending.py). After every reconnection, it sends the pending entries again in the same order.
The asyncio and the synchronous producer (producer.py, sync.py) wrap a publisher. They call its
methods on the event loop only.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict, deque
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Final, Protocol

from magnetar.client.asking import asking
from magnetar.client.cipher import TAG_BYTES, sealer_of
from magnetar.client.errors import (
    AlreadyClosed,
    ChecksumError,
    ConnectError,
    CryptoError,
    Interrupted,
    MessageTooBig,
    NotAllowedError,
    ProducerBlockedQuotaExceededException,
    PulsarException,
    Timeout,
    ends_producer,
    from_server_error,
    without_frames,
)
from magnetar.client.guard import end_after_bug, guarded, guarding
from magnetar.client.ids import partition_of
from magnetar.client.message import MessageId
from magnetar.client.options import BatchingType, ProducerOptions
from magnetar.client.producing.batching import BatchBuilder, Done
from magnetar.client.producing.chunked import ChunkedSend
from magnetar.client.producing.pending import PendingEntries, PendingEntry, ReceiptOutOfOrder
from magnetar.client.producing.statistics import (
    ProducerStatistics,
    SendCounter,
    statistics_of,
)
from magnetar.client.schema.wire import wire_schema
from magnetar.client.session.pool import Purpose
from magnetar.protos import pulsar_pb2 as pb
from magnetar.protos.compression import Compression
from magnetar.protos.entry import MESSAGE_BYTES_MAX
from magnetar.protos.errors import EntryTooLarge
from magnetar.protos.framing import send_header
from magnetar.protos.message import (
    EntryHeader,
    OutgoingMessage,
    encode_batch,
    encode_chunks,
    encode_message,
)
from magnetar.protos.names import Domain, TopicName
from magnetar.runtime.log import get_logger

if TYPE_CHECKING:
    from collections.abc import Sequence

    from magnetar.client.environment import Parts
    from magnetar.client.session.connection import Connection

log = get_logger(__name__)

EMPTIED_ENTRIES_MAX: Final = 1000
"""The maximum number of entries that timed out and whose receipts the broker still owes. Above this
limit, the producer attaches again: the broker will probably not answer these entries later."""


class OwningProducer(Protocol):
    """The producer that wraps a publisher and limits the pending messages."""

    def on_released(self, messages: int, message_bytes: int) -> None:
        """Release messages whose outcome the publisher is about to report."""

    def on_burst_end(self) -> None:
        """The publisher has reported all outcomes that it knows now."""


class Publisher:
    """The core of one producer. `open` attaches it to a broker."""

    def __init__(self, topic: str, options: ProducerOptions, parts: Parts) -> None:
        self.topic = topic
        self._partition = partition_of(topic)
        self.name = options.producer_name or ""  # "": the broker will choose the name
        self.producer: OwningProducer  # set once by the producer that wraps this object
        self._options = options
        self.pending_bytes_max = parts.pending_bytes_max
        self.pending_messages_max = options.pending_messages_max()
        self._parts = parts
        self._loop = asyncio.get_running_loop()
        self._now_ms = parts.clock.now_ms
        self._attachment = parts.attachment(self, Purpose.PUBLISH)
        self._task: asyncio.Task[None] | None = None  # None: not opened
        self._builder = _builder(options)
        # No chunks on a non-persistent topic: it may drop single entries, and a message that lacks
        # a chunk is lost.
        domain = TopicName.parse(topic).domain
        self._splits = options.chunking_enabled and domain is Domain.PERSISTENT
        self._pending = PendingEntries()
        # Messages submitted before the first attachment, which tells the producer its name and its
        # sequence ids.
        self._early: deque[_Early] = deque()
        # The time limit of the early message that `attach` is accepting. None: no early message, or
        # no time limit.
        self._early_due_at: float | None = None
        self._timeout_s = options.send_timeout_millis / 1000 or None
        self._compression = Compression(options.compression_type)
        self._header = EntryHeader("", 0)
        self._sealer = sealer_of(options)
        self.counter = SendCounter()
        self._schema_version: bytes | None = None  # None: the broker named no version
        initial = options.initial_sequence_id
        self._next_sequence_id = 0 if initial is None else initial + 1
        self._last_sequence_id = self._next_sequence_id - 1
        self._epoch = 0
        self._topic_epoch: int | None = None  # None: no exclusive access in this cluster so far
        self._connection: Connection | None = None  # None: not attached
        self._producer_id = 0
        self._was_attached = False
        self._moved = False  # the client has moved to another cluster since the last attachment
        self._message_bytes_max = MESSAGE_BYTES_MAX
        self._failure: PulsarException | None = None  # None: the publisher accepts messages
        self._over = asyncio.Event()
        self._flushes: OrderedDict[_Flush, None] = OrderedDict()  # the calls of flush() that wait
        self._told = 0  # the number of entries whose outcome was reported
        # The error for the next flush: the first one, since the last flush, of a message that did
        # not become an entry, or the error of a cancelled flush. None: no such error.
        self._refused: PulsarException | None = None
        self._batch_timer: asyncio.TimerHandle | None = None
        self._send_timer: asyncio.TimerHandle | None = None

    async def open(self) -> None:
        """Attach for the first time. If the attachment fails, close the producer and raise the
        error."""
        self.begin()
        try:
            await self._attachment.wait_first()
        except BaseException:
            self.shut_down(AlreadyClosed("the producer was not created", topic=self.topic))
            raise

    def begin(self) -> None:
        """Begin to attach for the first time. Messages wait until the publisher is attached."""
        work = guarded(self, self._attachment.run)
        self._task = self._parts.scope.start(work, f"producer of {self.topic}")
        self._parts.live.add(self)

    @property
    def never_opened(self) -> bool:
        """True when the publisher ended before its first attachment. It accepts no messages."""
        return self._failure is not None and not self._was_attached

    # Messages

    def submit(self, message: OutgoingMessage, message_bytes: int, done: Done) -> None:
        """Accept a message, and call `done` once with its outcome.

        The caller has checked the limits of pending messages. The publisher calls `done`
        during this call only if the message fails at once.
        """
        if self._failure is not None:
            self._refuse([done], message_bytes, self._failure)
            return
        if not self._was_attached:
            self._early.append(_Early(message, message_bytes, done, self._due_at()))
            if self._send_timer is None:
                self._arm_send_timer()
            return
        self._accept(message, message_bytes, done)

    def _accept(self, message: OutgoingMessage, message_bytes: int, done: Done) -> None:
        if self._builder is None:
            self._send_alone(message, message_bytes, done)
            return
        numbered = self._builder.by_key and message.sequence_id >= 0
        if message.deliver_at_ms is not None or numbered:
            self.seal()
            self._send([message], [done], message_bytes)
            return
        for batch in self._builder.add(message, message_bytes, done, self._loop.time()):
            self._send(batch.messages, batch.dones, batch.message_bytes)
        if self._batch_timer is None:
            self._arm_batch_timer()

    def _send_alone(self, message: OutgoingMessage, message_bytes: int, done: Done) -> None:
        # After the end of the publisher, `_send` refuses a message of any size.
        splits = self._splits and not self._over.is_set()
        if splits and len(message.payload) > self._chunk_bytes_max:
            self._send_in_chunks(message, done, message_bytes)
        else:
            self._send([message], [done], message_bytes)

    def submit_entry(self, messages: list[OutgoingMessage], message_bytes: int, done: Done) -> None:
        """Accept messages that become one entry, and call `done` once with the entry's outcome.

        `done` gets the id of the first message. The caller decides which messages an entry holds.
        Spark's sink needs this: a repeated call must send the same entry. The publisher calls
        `done` during this call only if the entry fails at once. With chunking, a single message
        that is too large for an entry is sent in chunks.
        """
        self.seal()
        if self._failure is not None:
            self._refuse([done], message_bytes, self._failure, messages=len(messages))
        elif self._splits and len(messages) == 1:
            self._send_alone(messages[0], message_bytes, done)
        else:
            self._send(messages, [done], message_bytes)

    def seal(self) -> None:
        """Send the open batches now, without waiting for more messages."""
        if self._builder is not None:
            for batch in self._builder.seal():
                self._send(batch.messages, batch.dones, batch.message_bytes)

    async def flush(self) -> None:
        """Return when every message submitted so far is stored.

        Raises the first error of a message that had no outcome when the call began, or that was
        refused since the last flush. Raises the error that ended the publisher, because messages
        may have failed with it.
        """
        error = await self.flushed()
        if error is not None:
            self.leave(error, raised=True)
            raise error.error

    async def flushed(self) -> FlushError | None:
        """Like `flush`, but return the first error of a message. The caller must pass the error to
        `leave`."""
        if self._failure is not None and self._was_attached:
            raise without_frames(self._failure)
        return await self._flush()

    def leave(self, error: FlushError, *, raised: bool) -> None:
        """End a call of `flush` that got this error. `raised`: the call raises an error; False: it
        was cancelled. The next flush raises the error if no call has raised it or still can."""
        error.flushes -= 1
        error.is_raised = error.is_raised or raised
        if error.flushes == 0 and not error.is_raised:
            self._refused = error.error

    async def _flush(self) -> FlushError | None:
        if self._early:  # early messages become entries with the first attachment
            await self._attachment.wait_first()
        self.seal()
        refused, self._refused = self._refused, None
        flush = _Flush(self._pending.appended, self._loop.create_future())
        if refused is not None:
            flush.fail(FlushError(refused))
        if self._pending.reported < self._pending.appended:
            self._flushes[flush] = None
            try:
                await flush.done
            except asyncio.CancelledError:  # leave the error to another call of flush()
                if flush.failure is not None:
                    self.leave(flush.failure, raised=False)
                raise
            finally:
                self._flushes.pop(flush, None)  # only a cancelled call is still there
        return flush.failure

    async def schema_version_of(self, schema: pb.Schema) -> bytes:
        """Return the version of a schema on the topic. The broker adds the schema if the topic does
        not have it.

        Raises IncompatibleSchema and the other refusals of the broker, and Timeout.
        """
        return await asking(partial(self._ask_schema_version, schema), self._parts, self.topic)

    async def _ask_schema_version(self, schema: pb.Schema) -> bytes:
        await self._attachment.wait_attached()
        connection = self._connection
        if connection is None:
            raise ConnectError("the producer is not attached", topic=self.topic)
        command = pb.CommandGetOrCreateSchema(
            topic=self.topic, schema=schema, producerName=self.name
        )
        answer = await connection.request(command, pb.CommandGetOrCreateSchemaResponse)
        if answer.HasField("error_code"):
            raise from_server_error(
                answer.error_code, answer.error_message, topic=self.topic, broker=connection.broker
            )
        return answer.schema_version

    async def close(self) -> None:
        """Accept no more messages, wait for the pending receipts, and close the producer.

        Raises Timeout if receipts or the broker's answer are missing after
        `operation_timeout_seconds`. The messages without a receipt then fail with Interrupted,
        because the broker may have stored them.
        """
        if self._failure is not None:
            await self._over.wait()  # another task is closing the producer
            return
        self.seal()
        self._failure = AlreadyClosed("the producer was closed", topic=self.topic)
        try:
            async with asyncio.timeout(self._parts.timeout_s):
                failed = await self._flushed_before_close()
                if failed is not None:
                    # The senders of these messages already got this error.
                    log.info("messages failed before close", topic=self.topic, error=str(failed))
                await self._say_goodbye()
        except TimeoutError:
            missing = self._early or self._pending.reported < self._pending.appended
            what = "receipts are" if missing else "the answer to the request to close is"
            reason = f"{what} missing after {self._parts.timeout_s:g} s"
            raise Timeout(reason, topic=self.topic) from None
        finally:
            self.shut_down(self._failure)

    async def _flushed_before_close(self) -> PulsarException | None:
        """Wait until all messages have outcomes. Returns the first error; None: no error."""
        try:
            error = await self._flush()
        except PulsarException as failure:  # the first attachment failed
            return failure
        if error is None:
            return None
        self.leave(error, raised=True)
        return error.error

    def statistics(self) -> ProducerStatistics:
        """Return what the publisher has counted, without rates."""
        return statistics_of([self.counter])

    def shut_down(self, error: PulsarException) -> None:
        """Close the producer at once. Messages without a receipt fail with Interrupted."""
        self._parts.live.discard(self)
        self._failure = self._failure or error
        self._attachment.close(error)
        if self._task is not None:
            self._task.cancel()
        if self._connection is not None:
            self._let_go(self._connection, self._producer_id)
        self._detach(error)
        reason = f"no receipt arrived before the end: {error.reason}"
        self._abandon(Interrupted(reason, topic=self.topic))
        self._over.set()

    @property
    def is_attached(self) -> bool:
        return self._connection is not None

    @property
    def awaits_receipts(self) -> bool:
        """True while the broker owes receipts."""
        return self._pending.awaits_receipts

    @property
    def last_sequence_id(self) -> int:
        """The sequence id of the last stored message. Before the first one: the initial id, or the
        last id that the broker has stored for the producer's name; -1: there is none."""
        return self._last_sequence_id

    # The attachment

    async def attach(self, connection: Connection) -> None:
        producer_id = next(self._parts.ids)
        connection.add_producer(producer_id, self)
        try:
            answer = await connection.request(
                self._create_command(producer_id),
                pb.CommandProducerSuccess,
                on_queued=self._attachment.wait_without_limit,
            )
            connection.check_holds(producer_id)
        except asyncio.CancelledError:  # the broker may still create the producer
            self._let_go(connection, producer_id)
            raise
        except PulsarException as error:
            connection.remove_producer(producer_id)
            if isinstance(error, ProducerBlockedQuotaExceededException):
                self._fail_pending(error)
            raise
        self._on_created(answer)
        self._was_attached = True
        self._connection, self._producer_id = connection, producer_id
        self._message_bytes_max = connection.max_message_bytes
        for entry in self._pending.on_attached():
            self._transmit(entry)
        if self._builder is not None:
            for batch in self._builder.limit(self._message_bytes_max):
                self._send(batch.messages, batch.dones, batch.message_bytes)
        early, self._early = self._early, deque()
        for one in early:
            self._early_due_at = one.due_at
            self._accept(one.message, one.message_bytes, one.done)
        if early:
            self.seal()
        self._early_due_at = None

    def is_final(self, error: PulsarException) -> bool:
        return ends_producer(error)

    def on_failed(self, error: PulsarException) -> None:
        self._parts.live.discard(self)
        self._failure = self._failure or error
        self._abandon(error)
        self._over.set()

    # The connection

    def on_receipts(
        self, sequence_ids: Sequence[int], ledger_id: int, entry_ids: Sequence[int]
    ) -> None:
        answered = self._pending.on_receipts(sequence_ids)
        if len(answered) < len(sequence_ids):
            try:
                self._pending.on_receipt(sequence_ids[len(answered)])
            except ReceiptOutOfOrder as error:
                self._recycle(ConnectError(str(error), topic=self.topic))
        self._on_stored(
            [
                (entry, entry_id)
                for entry, entry_id in zip(answered, entry_ids, strict=False)
                if entry is not None
            ],
            ledger_id,
        )

    def _on_stored(self, stored: Sequence[tuple[PendingEntry, int]], ledger_id: int) -> None:
        if not stored:
            return
        self._attachment.trouble = None
        self._told += len(stored)
        self._last_sequence_id = stored[-1][0].highest_sequence_id
        messages = sum([entry.reserved for entry, _ in stored])
        self._release(messages, sum([entry.message_bytes for entry, _ in stored]))
        now = self._loop.time()
        # `_on_all_chunks` counts the messages in chunks.
        self.counter.messages_stored += sum(
            [entry.reserved for entry, _ in stored if not entry.is_chunk]
        )
        self.counter.latencies_s.extend([now - entry.sent_at for entry, _ in stored])
        partition, topic = self._partition, self.topic
        for entry, entry_id in stored:
            if not entry.is_batch:
                message_id = MessageId(partition, ledger_id, entry_id, -1, 0, topic)
                entry.dones[0](None, message_id)
                continue
            size = entry.messages
            for index, done in enumerate(entry.dones):
                done(None, MessageId(partition, ledger_id, entry_id, index, size, topic))

    def on_send_error(self, sequence_id: int, error: PulsarException) -> None:
        error.topic = self.topic
        if ends_producer(error):
            self._detach(error)
            self._attachment.lost(error)
        elif isinstance(error, (NotAllowedError, ChecksumError)):
            try:
                entry = self._pending.on_receipt(sequence_id)
            except ReceiptOutOfOrder as disorder:
                self._recycle(ConnectError(str(disorder), topic=self.topic))
                return
            if entry is not None:
                self._report(entry, error)
        else:
            self._recycle(error)

    def on_closed_by_broker(self, assigned_url: str | None) -> None:
        error = ConnectError("the broker closed the producer", topic=self.topic)
        self._detach(error)
        self._attachment.lost(error, assigned_url)

    def on_moved(self) -> None:
        """Note a move to another cluster, which has its own sequence ids and epochs."""
        self._moved = True
        self._topic_epoch = None

    def on_disconnected(self, error: PulsarException) -> None:
        self._detach(error)
        self._attachment.lost(error)

    def on_frame_end(self) -> None:
        self._settle_flushes()
        self.producer.on_burst_end()

    # Sending

    def _send(self, messages: list[OutgoingMessage], dones: list[Done], message_bytes: int) -> None:
        """Encode messages as one entry, append it to the queue, and send it if attached.

        If a batch is too large, send its halves: the builder knows only the approximate size of
        the encoded batch.
        """
        # A bug in an earlier batch of the same call may have ended the publisher.
        if self._over.is_set() and self._failure is not None:
            self._refuse(dones, message_bytes, self._failure, messages=len(messages))
            return
        self._number(messages)
        try:
            parts = self._encode(messages)
        except (MessageTooBig, CryptoError) as error:
            if isinstance(error, MessageTooBig) and len(dones) > 1:
                half, half_bytes = len(messages) // 2, message_bytes // 2
                self._send(messages[:half], dones[:half], half_bytes)
                self._send(messages[half:], dones[half:], message_bytes - half_bytes)
                return
            self._refuse(dones, message_bytes, error, messages=len(messages))
            return
        except Exception as bug:  # no batch and no queue holds the messages: report them here
            self._refuse(dones, message_bytes, end_after_bug(self, bug), messages=len(messages))
            return
        self._append(
            PendingEntry(
                messages[0].sequence_id,
                messages[-1].sequence_id,
                len(messages) > 1,
                parts,
                dones,
                len(messages),
                message_bytes,
                self._due_at(),
            )
        )

    def _due_at(self) -> float | None:
        """Return the time limit of a message that is accepted now. None: no limit."""
        if self._early_due_at is not None:
            return self._early_due_at
        return self._timeout_s and self._loop.time() + self._timeout_s

    def _number(self, messages: Sequence[OutgoingMessage]) -> None:
        """Assign sequence ids to the messages that have none.

        Call this in the order of the entries. If the ids of two batches with different keys
        interleaved, deduplication would take the second batch for a duplicate.
        """
        for message in messages:
            if message.sequence_id < 0:
                message.sequence_id = self._next_sequence_id
                self._next_sequence_id += 1

    def _append(self, entry: PendingEntry) -> None:
        entry.sent_at = self._loop.time()
        self.counter.on_sent(entry.reserved, sum(map(len, entry.parts)))
        self._pending.append(entry)
        if self._pending.attached:
            self._transmit(entry)
        if self._send_timer is None and self._timeout_s is not None:
            self._arm_send_timer()

    def _send_in_chunks(self, message: OutgoingMessage, done: Done, message_bytes: int) -> None:
        """Send a message that is larger than the limit of an entry: one entry for each chunk.

        If the compressed message fits into one entry, send it as an ordinary entry.
        """
        self._number([message])
        number, due_at = message.sequence_id, self._due_at()
        try:
            chunks = list(
                encode_chunks(
                    message,
                    self._fresh_header(),
                    uuid=f"{self.name}-{number}",
                    chunk_bytes_max=self._chunk_bytes_max,
                )
            )
        except EntryTooLarge as error:
            self._refuse(
                [done], message_bytes, MessageTooBig(error.size, error.limit, topic=self.topic)
            )
            return
        except CryptoError as error:
            self._refuse([done], message_bytes, error)
            return
        except Exception as bug:  # no batch and no queue holds the message: report it here
            self._refuse([done], message_bytes, end_after_bug(self, bug))
            return
        whole = ChunkedSend(partial(self._on_all_chunks, done))
        dones = [done] if len(chunks) == 1 else [whole.add() for _ in chunks]
        for index, parts in enumerate(chunks):
            is_last = index == len(chunks) - 1
            self._append(
                PendingEntry(
                    number,
                    number,
                    False,
                    parts,
                    [dones[index]],
                    1,
                    message_bytes if is_last else 0,
                    due_at,
                    reserved=int(is_last),
                    is_chunk=len(chunks) > 1,
                )
            )

    def _on_all_chunks(
        self, done: Done, error: PulsarException | None, message_id: MessageId | None
    ) -> None:
        """Count and report the outcome of a message in chunks: all are stored, or one failed."""
        if error is None:
            self.counter.messages_stored += 1
        else:
            self.counter.messages_failed += 1
        done(error, message_id)

    @property
    def _chunk_bytes_max(self) -> int:
        return self._message_bytes_max - (0 if self._sealer is None else TAG_BYTES)

    def _encode(self, messages: Sequence[OutgoingMessage]) -> list[bytes]:
        """Encode an entry. A single message is not a batch, so that consumers parse less."""
        header = self._fresh_header()
        try:
            if len(messages) == 1:
                parts = encode_message(messages[0], header)
            else:
                parts = encode_batch(messages, header)
        except EntryTooLarge as error:
            raise MessageTooBig(error.size, error.limit, topic=self.topic) from None
        if len(parts[-1]) > self._message_bytes_max:
            raise MessageTooBig(len(parts[-1]), self._message_bytes_max, topic=self.topic)
        return parts

    def _fresh_header(self) -> EntryHeader:
        now_ms = self._now_ms()
        if self._sealer is not None:
            self._sealer.begin(self._loop.time())
        if self._header.publish_time_ms != now_ms:
            seal = None if self._sealer is None else self._sealer.seal
            self._header = EntryHeader(
                self.name, now_ms, self._compression, self._schema_version, seal=seal
            )
        return self._header

    def _transmit(self, entry: PendingEntry) -> None:
        assert self._connection is not None
        header = send_header(
            producer_id=self._producer_id,
            sequence_id=entry.sequence_id,
            num_messages=entry.messages,
            highest_sequence_id=entry.highest_sequence_id if entry.is_batch else 0,
            entry_size=sum(map(len, entry.parts)),
            is_chunk=entry.is_chunk,
        )
        entry.was_sent = True
        self._connection.send_entry(header, *entry.parts)

    def _arm_batch_timer(self) -> None:
        seal_at = self._builder.timer_at() if self._builder is not None else None
        if seal_at is not None:
            self._batch_timer = self._loop.call_at(seal_at, guarding(self, self._on_batch_timer))

    def _on_batch_timer(self) -> None:
        """Send the open batches if one is due. The timer may have been set for an earlier batch."""
        self._batch_timer = None
        assert self._builder is not None
        seal_at = self._builder.timer_at()
        if seal_at is not None and seal_at <= self._loop.time():
            self.seal()
        else:
            self._arm_batch_timer()

    # Outcomes

    def _arm_send_timer(self) -> None:
        expire_at = self._early[0].due_at if self._early else self._pending.timer_at()
        if expire_at is not None:
            self._send_timer = self._loop.call_at(expire_at, guarding(self, self._on_send_timer))

    def _on_send_timer(self) -> None:
        self._send_timer = None
        now = self._loop.time()
        while self._early and (due_at := self._early[0].due_at) is not None and due_at <= now:
            one = self._early.popleft()
            self._refuse([one.done], one.message_bytes, self._no_receipt())
        for entry in self._pending.expire(now):
            self._report(entry, self._no_receipt())
        self._settle_flushes()
        self.producer.on_burst_end()
        self._bound_emptied()
        self._arm_send_timer()

    def _no_receipt(self) -> Timeout:
        """Return the error of a message whose time limit passed, with the last known cause."""
        text = f"no receipt within {self._timeout_s:g} s"
        trouble = self._attachment.trouble
        last = "" if trouble is None else f"; last: {trouble.reason or type(trouble).__name__}"
        if self._connection is None:
            return Timeout(f"{text}: no broker accepts the producer{last}", topic=self.topic)
        broker = self._connection.broker
        return Timeout(f"{text}: the broker does not answer{last}", topic=self.topic, broker=broker)

    def _bound_emptied(self) -> None:
        """Limit the timed-out entries whose receipts are missing.

        The limits of pending messages do not count these entries, so their number could grow
        without limit. If the broker does not read, the client ends the connection and makes a new
        one. If the broker owes more than EMPTIED_ENTRIES_MAX receipts, the producer attaches again.
        With fewer missing receipts, the producer waits, because a new attachment sends the pending
        entries again and the broker may store them twice.
        """
        if self._connection is None:
            return
        unread = self._connection.unsent_bytes
        if min(unread, self._pending.emptied_bytes) >= self.pending_bytes_max:
            self._connection.give_up(f"the broker does not read: {unread} bytes are unsent")
        elif self._pending.emptied > EMPTIED_ENTRIES_MAX:
            reason = f"the broker owes more than {EMPTIED_ENTRIES_MAX} receipts"
            self._recycle(Timeout(reason, topic=self.topic))

    def _refuse(
        self, dones: list[Done], message_bytes: int, error: PulsarException, *, messages: int = 1
    ) -> None:
        """Fail messages that do not become an entry."""
        self.counter.messages_sent += messages
        self._refused = self._refused or error
        self._tell(dones, messages, message_bytes, error)
        self.producer.on_burst_end()

    def _report(self, entry: PendingEntry, error: PulsarException) -> None:
        failure = FlushError(error)
        for flush in self._flushes:
            if self._told < flush.target and flush.failure is None:
                flush.fail(failure)
        self._told += 1
        if entry.is_chunk:  # `_on_all_chunks` counts the message
            self._release(entry.reserved, entry.message_bytes)
            entry.dones[0](error, None)
        else:
            self._tell(entry.dones, entry.reserved, entry.message_bytes, error)

    def _tell(
        self, dones: list[Done], reserved: int, message_bytes: int, error: PulsarException
    ) -> None:
        self._release(reserved, message_bytes)
        self.counter.messages_failed += reserved
        for done in dones:
            done(error, None)

    def _release(self, messages: int, message_bytes: int) -> None:
        self.producer.on_released(messages, message_bytes)

    def _abandon(self, error: PulsarException) -> None:
        """Fail all remaining messages."""
        if self._builder is not None:
            for batch in self._builder.seal():
                self.counter.messages_sent += len(batch.dones)
                self._tell(batch.dones, len(batch.dones), batch.message_bytes, error)
        early, self._early = self._early, deque()
        for one in early:
            self.counter.messages_sent += 1
            self._tell([one.done], 1, one.message_bytes, error)
        for entry in self._pending.abandon():
            self._report(entry, error)
        self._settle_flushes()
        self.producer.on_burst_end()
        for timer in (self._batch_timer, self._send_timer):
            if timer is not None:
                timer.cancel()

    def _fail_pending(self, error: PulsarException) -> None:
        """Fail the pending entries. The producer stays usable.

        An entry that was sent on an earlier connection may be stored: its outcome is unknown.
        """
        unknown = Interrupted(f"no receipt before the error: {error.reason}", topic=self.topic)
        for entry in self._pending.abandon():
            self._report(entry, unknown if entry.was_sent else error)
        self.on_frame_end()

    def _settle_flushes(self) -> None:
        while self._flushes:
            flush = next(iter(self._flushes))
            if flush.target > self._pending.reported:
                return
            del self._flushes[flush]
            if not flush.done.done():  # done: the call of flush() was cancelled
                flush.done.set_result(None)

    # Attaching

    def _create_command(self, producer_id: int) -> pb.CommandProducer:
        properties = self._options.properties or {}
        epoch, self._epoch = self._epoch, self._epoch + 1
        return pb.CommandProducer(
            topic=self.topic,
            producer_id=producer_id,
            producer_name=self.name or None,
            user_provided_producer_name=self._options.producer_name is not None,
            epoch=epoch,
            topic_epoch=self._topic_epoch,
            producer_access_mode=pb.ProducerAccessMode.ValueType(self._options.access_mode),
            metadata=[pb.KeyValue(key=key, value=value) for key, value in properties.items()],
            initial_subscription_name=self._options.initial_subscription_name,
            stops_at_refusal=self._options.stops_at_refusal or None,
            schema=wire_schema(self._options.schema),
        )

    def _on_created(self, answer: pb.CommandProducerSuccess) -> None:
        if self._epoch == 1 or not self.name:
            self.name = answer.producer_name
        self._schema_version = answer.schema_version or None
        self._header = EntryHeader("", 0)
        if answer.HasField("topic_epoch"):
            self._topic_epoch = answer.topic_epoch
        nowhere = -1
        stored = self._pending.on_stored(answer.last_sequence_id)
        if self._moved:  # the answer tells nothing about entries sent to the former cluster
            self._moved = False
            self._next_sequence_id = max(self._next_sequence_id, answer.last_sequence_id + 1)
            reason = "the cluster that the client moved to has stored higher sequence ids"
            for entry in stored:
                self._report(entry, Interrupted(reason, topic=self.topic))
        else:
            self._on_stored([(entry, nowhere) for entry in stored], nowhere)
        self.on_frame_end()
        fresh = self._last_sequence_id == -1 and self._pending.appended == 0
        if fresh and answer.last_sequence_id > -1:
            self._last_sequence_id = answer.last_sequence_id
            self._next_sequence_id = answer.last_sequence_id + 1

    def _recycle(self, error: PulsarException) -> None:
        """Close the producer at the broker, and attach again."""
        if self._connection is not None:
            self._let_go(self._connection, self._producer_id)
        self._detach(error)
        self._attachment.lost(error)

    def _detach(self, error: PulsarException) -> None:
        if self._connection is not None:
            log.info("producer detached", topic=self.topic, reason=str(error))
            self._connection.remove_producer(self._producer_id)
            self._connection = None
        self._pending.on_detached()

    def _let_go(self, connection: Connection, producer_id: int) -> None:
        """Close a producer at the broker without waiting for the answer.

        Until the broker has closed the producer, it can answer ProducerBusy to a new attachment.
        The attachment then tries again.
        """
        connection.remove_producer(producer_id)
        connection.ask(pb.CommandCloseProducer(producer_id=producer_id), lambda _: None)

    async def _say_goodbye(self) -> None:
        if self._task is not None:
            self._task.cancel()  # the producer must not attach again during the wait
        if self._connection is None:
            return
        command = pb.CommandCloseProducer(producer_id=self._producer_id)
        with suppress(PulsarException):  # the broker does not know the producer, or is gone
            await self._connection.request(command, pb.CommandSuccess)
        self._detach(AlreadyClosed("the producer was closed", topic=self.topic))


@dataclass(slots=True)
class _Early:
    """A message submitted before the first attachment."""

    message: OutgoingMessage
    message_bytes: int
    done: Done
    due_at: float | None  # None: no time limit


@dataclass(slots=True, eq=False)
class _Flush:
    """A call of flush(). It waits until the outcomes of `target` entries are reported."""

    target: int
    done: asyncio.Future[None]
    failure: FlushError | None = None  # None: all entries so far were stored

    def fail(self, failure: FlushError) -> None:
        self.failure = failure
        failure.flushes += 1


@dataclass(slots=True, eq=False)
class FlushError:
    """An error of calls of flush(). All calls that fail with it share this object."""

    error: PulsarException
    flushes: int = 0  # the calls under way
    is_raised: bool = False  # a call has raised the error


def _builder(options: ProducerOptions) -> BatchBuilder | None:
    if not options.batching_enabled:
        return None
    return BatchBuilder(
        messages_max=options.batching_max_messages,
        bytes_max=options.batching_max_allowed_size_in_bytes,
        batch_bytes_max=MESSAGE_BYTES_MAX,
        delay_s=options.batching_max_publish_delay_ms / 1000,
        by_key=options.batching_type == BatchingType.KeyBased,
    )
