"""The states of the protocol's specification, the bugs that can be planted in it, and the text of a
step."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from functools import cache
from typing import Final, NamedTuple

NOWHERE: Final = -1  # replaces a seat: not a member
NEVER: Final = 99  # replaces an entry: it did not change its ensemble


class Bug(Enum):
    """Bugs that can be planted; the value says what the buggy protocol does."""

    READS_DO_NOT_FENCE = "a recoverer's reads do not fence, only its first question does"
    UNKNOWN_IS_FENCED = "no answer to a fence request counts as fenced"
    UNKNOWN_IS_ABSENT = "no answer to a recoverer's read counts as no such entry"
    ONE_NEGATIVE_ENDS = "one bookie that lacks the entry is proof enough"
    USED_BEFORE_RECORDED = "a new ensemble is written to and counted before it is recorded"
    CONFIRMS_DURING_CHANGE = "acks confirm entries after the first of the new segment was decided"
    ACKS_OF_REPLACED_COUNT = "an ack counts for the bookie that sits on the seat now"
    CHANGE_OF_RECOVERER_RECORDED = "a recoverer records its new ensemble before it closes"
    STARTS_AT_ANSWERED = "recovery starts at the confirmed entry that bookies tell, whatever the"
    " segments say"
    CLOSES_AT_APPENDED = "the writer closes at what it appended, not at what was confirmed"
    CLOSES_UNWRITTEN = "a recoverer closes before Qa bookies hold what it found"
    TELLS_OWN_PROGRESS = "a recoverer's write-backs call confirmed what it has written back"
    FENCE_NOT_DURABLE = "a fence is answered before it is durable, and a crash forgets it"
    ADD_NOT_DURABLE = "an add is answered before it is durable, and a crash forgets it"


class View(NamedTuple):
    """The knowledge of one recoverer about one bookie, and the bookie's place in its ensemble."""

    fenced: bool = False  # the "confirmed" that the bookie told; only while fencing
    lacks: int = 0  # bit e: the bookie said that it lacks entry e
    asked: int = NOWHERE  # seat in the ensemble that is asked
    working: int = NOWHERE  # seat in the private ensemble that is written back to


class Bookie(NamedTuple):
    stored: int = 0  # bit e: it holds entry e
    acked: int = 0  # bit e: its OK to the writer has arrived, or may still; beyond `told`
    fenced: bool = False
    tells: int = -1  # the "confirmed" inside the highest entry it holds
    since: int = 0  # the first entry that the writer sends it
    writes: int = NOWHERE  # seat in the ensemble that the writer writes to
    listed: int = NOWHERE  # seat in the last segment, as stored
    up: bool = True
    views: tuple[View, ...] = ()


class Attempt(NamedTuple):
    """One recoverer."""

    begun: bool = False  # the ensemble to be asked is frozen
    reading: bool = False  # enough bookies are fenced
    start: int = -1  # known to be confirmed
    next: int = 0  # the first entry without a conclusion; while reading
    found: int = 0  # bit e: some bookie gave entry e, beyond `next`
    ended: bool = False  # `next` is proven absent
    change: int = NEVER  # the first entry for which its own ensemble holds


class State(NamedTuple):
    open: bool  # False: IN_RECOVERY
    recorded: bool  # False: the writer uses an ensemble that is not stored (a bug)
    appended: int  # the number of entries
    told: int  # the last entry that the writer has confirmed for certain
    first: int  # the first entry of the last segment, as stored
    carried: tuple[int, ...]  # for each entry: the "confirmed" that it carries
    seen: int  # the highest entry that was ever told to be confirmed by a bookie
    changes: int  # the number of ensemble changes that the writer may still make
    crashes: int  # the number of bookies that may still crash
    attempts: tuple[Attempt, ...]
    bookies: tuple[Bookie, ...]


Step = tuple[str | int, ...]
"""A step of the exploration: a verb and its numbers. `tell` makes a sentence of it."""


@dataclass(frozen=True, kw_only=True)
class Case:
    """Bounds, and perhaps a bug."""

    sizes: tuple[int, int, int]  # E, Qw, Qa
    entries: int
    spares: int = 0
    recoverers: int = 2
    writer_changes: int = 0
    recoverer_changes: int = 0  # the ensemble changes of each recoverer; at most one
    crashes: int = 0
    read_ahead: bool = False  # recoverers read entries before they know about earlier ones
    fences_checked: bool = True  # False: only the outcome shows whether fences are missing
    bugs: frozenset[Bug] = frozenset()

    @property
    def alike(self) -> bool:
        return self.sizes[0] == self.sizes[1]

    def __str__(self) -> str:
        return (
            f"{'/'.join(map(str, self.sizes))}, {self.entries} entries, {self.spares} spares,"
            f" {self.recoverers} recoverers, ensemble changes {self.writer_changes} of the writer"
            f" and {self.recoverer_changes} of each recoverer, {self.crashes} crashes"
            f"{', read-ahead' if self.read_ahead else ''}"
        )


# -- bookies -----------------------------------------------------------------------------------


@cache
def stores(bookie: Bookie, entry: int, tells: int) -> Bookie:
    highest = bookie.stored >> entry == 0
    return bookie._replace(
        stored=bookie.stored | 1 << entry, tells=tells if highest else bookie.tells
    )


@cache
def sees(bookie: Bookie, who: int, view: View) -> Bookie:
    return bookie._replace(views=put(bookie.views, who, view))


@cache
def swap(bookie: Bookie) -> Bookie:
    return bookie._replace(views=bookie.views[::-1])


def put(values: tuple, number: int, value: object) -> tuple:  # type: ignore[type-arg]
    return (*values[:number], value, *values[number + 1 :])


def tell(step: Step) -> str:
    """A step as a sentence."""
    match step:
        case ("append", entry, told):
            return f"the writer appends entry {entry}, having confirmed {told}"
        case ("add", entry, bookie):
            return f"the add of entry {entry} arrives at b{bookie}, which stores it"
        case ("change", out, into, first):
            return f"the writer replaces b{out} by b{into} from entry {first} on"
        case ("record",):
            return "the new ensemble is recorded"
        case ("claim",):
            return "the ledger is claimed: IN_RECOVERY"
        case ("begin", who):
            return f"recoverer {who} begins"
        case ("silent", who, bookie):
            return f"recoverer {who} gets no answer to its fence from b{bookie}"
        case ("fence", who, bookie):
            return f"recoverer {who} fences b{bookie}"
        case ("mute", who, entry, bookie):
            return f"recoverer {who} gets no answer about entry {entry} from b{bookie}"
        case ("found", who, entry, bookie):
            return f"recoverer {who} reads entry {entry} from b{bookie}"
        case ("lacks", who, entry, bookie):
            return f"b{bookie} tells recoverer {who} that it lacks entry {entry}"
        case ("absent", who, entry):
            return f"all bookies that lack entry {entry} tell recoverer {who} so"
        case ("back", who, entry, bookie):
            return f"recoverer {who} writes entry {entry} back to b{bookie}"
        case ("private", who, out, into, first):
            return f"recoverer {who} replaces b{out} by b{into} from entry {first} on, for itself"
        case ("crash", bookie):
            return f"b{bookie} crashes"
    raise AssertionError(step)
