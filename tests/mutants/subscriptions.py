"""Bugs in dispatchers: wrong consumers, wrong entries, and wrong times of delivery."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from mutants.plant import Mutant, enter
from world.scenarios import SCENARIOS

from magnetar.broker.dispatch.draining import DrainingHashes
from magnetar.broker.dispatch.withheld import Withheld

if TYPE_CHECKING:
    from mutants.plant import Fired

KEYED, ORDERED = SCENARIOS["key_shared"], SCENARIOS["ordered nacks"]
RELAXED = SCENARIOS["relaxed keys"]
SHARED, FAILOVER = SCENARIOS["shared"], SCENARIOS["failover"]
KEY_SHARED = "magnetar.broker.dispatch.key_shared:KeyShared."
ONE_OF_SHARED = "magnetar.broker.dispatch.shared:Shared."


# -- keys ------------------------------------------------------------------------------------------


def _without_draining(right: Any, fired: Fired) -> Any:
    def _dispatch(self: Any, entries: Any, slots: Any, blocked: Any) -> Any:
        draining = self._draining
        if any(self._drains(slot) for slot in slots):
            fired()
        self._draining = DrainingHashes()
        try:
            return right(self, entries, slots, blocked)
        finally:
            self._draining = draining

    return _dispatch


enter(
    Mutant(
        name="the gate at send time is skipped",
        breaks="HASH: entries of a hash that drains wait",
        wrong={KEY_SHARED + "_dispatch": _without_draining},
        caught_by=frozenset({"HASH", "bug"}),
        scene=KEYED,
        seeds=10,
    )
)


def _past_the_waiting(right: Any, fired: Fired) -> Any:
    def _dispatch(self: Any, entries: Any, slots: Any, blocked: Any) -> Any:
        if any(slot in blocked for slot in slots):
            fired()
        return right(self, entries, slots, ())

    return _dispatch


enter(
    Mutant(
        name="new entries overtake waiting entries",
        breaks="ORDER: an entry waits while earlier entries of its key wait",
        wrong={KEY_SHARED + "_dispatch": _past_the_waiting},
        caught_by=frozenset({"ORDER", "HASH", "bug"}),
        scene=KEYED,
        seeds=10,
    )
)


def _twice(right: Any, fired: Fired) -> Any:
    def _astray(self: Any, counts: Any) -> Any:
        found = right(self, counts)
        if found:
            fired()
        return {slot: 2 * count for slot, count in found.items()}

    return _astray


enter(
    Mutant(
        name="references of a draining hash count twice",
        breaks="STUCK: a hash is free when its last entry is acknowledged",
        wrong={KEY_SHARED + "_astray": _twice},
        caught_by=frozenset({"STUCK", "bug"}),
        scene=KEYED,
        seeds=10,
    )
)


def _only_one(right: Any, fired: Fired) -> Any:
    def _astray(self: Any, counts: Any) -> Any:
        found = right(self, counts)
        if any(count > 1 for count in found.values()):
            fired()
        return dict.fromkeys(found, 1)

    return _astray


enter(
    Mutant(
        name="a hash is unblocked at its first acknowledgement",
        breaks="HASH: the last acknowledgement unblocks it",
        wrong={KEY_SHARED + "_astray": _only_one},
        caught_by=frozenset({"HASH", "bug"}),
        scene=KEYED,
        seeds=20,
    )
)


def _one_decides(right: Any, fired: Fired) -> Any:
    def _decide_order(self: Any, now: float) -> None:
        right(self, now)
        some = any(it.key_shared.allow_out_of_order for it in self._consumers)
        if some and not self.policy.allow_out_of_order:
            fired()
            self._draining.clear()
            self.policy = replace(self.policy, allow_out_of_order=True)

    return _decide_order


enter(
    Mutant(
        name="one consumer that allows disorder decides for all",
        breaks="HASH, ORDER: the strictest consumer decides",
        wrong={KEY_SHARED + "_decide_order": _one_decides},
        caught_by=frozenset({"HASH", "ORDER"}),
        scene=RELAXED,
        seeds=10,
    )
)


def _forgets_disorder(right: Any, fired: Fired) -> Any:
    def _decide_order(self: Any, now: float) -> None:
        relaxed = self.policy.allow_out_of_order
        right(self, now)
        if relaxed and not self.policy.allow_out_of_order and self._draining:
            fired()
            self._draining.clear()

    return _decide_order


enter(
    Mutant(
        name="hashes at several consumers do not drain when order begins",
        breaks="HASH: every hash with pending entries drains",
        wrong={KEY_SHARED + "_decide_order": _forgets_disorder},
        caught_by=frozenset({"HASH", "bug"}),
        scene=RELAXED,
        seeds=20,
    )
)


def _no_timer(right: Any, fired: Fired) -> Any:
    def next_timer(self: Any) -> Any:
        if self._unblocked:
            fired()
        return self._wake_s

    return next_timer


enter(
    Mutant(
        name="the last acknowledgement of a draining hash is lost",
        breaks="STUCK: waiting entries must be delivered",
        wrong={KEY_SHARED + "next_timer": _no_timer},
        caught_by=frozenset({"STUCK"}),
        scene=KEYED,
        seeds=20,
    )
)


def _forgets_withheld(right: Any, fired: Fired) -> Any:
    def remove_consumer(self: Any, consumer: Any, now: float) -> Any:
        slots = set(self._withheld.slots())
        if slots and len(self._consumers) > 1:
            fired()
        self._withheld = Withheld()
        self._queue(slots)
        return right(self, consumer, now)

    return remove_consumer


enter(
    Mutant(
        name="withheld hashes are forgotten when a consumer leaves",
        breaks="NACK: only an acknowledgement releases a hash",
        wrong={KEY_SHARED + "remove_consumer": _forgets_withheld},
        caught_by=frozenset({"NACK"}),
        scene=ORDERED,
        seeds=20,
    )
)


# -- permits, counts, delays, acknowledgements -----------------------------------------------------


def _gives_back(right: Any, fired: Fired) -> Any:
    def on_redeliver(self: Any, consumer: Any, positions: Any, now: float) -> Any:
        back = sum(consumer.pending.get(at) or 0 for at in positions or ())
        if back:
            fired()
        consumer.permits += back
        return right(self, consumer, positions, now)

    return on_redeliver


enter(
    Mutant(
        name="a returned entry restores permits",
        breaks="PERMIT: only the client grants permits",
        wrong={ONE_OF_SHARED + "on_redeliver": _gives_back},
        caught_by=frozenset({"PERMIT"}),
        scene=SHARED,
        seeds=20,
    )
)


def _uncounted(right: Any, fired: Fired) -> Any:
    def count_again(self: Any, ledger: int, entries: Any) -> None:
        entries = list(entries)
        if len(entries) > 1:
            fired()
        right(self, ledger, entries[:1])

    return count_again


enter(
    Mutant(
        name="of several redeliveries at once, only one is counted",
        breaks="COUNT: each redelivered entry is counted",
        wrong={"magnetar.broker.cursor.redeliveries:Redeliveries.count_again": _uncounted},
        caught_by=frozenset({"COUNT"}),
        scene=SHARED,
        seeds=10,
    )
)


def _too_soon(right: Any, fired: Fired) -> Any:
    def _until_ms(self: Any, now: float) -> Any:
        if self.index:
            fired()
        return right(self, now) + 1_500

    return _until_ms


enter(
    Mutant(
        name="delayed entries are due early",
        breaks="DELAY: at most a tick before their time",
        wrong={"magnetar.broker.dispatch.delayed:Delays._until_ms": _too_soon},
        caught_by=frozenset({"DELAY"}),
        scene=SHARED,
        seeds=10,
    )
)


def _takes_again(right: Any, fired: Fired) -> Any:
    def take_due(self: Any, count: int, now: float, *, read_position: Any) -> Any:
        found = sorted(self.index.take_due(self._until_ms(now), count))
        if any(position >= read_position for position in found):
            fired()
        return found

    return take_due


enter(
    Mutant(
        name="due entries are delivered before they were read, and again after the read",
        breaks="TWICE: only one consumer at a time holds an entry",
        wrong={"magnetar.broker.dispatch.delayed:Delays.take_due": _takes_again},
        caught_by=frozenset({"TWICE", "bug"}),
        scene=SHARED,
        seeds=40,
    )
)


def _cumulative(right: Any, fired: Fired) -> Any:
    fired()
    return True


enter(
    Mutant(
        name="consumers of Shared may acknowledge cumulatively",
        breaks="CUMUL: it would acknowledge entries of other consumers",
        wrong={ONE_OF_SHARED + "cumulative_acks": _cumulative},
        caught_by=frozenset({"CUMUL"}),
        scene=SHARED,
        seeds=10,
    )
)


# -- one active consumer ---------------------------------------------------------------------------


def _goes_on(right: Any, fired: Fired) -> Any:
    def _rewind(self: Any) -> None:
        position = self.read_position
        right(self)
        if self.read_position != position:
            fired()
        self.read_position = position

    return _rewind


enter(
    Mutant(
        name="the next active consumer continues where the former one was",
        breaks="ORDER: it begins with the first unacknowledged entry",
        wrong={"magnetar.broker.dispatch.single_active:SingleActive._rewind": _goes_on},
        caught_by=frozenset({"ORDER", "STUCK"}),
        scene=FAILOVER,
        seeds=10,
    )
)
