"""Delayed delivery: entries wait in an index until their delivery time, instead of at a consumer.

Theory of operation. A Shared or Key_Shared dispatcher calls its `Delays` at three places:

- `hold_back` after each read. It puts the entries that are not due into the index.
- `take_due` before it reads new entries. It returns the entries of the index that have become due.
  The dispatcher reads these entries again.
- `first_new` for the position of the next read. It skips entries that are in the index.

The dispatcher sets its timer to `wake_s`. The subscription removes acknowledged entries from the
index. The subscription keeps its index when the last consumer leaves, after a seek, and when its
type changes. Exclusive and Failover subscriptions deliver at once and do not use the index.

*Ticks*: a timer fires on a multiple of `tick_ms` of the wall clock, so that many delivery times
share one timer. By default, an entry is delivered up to one tick early. With `strict`, an entry is
never early, and up to one tick late.

*Fixed delays*: if every message of a topic has the same delay, messages become due in the order of
the log. While the first of them is not due, further reads find nothing to deliver. With
`fixed_look_ahead`, the dispatcher stops reading while three conditions hold:

- The index has at least this many entries.
- None of them is due.
- They were read with ascending delivery times (up to `tick_ms` of disorder is allowed), and the
  dispatcher read no undelayed entry among or after them.

An undelayed message that is published after these entries waits, too.

The clock of a dispatcher is the time of the event loop, but delivery times are wall time. `wall_ms`
translates the first to the second. The wall clock may jump, so a timer reads it again after at most
CLOCK_LOOK_S.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Final, Protocol

from magnetar.broker.dispatch.delayed_index import DUE_MS_MAX, DelayedIndex
from magnetar.broker.dispatch.explain import Reason, Why

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from magnetar.broker.dispatch.acks import Acks
    from magnetar.broker.log.entry import StoredEntry
    from magnetar.broker.log.position import Position

INDEX_ENTRIES_MAX: Final = 2_000_000
"""The limit of delayed entries of one subscription: 40 MB. At the limit the dispatcher reads
nothing new until entries are due or acknowledged."""

CLOCK_LOOK_S: Final = 60.0
"""The longest time in seconds by which an entry is late after the wall clock has jumped
forwards."""

_EMPTY: Final = DelayedIndex(run_entries=0)
"""The empty index that subscriptions share until their first delayed entry. It takes no entries. An
empty index of their own would take a kilobyte each."""

_JUMPS_MAX: Final = 64
"""The limit of steps of `first_new` over acknowledged and indexed entries: about 0.3 ms. After this
many steps, the dispatcher reads from the position that the search has reached. That read may return
entries that are in the index. `hold_back` handles them."""

_ROUNDS_MAX: Final = 10
"""The limit of rounds of one `take_due`. Each round removes due entries from the index. If it finds
entries that the dispatcher has yet to read from the log, it does not return them, and another round
follows. Later calls remove the rest: a million of them in one step would block the event loop."""


@dataclass(slots=True)
class DelayPolicy:
    """The delayed-delivery policy of one topic. The topic updates it when the topic's policies
    change."""

    enabled: bool = True  # False: every entry is due at once
    tick_ms: int = 1_000
    strict: bool = False  # True: never early
    fixed_look_ahead: int = 0  # entries in the index; see "Fixed delays"; 0: off


class Indexes(Protocol):
    """The stored indexes of a topic's durable subscriptions."""

    def find(self, subscription: str) -> DelayedIndex | None:
        """The index of a subscription. None: the subscription has none yet."""

    def index_of(self, subscription: str) -> DelayedIndex:
        """The index of a subscription. Creates the index if the subscription has none yet."""


