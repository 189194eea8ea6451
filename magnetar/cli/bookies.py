"""`magnetar bookies`: show, drain, decommission and repair the bookies of a cluster.

The commands read the metadata store and ask the bookies. They never open a ledger, so they disturb
no writer.
"""

from __future__ import annotations

import logging
import sys
from contextlib import asynccontextmanager
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from magnetar.bookie.ledger.connection import RemoteBookiePeer
from magnetar.bookie.ledger.errors import LedgerError
from magnetar.bookie.repair.decommission import Progress, Stage, decommission, drain, undrain
from magnetar.bookie.repair.errors import RepairError, StillNeeded
from magnetar.bookie.repair.pause import pause, paused, resume
from magnetar.bookie.repair.survey import survey_bookies, survey_ledger, survey_under_replication
from magnetar.cli.client import fail
from magnetar.cli.help import App
from magnetar.cli.interrupt import INTERRUPTED, run_interruptible
from magnetar.cli.output import print_json, print_table, time_of
from magnetar.metadata.errors import MetadataError
from magnetar.metadata.model import LEDGER_ID_MAX, BookieId, LedgerId
from magnetar.metadata.url import InvalidMetadataUrl, MetadataUrl
from magnetar.metadata.zookeeper import ZooKeeperStore
from magnetar.runtime.clock import SystemClock
from magnetar.runtime.log import configure_logging

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Coroutine

    from magnetar.bookie.repair.survey import BookieRow, CopyRow, LedgerView
    from magnetar.metadata.model import Member
    from magnetar.metadata.under_replication import RepairPause, UnderReplication

BLOCKERS_SHOWN_MAX: Final = 10
CONNECT_S: Final = 3.0  # short, because a user waits

Url = Annotated[
    str,
    typer.Option(
        "--metadata-url",
        envvar="MAGNETAR_METADATA_URL",
        help="metadata store of the cluster: zk://host:port[,host:port…][/folder]",
    ),
]
Json = Annotated[bool, typer.Option("--json", help="print JSON, for programs")]
Bookie = Annotated[str, typer.Argument(help="id of the bookie, for example bookie-1")]


def add_to(app: typer.Typer) -> None:
    bookies = App(help="Show and manage bookies and their ledgers.", no_args_is_help=True)
    bookies.callback()(lambda: None)
    bookies.command("list")(list_bookies)
    bookies.command("drain")(drain_bookie)
    bookies.command("undrain")(undrain_bookie)
    bookies.command("decommission")(decommission_bookie)
    bookies.command("under-replicated")(under_replicated)
    bookies.command("ledger")(ledger)
    repair = App(
        help="Pause or resume repair of the whole cluster, for example for maintenance.",
        no_args_is_help=True,
    )
    repair.command("pause")(pause_repair)
    repair.command("resume")(resume_repair)
    repair.command("status")(repair_status)
    bookies.add_typer(repair, name="repair")
    app.add_typer(bookies, name="bookies")


def list_bookies(metadata_url: Url, as_json: Json = False) -> None:
    """List all bookies with their state, their disk, and their number of ledgers."""

    async def work() -> None:
        async with _store(metadata_url) as store:
            rows = await survey_bookies(store, RemoteBookiePeer)
        if as_json:
            print_json([_bookie_json(row) for row in rows])
            return
        print_table(
            ("bookie", "incarnation", "state", "address", "zone", "disk", "ledgers", "open"),
            (
                (
                    row.member.bookie,
                    row.member.incarnation[:8],
                    row.state,
                    row.address or "-",
                    row.zone or "-",
                    _disk(row),
                    str(row.ledgers),
                    str(row.open_ledgers),
                )
                for row in rows
            ),
        )

    _run(work())


def drain_bookie(bookie: Bookie, metadata_url: Url) -> None:
    """Give a bookie no new ledgers. If other bookies are available, the brokers end their open
    ledgers on it and begin new ones elsewhere. The bookie keeps and serves its entries."""

    async def work() -> None:
        async with _store(metadata_url) as store:
            await drain(store, SystemClock(), BookieId(bookie), decommission=False)
        typer.echo(
            f"{bookie} gets no new ledgers until you run `magnetar bookies undrain {bookie}`"
        )

    _run(work())


def undrain_bookie(bookie: Bookie, metadata_url: Url) -> None:
    """Give a bookie new ledgers again: ends a drain or a decommission."""

    async def work() -> None:
        async with _store(metadata_url) as store:
            await undrain(store, BookieId(bookie))
        typer.echo(f"{bookie} may get new ledgers")

    _run(work())


