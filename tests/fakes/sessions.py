"""Sessions as a topic sees them: they record what the topic sends to producers and consumers."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fakes.entries import texts_of

from magnetar.broker.log.position import Position

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from magnetar.broker.dispatch.dispatcher import EntryDetail
    from magnetar.broker.log.entry import StoredEntry
    from magnetar.broker.topic.contract import CloseReason, ReadyProducer


class FakeProducerSession:
    """`answers` holds receipts and errors in the order in which they came."""

    def __init__(self, *, alive: bool = True) -> None:
        self.alive = alive
        self.probes = 0
        self.answers: list[tuple[int, Position | Exception]] = []
        self.batches: list[int] = []
        self.reason: CloseReason | None = None
        self.is_ready = False  # set after a wait for exclusive access
        self.refusal: Exception | None = None  # the error that ended the wait

    def ready(self, producer: ReadyProducer) -> None:
        assert not self.is_ready, "ready twice"
        self.is_ready = True

    def refused(self, error: Exception) -> None:
        assert self.reason is None, "ended twice"
        self.refusal = error

    def receipts(self, ledger: int, receipts: Iterable[tuple[int, int, int]]) -> None:
        assert self.reason is None, "the producer answered after its close"
        answers = [(number, Position(ledger, entry)) for number, _, entry in receipts]
        assert answers
        self.batches.append(len(answers))
        self.answers += answers

    def send_error(self, sequence_id: int, error: Exception) -> None:
        assert self.reason is None, "the producer answered after its close"
        self.answers.append((sequence_id, error))

    def closed(self, reason: CloseReason) -> None:
        assert self.reason is None, "closed twice"
        self.reason = reason

    async def probe(self) -> bool:
        self.probes += 1
        return self.alive

    @property
    def receipted(self) -> list[int]:
        """Sequence ids with a receipt."""
        return [number for number, answer in self.answers if not isinstance(answer, Exception)]


class FakeConsumerSession:
    """`texts` and `entries` hold what was delivered, in order."""

    def __init__(self, *, alive: bool = True, room: bool = True) -> None:
        self.alive = alive
        self.room = room
        self.entries: list[StoredEntry] = []
        self.counts: list[int] = []
        self.ack_sets: list[tuple[int, ...]] = []
        self.deliveries = 0
        self.active: list[bool] = []
        self.ends = 0
        self.reason: CloseReason | None = None

    def writable(self) -> bool:
        return self.room

    def deliver(self, entries: Sequence[StoredEntry], details: Mapping[int, EntryDetail]) -> None:
        assert self.reason is None, "the consumer got entries after its close"
        assert self.room, "delivered without room"
        assert entries
        self.deliveries += 1
        for index, entry in enumerate(entries):
            detail = details.get(index)
            self.entries.append(entry)
            self.counts.append(detail.redelivery_count if detail else 0)
            self.ack_sets.append(detail.ack_set if detail else ())

    def reached_end(self) -> None:
        self.ends += 1

    def active_changed(self, active: bool) -> None:
        self.active.append(active)

    def closed(self, reason: CloseReason) -> None:
        assert self.reason is None, "closed twice"
        self.reason = reason

    async def probe(self) -> bool:
        return self.alive

    @property
    def texts(self) -> list[str]:
        return [text for entry in self.entries for text in texts_of(entry.data)]

    @property
    def positions(self) -> list[Position]:
        return [entry.position for entry in self.entries]
