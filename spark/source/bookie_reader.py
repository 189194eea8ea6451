"""Reads sealed ledgers from their bookies, on an executor.

A task reads with `LedgerReader`, as brokers do, but without a metadata store: the plan has the
ledgers' metadata and the addresses of the bookies. The reads run on an event loop in a thread, one
for each Python process. While the task decodes one run of entries, the loop reads the next run.

The read key of the plan allows only reads, so no reader can fence a ledger. No failed read is an
error here: the task continues with the topic's owner.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import logging
import random
import threading
import time
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, TypeVar

import uvloop

from magnetar.bookie.ledger.bad_copies import BadCopies
from magnetar.bookie.ledger.config import LedgerConfig
from magnetar.bookie.ledger.connection import RemoteBookiePeer
from magnetar.bookie.ledger.errors import BookieUnavailable, EntryUnreadable
from magnetar.bookie.ledger.handle import LedgerReader
from magnetar.bookie.ledger.health import BookieHealth
from magnetar.metadata.errors import Unavailable
from magnetar.metadata.model import BookieAddress, BookieRegistration, EntryId
from magnetar.protos.envelope import BookieCode
from magnetar.spark.source.partition_reader import RangeEntry

if TYPE_CHECKING:
    from collections.abc import Coroutine, Iterator, Mapping

    from magnetar.metadata.model import LedgerId, LedgerMetadata, Member
    from magnetar.spark.planner import Span
    from magnetar.spark.sealed import Sealed

READ_BYTES: Final = 2 << 20
"""The size of one read. Two reads are in memory: the one that is decoded, and the next one."""

READ_S_MAX: Final = 15.0
"""The time limit of one read. Each of three replicas has 5 s, and these times overlap."""

AVOIDED_S: Final = 60.0
"""The time for which the process does not ask a bookie that it could not reach."""

T = TypeVar("T")

log = logging.getLogger(__name__)


class BookieReader:
    """The reads of one task. For one thread."""

    def __init__(self, sealed: Sealed, bookies: _Bookies, turn: int) -> None:
        self._sealed = sealed
        self._turn = turn
        self._bookies = bookies
        self._services = _Services(
            config=LedgerConfig(),
            records=_NoRecords(),
            directory=bookies,
            pool=bookies,
            health=BookieHealth(half_life_s=LedgerConfig().health_half_life_s),
            bad_copies=BadCopies(),
            random=random.Random(turn),
        )

    def entries(self, span: Span) -> Iterator[RangeEntry]:
        """Yield entries from the first one of the span on, in order. The iterator may end at any
        entry. The caller then reads the rest from the owner."""
        metadata = self._sealed.ledgers.get(span.ledger)
        if metadata is None or metadata.last_entry is None or span.last > metadata.last_entry:
            return
        members = metadata.segment_of(EntryId(span.first)).members
        if all(map(self._bookies.is_avoided, members)):
            return
        favourite = members[self._turn % len(members)]
        reader = LedgerReader(metadata, self._services, favourite=favourite)
        reading = _begin(reader.read(span.first, span.last, bytes_max=READ_BYTES))
        try:
            while True:
                found = reading.result(READ_S_MAX)
                following = found[-1].entry + 1
                if following <= span.last:
                    reading = _begin(reader.read(following, span.last, bytes_max=READ_BYTES))
                for entry in found:
                    yield RangeEntry(span.ledger, entry.entry, entry.payload)
                if following > span.last:
                    return
        except EntryUnreadable as error:
            self._on_unreadable(members, error)
        except concurrent.futures.TimeoutError:
            log.warning("bookies did not answer within %g s: %s", READ_S_MAX, span)
        finally:
            reading.cancel()

    def _on_unreadable(self, members: tuple[Member, ...], error: EntryUnreadable) -> None:
        log.warning("the rest is read from the topic's owner: %s", error)
        for member in members:
            if error.answers.get(member.bookie) in _UNREACHABLE:
                self._bookies.avoid(member)


@contextmanager
def reading_from_bookies(sealed: Sealed, *, turn: int) -> Iterator[BookieReader]:
    """Yield the reader of a task. Close its connections afterwards, because a bookie serves at most
    1,000 connections.

    `turn`: tasks with different numbers ask different replicas first.
    """
    bookies = _Bookies(sealed.addresses)
    try:
        yield BookieReader(sealed, bookies, turn)
    finally:
        if bookies.peers:
            _begin(bookies.close())


_UNREACHABLE: Final = frozenset({BookieCode.CONNECTION_LOST, BookieCode.TIMEOUT})


@dataclass(frozen=True, slots=True)
class _Services:
    """The services that a LedgerReader needs: ReadServices of the ledger package."""

    config: LedgerConfig
    records: _NoRecords
    directory: _Bookies
    pool: _Bookies
    health: BookieHealth
    bad_copies: BadCopies  # not reported: the bookies' own scrub finds bad copies
    random: random.Random


class _NoRecords:
    """The metadata store of an executor: it has none."""

    async def get(self, ledger: LedgerId) -> LedgerMetadata | None:
        raise Unavailable("an executor has no metadata store")


class _Bookies:
    """The bookies of a plan, and the connections of a task to them."""

    def __init__(self, addresses: Mapping[Member, str]) -> None:
        self.peers: dict[Member, RemoteBookiePeer] = {}
        self.listed = {
            member: BookieRegistration(
                bookie=member.bookie,
                incarnation=member.incarnation,
                boot_epoch=0,
                address=BookieAddress(data=address, grpc=address),  # reads use `data` only
                http_address="",
                zone="",
                read_only=False,
            )
            for member, address in addresses.items()
            if address
        }

    def peer(self, member: Member) -> RemoteBookiePeer:
        registration = self.listed.get(member)
        if registration is None or self.is_avoided(member):
            why = "it could not be reached" if registration else "the plan has no address"
            raise BookieUnavailable(member.bookie, BookieCode.CONNECTION_LOST, why)
        if member not in self.peers:
            self.peers[member] = RemoteBookiePeer(member, registration.address)
        return self.peers[member]

    def is_avoided(self, member: Member) -> bool:
        if member not in self.listed:
            return True
        return time.monotonic() < _avoided_until_s.get(self.listed[member].address.data, 0.0)

    def avoid(self, member: Member) -> None:
        if member in self.listed:
            _avoided_until_s[self.listed[member].address.data] = time.monotonic() + AVOIDED_S

    async def close(self) -> None:
        for peer in self.peers.values():
            await peer.close()


# State of this process. Spark forks its workers before they load this module.

_avoided_until_s: dict[str, float] = {}  # keyed by address; has at most one item for each bookie
_starting = threading.Lock()
_loops: list[asyncio.AbstractEventLoop] = []  # has at most one loop


def _begin(work: Coroutine[Any, Any, T]) -> concurrent.futures.Future[T]:
    """Start the work on the loop."""
    with _starting:
        if not _loops:
            _loops.append(uvloop.new_event_loop())
            threading.Thread(
                target=_loops[0].run_forever, name="magnetar-bookies", daemon=True
            ).start()
    return asyncio.run_coroutine_threadsafe(work, _loops[0])
