"""Late acks: when a ledger ends for any reason, the process waits for the missing acks of the
bookies. The process notes each member whose acks never arrive."""

import asyncio

import pytest
from fakes.ledger_lives import QUICK, append, confirmed, create, ledger_cluster, seated
from support import wait_until


@pytest.mark.parametrize("stored", [True, False])
async def test_late_acks_of_write_backs_are_awaited(*, stored: bool) -> None:
    async with ledger_cluster(3) as (nodes, ledgers), nodes.process(QUICK, seed=2) as others:
        appender = await create(ledgers)
        append(appender, 5)
        await confirmed(appender)
        appender.abandon()
        late = seated(nodes, appender)[0]
        await wait_until(lambda: len(late.entries(appender.ledger)) == 5)
        late.may_ack.clear()
        closed = await others.recover(appender.ledger)
        assert closed.last_entry == 4
        assert not len(others.bad_copies)
        if stored:
            late.may_ack.set()
            await asyncio.sleep(2 * QUICK.add_timeout_s)
            assert not len(others.bad_copies)
        else:
            late.kill()
            await wait_until(lambda: len(others.bad_copies))
            ((ledger, note),) = others.bad_copies.drain()
            assert (ledger, note.member) == (appender.ledger, late.member)
            assert note.last_entry == 4


@pytest.mark.parametrize("how", ["fenced", "abandoned", "failed"])
async def test_a_writer_that_cannot_close_notes_what_members_miss(how: str) -> None:
    """A recovery begins after the last confirmed entry and does not check the copies before."""

    async with ledger_cluster(3) as (nodes, ledgers), nodes.process(QUICK, seed=2) as others:
        appender = await create(ledgers)
        late, *_ = members = seated(nodes, appender)
        late.may_take.clear()
        append(appender, 3)
        await confirmed(appender)
        append(appender)  # this add carries the last confirmed entry
        await confirmed(appender)
        match how:
            case "abandoned":
                appender.abandon()
            case "fenced":
                await others.recover(appender.ledger)
                append(appender)
                await wait_until(lambda: appender.failure)
            case "failed":
                for each in members:
                    each.may_take.clear()
                append(appender)
                await wait_until(lambda: appender.failure)
        await others.recover(appender.ledger)
        for each in members:
            each.may_take.set()
        await asyncio.sleep(2 * QUICK.add_timeout_s)
        noted = {
            entry
            for each in (ledgers, others)
            for _, note in each.bad_copies.drain()
            if note.member == late.member
            for entry in range(note.first_entry, note.last_entry + 1)
        }
        assert set(range(4)) <= noted | set(late.entries(appender.ledger))
