"""Each kind of invalid call of a ledger raises its own error and harms nothing else. The bookies
are real and run in this process."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from random import Random

import pytest
from fakes.bookies import IDENTITY, OTHER, Bookie, running_bookie
from fakes.ledger_lives import QUICK, append, confirmed, create, payload, read_all
from support import wait_until

from magnetar.bookie.ledger.appender import LedgerAppender
from magnetar.bookie.ledger.bookie_registry import BookieRegistry
from magnetar.bookie.ledger.config import LedgerConfig
from magnetar.bookie.ledger.errors import (
    EntryTooLarge,
    EntryUnreadable,
    LedgerFenced,
    LedgerNotFound,
    RecoveryIncomplete,
)
from magnetar.bookie.ledger.handle import LedgerReader
from magnetar.bookie.ledger.ledgers import Ledgers
from magnetar.bookie.ledger.peer import BookiePeer
from magnetar.bookie.ledger.pool import PeerPool
from magnetar.bookie.local import LocalBookiePeer
from magnetar.metadata import paths
from magnetar.metadata.codec import encode_bookie_registration, encode_ledger
from magnetar.metadata.errors import InvalidLedgerMetadata
from magnetar.metadata.ids import LedgerIds
from magnetar.metadata.memory import MemoryStore, MemoryTree
from magnetar.metadata.model import (
    BookieAddress,
    BookieId,
    BookieRegistration,
    LedgerId,
    LedgerMetadata,
    Member,
)
from magnetar.protos.envelope import ENTRY_BYTES_MAX, BookieCode
from magnetar.runtime.clock import SystemClock


@asynccontextmanager
async def three_bookies() -> AsyncIterator[tuple[Ledgers, MemoryStore]]:
    store, bookies = MemoryStore(MemoryTree()), dict[str, Bookie]()
    async with AsyncExitStack() as stack:
        for name in ("b0", "b1", "b2"):
            identity = replace(IDENTITY, bookie=name)
            bookies[name] = await stack.enter_async_context(
                running_bookie(identity=identity, inline=True)
            )
            await store.create_ephemeral(
                paths.bookie_available(BookieId(name)), encode_bookie_registration(listed(name))
            )
        group = await stack.enter_async_context(asyncio.TaskGroup())
        directory = BookieRegistry(store)

        def open_peer(member: Member, _: BookieAddress) -> BookiePeer:
            return LocalBookiePeer(member, bookies[member.bookie].service, group=group)

        pool = PeerPool(
            directory, open_peer, client_name="test", random=Random(1), connect_timeout_s=0.3
        )
        ledgers = Ledgers(store, directory, pool, LedgerIds(store), QUICK, SystemClock(), Random(1))
        running = group.create_task(ledgers.run())
        await ledgers.wait_ready()
        yield ledgers, store
        running.cancel()


def listed(name: str) -> BookieRegistration:
    return BookieRegistration(
        bookie=BookieId(name),
        incarnation=IDENTITY.incarnation,
        boot_epoch=1,
        address=BookieAddress("in-process:1", "in-process:1"),
        http_address="",
        zone="",
        read_only=False,
    )


async def unharmed(ledgers: Ledgers, appender: LedgerAppender, count: int) -> None:
    """Assert that the refusal did not change the ledger."""
    append(appender)
    await confirmed(appender)
    await appender.close()
    assert await read_all(ledgers, appender.ledger) == [payload(n) for n in range(count + 1)]


def writer_of(metadata: LedgerMetadata, ledgers: Ledgers) -> LedgerAppender:
    return LedgerAppender(metadata, ledgers.services, on_busy=ledgers._on_busy)


async def pretend(store: MemoryStore, metadata: LedgerMetadata) -> None:
    """Replace the metadata by forged or wrong metadata."""
    path = paths.ledger(metadata.ledger)
    stored = await store.get(path)
    expected = -1 if stored is None else stored.version
    await store.put(path, encode_ledger(metadata), expected=expected)


# -- another master key --------------------------------------------------------------------------


async def test_a_writer_with_another_master_key_is_refused_as_a_stranger() -> None:
    async with three_bookies() as (ledgers, _):
        appender = await create(ledgers)
        append(appender, 2)
        await confirmed(appender)
        await wait_until(lambda: not ledgers._busy)
        true = appender.metadata
        appender._leave()  # a process allows one writer of a ledger
        stranger = writer_of(replace(true, master_key=true.master_key ^ 1), ledgers)
        append(stranger)
        await wait_until(lambda: stranger.failure)
        assert isinstance(stranger.failure, LedgerFenced)
        assert "UNAUTHORIZED" in str(stranger.failure)
        assert stranger.metadata.segments == true.segments, "the ensemble was changed"
        assert (await ledgers.recover(true.ledger)).last_entry == 1
        assert await read_all(ledgers, true.ledger) == [payload(0), payload(1)]


async def test_a_reader_with_another_master_key_learns_nothing_not_even_absence() -> None:
    async with three_bookies() as (ledgers, _):
        appender = await create(ledgers)
        append(appender, 2)
        await confirmed(appender)
        metadata = await appender.close()
        wrong = replace(metadata, master_key=metadata.master_key ^ 1)
        with pytest.raises(EntryUnreadable) as caught:
            await LedgerReader(wrong, ledgers.services).read(5, 5, bytes_max=1)
        assert BookieCode.UNAUTHORIZED in caught.value.answers.values()
        assert not caught.value.missing
        assert ledgers.bad_copies.drain() == []


async def test_a_recovery_with_another_master_key_neither_fences_nor_closes() -> None:
    async with three_bookies() as (ledgers, store):
        appender = await create(ledgers)
        append(appender, 2)
        await confirmed(appender)
        true = appender.metadata
        await pretend(store, replace(true, master_key=true.master_key ^ 1))
        with pytest.raises(RecoveryIncomplete, match="UNAUTHORIZED"):
            await ledgers.recover(true.ledger)
        await pretend(store, true)
        await unharmed(ledgers, appender, 2)


# -- another incarnation -------------------------------------------------------------------------


async def test_members_of_another_incarnation_are_not_written_to_and_prove_nothing() -> None:
    async with three_bookies() as (ledgers, store):
        appender = await create(ledgers)
        append(appender, 2)
        await confirmed(appender)
        true = appender.metadata
        former = [Member(each.bookie, OTHER) for each in true.last_segment.members]
        wrong = true.with_ensemble(true.segments[0].first_entry, former)
        await pretend(store, wrong)
        with pytest.raises(RecoveryIncomplete, match="WRONG_INCARNATION"):
            await ledgers.recover(true.ledger)
        stranger = writer_of(replace(wrong, ledger=LedgerId(4711)), ledgers)
        append(stranger)
        await wait_until(lambda: stranger.degraded)
        assert stranger.confirmed == -1
        stranger.abandon()
        reader = LedgerReader(wrong, ledgers.services)
        await pretend(store, true)
        # The refreshed metadata names the real members.
        assert len(await reader.read(0, 0, bytes_max=1)) == 1
        await unharmed(ledgers, appender, 2)


# -- ledgers unknown to bookies ------------------------------------------------------------------


async def test_a_ledger_without_metadata_is_not_found() -> None:
    async with three_bookies() as (ledgers, _):
        with pytest.raises(LedgerNotFound) as caught:
            await ledgers.recover(LedgerId(99))
        assert caught.value.ledger == 99
        assert await ledgers.metadata(LedgerId(99)) is None
        await ledgers.delete(LedgerId(99))


async def test_a_ledger_that_no_bookie_knows_is_closed_empty_but_its_entries_are_missed() -> None:
    """The recovery trusts undamaged bookies. A reader of the entries gets an error that names them
    missing."""

    async with three_bookies() as (ledgers, store):
        appender = await create(ledgers)
        unknown = replace(appender.metadata, ledger=LedgerId(4711))
        await pretend(store, unknown)
        closed = await ledgers.recover(unknown.ledger)
        assert (closed.last_entry, closed.length) == (-1, 0)
        other = replace(appender.metadata, ledger=LedgerId(4712))
        await pretend(store, other)
        with pytest.raises(EntryUnreadable) as caught:
            await LedgerReader(other, ledgers.services).read(3, 3, bytes_max=1)
        assert set(caught.value.answers.values()) == {BookieCode.NO_SUCH_LEDGER}
        assert caught.value.missing
        await unharmed(ledgers, appender, 0)


# -- sizes ---------------------------------------------------------------------------------------


async def test_t34_too_large_an_entry_never_reaches_a_bookie() -> None:
    async with three_bookies() as (ledgers, _):
        appender = await create(ledgers)
        append(appender)
        large = bytes(ENTRY_BYTES_MAX + 1)
        with pytest.raises(EntryTooLarge) as caught:
            appender.append_nowait([[large]])
        assert (caught.value.size, caught.value.limit) == (len(large), ENTRY_BYTES_MAX)
        assert caught.value.definite
        await unharmed(ledgers, appender, 1)
        assert len(appender.metadata.segments) == 1


@pytest.mark.parametrize("sizes", [(3, 2, 3), (2, 3, 2), (3, 3, 0), (0, 0, 0), (33, 3, 2)])
def test_sizes_that_contradict_each_other_are_refused_by_name(sizes: tuple[int, int, int]) -> None:
    ensemble_size, write_quorum, ack_quorum = sizes
    with pytest.raises(ValueError, match=f"E/Qw/Qa = {'/'.join(map(str, sizes))}"):
        LedgerConfig(ensemble_size=ensemble_size, write_quorum=write_quorum, ack_quorum=ack_quorum)


@pytest.mark.parametrize("sizes", [(3, 2, 3), (2, 3, 2), (3, 3, 0)])
async def test_metadata_with_such_sizes_is_never_used(sizes: tuple[int, int, int]) -> None:
    async with three_bookies() as (ledgers, _):
        metadata = (await create(ledgers)).metadata
        with pytest.raises(InvalidLedgerMetadata, match="quorums"):
            replace(metadata, ensemble_size=sizes[0], write_quorum=sizes[1], ack_quorum=sizes[2])
