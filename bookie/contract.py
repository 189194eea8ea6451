"""The calls of the bookie contract as values, for both ends: see protos/bookie.proto.

Streams of adds and answers to reads are bytes: see magnetar.protos.envelope. Incarnations are
32 hex digits. For a former incarnation with a readable store, the bookie answers DAMAGED_STORE,
except to reads of entries that are still there. For any other incarnation it answers
WRONG_INCARNATION. Both answers mean "unknown".
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from functools import lru_cache
from hashlib import blake2b
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from magnetar.protos.envelope import BookieCode


STRIDE_MAX: Final = 32
"""The largest ensemble."""

BEAT_S: Final = 0.5
"""The time between two beats of a broker to each bookie. A beat and its answer cost 0.02 ms of CPU
at each end, or up to 0.1 ms if the process was idle. With three bookies this is at most 0.06 % of a
core of the broker."""


_U64: Final = struct.Struct(">Q")


@lru_cache(maxsize=1_024)  # a bookie is asked for the same ledgers again and again
def read_key(master_key: int, ledger: int) -> int:
    """Return the key that allows reads of the ledger, and neither adds nor fences. The master key
    cannot be computed from the read key."""
    digest = blake2b(_U64.pack(ledger), key=_U64.pack(master_key), digest_size=8, person=b"read")
    (key,) = _U64.unpack(digest.digest())
    return int(key)


def may_read(master_key: int, ledger: int, shown: int) -> bool:
    """Return whether a client that shows the key `shown` may read the ledger. The ledger's master
    key and its read key allow reads."""
    return shown in (master_key, read_key(master_key, ledger))


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadRequest:
    """A request for the entries `first`..`last`. If the first entry is larger than `bytes_max`, the
    bookie returns it nevertheless."""

    incarnation: str
    ledger: int
    master_key: int  # without `fence`, the read key is enough
    first: int
    last: int
    bytes_max: int | None = None  # None: the bookie's own limit
    entries_max: int | None = None  # None: the bookie's own limit
    # True: fence the ledger, and answer after the fence is durable. A former incarnation returns
    # entries without a fence.
    fence: bool = False
    # Read only the first `run` of every `stride` entries, counted from `first`. Both 0: all
    # entries.
    run: int = 0
    stride: int = 0

    @property
    def well_formed(self) -> bool:
        striped = 0 < self.run <= self.stride <= STRIDE_MAX
        return 0 <= self.first <= self.last and (striped or self.run == self.stride == 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class LastConfirmedRequest:
    incarnation: str
    ledger: int
    master_key: int
    fence: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class LastConfirmed:
    """The answer of `last_confirmed`. With a code other than OK the numbers are -1, -1, 0 and have
    no meaning. The same holds for an OK to a request that fences, when the last entry cannot be
    read."""

    code: BookieCode
    confirmed: int = -1  # the confirmed entry in the last stored entry's envelope; -1: none
    last_entry: int = -1  # the last stored entry; -1: none
    length: int = 0  # payload bytes of entries 0..last_entry, from the same envelope


@dataclass(frozen=True, slots=True)
class LedgerPage:
    code: BookieCode
    ledgers: tuple[int, ...] = ()  # ascending
    more: bool = False  # True: continue after the last ledger


@dataclass(frozen=True, slots=True)
class EntryRun:
    """The entries first .. first + count - 1."""

    first: int
    count: int


@dataclass(frozen=True, slots=True)
class EntryPage:
    code: BookieCode
    runs: tuple[EntryRun, ...] = ()  # ascending; within a page they neither overlap nor touch
    more: bool = False  # True: continue with the entry after the last run


@dataclass(frozen=True, slots=True, kw_only=True)
class LastHeard:
    """The time since a bookie last heard a broker."""

    heard_s: float  # seconds since the broker's last beat
    listening_s: float  # seconds until now in which the bookie certainly received every beat

    @property
    def silent_s(self) -> float:
        """The time in which the broker has certainly sent nothing to this bookie."""
        return min(self.heard_s, self.listening_s)


@dataclass(frozen=True, slots=True, kw_only=True)
class BookieInfo:
    bookie: str
    incarnation: str
    boot_epoch: int
    cluster: str
    state: str  # "serving" or "stopping"
    read_only: bool
    disk_total_bytes: int
    disk_free_bytes: int
