"""An inspection reports on undamaged and damaged directories and does not change them."""

from __future__ import annotations

import json
import shutil
from typing import TYPE_CHECKING

import pytest
from fakes.bookies import KEY, crash_image, envelope
from fakes.directories import (
    ENTRIES,
    DirectoryCluster,
    cut_log,
    fill,
    flip_payload,
    grow_length_field,
    identity_of,
    killed_directory,
    later_watermark,
)
from support import run
from typer.testing import CliRunner

from magnetar.bookie import errors
from magnetar.bookie.storage.format import (
    LedgerRecord,
    Tombstone,
    encode_ledger_record,
    encode_tombstone,
    entry_key,
    ledger_key,
)
from magnetar.bookie.storage.inspection import LedgerFacts, inspect_directory
from magnetar.bookie.storage.layout import IDENTITY, STORE, WATERMARK
from magnetar.bookie.storage.rot import note_rot
from magnetar.cli.main import make_app

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

pytestmark = pytest.mark.real_loop


@pytest.fixture
def used(tmp_path: Path) -> Path:
    run(killed_directory(DirectoryCluster(), tmp_path / "used"))
    return tmp_path / "used"


ROT = errors.StorageFailed("sync", "Corruption: block checksum mismatch in 000012.sst offset 0")


def fingerprint(path: Path) -> dict[str, tuple[bytes, int, int]]:
    """The content, mtime and ctime of each file, and the times of each folder."""
    found = {}
    for each in [path, *path.rglob("*")]:
        state = each.stat()
        content = each.read_bytes() if each.is_file() else b""
        found[str(each)] = (content, state.st_mtime_ns, state.st_ctime_ns)
    return found


def inspect(path: Path | str, *flags: str) -> tuple[int, str]:
    arguments = ["bookie", "inspect", str(path), *flags]
    done = CliRunner().invoke(make_app(arguments), arguments)
    return done.exit_code, done.output


def test_the_help_names_the_exit_status() -> None:
    code, said = inspect("--help")
    assert code == 0
    assert "exit status is 0 without damage, and 1 with damage" in " ".join(said.split())


def test_an_undamaged_directory_is_reported_as_whole(used: Path) -> None:
    before = fingerprint(used)
    facts = inspect_directory(used, verify=True)
    assert facts.whole
    assert facts.identity == identity_of(used)
    assert facts.store.incarnation == identity_of(used).incarnation
    assert facts.store.watermark is not None
    assert facts.store.watermark.sequence == facts.store.sequence == ENTRIES + 2
    size = sum(len(envelope(1, entry, b"%d" % entry * 600)) for entry in range(ENTRIES))
    assert facts.store.ledgers == [
        LedgerFacts(1, False, ENTRIES, 0, ENTRIES - 1, 1, size, 0, []),
    ]
    assert facts.formers == []
    assert fingerprint(used) == before


def test_an_inspection_reports_gaps_fences_and_damaged_entries(tmp_path: Path) -> None:
    directory = run(DirectoryCluster().start(tmp_path / "live"))
    record = LedgerRecord(KEY, fenced=True, created_ms=0)
    torn = bytearray(envelope(3, 9))
    torn[-1] ^= 1
    puts = [(ledger_key(3), encode_ledger_record(record))]
    puts += [(entry_key(3, entry), envelope(3, entry)) for entry in (2, 3, 5, 8)]
    puts += [(entry_key(3, 9), bytes(torn)), (entry_key(3, 10), envelope(3, 11))]
    directory.storage.write(puts)
    directory.close()
    whole = inspect_directory(tmp_path / "live", verify=False)
    assert whole.whole  # checksums were not verified
    facts = inspect_directory(tmp_path / "live", verify=True)
    assert not facts.whole
    [ledger] = facts.store.ledgers
    assert (ledger.fenced, ledger.entries, ledger.first, ledger.last) == (True, 6, 2, 10)
    assert (ledger.runs, ledger.damaged, ledger.damaged_entries) == (3, 2, [9, 10])


def test_an_inspection_reports_a_damaged_ledger_record_and_tombstone(tmp_path: Path) -> None:
    directory = run(DirectoryCluster().start(tmp_path / "live"))
    record = encode_ledger_record(LedgerRecord(KEY, fenced=True, created_ms=0))
    directory.storage.write([(ledger_key(3), record), (ledger_key(4), b"no record")])
    directory.storage.write([(entry_key(4, 0), envelope(4, 0))])
    directory.storage.delete_ledger(5, b"no tombstone")
    directory.close()
    status, output = inspect(tmp_path / "live")
    assert status == 1
    assert "DAMAGED: the record of ledger 4: 9 bytes instead of 22" in output
    assert "DAMAGED: the tombstone of deleted ledger 5: 12 bytes instead of 22" in output
    assert "magnetar bookies decommission" in output
    assert "Stop the bookie when the command says so" in output
    facts = inspect_directory(tmp_path / "live", verify=False)
    assert not facts.whole
    assert [(it.ledger, it.fenced, it.entries) for it in facts.store.ledgers] == [
        (3, True, 0),
        (4, None, 1),
    ]


