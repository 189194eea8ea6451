"""RangeRead: decides which replica a read of confirmed entries asks next, and when it gives up.

No I/O, no clock, no tasks. A read asks one replica at a time for its range. It asks the next
replica after a wrong answer: an error, no such entry, a damaged envelope, another entry's envelope.
If an answer takes too long, the read asks the next replica in addition. If all replicas have
failed, the metadata may be outdated, because repair moves replicas. The caller then reads the
metadata again, once (`Refresh`), and the read asks the new replicas. A sound envelope from one
replica is enough, because the entry is confirmed.

The caller orders the replicas by `Standing` first. Healthy bookies come first, then bookies that
are slow or failed recently. Read-only bookies follow: a bookie with a full disk should save its
capacity. Bookies that are not listed come last: they are probably down.

A ledger whose write quorum is smaller than its ensemble is *striped*: each bookie holds only a part
of the entries. `LedgerReader` (handle.py) reads a range of a striped ledger in stripes. If that
fails, it reads windows (`windows`), several at a time. For each window, one bookie holds all
entries.

Invariants (see `check`):

1. The read asks each replica at most once.
2. Until a sound answer arrives, a replica is being asked, or the last action was Refresh or GiveUp.
3. The read returns at most one Deliver or GiveUp, and no action after it.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from typing import TYPE_CHECKING, Final, NamedTuple

from magnetar.bookie.ledger.health import Grade
from magnetar.metadata.model import EntryId
from magnetar.protos.envelope import (
    ENVELOPE,
    BookieCode,
    EnvelopeDamaged,
    decode_envelope,
    decode_read_answers,
    decode_run,
)

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from magnetar.metadata.model import BookieRegistration, Member
    from magnetar.protos.envelope import Buffer

NEGATIVE = frozenset({BookieCode.NO_SUCH_ENTRY, BookieCode.NO_SUCH_LEDGER})
"""The codes with which a bookie reports that its undamaged store does not have the entry."""


WINDOWS_MAX: Final = 16
"""The maximum number of windows that one read requests at the same time, on a connection each."""


class Standing(IntEnum):
    """The expected quality of a replica, best first."""

    WELL = 0
    DOUBTFUL = 1  # slow, or failed recently
    READ_ONLY = 2
    UNKNOWN = 3  # not listed


class LedgerEntry(NamedTuple):
    """A confirmed, sound entry, with all that a copy of the entry needs."""

    entry: EntryId
    envelope: bytes  # the entry as bookies store it; not a view of a frame

    @property
    def payload(self) -> memoryview:
        """A view of `envelope`, without its header."""
        return memoryview(self.envelope)[ENVELOPE.size :]

    @property
    def length(self) -> int:
        """The payload bytes of the ledger's entries up to and including this one."""
        length: int = ENVELOPE.unpack_from(self.envelope)[4]
        return length


@dataclass(frozen=True, slots=True)
class Ask:
    """Ask this replica for the range; then call `on_entries` or `on_refused`."""

    member: Member


@dataclass(frozen=True, slots=True)
class Deliver:
    """The result: a contiguous run from the first entry of the range on."""

    entries: Sequence[LedgerEntry]
    member: Member


@dataclass(frozen=True, slots=True)
class Refresh:
    """Read the ledger's metadata again; then call `on_refreshed`."""


@dataclass(frozen=True, slots=True)
class GiveUp:
    """No replica returned the first entry; `answers` holds the reason of each replica."""

    answers: dict[Member, BookieCode]


Action = Ask | Deliver | Refresh | GiveUp


