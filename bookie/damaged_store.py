"""What a bookie answers for a former incarnation of itself, whose store was found damaged.

The class of such answers is *limbo*. An entry that is there, and whose checksum holds, is given:
it is what was acknowledged. Everything else is unknown: that an entry or a ledger is not there says
nothing about whether it was; a fence could not be made to hold; adds go to the present incarnation.
A former incarnation of which nothing can be read is answered like one that never was:
WRONG_INCARNATION, unknown as well.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from magnetar.bookie.errors import StorageFailed
from magnetar.bookie.storage.format import FormatDamaged, decode_ledger_record
from magnetar.protos.envelope import BookieCode, EnvelopeDamaged, decode_envelope

if TYPE_CHECKING:
    from collections.abc import Mapping

    from magnetar.bookie.storage.store import Storage


class FormerStores:
    """The former incarnations. Its reads block."""

    def __init__(self, stores: Mapping[str, Storage | None]) -> None:
        """By incarnation. None: nothing can be read of it."""
        self._stores = stores

    def code(self, incarnation: str) -> BookieCode:
        """The answer to everything but a read, for any incarnation that is not the present one."""
        readable = self._stores.get(incarnation) is not None
        return BookieCode.LIMBO if readable else BookieCode.WRONG_INCARNATION

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
        """Envelopes of the entries from `first` on that are there and whole, up to the first one
        that is not; limits as of `Storage.run`."""
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
    """Whether nothing speaks against it: a ledger's record that is lost cannot keep its entries
    from whoever restores them."""
    try:
        value = storage.ledger_record(ledger)
        return value is None or decode_ledger_record(value).master_key == master_key
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