def test_a_ledger_that_cannot_be_listed_hides_no_other(tmp_path: Path) -> None:
    directory = run(DirectoryCluster().start(tmp_path / "live"))
    record = LedgerRecord(KEY, fenced=False, created_ms=0)
    for ledger in (1, 2, 3):
        directory.storage.write([(ledger_key(ledger), encode_ledger_record(record))])
        directory.storage.write(
            [(entry_key(ledger, entry), envelope(ledger, entry)) for entry in range(3000)]
        )
    directory.storage.delete_ledger(9, encode_tombstone(Tombstone(1)))
    directory.close()
    (table,) = (tmp_path / "live" / STORE).glob("*.sst")
    with open(table, "r+b") as file:
        file.seek(table.stat().st_size // 2)
        file.write(b"what is this")
    facts = inspect_directory(tmp_path / "live", verify=False)
    assert not facts.whole
    assert [each.ledger for each in facts.store.ledgers] == [1, 2, 3]
    first, second, third = (each.entries for each in facts.store.ledgers)
    assert (first, third) == (3000, 3000)
    assert second < 3000
    assert facts.store.damage[0].startswith("ledger 2 from entry")
    assert facts.store.tombstones == 1


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (cut_log, "the log lost operations that were on disk"),
        (grow_length_field, "the log lost operations that were on disk"),
        (flip_payload, "does not open"),
        (lambda path: (path / WATERMARK).unlink(), "the watermark is missing"),
        (lambda path: (path / WATERMARK).write_bytes(b"x"), "the watermark is damaged"),
        (later_watermark, "an older identity file was restored"),
        (lambda path: note_rot(path, identity_of(path).incarnation, ROT), "an unreadable table"),
        (lambda path: (path / IDENTITY).unlink(), "the identity file is missing"),
        (lambda path: (path / IDENTITY).write_bytes(b"x"), "the identity file is damaged"),
        (lambda path: (path / STORE / "CURRENT").unlink(), "CURRENT"),
        (lambda path: shutil.rmtree(path / STORE), "the store is missing"),
    ],
)
def test_damage_is_named_and_nothing_is_written(
    used: Path, damage: Callable[[Path], object], said: str
) -> None:
    damage(used)
    before = fingerprint(used)
    status, output = inspect(used, "--verify")
    assert status == 1
    assert said in output
    assert output.strip().endswith("DAMAGED")
    assert fingerprint(used) == before


async def test_an_inspection_reports_each_former_incarnation(tmp_path: Path) -> None:
    cluster = DirectoryCluster()
    await killed_directory(cluster, tmp_path / "used")
    former = identity_of(tmp_path / "used").incarnation
    (tmp_path / "used" / WATERMARK).unlink()
    directory = await cluster.start(tmp_path / "used")
    fill(directory, ledger=7)
    directory.close()
    before = fingerprint(tmp_path / "used")
    status, output = inspect(tmp_path / "used", "--json")
    facts = json.loads(output)
    assert status == 0
    assert facts["whole"]
    assert [each["ledger"] for each in facts["store"]["ledgers"]] == [7]
    [kept] = facts["formers"]
    assert (kept["incarnation"], kept["damage"]) == (former, ["the watermark is missing"])
    assert [each["entries"] for each in kept["ledgers"]] == [ENTRIES]
    assert f"former incarnation {former}" in inspect(tmp_path / "used")[1]
    assert fingerprint(tmp_path / "used") == before


def test_a_directory_without_a_bookies_files_is_refused(tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "none"):
        with pytest.raises(errors.DirectoryForeign):
            inspect_directory(path, verify=False)
    assert inspect(tmp_path)[0] == 1


def test_a_running_bookies_directory_is_refused(tmp_path: Path) -> None:
    directory = run(DirectoryCluster().start(tmp_path / "live"))
    with pytest.raises(errors.DirectoryLocked, match="using it"):
        inspect_directory(tmp_path / "live", verify=False)
    crash_image(tmp_path / "live", tmp_path / "copy")
    assert inspect_directory(tmp_path / "copy", verify=True).whole
    directory.close()
    assert inspect_directory(tmp_path / "live", verify=True).whole
