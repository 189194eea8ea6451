"""How much of a topic's record each of its parts may take.

The metadata store takes a record of 1,000 KiB and no more. What grows is refused before that, each
part at a bound of its own, so that many subscriptions do not stop the writers, nor many ledgers the
subscribers; and so that there is always room for what must not fail: the next owner's epoch, the
end of a ledger, cursors. Of a full topic everything can be read; whoever would make it grow is
told (TopicFull).
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Final

from magnetar.broker.errors import TopicFull
from magnetar.metadata.codec import encode_topic
from magnetar.metadata.model import SubscriptionRecord, TopicRecord

if TYPE_CHECKING:
    from magnetar.protos.names import TopicName

LEDGERS_MAX: Final = 10_000
"""At most 58 bytes each (five numbers of ten bytes, their tags, a header): 566 KiB. With
`ledger_size_factor`, of a topic that always rolls as early as it may, two years, or 100 TiB."""

SUBSCRIPTIONS_BYTES_MAX: Final = 300 << 10
"""Names, properties and the state that they begin with: 3,000 of 100 bytes. With the ledgers and
`CursorConfig.inline_bytes_max` it is 930 KiB."""

LEDGERS_PER_STEP: Final = 500
"""With each so many ledgers in its record, a topic's next ones are larger."""


def ledger_size_factor(ledgers: int) -> int:
    """How many times as large as usual a ledger may become in a topic that has this many."""
    return 1 + ledgers // LEDGERS_PER_STEP


def require_ledger_room(name: TopicName, ledgers: int) -> None:
    """Whether the record may list one more. Raises TopicFull."""
    if ledgers >= LEDGERS_MAX:
        raise TopicFull(str(name), f"it has {ledgers} ledgers, as many as it may")


def with_subscription(
    name: TopicName, record: TopicRecord, subscription: str, begin: SubscriptionRecord
) -> TopicRecord:
    """The record with one more subscription. Raises TopicFull."""
    subscriptions = {**record.subscriptions, subscription: begin}
    size = len(encode_topic(TopicRecord(epoch=0, subscriptions=subscriptions)))
    if size > SUBSCRIPTIONS_BYTES_MAX:
        why = f"its subscriptions would take {size} bytes of {SUBSCRIPTIONS_BYTES_MAX}"
        raise TopicFull(str(name), why)
    return replace(record, subscriptions=subscriptions)