class Delays:
    """The delayed entries of one subscription."""

    __slots__ = (
        "_entries_max",
        "_highest_ms",
        "_indexes",
        "_is_fixed",
        "_policy",
        "_subscription",
        "_wake_ms",
        "_wake_s",
        "_wall_ms",
        "index",
    )

    def __init__(
        self,
        policy: DelayPolicy,
        wall_ms: Callable[[float], int],
        *,
        indexes: Indexes | None = None,
        subscription: str = "",
        entries_max: int = INDEX_ENTRIES_MAX,
    ) -> None:
        """`wall_ms` translates a time of the event loop near the present to wall time in
        milliseconds. `indexes` has the index of `subscription`, perhaps with entries that an
        earlier owner of the topic has stored. `indexes` None: the index is not stored."""
        found = None if indexes is None else indexes.find(subscription)
        self.index = _EMPTY if found is None else found
        self._indexes = indexes
        self._subscription = subscription
        self._policy = policy
        self._wall_ms = wall_ms
        self._entries_max = entries_max
        self._wake_ms = -1  # the wall time that `wake_s` translated last, to `_wake_s`
        self._wake_s = 0.0
        # True: the third condition of "Fixed delays" holds.
        self._is_fixed = not self.index
        self._highest_ms = 0  # the highest delivery time added since the index was empty

    @property
    def is_full(self) -> bool:
        """True when the index is at its limit: the dispatcher must read no new entries."""
        return len(self.index) >= self._entries_max

    def pauses(self, now: float) -> bool:
        """Returns True when the dispatcher should not read new entries: with fixed delays, they are
        due later than the entries in the index."""
        look_ahead = self._policy.fixed_look_ahead
        if not look_ahead or not self._is_fixed or len(self.index) < look_ahead:
            return False
        due_ms = self.index.next_due_ms
        return due_ms is not None and due_ms > self._until_ms(now)

    def hold_back(self, entries: list[StoredEntry], acks: Acks, now: float) -> list[StoredEntry]:
        """Put the entries that are neither due nor acknowledged into the index. Returns the due
        entries, of which some may be acknowledged."""
        if not any(entry.view.deliver_at_ms is not None for entry in entries):
            self._is_fixed = False
            return entries
        index, until_ms = self.index, self._until_ms(now)
        if not index:
            self._is_fixed, self._highest_ms = True, 0
        due: list[StoredEntry] = []
        for entry in entries:
            deliver_at_ms = entry.view.deliver_at_ms
            if deliver_at_ms is not None and deliver_at_ms > until_ms:
                if not acks.is_acked(entry.position):
                    if index is _EMPTY:
                        index = self.index = self._new_index()
                    index.add(entry.position, deliver_at_ms)
                    if deliver_at_ms < self._highest_ms - self._policy.tick_ms:
                        self._is_fixed = False
                    self._highest_ms = max(self._highest_ms, deliver_at_ms)
            else:
                if deliver_at_ms is None:
                    self._is_fixed = False
                due.append(entry)
                if index and deliver_at_ms is not None:
                    index.discard(entry.position)
        return due

    def take_due(self, count: int, now: float, *, read_position: Position) -> list[Position]:
        """Remove due entries from the index, the earliest first. Returns up to `count` of them, in
        ascending order of their positions.

        The method removes due entries at or after `read_position`, too, but does not return them.
        The dispatcher has not read them yet, and would deliver them twice. The index has such
        entries after a failover, a seek or a change of the subscription type."""
        if not self.index:
            return []
        until_ms = self._until_ms(now)
        found: list[Position] = []
        for _ in range(_ROUNDS_MAX):
            due = self.index.take_due(until_ms, count - len(found))
            found += [position for position in due if position < read_position]
            if not due or len(found) == count:
                break
        return sorted(found)

    def first_new(self, position: Position, acks: Acks) -> Position:
        """The first entry at or after `position` that is neither acknowledged nor in the index. If
        the search takes too many steps: an earlier position."""
        position = acks.first_unacked(position)
        if self.index:
            for _ in range(_JUMPS_MAX):
                absent = self.index.first_absent(position)
                if absent == position:
                    break
                position = acks.first_unacked(absent)
        return position

    def wake_s(self, now: float) -> float | None:
        """The time of the event loop at which the dispatcher must call `take_due`. None: no entry
        is delayed."""
        due_ms = self.index.next_due_ms
        if due_ms is None:
            return None
        tick_ms = self._policy.tick_ms
        if not self._policy.strict:
            due_ms -= tick_ms
        wake_ms = -(-due_ms // tick_ms) * tick_ms
        if wake_ms != self._wake_ms or self._wake_s <= now:
            # At least a millisecond: the wall clock has no finer steps.
            wait_s = max(wake_ms - self._wall_ms(now), 1) / 1_000
            self._wake_ms, self._wake_s = wake_ms, now + min(wait_s, CLOCK_LOOK_S)
        return self._wake_s

    def on_acked(self, positions: Sequence[Position]) -> None:
        """These entries are acknowledged: remove them from the index."""
        if self.index:
            for position in positions:
                self.index.discard(position)

    def on_acked_through(self, position: Position) -> None:
        """Every entry up to this one is acknowledged: remove them from the index."""
        if self.index:
            self.index.discard_through(position)

    def explain(self, now: float) -> list[Reason]:
        """The number of delayed entries and the next delivery time, as a reason. []: no entry is
        delayed."""
        due_ms = self.index.next_due_ms
        if due_ms is None:
            return []
        time = datetime.fromtimestamp(due_ms // 1_000, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
        in_s = max(0, due_ms - self._wall_ms(now)) / 1_000
        detail = (
            f"{len(self.index)} entries are delayed; the next is due at {time}, in {in_s:.1f} s"
        )
        if self.is_full:
            detail += "; the broker reads no new entries, because the index of delayed ones is full"
        elif self.pauses(now):
            detail += "; the broker reads no new entries until then, because all delays are equal"
        facts = {"delayed": len(self.index), "nextDueMs": due_ms}
        return [Reason(Why.DELAYED, detail, "", facts, in_s)]

    def _new_index(self) -> DelayedIndex:
        if self._indexes is None:
            return DelayedIndex()
        return self._indexes.index_of(self._subscription)

    def _until_ms(self, now: float) -> int:
        """The latest delivery time, in milliseconds, of the entries that are due now."""
        policy = self._policy
        if not policy.enabled:
            return DUE_MS_MAX
        return self._wall_ms(now) + (0 if policy.strict else policy.tick_ms)
