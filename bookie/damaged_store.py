"""Answers for a former incarnation of a bookie whose store was found damaged.

The bookie returns a stored entry if its checksum is right: the checksum covers the entry and its
ids, so this is the entry that the bookie stored. To every other request the bookie answers
DAMAGED_STORE, which means "unknown". A missing entry or ledger may have existed. The bookie cannot
store a fence, because the store of a former incarnation is read-only. Adds belong to the present
incarnation. For a former incarnation with an unreadable store the bookie answers as for an
incarnation that never existed: WRONG_INCARNATION, which also means "unknown".
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from magnetar.bookie.contract import may_read
from magnetar.bookie.errors import StorageFailed
from magnetar.bookie.storage.format import FormatDamaged, decode_ledger_record
from magnetar.protos.envelope import BookieCode, EnvelopeDamaged, decode_envelope

if TYPE_CHECKING:
    from collections.abc import Mapping

    from magnetar.bookie.storage.store import Storage


class FormerStores:
    """The stores of the former incarnations. Reads block the calling thread."""

    def __init__(self, stores: Mapping[str, Storage | None]) -> None:
        """`stores` maps each former incarnation to its store, or to None if the store cannot be
        read."""
        self._stores = stores

    def code(self, incarnation: str) -> BookieCode:
        """Return the answer to every call except a read, for any incarnation but the present
        one."""
        readable = self._stores.get(incarnation) is not None
        return BookieCode.DAMAGED_STORE if readable else BookieCode.WRONG_INCARNATION

    def run(
        self,
        incarnation: str,
        ledger: int,
        master_key: int,
        first: int,
        last: int,
        *,
        bytes_max: int,
        entries_max: int,
    ) -> list[bytes]:
        """Return the envelopes of the intact entries from `first` on, up to the first missing or
        damaged entry. The limits are those of `Storage.run`."""
        storage = self._stores.get(incarnation)
        if storage is None or not _may_read(storage, ledger, master_key):
            return []
        found: list[bytes] = []
        size = 0
        for entry in range(first, min(last, first + entries_max - 1) + 1):
            envelope = _intact(storage, ledger, entry)
            if envelope is None:
                break
            found.append(envelope)
            size += len(envelope)
            if size >= bytes_max:
                break
        return found


def _may_read(storage: Storage, ledger: int, master_key: int) -> bool:
    """Return whether the key allows reads. If the ledger's record is lost, any key does: the loss
    must not prevent reads for a repair."""
    try:
        value = storage.ledger_record(ledger)
        if value is None:
            return True
        return may_read(decode_ledger_record(value).master_key, ledger, master_key)
    except (StorageFailed, FormatDamaged):
        return True


def _intact(storage: Storage, ledger: int, entry: int) -> bytes | None:
    try:
        value = storage.entry(ledger, entry)
        if value is None:
            return None
        envelope = decode_envelope(value)
    except (StorageFailed, EnvelopeDamaged):
        return None
    return value if (envelope.ledger, envelope.entry) == (ledger, entry) else None
