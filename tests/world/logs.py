"""I14: rules that a log of ledgers keeps while brokers take it over from each other.

Two kinds of log are checked: those of real topics, whose records name their ledgers, and the plain
list of the contenders. The oracle receives each version of a record or list at the moment it is
stored, each message that is sent, acknowledged or read, and at the end everything that can be read.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING

from world.lives import Lives

from magnetar.metadata.codec import decode_topic
from magnetar.metadata.model import LedgerId, LedgerState

if TYPE_CHECKING:
    from collections.abc import Sequence

    from world.oracle import Oracle

    from magnetar.broker.log.position import Position
    from magnetar.metadata.model import LedgerMetadata, TopicLedger, TopicRecord

LIST = "/topics/log"


@dataclass
class Messages:
    """The messages of one topic."""

    sent: dict[str, None] = field(default_factory=dict)
    acknowledged: dict[str, Position] = field(default_factory=dict)
    seen: dict[Position, str] = field(default_factory=dict)  # messages that any client has read


class Logs:
    def __init__(self, oracle: Oracle) -> None:
        self.messages = Messages()
        self.lives = Lives(oracle)
        self.unlisted: set[LedgerId] = set()  # ledgers of logs that do not list them yet
        self.rolls = 0  # ledgers that were added to a list
        self._oracle = oracle
        self._records: dict[str, TopicRecord] = {}
        self._lists: dict[str, list[LedgerId]] = {}

    # -- the list of ledgers -----------------------------------------------------------------------

    def on_ledger(self, ledger: LedgerMetadata) -> None:
        """A ledger was created. Its properties say whether it belongs to a log."""
        if ledger.custom.get("kind") == b"data" or "log" in ledger.custom:
            self.unlisted.add(ledger.ledger)

    def on_list(self, path: str, ledgers: Sequence[LedgerId]) -> None:
        before = self._lists.get(path, [])
        self._lists[path] = list(ledgers)
        self.i14_ledgers_are_appended(path, before, ledgers)
        if set(ledgers) - set(before):
            self.i14_only_the_last_is_open(path, ledgers)
        self.unlisted.difference_update(ledgers)

    def on_record(self, path: str, value: bytes) -> None:
        """A topic's record was stored."""
        after = decode_topic(value)
        before = self._records.get(path)
        self._records[path] = after
        self.lives.on_record(path, value)
        if before is not None and before.incarnation != after.incarnation:
            # the topic was created again
            self._lists.pop(path, None)
            before = None
        if before is not None:
            self._oracle.hold(
                after.epoch >= before.epoch,
                "I14",
                lambda: f"{path}: epoch {after.epoch} after {before.epoch}",
            )
            if not after.deleted:
                self.i14_what_is_closed_stays(path, before.ledgers, after)
        self.on_list(path, [part.ledger for part in after.ledgers])
        for part in after.ledgers:
            self.i14_the_record_tells_the_truth(path, part)

    def i14_ledgers_are_appended(
        self, path: str, before: Sequence[LedgerId], after: Sequence[LedgerId]
    ) -> None:
        """I14: ledgers are added at the end, with increasing ids; their order never changes."""
        kept = [ledger for ledger in before if ledger in after]
        added = [ledger for ledger in after if ledger not in before]
        self.rolls += len(added)
        self._oracle.hold(
            [*kept, *added] == list(after) == sorted(set(after)),
            "I14",
            lambda: f"{path}: {list(after)} after {list(before)}",
        )

    def i14_only_the_last_is_open(self, path: str, ledgers: Sequence[LedgerId]) -> None:
        """I14: a ledger is added only when all earlier ledgers of the list are closed."""
        for ledger in ledgers[:-1]:
            life = self._oracle.life(ledger)
            closed = life.deleted or life.versions[-1].state is LedgerState.CLOSED
            self._oracle.hold(
                closed,
                "I14",
                partial(
                    "{}: {} is added after {}, which is open".format, path, ledgers[-1], ledger
                ),
            )

    def i14_what_is_closed_stays(
        self, path: str, before: Sequence[TopicLedger], after: TopicRecord
    ) -> None:
        """I14: no ledger with entries leaves the list without a trim, and its row does not
        change."""
        now = {part.ledger: part for part in after.ledgers}
        for part in before:
            told = now.get(part.ledger)
            if told is None:
                stored = self._oracle.life(part.ledger).versions[-1]
                last = stored.last_entry
                self._oracle.hold(
                    last == -1 or self.lives.may_leave(after, part, stored),
                    "I14",
                    partial("{}: {} left the list, it ends at {}".format, path, part.ledger, last),
                )
            elif part.closed_ms:
                self._oracle.hold(
                    told == part, "I14", partial("{}: {} became {}".format, path, part, told)
                )

    def i14_the_record_tells_the_truth(self, path: str, part: TopicLedger) -> None:
        """I14: the topic's record and the ledger's record agree on a closed ledger."""
        if not part.closed_ms:
            return
        stored = self._oracle.life(part.ledger).versions[-1]
        assert stored.last_entry is not None or stored.state is not LedgerState.CLOSED
        entries = None if stored.last_entry is None else stored.last_entry + 1
        self._oracle.hold(
            (entries, stored.length) == (part.entries, part.length),
            "I14",
            partial("{}: the topic's record says {}, the ledger's {}".format, path, part, entries),
        )

    def i14_nothing_outside_the_list(self, ledger: int, entry: int) -> None:
        """I14: a ledger of a log is listed before it has entries."""
        self._oracle.hold(
            ledger not in self.unlisted,
            "I14",
            lambda: f"{ledger}:{entry} is stored, and its ledger is in no list",
        )

    # -- messages ----------------------------------------------------------------------------------

    def on_sent(self, message: str) -> None:
        assert message not in self.messages.sent
        self.messages.sent[message] = None

    def on_acknowledged(self, message: str, position: Position) -> None:
        acknowledged = self.messages.acknowledged
        self._oracle.hold(
            message not in acknowledged, "I14", lambda: f"{message} is acknowledged twice"
        )
        acknowledged[message] = position
        self._see(message, position)

    def on_read(self, message: str, position: Position) -> None:
        self._oracle.reads += 1
        self._see(message, position)

    def _see(self, message: str, position: Position) -> None:
        """I14: all reads of a position find the same message."""
        before = self.messages.seen.setdefault(position, message)
        self._oracle.hold(
            before == message,
            "I14",
            lambda: f"{position} holds {message}, and held {before} before",
        )

    def on_all_read(self, found: Sequence[tuple[Position, int, str]]) -> None:
        """At the end: the position, index and text of each message in the log."""
        messages, hold = self.messages, self._oracle.hold
        texts = [text for _, _, text in found]
        hold(len(set(texts)) == len(texts), "I14", lambda: "a message is in the log twice")
        positions = {position: text for position, _, text in found}
        hold(list(positions) == sorted(positions), "I14", lambda: "positions go backwards")
        for number, (position, index, text) in enumerate(found):
            hold(index == number, "I14", partial("{} has index {}".format, position, index))
            hold(text in messages.sent, "I14", partial("{} was never sent".format, text))
        for position, text in messages.seen.items():
            hold(
                positions.get(position) == text,
                "I14",
                partial("{} was at {} before".format, text, position),
            )
        order = {text: at for at, text in enumerate(messages.sent)}
        reigns: dict[str, int] = {}
        for text in texts:
            reign = text.rpartition(" ")[0]
            hold(
                order[text] > reigns.get(reign, -1),
                "I14",
                partial("{} is stored after messages that were sent later".format, text),
            )
            reigns[reign] = order[text]
