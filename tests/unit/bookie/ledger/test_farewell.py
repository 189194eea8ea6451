"""What bookies owe a ledger when it ends, however it ends: awaited, and noted if it never comes."""

import asyncio

import pytest
from fakes.ledger_lives import QUICK, append, confirmed, create, seated, world
from fakes.virtual_loop import run_virtual as run
from support import wait_until


@pytest.mark.parametrize("stored", [True, False])
def test_who_is_late_with_what_a_recovery_writes_back_is_awaited(*, stored: bool) -> None:
    async def main() -> None:
        async with world(3) as (nodes, ledgers), nodes.process(QUICK, seed=2) as others:
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

    run(main())
