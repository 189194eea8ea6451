"""Copies entries of sealed segments to one bookie.

The process reads each entry from any replica with a sound copy. It sends the entry byte for
byte, so that all copies stay equal. A bookie accepts an add with the COPY flag even if the ledger
is fenced, and the add fences nothing. The next piece is read while the previous one is sent and
stored. The bytes in flight and the rate of reading are limited.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from magnetar.bookie.ledger.errors import BookieUnavailable, EntryUnreadable
from magnetar.bookie.ledger.handle import LedgerReader
from magnetar.bookie.ledger.quorum import quorum_of
from magnetar.bookie.repair.errors import CopyFailed
from magnetar.bookie.repair.plan import COMPARED_AT_ONCE, missing, striped
from magnetar.protos.envelope import ADD, COPY, BookieCode
from magnetar.runtime.errors import StreamClosed

if TYPE_CHECKING:
    from magnetar.bookie.ledger.add_stream import AddStream
    from magnetar.bookie.ledger.quorum import Quorum
    from magnetar.bookie.ledger.reader import LedgerEntry
    from magnetar.bookie.ledger.services import Services
    from magnetar.bookie.repair.pace import Pace
    from magnetar.metadata.model import LedgerMetadata, Member

READ_BYTES_MAX: Final = 2 << 20
"""Bytes of one read: a sixtieth of a second at the full rate."""

UNANSWERED_BYTES_MAX: Final = 1 << 20
"""Bytes of one ledger in flight to the bookie. With this limit, a disk that syncs in 5 ms stores
200 MB/s. More bytes would only delay the appends of writers: with 8 MiB their median latency rises
from 4 to 50 ms, with this limit to 9 (measured)."""


@dataclass(slots=True)
class CopyProgress:
    """How far a copy has come, also when it failed."""

    following: int  # the target has the seat's entries before this one on disk
    copied_bytes: int = 0


async def copy_entries(
    metadata: LedgerMetadata,
    seat: int,
    last: int,
    target: Member,
    services: Services,
    pace: Pace,
    progress: CopyProgress,
) -> None:
    """Make `target` store durably the entries from `progress.following` to `last` that are striped
    to `seat`; they must be in one segment. Updates `progress`, also if it raises an error.

    Raises EntryUnreadable if no replica returns an entry; `target` then has the entries before it.
    Raises CopyFailed if `target` does not store them.
    """
    stream = services.pool.copies(target)
    if not await stream.connect(services.config.connect_timeout_s):
        raise CopyFailed(metadata.ledger, target.bookie, BookieCode.CONNECTION_LOST)
    reader = LedgerReader(metadata, services)
    first = progress.following
    sending = _Sending(
        metadata.ledger, stream, first, silence_max_s=2 * services.config.add_timeout_s
    )
    loop = asyncio.get_running_loop()
    try:
        async with asyncio.TaskGroup() as group:
            ahead = _ReadAhead(reader, quorum_of(metadata), seat, first, last, group)
            while (piece := await ahead.next()) is not None:
                if isinstance(piece, EntryUnreadable):
                    await sending.wait_stored()  # the entries before it
                    raise piece
                await asyncio.sleep(pace.delay_s(piece.read_bytes, loop.time()))
                for entry in piece.entries:
                    await sending.wait_room()
                    head = ADD.pack(COPY, len(entry.envelope), metadata.master_key)
                    sending.put(entry.entry, head, entry.envelope)
            await sending.wait_stored()
            progress.following = last + 1
    except BaseExceptionGroup as errors:
        raise errors.exceptions[0] from None
    finally:
        sending.end()
        progress.following = max(progress.following, sending.stored_before)
        progress.copied_bytes += sending.stored_bytes


async def first_missing(
    metadata: LedgerMetadata, seat: int, first: int, last: int, member: Member, services: Services
) -> int:
    """Return the first of the entries first..last that is striped to `seat` and that `member` does
    not list; last + 1: it lists all. An entry for which the bookie gives no answer counts as
    missing."""
    at = first
    while at <= last:
        try:
            async with asyncio.timeout(services.config.read_timeout_s):
                page = await services.pool.peer(member).list_entries(metadata.ledger, at)
        except (BookieUnavailable, StreamClosed, TimeoutError):
            return at
        found = page.runs if page.code is BookieCode.OK else ()
        held = [range(run.first, run.first + run.count) for run in found]
        end = min(last, at + COMPARED_AT_ONCE - 1)
        if page.more and held:
            end = min(end, held[-1].stop - 1)
        gaps = missing(striped(metadata, seat, at, end), held)
        if gaps:
            return gaps[0].start
        at = end + 1
    return last + 1


@dataclass(frozen=True, slots=True)
class _Piece:
    entries: list[LedgerEntry]  # the entries that are striped to the seat
    read_bytes: int  # the bytes of all entries that were read for them


class _ReadAhead:
    """The entries first..last that are striped to a seat, in pieces, with one piece read ahead.

    Entries between the seat's stripes are read too, and dropped, because one long read is cheaper
    than many short ones. Usually the gaps between the stripes are shorter than the stripes. If an
    entry in a gap cannot be read, the next read begins after the gap.
    """

    def __init__(
        self,
        reader: LedgerReader,
        quorum: Quorum,
        seat: int,
        first: int,
        last: int,
        group: asyncio.TaskGroup,
    ) -> None:
        """Begin to read, in `group`."""
        self._reader = reader
        self._quorum = quorum
        self._seat = seat
        self._last = last
        self._group = group
        self._reading = self._begin(first)

    async def next(self) -> _Piece | EntryUnreadable | None:
        """Return the next piece. None: all entries were read. EntryUnreadable: the entry after the
        last piece cannot be read, and no further call is allowed."""
        if self._reading is None:
            return None
        found = await self._reading
        if isinstance(found, EntryUnreadable):
            return found
        self._reading = self._begin(found[-1].entry + 1)
        return _Piece(
            [each for each in found if self._quorum.write_set(each.entry) >> self._seat & 1],
            sum(len(each.envelope) for each in found),
        )

    def _begin(self, entry: int) -> asyncio.Task[list[LedgerEntry] | EntryUnreadable] | None:
        at = self._quorum.run_of(self._seat, entry).start
        if at > self._last:
            return None
        return self._group.create_task(self._read(at))

    async def _read(self, at: int) -> list[LedgerEntry] | EntryUnreadable:
        """Read the entries from this one on. An error must not cancel the group, which still sends
        the entries of the previous read."""
        try:
            return await self._reader.read(at, self._last, bytes_max=READ_BYTES_MAX)
        except EntryUnreadable as error:
            return error


class _Sending:
    """An AddSink: adds of one ledger to one bookie, and their outstanding acks."""

    def __init__(self, ledger: int, stream: AddStream, first: int, *, silence_max_s: float) -> None:
        """`first`: the first entry. The entries must be sent in ascending order."""
        self.stored_bytes = 0
        self._ledger = ledger
        self._stream = stream
        self._following = first  # the entry after the last one that was sent
        self._silence_max_s = silence_max_s
        self._sizes: dict[int, int] = {}  # the sizes of entries without an ack, ascending
        self._unanswered_bytes = 0
        self._failure: CopyFailed | None = None
        self._moved = asyncio.Event()
        stream.attach(ledger, self)

    @property
    def stored_before(self) -> int:
        """All sent entries before this one are on the bookie's disk."""
        return next(iter(self._sizes), self._following)

    def put(self, entry: int, head: bytes, envelope: bytes) -> None:
        """Send an add. Raises CopyFailed."""
        if self._stream.put is None:
            self._fail(BookieCode.CONNECTION_LOST)
        if self._failure is not None:
            raise self._failure
        assert self._stream.put is not None
        assert entry >= self._following, (entry, self._following)
        self._following = entry + 1
        self._sizes[entry] = len(envelope)
        self._unanswered_bytes += len(envelope)
        self._stream.put(head, envelope)

    async def wait_room(self) -> None:
        """Wait until bytes in flight fall below the limit. Raises CopyFailed."""
        await self._wait(UNANSWERED_BYTES_MAX)

    async def wait_stored(self) -> None:
        """Wait until the bookie has all sent entries on disk. Raises CopyFailed, unless the bookie
        had acknowledged all of them before the failure."""
        await self._wait(1)

    def end(self) -> None:
        self._stream.detach(self._ledger)

    async def _wait(self, bytes_below: int) -> None:
        while self._unanswered_bytes >= bytes_below:
            if self._failure is not None:
                raise self._failure
            self._moved.clear()
            try:
                async with asyncio.timeout(self._silence_max_s):
                    await self._moved.wait()
            except TimeoutError:
                self._fail(BookieCode.TIMEOUT)

    # -- the bookie's answers (AddSink) ------------------------------------------------------------

    def on_acks(self, stream: AddStream, entries: list[int]) -> None:
        for entry in entries:
            size = self._sizes.pop(entry, 0)
            self._unanswered_bytes -= size
            self.stored_bytes += size
        self._moved.set()

    def on_add_failed(self, stream: AddStream, entry: int, code: BookieCode) -> None:
        self._fail(code)

    def on_stream(self, stream: AddStream) -> None:
        self._fail(BookieCode.CONNECTION_LOST)  # entries in flight may be lost

    def _fail(self, code: BookieCode) -> None:
        self._failure = self._failure or CopyFailed(self._ledger, self._stream.member.bookie, code)
        self._moved.set()
