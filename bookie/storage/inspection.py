"""Inspects a data directory without its bookie: its content and its damage.

The inspection writes nothing to the directory. RocksDB opens a view of links to the store's files
(former.py) in another place. Damage is a result here, not an error.
"""

from __future__ import annotations

import fcntl
import os
import tempfile
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Final

from magnetar.bookie.errors import DirectoryForeign, StorageFailed
from magnetar.bookie.storage.format import (
    FormatDamaged,
    Identity,
    Watermark,
    decode_ledger_record,
    decode_tombstone,
)
from magnetar.bookie.storage.former import former_incarnations, make_view
from magnetar.bookie.storage.layout import FORMER, LOCK, STORE, WATERMARK, find, in_use
from magnetar.bookie.storage.manifest import find_damage
from magnetar.bookie.storage.probe import check_sequence
from magnetar.bookie.storage.rocks import RocksStorage
from magnetar.bookie.storage.rot import noted_rot
from magnetar.bookie.storage.watermark import read_watermark
from magnetar.protos.envelope import EnvelopeDamaged, decode_envelope

if TYPE_CHECKING:
    from collections.abc import Iterator

_PAGE: Final = 1000
# The number of damaged entries that are listed for each ledger; further ones are only counted.
NAMED_MAX: Final = 100

RECORD_REMEDY: Final = (
    "If the record of a ledger is damaged, the bookie answers each request for the ledger with "
    "'unknown'. Start the bookie and run `magnetar bookies decommission`, which copies the ledgers "
    "from other bookies. Stop the bookie when the command says so. After the end of the command, "
    "start the bookie on an empty directory."
)


@dataclass(slots=True)
class LedgerFacts:
    ledger: int
    fenced: bool | None = None  # None: the ledger's record is missing or damaged
    entries: int = 0
    first: int = -1
    last: int = -1
    runs: int = 0  # ranges without a gap
    bytes: int = 0  # the size of the readable envelopes
    damaged: int = 0  # unreadable or, with `verify`, with a wrong checksum
    damaged_entries: list[int] = field(default_factory=list)  # the first NAMED_MAX


@dataclass(slots=True)
class StoreFacts:
    incarnation: str
    damage: list[str]  # empty: none was found
    opened: bool = False
    sequence: int = 0  # the sequence number of the last operation
    watermark: Watermark | None = None  # None: missing or damaged
    ledgers: list[LedgerFacts] = field(default_factory=list)
    tombstones: int = 0  # remembered deletions of ledgers


@dataclass(slots=True)
class DirectoryFacts:
    path: str
    identity: Identity | None  # None: missing or damaged
    damage: list[str]  # the damage of the directory itself
    store: StoreFacts
    formers: list[StoreFacts]

    @property
    def whole(self) -> bool:
        """True when there is no damage, except the known damage of former incarnations."""
        damaged = self.damage or self.store.damage
        return not damaged and not any(ledger.damaged for ledger in self.store.ledgers)


def inspect_directory(path: Path, *, verify: bool) -> DirectoryFacts:
    """Inspect the directory. `verify` checks each entry's checksum; sizes are read in any case.

    Raises DirectoryLocked when the bookie runs, DirectoryForeign when the directory is not a
    bookie's, and DirectoryUnusable when a file cannot be read.
    """
    found = find(path) if path.is_dir() else None
    if found is None or (found.identity is None and STORE not in found.others):
        raise DirectoryForeign(
            path,
            found="neither an identity file nor a store",
            expected="the data directory of a bookie",
            remedy="Give the directory from the bookie's data_dir.",
        )
    identity = found.identity if isinstance(found.identity, Identity) else None
    damage = []
    if isinstance(found.identity, FormatDamaged):
        damage.append(f"the identity file is damaged: {found.identity.reason}")
    elif found.identity is None:
        damage.append("the identity file is missing")
    with _alone(path), tempfile.TemporaryDirectory(prefix="magnetar-inspect-") as views:
        present = "" if identity is None else identity.incarnation
        store = _store(path, present, Path(views) / "present", verify=verify)
        if identity is not None:
            store.damage += _damage_beside(path, identity, store.watermark)
        formers = [
            _store(path / FORMER / each, each, Path(views) / each, verify=verify)
            for each in former_incarnations(path)
        ]
    return DirectoryFacts(str(path), identity, damage, store, formers)