def decommission_bookie(
    bookie: Bookie,
    metadata_url: Url,
    timeout_s: Annotated[
        float, typer.Option("--timeout-s", min=1, help="time limit of the command")
    ] = 86_400.0,
) -> None:
    """Move all ledgers away from a bookie, then remove it from the cluster.

    Leave the bookie running until the command asks you to stop it: the bookie is the best source
    for its own copies. You can interrupt the command and run it again. With exit status 1, the
    bookie was not removed; the command names each ledger that is still on the bookie, and why.
    """

    async def work() -> None:
        async with _store(metadata_url) as store:
            await decommission(
                store,
                SystemClock(),
                BookieId(bookie),
                timeout_s=timeout_s,
                on_progress=lambda progress: _tell(bookie, progress),
            )

    try:
        _run(work())
    except StillNeeded as error:
        _print_blockers(error.blockers, all_of_them=True)
        fail(str(error))


def under_replicated(metadata_url: Url, as_json: Json = False) -> None:
    """List the ledgers that wait for repair, and the reason why the last attempt failed."""

    async def work() -> None:
        async with _store(metadata_url) as store:
            found = await survey_under_replication(store, SystemClock())
            standing = await paused(store)
        if as_json:
            print_json(
                [
                    {"ledger": record.ledger, "repairing": working, **_faults_json(record.faults)}
                    for record, working in found
                ]
            )
            return
        if standing is not None:
            typer.echo(_pause_line(standing))
        print_table(
            ("ledger", "since", "lost", "bad copies", "narrow", "state"),
            (
                (
                    str(record.ledger),
                    time_of(record.faults.created_ms),
                    ", ".join(sorted(map(_short, record.faults.lost))) or "-",
                    ", ".join(
                        f"{_short(bad.member)}: {bad.first_entry}-{bad.last_entry}"
                        for bad in record.faults.bad[:BLOCKERS_SHOWN_MAX]
                    )
                    or "-",
                    "yes" if record.faults.narrow else "-",
                    "being repaired" if working else record.faults.failure or "waits",
                )
                for record, working in found
            ),
        )

    _run(work())


def pause_repair(
    metadata_url: Url,
    reason: Annotated[str, typer.Option(help="shown by `repair status`")] = "",
) -> None:
    """Pause repair: until it resumes, no bookie is declared lost and no new copy begins. The pause
    does not affect clients."""

    async def work() -> None:
        async with _store(metadata_url) as store:
            await pause(store, SystemClock(), reason=reason)
        typer.echo("repair is paused until you run `magnetar bookies repair resume`")

    _run(work())


def resume_repair(metadata_url: Url) -> None:
    """Resume repair. The delay before a missing bookie is declared lost starts again."""

    async def work() -> None:
        async with _store(metadata_url) as store:
            await resume(store)
        typer.echo("repair is resumed")

    _run(work())


def repair_status(metadata_url: Url, as_json: Json = False) -> None:
    """Show whether repair is paused, since when, and why."""

    async def work() -> None:
        async with _store(metadata_url) as store:
            found = await paused(store)
        if as_json:
            print_json(
                {"paused": found is not None}
                | ({} if found is None else {"since_ms": found.since_ms, "reason": found.reason})
            )
        else:
            typer.echo("repair is not paused" if found is None else _pause_line(found))

    _run(work())


def ledger(
    ledger_id: Annotated[int, typer.Argument(metavar="ID", min=0, max=LEDGER_ID_MAX)],
    metadata_url: Url,
    as_json: Json = False,
) -> None:
    """Show a ledger: its state, and the entries that each bookie reports."""

    async def work() -> None:
        async with _store(metadata_url) as store:
            view = await survey_ledger(store, RemoteBookiePeer, SystemClock(), LedgerId(ledger_id))
        if as_json:
            print_json(_ledger_json(view))
        else:
            _print_ledger(view)

    _run(work())


# -- shared by all commands ------------------------------------------------------------------------


def _run(work: Coroutine[Any, Any, None]) -> None:
    """Run the work of a command. An operating error ends the command with one line and exit code 1;
    an invalid URL has exit code 2."""
    configure_logging(level="ERROR")
    logging.getLogger("kazoo").setLevel(logging.CRITICAL)
    try:
        run_interruptible(work)
    except KeyboardInterrupt:
        raise typer.Exit(INTERRUPTED) from None
    except StillNeeded:
        raise
    except InvalidMetadataUrl as error:
        fail(str(error), code=2)
    except (RepairError, LedgerError, MetadataError) as error:
        fail(str(error))


@asynccontextmanager
async def _store(url: str) -> AsyncIterator[ZooKeeperStore]:
    where = MetadataUrl.parse(url)
    store = await ZooKeeperStore.connect(
        where.hosts, chroot=where.chroot, connect_timeout_s=CONNECT_S
    )
    try:
        yield store
    finally:
        await store.close()


