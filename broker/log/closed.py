"""The content of a topic, read without opening it.

If the topic's record lists closed ledgers only, they hold every message whose producer got a
receipt before the record was read: an owner lists a ledger in the record before it adds the first
entry to the ledger. So any broker can read the content, not only the owner of the topic. This takes
a read of the record, of the last ledger's metadata, and of its last entry. Opening the topic would
also write the record, recover cursors, and keep the topic in memory.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from magnetar.bookie.ledger.errors import LedgerError
from magnetar.broker.log.chain import Chain
from magnetar.broker.log.entry import parse_payload
from magnetar.broker.log.position import Position
from magnetar.metadata import paths
from magnetar.metadata.codec import decode_topic
from magnetar.metadata.errors import MetadataError
from magnetar.metadata.model import EntryId
from magnetar.protos.errors import EntryError

if TYPE_CHECKING:
    from magnetar.broker.log.ledgers import LedgerStore
    from magnetar.metadata.model import TopicLedger
    from magnetar.metadata.store import MetadataStore
    from magnetar.protos.names import TopicName


async def closed_chain(
    name: TopicName, *, store: MetadataStore, ledgers: LedgerStore
) -> Chain | None:
    """The chain of a topic whose ledgers are all closed. None: a ledger is open, the topic does not
    exist or is deleted, a read failed, or the last ledger does not end where the record says. The
    caller then opens the topic, which gives the answer or the error."""
    path = paths.topic(name.tenant, name.namespace, name.domain, name.topic)
    try:
        await store.sync(path)
        found = await store.get(path)
        record = None if found is None else decode_topic(found.value)
        if record is None or record.deleted or any(not it.closed_ms for it in record.ledgers):
            return None
        kept = [part for part in record.ledgers if part.entries]
        next_index = 0 if record.dropped is None else record.dropped.next_index
        if record.ledgers:
            next_index = record.ledgers[-1].first_index
        if kept:
            next_index = await _last_index(kept[-1], ledgers) + 1
    except (MetadataError, LedgerError, EntryError, _Unclear):
        return None
    return Chain(kept, next_index=next_index, dropped=record.dropped)


class _Unclear(Exception):
    """The last ledger does not exist, or does not end where the topic's record says."""


async def _last_index(last: TopicLedger, ledgers: LedgerStore) -> int:
    """Index of the last message."""
    entry = EntryId(last.entries - 1)
    metadata = await ledgers.metadata(last.ledger)
    if metadata is None or metadata.last_entry != entry:
        raise _Unclear
    (part,) = await ledgers.reader(metadata).read(entry, entry, bytes_max=1)
    return parse_payload(Position(last.ledger, entry), part.payload).index
