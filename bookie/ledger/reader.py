"""Reading confirmed entries, as arithmetic: which replica to ask next, when to give up.

No I/O, no clock, no tasks. A range is asked of one replica at a time. Whatever is wrong with its
answer (an error, no such entry, a damaged envelope, another entry's envelope), the next replica is
asked; so it is, beside the first, when an answer takes too long. When all have been asked in vain
the metadata may be out of date, as replicas are moved: it is read again, once, and those who were
not asked before are. A sound envelope from one replica is enough, because the entry is confirmed.

Invariants (see `check`):

1. Each replica is asked at most once.
2. While no answer was sound, somebody is being asked, or Refresh or GiveUp was the last action.
3. Nothing is delivered twice, and nothing after GiveUp.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from magnetar.metadata.model import EntryId
from magnetar.protos.envelope import BookieCode, EnvelopeDamaged, ReadAnswer, decode_envelope

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from magnetar.metadata.model import Member

NEGATIVE = frozenset({BookieCode.NO_SUCH_ENTRY, BookieCode.NO_SUCH_LEDGER})
"""The explicit negatives: the bookie's undamaged store does not have the entry."""


@dataclass(frozen=True, slots=True)
class LedgerEntry:
    """A confirmed entry. `payload` is a view over the entry's own bytes, not over a frame."""

    entry: EntryId
    payload: memoryview
    length: int  # payload bytes of the ledger's entries up to this one


@dataclass(frozen=True, slots=True)
class Ask:
    """Ask this replica for the range; then `on_entries` or `on_refused`."""

    member: Member


@dataclass(frozen=True, slots=True)
class Deliver:
    """The result: a contiguous run from the first entry of the range on."""

    entries: Sequence[LedgerEntry]
    member: Member


@dataclass(frozen=True, slots=True)
class Refresh:
    """Read the ledger's metadata again; then `on_refreshed`."""


@dataclass(frozen=True, slots=True)
class GiveUp:
    """No replica could be read: what each said."""

    answers: dict[Member, BookieCode]


Action = Ask | Deliver | Refresh | GiveUp


class RangeRead:
    """One range, wholly held by each of `replicas`, which are in the order of preference.

    `now` is in seconds of any clock that does not go backwards.
    """

    def __init__(self, replicas: Sequence[Member], *, speculate_after_s: float) -> None:
        self.answers: dict[Member, BookieCode] = {}  # of those who were of no use
        self.asking: dict[Member, None] = {}  # in the order of asking
        self.done = False
        self._waiting = list(replicas)
        self._patience_s = speculate_after_s
        self._speculate_at: float | None = None  # None: nobody is left, or nobody is being asked
        self._refreshed = False

    def begin(self, now: float) -> list[Action]:
        return self._ask_next(now)

    def on_entries(self, member: Member, entries: Sequence[LedgerEntry]) -> list[Action]:
        """The replica gave at least the first entry, soundly."""
        assert entries
        self.asking.pop(member, None)
        if self.done:
            return []
        self.done = True
        return [Deliver(entries, member)]

    def on_refused(self, member: Member, code: BookieCode, now: float) -> list[Action]:
        """The replica is of no use for the first entry of the range."""
        self.asking.pop(member, None)
        self.answers[member] = code
        return [] if self.done else self._ask_next(now)

    def on_tick(self, now: float) -> list[Action]:
        """`timer_at` has come: ask one more beside those who take so long; twice as patiently."""
        if self.done or self._speculate_at is None or now < self._speculate_at:
            return []
        self._patience_s *= 2
        return self._ask_next(now) if self._waiting else []

    def on_refreshed(self, replicas: Sequence[Member], now: float) -> list[Action]:
        """Who holds the range according to metadata that was read just now; () if that failed."""
        self._waiting = [member for member in replicas if member not in self.answers]
        return self._ask_next(now)

    def timer_at(self) -> float | None:
        """When to call `on_tick`. None: not before something else happens."""
        return None if self.done or not self._waiting else self._speculate_at

    def check(self) -> None:
        assert not set(self.asking) & set(self.answers)
        assert not set(self._waiting) & (set(self.asking) | set(self.answers))

    def _ask_next(self, now: float) -> list[Action]:
        if self._waiting:
            member = self._waiting.pop(0)
            self.asking[member] = None
            self._speculate_at = now + self._patience_s
            return [Ask(member)]
        if self.asking:
            return []
        if not self._refreshed:
            self._refreshed = True
            return [Refresh()]
        self.done = True
        return [GiveUp(dict(self.answers))]


def sound_prefix(
    ledger: int, first: int, answers: Iterable[ReadAnswer]
) -> tuple[list[LedgerEntry], BookieCode]:
    """The verified run of entries from `first` on, and the code that ended it (OK: the answers
    ended). Checksums, ledger and entry ids are checked: anything else is CORRUPT."""
    entries: list[LedgerEntry] = []
    for answer in answers:
        expected = first + len(entries)
        if answer.entry == expected and answer.code is not BookieCode.OK:
            return entries, answer.code
        try:
            envelope = decode_envelope(answer.envelope)
        except EnvelopeDamaged:
            return entries, BookieCode.CORRUPT
        if (answer.entry, envelope.entry, envelope.ledger) != (expected, expected, ledger):
            return entries, BookieCode.CORRUPT
        entries.append(LedgerEntry(EntryId(expected), envelope.payload, envelope.length))
    return entries, BookieCode.OK


def outranking(answers: Iterable[BookieCode]) -> BookieCode:
    """The one answer that sums up why an entry cannot be read: "perhaps" outranks "no", so that
    an entry which may exist is never reported as absent."""
    answers = list(answers)
    unknown = [code for code in answers if code not in NEGATIVE]
    return (unknown or answers or [BookieCode.CONNECTION_LOST])[0]
