"""Groups acknowledgements, and keeps each group until the broker has answered that it is durable.

The user acknowledges messages. The broker accepts acknowledgements of entries: of a whole entry, or
of some of its messages as a set of bits. The tracker gathers acknowledgements for ACK_DELAY_S, or
until it has ACK_IDS_MAX ids. Then the client sends them as groups, unless it is not connected or
ACK_GROUPS_IN_FLIGHT_MAX groups have no answer. If the connection breaks before the broker has
answered a group, the client sends the group again on the next connection. So the failure of a
broker loses no acknowledgement. Until the answer, the broker may redeliver a message that the user
has acknowledged. `acknowledged` recognises such a message, and the client does not deliver it to
the user again.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Mapping

    from magnetar.client.ids import Key

ACK_DELAY_S: Final = 0.1
"""The time in seconds for which the client gathers acknowledgements. It is the default of Apache's
clients. If the client crashes, it loses the acknowledgements of this time."""

ACK_IDS_MAX: Final = 1000
"""The maximum number of ids in a group. When this many ids are pending, the client sends a group
without waiting. At about 12 bytes an id, a command has 12 KB. If every id carries a set of 1,000
bits, a command has 170 KB. Both sizes are below the limit of 256 KiB for a command."""

ACK_GROUPS_IN_FLIGHT_MAX: Final = 8
"""The maximum number of unanswered groups. At this limit, further ids wait, so the client does not
flood a broker that does not answer. A broker that answers in 5 ms accepts 1.6 million ids a
second."""

PENDING_IDS_MAX: Final = 100_000
"""The limit of ids that wait to be sent, about 200 bytes each. At this limit, the consumer requests
no more messages until the broker has confirmed some ids. The limit is needed because a broker can
deliver messages and be unable to confirm acknowledgements, for example when too few bookies accept
a cursor's entries. Messages that the consumer has already requested still arrive, and the user can
acknowledge them. If the broker does not answer, a consumer that acknowledges 200,000 entries a
second reaches the limit in about half a second."""

PARTIAL_BATCHES_MAX: Final = 100_000
"""The maximum number of partly acknowledged batches, about 300 bytes each. Beyond this limit, the
client forgets the oldest batch, and the user may get its acknowledged messages again."""


@dataclass(frozen=True, slots=True)
class AckGroup:
    """The content of one ACK command."""

    number: int
    is_cumulative: bool  # True: the group has one id
    # For each entry, the bits of its unacknowledged messages; 0: the whole entry is acknowledged.
    ids: Mapping[Key, int]

    def covers(self, key: Key) -> bool:
        """Return whether the group acknowledges the whole entry `key`."""
        if not self.is_cumulative:
            return self.ids.get(key) == 0
        ((position, unacked),) = self.ids.items()
        return key < position or (key == position and unacked == 0)


class AckTracker:
    """A machine: acknowledgements and answers in, groups out.

    Invariants:

    1. A group acknowledges only what a call of `acknowledge` or `acknowledge_cumulative` did.
    2. Every acknowledgement of a whole entry is pending, in flight, answered, or dropped by
       `on_seek`.
    3. The position of every pending key is at or after the pending cumulative position.
    4. A partly acknowledged batch has at least one acknowledged and one unacknowledged message.
    5. There are at most PARTIAL_BATCHES_MAX partly acknowledged batches.
    """

    def __init__(self, *, batch_indexes: bool) -> None:
        """`batch_indexes`: True: send the acknowledgements of parts of batches, too. False: send
        only acknowledgements of whole entries."""
        self._batch_indexes = batch_indexes
        self._pending: dict[Key, int] = {}
        self._partial: dict[Key, int] = {}
        # The pending cumulative position: a key, and the unacknowledged bits of its entry. If the
        # key is in `_pending`, the bits there count. None: nothing cumulative is pending.
        self._below: tuple[Key, int] | None = None
        self._in_flight: dict[int, AckGroup] = {}
        self._newest: Key = (-1, -1)  # no later entry was ever acknowledged
        self._oldest_at: float | None = None  # None: nothing is pending
        # After a retriable refusal: the loop time before which no group is sent.
        self._not_before = 0.0
        self._number = 0

    def acknowledge(
        self, key: Key, batch_index: int, batch_size: int, now: float, count: int = 1
    ) -> bool:
        """Acknowledge `count` messages of an entry, from `batch_index` on (-1: the entry is not a
        batch).

        Returns whether the whole entry is acknowledged now.
        """
        is_new = key > self._newest
        if is_new:
            self._newest = key
        if batch_index < 0:
            self._partial.pop(key, None)
            unacked = 0
        else:
            assert 0 < count <= batch_size - batch_index
            before = self._partial.get(key)
            if before is None:
                if not is_new and self._is_done(key):
                    return True
                before = (1 << batch_size) - 1
            unacked = before & ~((1 << count) - 1 << batch_index)
            self._set_partial(key, unacked)
        if (unacked == 0 or self._batch_indexes) and not self._is_covered(key):
            self._pending[key] = unacked
            if self._oldest_at is None:
                self._oldest_at = now
        return unacked == 0

    def acknowledge_cumulative(
        self, key: Key, batch_index: int, batch_size: int, now: float
    ) -> None:
        """Acknowledge this message and all messages before it."""
        self._newest = max(self._newest, key)
        everything = (1 << batch_size) - 1 if batch_index >= 0 else 0
        unacked = everything & ~((1 << batch_index + 1) - 1) if everything else 0
        if key in self._partial:
            unacked &= self._partial[key]
        elif self._is_done(key):
            unacked = 0
        for known in [known for known in self._partial if known <= key]:
            del self._partial[known]
        self._set_partial(key, unacked)
        self._raise_below(key, everything)
        if (unacked == 0 or self._batch_indexes) and not self._is_covered(key):
            self._pending[key] = unacked
        self._touch(now)

    def take(self, now: float, *, hurry: bool = False) -> list[AckGroup]:
        """Return the groups to send now. `hurry`: do not wait until ACK_DELAY_S has passed."""
        groups: list[AckGroup] = []
        due_at = self.timer_at()
        if due_at is None or now < (self._not_before if hurry else due_at):
            return groups
        while self._oldest_at is not None and len(self._in_flight) < ACK_GROUPS_IN_FLIGHT_MAX:
            groups.append(self._next_group())
            if not self._pending and self._below is None:
                self._oldest_at = None
        return groups

    def is_in_flight(self, number: int) -> bool:
        """Return whether a group still waits for its answer."""
        return number in self._in_flight

    def on_answered(self, number: int) -> None:
        """Forget a group that is durable, or that the broker refused permanently."""
        self._in_flight.pop(number, None)

    def on_failed(self, number: int, now: float) -> None:
        """Make a group pending again after a retriable failure."""
        group = self._in_flight.pop(number, None)
        if group is not None:
            self._put_back(group)
            self._touch(now)
            self._not_before = now + ACK_DELAY_S

    def on_disconnected(self, now: float) -> None:
        """Make all groups in flight pending again: their answers are lost."""
        groups, self._in_flight = self._in_flight, {}
        self._not_before = 0.0
        for group in groups.values():
            self._put_back(group)
        if groups:
            self._touch(now)

    def on_seek(self) -> None:
        """Drop all acknowledgements: a seek moved the subscription, or the client left it."""
        self._pending.clear()
        self._partial.clear()
        self._in_flight.clear()
        self._below = None
        self._oldest_at = None

    def acknowledged(self, key: Key, batch_size: int) -> int:
        """Return the acknowledged messages of an entry, as bits. The broker may redeliver them.

        An entry that is not a batch has one message, bit 0. Returns 0 for an entry that the tracker
        does not know.
        """
        if key > self._newest:
            return 0
        everything = (1 << batch_size) - 1
        unacked = self._partial.get(key, self._pending.get(key))
        if unacked is not None:
            return everything & ~unacked
        return everything if self._is_done(key) else 0

    def timer_at(self) -> float | None:
        """Return the time at which `take` returns a group. None: not before the next event."""
        if self._oldest_at is None or len(self._in_flight) >= ACK_GROUPS_IN_FLIGHT_MAX:
            return None
        delay_s = 0.0 if self.is_full else ACK_DELAY_S
        return max(self._oldest_at + delay_s, self._not_before)

    @property
    def is_full(self) -> bool:
        """True when enough ids for a full group are pending."""
        return len(self._pending) >= ACK_IDS_MAX

    @property
    def is_behind(self) -> bool:
        """True when too many ids are pending, so the consumer must request no more messages."""
        return len(self._pending) >= PENDING_IDS_MAX

    @property
    def settled(self) -> bool:
        """True when no acknowledgement is pending or in flight."""
        return self._oldest_at is None and not self._in_flight

    def check(self) -> None:
        has_pending = bool(self._pending) or self._below is not None
        assert has_pending == (self._oldest_at is not None)
        assert len(self._in_flight) <= ACK_GROUPS_IN_FLIGHT_MAX
        assert len(self._partial) <= PARTIAL_BATCHES_MAX
        assert all(self._partial.values())
        assert not any(self._is_covered(key) for key in self._pending)
        assert all(key <= self._newest for key in (*self._pending, *self._partial))

    def _set_partial(self, key: Key, unacked: int) -> None:
        if unacked:
            self._partial[key] = unacked
            if len(self._partial) > PARTIAL_BATCHES_MAX:
                del self._partial[next(iter(self._partial))]
        else:
            self._partial.pop(key, None)

    def _raise_below(self, key: Key, unacked: int) -> None:
        """Move the pending cumulative position forward; never move it back."""
        if self._below is None or key > self._below[0]:
            self._below = key, unacked
            for known in [known for known in self._pending if known < key]:
                del self._pending[known]

    def _is_done(self, key: Key) -> bool:
        """Return whether the whole entry is acknowledged but the broker has not confirmed it."""
        if self._pending.get(key) == 0 or self._is_covered(key):
            return True
        return any(group.covers(key) for group in self._in_flight.values())

    def _is_covered(self, key: Key) -> bool:
        """Return whether the pending cumulative position acknowledges the whole entry `key`."""
        return self._below is not None and key < self._below[0]

    def _next_group(self) -> AckGroup:
        self._number += 1
        if self._below is not None:
            key, unacked = self._below
            self._below = None
            group = AckGroup(self._number, True, {key: self._pending.pop(key, unacked)})
        elif len(self._pending) <= ACK_IDS_MAX:
            group = AckGroup(self._number, False, self._pending)
            self._pending = {}
        else:
            keys = tuple(islice(self._pending, ACK_IDS_MAX))
            group = AckGroup(self._number, False, {key: self._pending.pop(key) for key in keys})
        self._in_flight[group.number] = group
        return group

    def _put_back(self, group: AckGroup) -> None:
        if group.is_cumulative:
            self._raise_below(*next(iter(group.ids.items())))
        for key, unacked in group.ids.items():
            if not self._is_covered(key):
                newer = self._pending.get(key, self._partial.get(key, unacked))
                self._pending[key] = unacked & newer

    def _touch(self, now: float) -> None:
        """Note the time when the first id becomes pending; clear it when no id is pending."""
        if not self._pending and self._below is None:
            self._oldest_at = None
        elif self._oldest_at is None:
            self._oldest_at = now
