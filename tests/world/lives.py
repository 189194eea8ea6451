"""Rules that a topic keeps through its life: oracles over trims, deletions, acks, sequence ids.

A topic that is deleted and created again is another *generation*, with another incarnation in its
record. A promise to a client holds within one generation. The oracles, besides I14:

    ACK    an entry whose acknowledgement was answered is not redelivered
    DEDUP  with deduplication on, each sequence id of a producer is stored once
    LIVE   no ledger that a topic lists is deleted
    LEAK   in the end each ledger is listed, and bookies keep nothing of the deleted ones
    LOST   an entry with a receipt is in the log, or was trimmed
    ORDER  entries are stored and delivered in the order in which they were sent
    TRIM   a trimmed ledger was acknowledged by every durable subscription, and retention let it go
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING

from magnetar.broker.log.entry import parse_payload
from magnetar.broker.log.position import EARLIEST, Position
from magnetar.metadata.codec import decode_topic
from magnetar.metadata.policies import UNLIMITED

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from world.oracle import Oracle

    from magnetar.metadata.model import LedgerId, LedgerMetadata, TopicLedger, TopicRecord

SUBSCRIPTIONS = ("a", "b")
"""Each generation has these subscriptions before its first message."""

Message = tuple[str, int]
"""Producer and sequence id."""


@dataclass
class Generation:
    receipted: dict[Message, Position] = field(default_factory=dict)  # -1:-1: a duplicate
    # messages with a receipt or a delivery
    seen: dict[Position, Message] = field(default_factory=dict)
    sent_acks: dict[str, set[Position]] = field(default_factory=dict)  # keyed by subscription
    answered: dict[str, set[Position]] = field(default_factory=dict)
    # The marks of cumulative acknowledgements.
    marks: dict[str, Position] = field(default_factory=dict)
    answered_marks: dict[str, Position] = field(default_factory=dict)
    delivered: dict[str, set[Message]] = field(default_factory=dict)
    trimmed: list[LedgerId] = field(default_factory=list)
    deleted: bool = False


class Lives:
    """The oracles of one topic."""

    def __init__(self, oracle: Oracle) -> None:
        self.retention_s: int | None = None  # None: no topic is trimmed; or UNLIMITED
        self.deduplicates = False
        self.now_ms = 0  # the brokers' time, set before each record is checked
        self.generations: dict[str, Generation] = {}
        self._oracle = oracle
        self._records: dict[str, TopicRecord] = {}

    # -- records and ledgers -----------------------------------------------------------------------

    def generation(self, incarnation: str) -> Generation:
        return self.generations.setdefault(incarnation, Generation())

    def on_record(self, path: str, value: bytes | None) -> None:
        if value is None:
            self._records.pop(path, None)
            return
        record = self._records[path] = decode_topic(value)
        found = self.generation(record.incarnation)
        if record.deleted and not found.deleted:
            found.deleted = True

    def on_ledger_deleted(self, ledger: LedgerId) -> None:
        """LIVE: the ledger's metadata is deleted."""
        for path, record in self._records.items():
            listed = any(part.ledger == ledger for part in record.ledgers)
            self._oracle.hold(
                not listed and ledger not in (*record.cursor_ledgers, *record.delayed_ledgers),
                "LIVE",
                partial("{} is deleted, and {} lists it".format, ledger, path),
            )

    def may_leave(self, after: TopicRecord, part: TopicLedger, stored: LedgerMetadata) -> bool:
        """TRIM: a ledger with entries leaves a topic's list. False: no policy allows it."""
        if self.retention_s is None:
            return False
        found, hold = self.generation(after.incarnation), self._oracle.hold
        last = stored.last_entry
        hold(last is not None, "TRIM", lambda: f"{part} is open and was trimmed")
        assert last is not None
        for subscription in SUBSCRIPTIONS:
            mark = found.marks.get(subscription, EARLIEST)
            acked = found.sent_acks.get(subscription, ())
            for entry in range(last + 1):
                position = Position(part.ledger, entry)
                hold(
                    position <= mark or position in acked,
                    "TRIM",
                    partial("{} is trimmed, {} has not acked it".format, position, subscription),
                )
        age_s = (self.now_ms - part.closed_ms) / 1_000 if part.closed_ms else 0.0
        hold(
            self.retention_s != UNLIMITED and age_s >= self.retention_s,
            "TRIM",
            lambda: f"{part} is trimmed after {age_s} s, retention is {self.retention_s} s",
        )
        found.trimmed.append(part.ledger)
        self._oracle.note("topic", "ledger trimmed", part.ledger)
        return True

    # -- answers to clients ---------------------------------------------------------------------

    def on_receipt(self, incarnation: str, message: Message, position: Position) -> None:
        found = self.generation(incarnation)
        if position.entry < 0:
            self._oracle.hold(
                self.deduplicates,
                "DEDUP",
                lambda: f"{message} is called a duplicate, but no policy asks for deduplication",
            )
            found.receipted.setdefault(message, position)
            return
        before = found.receipted.get(message)
        self._oracle.hold(
            not self.deduplicates or before is None or before == position,
            "DEDUP",
            lambda: f"{message} is stored at {position}, and before at {before}",
        )
        found.receipted[message] = position
        self._see(found, message, position)

    def on_delivery(
        self, incarnation: str, subscription: str, message: Message, position: Position
    ) -> None:
        found = self.generation(incarnation)
        answered = position in found.answered.get(subscription, ())
        answered |= position <= found.answered_marks.get(subscription, EARLIEST)
        self._oracle.reads += 1
        self._oracle.hold(
            not answered,
            "ACK",
            lambda: f"{position} is delivered to {subscription} after its ack was answered",
        )
        self._see(found, message, position)
        found.delivered.setdefault(subscription, set()).add(message)

    def on_ack(self, incarnation: str, subscription: str, positions: Iterable[Position]) -> None:
        """A client sends an acknowledgement of these positions."""
        self.generation(incarnation).sent_acks.setdefault(subscription, set()).update(positions)

    def on_mark(self, incarnation: str, subscription: str, mark: Position) -> None:
        """A client acknowledges everything up to this position."""
        marks = self.generation(incarnation).marks
        marks[subscription] = max(mark, marks.get(subscription, EARLIEST))

    def on_answer(self, incarnation: str, subscription: str, positions: Iterable[Position]) -> None:
        self.generation(incarnation).answered.setdefault(subscription, set()).update(positions)

    def on_mark_answer(self, incarnation: str, subscription: str, mark: Position) -> None:
        marks = self.generation(incarnation).answered_marks
        marks[subscription] = max(mark, marks.get(subscription, EARLIEST))

    def _see(self, found: Generation, message: Message, position: Position) -> None:
        before = found.seen.setdefault(position, message)
        self._oracle.hold(
            before == message,
            "I14",
            lambda: f"{position} holds {message}, and held {before} before",
        )

    # -- the end -----------------------------------------------------------------------------------

    def on_end(self, incarnation: str, ledgers: Sequence[TopicLedger]) -> None:
        """Check the end: all faults are healed, all ledgers are closed, and every subscription has
        got its remaining messages."""
        found, hold = self.generation(incarnation), self._oracle.hold
        texts: list[Message] = []
        for ledger in sorted({*found.trimmed, *(part.ledger for part in ledgers)}):
            life = self._oracle.life(ledger)
            last = life.versions[-1].last_entry
            assert last is not None
            for entry in range(last + 1):
                position = Position(ledger, entry)
                message = message_in(position, life.payloads[entry])
                self._see(found, message, position)
                texts.append(message)
        held = set(texts)
        for message, position in found.receipted.items():
            hold(
                message in held,
                "LOST",
                partial("{} had the receipt {}, and is missing".format, message, position),
            )
        for position, message in found.seen.items():
            hold(
                message in held,
                "LOST",
                partial("{} was {}, and is missing".format, position, message),
            )
        if self.deduplicates:
            hold(
                len(held) == len(texts),
                "DEDUP",
                lambda: f"stored twice: {[each for each in held if texts.count(each) > 1]}",
            )
        first = list(dict.fromkeys(texts))
        hold(_in_order(first), "ORDER", lambda: f"stored in this order: {first}")
        for subscription in SUBSCRIPTIONS:
            missing = held - found.delivered.get(subscription, set())
            hold(
                not missing,
                "LOST",
                partial("{} never got {}".format, subscription, sorted(missing)[:3]),
            )


def message_in(position: Position, payload: bytes) -> Message:
    view = parse_payload(position, memoryview(payload)).view
    return view.producer_name, view.highest_sequence_id


def _in_order(messages: Sequence[Message]) -> bool:
    last: dict[str, int] = {}
    for producer, number in messages:
        if number <= last.get(producer, -1):
            return False
        last[producer] = number
    return True