class RangeRead:
    """The read of one range. `replicas`: the members that hold the first entry of the range, in the
    order of preference.

    `now` is in seconds of any clock that does not go backwards.
    """

    def __init__(self, replicas: Sequence[Member], *, speculate_after_s: float) -> None:
        self.answers: dict[Member, BookieCode] = {}  # the answers of the replicas that failed
        self.asking: dict[Member, None] = {}  # asked, and not answered yet; oldest request first
        self.done = False
        self._waiting = list(replicas)
        self._speculate_after_s = speculate_after_s
        self._speculate_at: float | None = None  # None: no replica was asked yet
        self._refreshed = False

    def begin(self, now: float) -> list[Action]:
        return self._ask_next(now)

    def on_entries(self, member: Member, entries: Sequence[LedgerEntry]) -> list[Action]:
        """The replica returned these sound entries, from the first entry of the range on."""
        assert entries
        self.asking.pop(member, None)
        if self.done:
            return []
        self.done = True
        return [Deliver(entries, member)]

    def on_refused(self, member: Member, code: BookieCode, now: float) -> list[Action]:
        """The replica cannot provide the first entry of the range."""
        self.asking.pop(member, None)
        self.answers[member] = code
        return [] if self.done else self._ask_next(now)

    def on_tick(self, now: float) -> list[Action]:
        """`timer_at` has passed: ask one more replica in addition, and double the waiting time."""
        if self.done or self._speculate_at is None or now < self._speculate_at:
            return []
        self._speculate_after_s *= 2
        return self._ask_next(now) if self._waiting else []

    def on_refreshed(self, replicas: Sequence[Member], now: float) -> list[Action]:
        """`replicas`: as in the constructor, by freshly read metadata; (): the metadata could not
        be read, or the ledger is deleted."""
        self._waiting = [member for member in replicas if member not in self.answers]
        return self._ask_next(now)

    def timer_at(self) -> float | None:
        """Return the time at which to call `on_tick`. None: no call is needed."""
        return None if self.done or not self._waiting else self._speculate_at

    def check(self) -> None:
        assert not set(self.asking) & set(self.answers)
        assert not set(self._waiting) & (set(self.asking) | set(self.answers))

    def _ask_next(self, now: float) -> list[Action]:
        if self._waiting:
            member = self._waiting.pop(0)
            self.asking[member] = None
            self._speculate_at = now + self._speculate_after_s
            return [Ask(member)]
        if self.asking:
            return []
        if not self._refreshed:
            self._refreshed = True
            return [Refresh()]
        self.done = True
        return [GiveUp(dict(self.answers))]


def standing(registration: BookieRegistration | None, grade: Grade) -> Standing:
    """Return a member's standing. `registration` None: the member is not listed now."""
    if registration is None:
        return Standing.UNKNOWN
    if registration.read_only:
        return Standing.READ_ONLY
    return Standing.WELL if grade is Grade.HEALTHY else Standing.DOUBTFUL


def windows(
    first: int, last: int, *, size: int, entry_bytes: float, bytes_max: int
) -> tuple[list[tuple[int, int]], int]:
    """Return the windows of a striped range to read at the same time, and the bytes to request for
    each window. A window is a pair (first, last) of `size` entries; the last window may be shorter.
    With `entry_bytes` per entry, all windows together have about `bytes_max`. The bytes for each
    window are twice its share of `bytes_max`: if a window were cut short, the windows after it
    would be useless."""
    count = min(max(round(bytes_max / (entry_bytes * size)), 1), WINDOWS_MAX)
    starts = range(first, min(last + 1, first + count * size), size)
    found = [(start, min(start + size - 1, last)) for start in starts]
    share = -(-bytes_max // len(found))
    return found, min(2 * share, bytes_max)


def sound_prefix(
    ledger: int, first: int, frames: Iterable[Buffer]
) -> tuple[list[LedgerEntry], BookieCode]:
    """Return the verified run of entries from `first` on, and the code that ended it (OK: the
    answers ended). A wrong checksum, ledger or entry id counts as CORRUPT. Raises FrameDamaged."""
    entries: list[LedgerEntry] = []
    new = tuple.__new__  # `LedgerEntry(...)` costs twice as much
    for frame in frames:
        following = first + len(entries)
        found, code = decode_run(frame, ledger=ledger, first=following)
        entries += [new(LedgerEntry, numbered) for numbered in enumerate(found, following)]
        if code is not BookieCode.OK:
            return entries, code
    return entries, BookieCode.OK


def sound_stripes(
    ledger: int, wanted: Iterable[int], frames: Iterable[Buffer]
) -> tuple[dict[int, LedgerEntry], tuple[int, BookieCode] | None]:
    """Return the verified entries among `wanted`, in order, up to the first failure. Return also
    the failed entry with its code (None: the answers ended). Raises FrameDamaged."""
    entries: dict[int, LedgerEntry] = {}
    answers = (answer for frame in frames for answer in decode_read_answers(frame))
    for entry, answer in zip(wanted, answers, strict=False):
        if answer.code is not BookieCode.OK and answer.entry == entry:
            return entries, (entry, answer.code)
        try:
            envelope = decode_envelope(answer.envelope)
        except EnvelopeDamaged:
            return entries, (entry, BookieCode.CORRUPT)
        if (answer.entry, envelope.entry, envelope.ledger) != (entry, entry, ledger):
            return entries, (entry, BookieCode.CORRUPT)
        entries[entry] = LedgerEntry(EntryId(entry), answer.envelope)
    return entries, None


def outranking(answers: Iterable[BookieCode]) -> BookieCode:
    """Return the answer that best says why an entry cannot be read. An answer outside NEGATIVE
    comes first, so that an entry that may exist is never reported as absent."""
    answers = list(answers)
    unknown = [code for code in answers if code not in NEGATIVE]
    return (unknown or answers or [BookieCode.CONNECTION_LOST])[0]
