"""The seam between a subscription and the machine that decides who gets which entry.

A dispatcher is fed what happens (a consumer came, granted permits, entries were read, …) and says
what to do, in order. It knows no I/O: it asks for entries with `Read` and `Replay`, of which at
most one is outstanding, and hands them out with `Deliver`. What it must know of the world beyond
its own facts it asks for by two views: what is acknowledged (`Acks`) and how far the log goes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Protocol

from magnetar.broker.log.position import Position

if TYPE_CHECKING:
    from collections.abc import Sequence

    from magnetar.broker.dispatch.explain import Reason
    from magnetar.broker.dispatch.permits import Consumer
    from magnetar.broker.log.entry import StoredEntry


@dataclass(slots=True)
class Mark:
    """What a delivery says beyond the entry itself. Not frozen: thousands in a redelivery."""

    redelivery_count: int
    ack_set: tuple[int, ...]  # which messages of the batch are not acknowledged; (): all of them


@dataclass(slots=True)
class Deliver:
    """Give these to the consumer. They are pending there already, where that is kept."""

    consumer: Consumer
    entries: list[StoredEntry]
    marks: dict[int, Mark]  # sparse: index in `entries` -> what is not Mark(0, ())
    messages: int  # not acknowledged ones: what was debited from the permits


@dataclass(frozen=True, slots=True)
class Read:
    """Read on from `first`; answer with `on_entries` or `on_read_failed`."""

    first: Position
    entries_max: int
    through: Position  # how far the log went when this was asked
    rewinds: int  # of the machine, when this was asked


@dataclass(frozen=True, slots=True)
class Replay:
    """Read just these, ascending; answer with `on_replayed` or `on_read_failed`."""

    positions: list[Position]


Action = Deliver | Read | Replay


class Acks(Protocol):
    """What a dispatcher asks of the cursor of its subscription. All of it answers at once."""

    @property
    def mark_delete(self) -> Position:
        """Everything up to here is acknowledged."""

    @property
    def highest_acked(self) -> Position:
        """Nothing beyond this is acknowledged, wholly or partly; at least `mark_delete`."""

    def is_acked(self, position: Position) -> bool:
        """Whether the whole entry is acknowledged."""

    def batch_ack_set(self, position: Position) -> tuple[int, ...] | None:
        """Which messages of a partly acknowledged batch are left; None: nothing of it is acked."""

    def first_unacked(self, position: Position) -> Position:
        """The first entry at or after `position` that is not acknowledged; past the log's end when
        there is none."""


class Dispatcher(Protocol):
    """One subscription's decisions. Every method mutates first, then says what to do."""

    @property
    def read_position(self) -> Position:
        """Where reading goes on."""

    def add_consumer(self, consumer: Consumer) -> list[Action]:
        """A consumer came; it has no permits yet."""

    def remove_consumer(self, consumer: Consumer) -> list[Action]:
        """It left; what it held unacknowledged goes to others or to its successor."""

    def on_flow(self, consumer: Consumer, permits: int) -> list[Action]:
        """The consumer takes this many more messages."""

    def on_redeliver(
        self, consumer: Consumer, positions: Sequence[Position] | None
    ) -> list[Action]:
        """Give these again; None: all that the consumer holds."""

    def on_acked(self, consumer: Consumer, positions: Sequence[Position]) -> list[Action]:
        """The cursor has noted that these entries are acknowledged as a whole."""

    def on_partly_acked(self, consumer: Consumer, position: Position) -> list[Action]:
        """The cursor has noted that some or all messages of this batch are acknowledged."""

    def on_entries(self, entries: list[StoredEntry]) -> list[Action]:
        """The answer to the outstanding `Read`; []: there was nothing."""

    def on_replayed(self, entries: list[StoredEntry], through: Position) -> list[Action]:
        """The answer to the outstanding `Replay`: all that exist of the positions up to `through`;
        the later ones were not tried."""

    def on_read_failed(self) -> list[Action]:
        """Whatever was outstanding could not be read; it is asked for again, if still wanted."""

    def advance(self) -> list[Action]:
        """The log has grown, or a connection has room again."""

    def explain(self) -> list[Reason]:
        """Why nothing is being dispatched; never empty when nothing is."""

    def check(self) -> None:
        """Assert the invariants of the module's docstring."""


def after(position: Position) -> Position:
    """The place behind `position`; the log finds the entry that is really next."""
    return Position(position.ledger, position.entry + 1)


def unacked_messages(entry: StoredEntry, acks: Acks) -> tuple[int, tuple[int, ...]]:
    """How many messages of the entry are not acknowledged, and which; 0: the whole entry is."""
    if acks.is_acked(entry.position):
        return 0, ()
    if not entry.view.is_batch:
        return 1, ()
    ack_set = acks.batch_ack_set(entry.position)
    if ack_set is None:
        return entry.view.num_messages, ()
    return unacked_in(ack_set), ack_set


def unacked_in(ack_set: tuple[int, ...]) -> int:
    """How many messages of a batch are left: the set bits of signed 64-bit words."""
    return sum((word & _WORD).bit_count() for word in ack_set)


_WORD: Final = (1 << 64) - 1