@contextmanager
def _alone(path: Path) -> Iterator[None]:
    """Prevent a bookie's start on the directory. Raises DirectoryLocked."""
    try:
        lock = os.open(path / LOCK, os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        yield
        return
    try:
        try:
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            raise in_use(path, lock) from None
        yield
    finally:
        os.close(lock)


def _store(directory: Path, incarnation: str, view: Path, *, verify: bool) -> StoreFacts:
    facts = StoreFacts(incarnation, [])
    if not (directory / STORE).is_dir():
        facts.damage.append("the store is missing")
        return facts
    _look_at_watermark(directory, facts)
    storage = _open(directory / STORE, view, facts)
    if storage is None:
        return facts
    try:
        facts.opened = True
        facts.sequence = storage.sequence()
        if facts.watermark is not None:
            check_sequence(facts.sequence, facts.watermark.sequence)
        owner = (storage.owner() or b"none").decode(errors="replace")
        if incarnation and owner != incarnation:
            facts.damage.append(f"the store belongs to {owner!r}")
        facts.tombstones = sum(1 for _ in _tombstones(storage, facts.damage))
        for each in _ledgers(storage):
            facts.ledgers.append(_ledger(storage, each, facts.damage, verify=verify))
    except StorageFailed as error:
        facts.damage.append(str(error))
    finally:
        storage.close()
    return facts


def _damage_beside(path: Path, identity: Identity, watermark: Watermark | None) -> list[str]:
    """Return the damage that is not visible in the store, but for which the next start replaces the
    store. Raises DirectoryUnusable."""
    found = []
    rot = noted_rot(path, identity.incarnation)
    if rot is not None:
        found.append(f"the bookie ended because of an unreadable table: {rot}")
    if watermark is not None and watermark.boot_epoch > identity.boot_epoch:
        epochs = f"the watermark has boot epoch {watermark.boot_epoch}, the identity"
        found.append(f"{epochs} {identity.boot_epoch}: an older identity file was restored")
    return found


def _look_at_watermark(directory: Path, facts: StoreFacts) -> None:
    try:
        facts.watermark = read_watermark(directory / WATERMARK)
        if facts.watermark is None:
            facts.damage.append("the watermark is missing")
        elif missing := find_damage(directory / STORE, facts.watermark):
            facts.damage.append(missing)
    except (FormatDamaged, StorageFailed) as error:
        facts.damage.append(f"the watermark is damaged: {error}")
    except OSError as error:
        facts.damage.append(str(error))


def _open(store: Path, view: Path, facts: StoreFacts) -> RocksStorage | None:
    """Open the store normally, or else with everything that can be read."""
    for salvage in (False, True):
        try:
            make_view(store, view)
            return RocksStorage.open_read_only(view, salvage=salvage)
        except (StorageFailed, OSError) as error:
            facts.damage.append(f"the store does not open{' at all' if salvage else ''}: {error}")
    return None


def _ledgers(storage: RocksStorage) -> Iterator[int]:
    after = -1
    while page := storage.ledgers(after, ledgers_max=_PAGE):
        yield from page
        after = page[-1]


def _tombstones(storage: RocksStorage, damage: list[str]) -> Iterator[int]:
    """Yield the deleted ledgers. Add each damaged tombstone to `damage`."""
    after = -1
    while page := storage.tombstones(after, ledgers_max=_PAGE):
        for ledger, stone in page:
            try:
                decode_tombstone(stone)
            except FormatDamaged as error:
                damage.append(f"the tombstone of deleted ledger {ledger}: {error.reason}")
            yield ledger
        after = page[-1][0]


def _ledger(storage: RocksStorage, ledger: int, damage: list[str], *, verify: bool) -> LedgerFacts:
    """Return the readable facts of the ledger. If its record is damaged, or not all of its entries
    can be listed, add the reason to `damage`."""
    facts = LedgerFacts(ledger)
    try:
        facts.fenced = decode_ledger_record(storage.ledger_record(ledger) or b"").fenced
    except (FormatDamaged, StorageFailed) as error:
        damage.append(f"the record of ledger {ledger}: {error}")
    at = 0
    try:
        while page := storage.entry_ids(ledger, at, entries_max=_PAGE):
            for entry in page:
                _add_entry(storage, facts, entry, verify=verify)
            at = page[-1] + 1
    except StorageFailed as error:
        damage.append(f"ledger {ledger} from entry {at} on: {error}")
    return facts


def _add_entry(storage: RocksStorage, facts: LedgerFacts, entry: int, *, verify: bool) -> None:
    facts.runs += entry != facts.last + 1 or facts.entries == 0
    facts.first = entry if facts.entries == 0 else facts.first
    facts.last = entry
    facts.entries += 1
    try:
        value = storage.entry(facts.ledger, entry) or b""
        facts.bytes += len(value)
        if verify:
            found = decode_envelope(value)
            if (found.ledger, found.entry) != (facts.ledger, entry):
                raise EnvelopeDamaged(f"it is entry {found.ledger}:{found.entry}")
    except (StorageFailed, EnvelopeDamaged):
        facts.damaged += 1
        if len(facts.damaged_entries) < NAMED_MAX:
            facts.damaged_entries.append(entry)
