"""An entry of a log in parsed form. Readers share it, so no code changes it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from magnetar.protos.entry import (
    broker_metadata_prefix,
    parse_stored_entry,
    strip_broker_metadata,
)
from magnetar.protos.errors import MalformedEntry

if TYPE_CHECKING:
    from magnetar.broker.log.position import Position
    from magnetar.protos.entry import EntryView

OVERHEAD_BYTES: Final = 600
"""The memory of an entry besides its data: position, view and numbers, 541 bytes measured. It does
not include the producer's name and keys."""


@dataclass(slots=True)
class StoredEntry:
    """One stored message or batch. A value by convention; not frozen, which would cost 0.4 us."""

    position: Position
    index: int  # the index of the entry's last message in the topic
    broker_timestamp_ms: int  # when the broker appended the entry
    view: EntryView  # over memory of its own: no entry keeps a frame alive

    @property
    def data(self) -> bytes | memoryview:
        """The bytes that the producer sent; the broker delivers them unchanged."""
        return self.view.data

    @property
    def broker_metadata(self) -> bytes:
        """The prefix that the broker put in front of `data`."""
        return broker_metadata_prefix(
            broker_timestamp_ms=self.broker_timestamp_ms, index=self.index
        )

    @property
    def messages(self) -> int:
        return self.view.num_messages

    @property
    def held_bytes(self) -> int:
        """The memory that the entry takes."""
        return len(self.view.data) + OVERHEAD_BYTES


def parse_payload(position: Position, payload: memoryview) -> StoredEntry:
    """Parse the payload of an entry in a ledger. Raises MalformedEntry."""
    broker, data = strip_broker_metadata(payload)
    if broker is None:
        raise MalformedEntry("no broker entry metadata")
    view = parse_stored_entry(data)
    return StoredEntry(position, broker.index, broker.broker_timestamp_ms, view)