def _tell(bookie: str, progress: Progress) -> None:
    match progress.stage:
        case Stage.MOVING:
            count = len(progress.blockers)
            typer.echo(f"{bookie}: {count} {'ledger is' if count == 1 else 'ledgers are'} on it")
            _print_blockers(progress.blockers)
        case Stage.SERVING:
            typer.echo(
                f"{bookie}: no ledgers are on it any more. Stop it now; waiting until it is down"
            )
        case Stage.REMOVED:
            typer.echo(f"{bookie}: removed from the cluster; its directory may be deleted")
    sys.stdout.flush()


def _print_blockers(blockers: Any, *, all_of_them: bool = False) -> None:
    shown = sorted(blockers.items())
    for number, why in shown if all_of_them else shown[:BLOCKERS_SHOWN_MAX]:
        typer.echo(f"  ledger {number}: {why}")
    if not all_of_them and len(shown) > BLOCKERS_SHOWN_MAX:
        typer.echo(f"  and {len(shown) - BLOCKERS_SHOWN_MAX} more")


def _print_ledger(view: LedgerView) -> None:
    metadata = view.metadata
    quorum = f"{metadata.ensemble_size}/{metadata.write_quorum}/{metadata.ack_quorum}"
    typer.echo(f"ledger {metadata.ledger}: {metadata.state.name}, E/Qw/Qa {quorum}")
    typer.echo(f"created {time_of(metadata.created_ms)}")
    if metadata.last_entry is not None:
        typer.echo(f"{metadata.last_entry + 1} entries, {metadata.length} bytes")
    if metadata.under_replicated:
        typer.echo("created with fewer copies than configured")
    if view.record is not None:
        since = time_of(view.record.faults.created_ms)
        typer.echo(f"under-replicated since {since}: {view.record.faults.failure or 'waits'}")
    print_table(
        ("entries", "seat", "bookie", "incarnation", "state", "holds", "of"),
        (
            (
                f"{row.first}-{'' if row.last is None else row.last}",
                str(row.seat),
                row.member.bookie,
                row.member.incarnation[:8],
                row.state,
                row.why if row.held is None else str(row.held),
                "?" if row.expected is None else str(row.expected),
            )
            for row in view.copies
        ),
    )


def _bookie_json(row: BookieRow) -> dict[str, object]:
    return {
        "bookie": row.member.bookie,
        "incarnation": row.member.incarnation,
        "state": row.state,
        "address": row.address,
        "zone": row.zone,
        "disk_total_bytes": row.disk_total_bytes,
        "disk_free_bytes": row.disk_free_bytes,
        "ledgers": row.ledgers,
        "open_ledgers": row.open_ledgers,
    }


def _faults_json(faults: UnderReplication) -> dict[str, object]:
    return {
        "since_ms": faults.created_ms,
        "lost": sorted((_member_json(member) for member in faults.lost), key=str),
        "bad_copies": [
            {**_member_json(bad.member), "first": bad.first_entry, "last": bad.last_entry}
            for bad in faults.bad
        ],
        "narrow": faults.narrow,
        "failure": faults.failure,
        "failed_ms": faults.failed_ms,
    }


def _ledger_json(view: LedgerView) -> dict[str, object]:
    metadata = view.metadata
    return {
        "ledger": metadata.ledger,
        "state": metadata.state.name,
        "ensemble_size": metadata.ensemble_size,
        "write_quorum": metadata.write_quorum,
        "ack_quorum": metadata.ack_quorum,
        "created_ms": metadata.created_ms,
        "last_entry": metadata.last_entry,
        "length": metadata.length,
        "under_replicated": metadata.under_replicated,
        "under_replication": None if view.record is None else _faults_json(view.record.faults),
        "copies": [_copy_json(row) for row in view.copies],
    }


def _copy_json(row: CopyRow) -> dict[str, object]:
    found = asdict(row)
    del found["member"]
    return {**_member_json(row.member), **found}


def _member_json(member: Member) -> dict[str, str]:
    return {"bookie": member.bookie, "incarnation": member.incarnation}


def _pause_line(pause: RepairPause) -> str:
    why = f": {pause.reason}" if pause.reason else ""
    return f"repair is paused since {time_of(pause.since_ms)}{why}"


def _short(member: Member) -> str:
    return f"{member.bookie} ({member.incarnation[:8]})"


def _disk(row: BookieRow) -> str:
    if row.disk_total_bytes is None or row.disk_free_bytes is None:
        return "?" if row.address else "-"
    if row.disk_total_bytes == 0:
        return "-"
    used = 1 - row.disk_free_bytes / row.disk_total_bytes
    return f"{used:.0%} of {row.disk_total_bytes / 1e9:.0f} GB"
