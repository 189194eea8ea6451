"""The appender's shell where several things happen in one turn of the loop."""

from fakes.ledger_bookies import cluster
from fakes.ledger_lives import QUICK, append, confirmed, create, seated, spare
from fakes.virtual_loop import run_virtual as run
from support import wait_until

from magnetar.metadata.memory import Fault, MemoryStore


def test_who_is_told_of_progress_may_append_though_the_new_member_is_gone_already() -> None:
    """What was acknowledged during a change is confirmed with it, and the stream of the member that
    came in was lost meanwhile: nobody has told the ledger, which did not listen to it yet."""

    async def main() -> None:
        async with cluster(4) as nodes:
            faults: list[Fault] = []
            store = MemoryStore(
                nodes.tree,
                faults=lambda op, path: (
                    faults[0] if faults and op == "put" and "/ledgers/meta" in path else None
                ),
            )
            async with nodes.process(QUICK, store=store) as ledgers:
                appender = await create(ledgers)
                append(appender)
                await confirmed(appender)
                faults.append(Fault.REQUEST_LOST)
                newcomer = spare(nodes, appender)
                seated(nodes, appender)[0].kill()
                append(appender)
                await wait_until(lambda: "changing" in appender.describe())
                append(appender)
                told: list[int] = []

                def progress() -> None:
                    told.append(appender.confirmed)
                    if len(told) == 1:
                        append(appender)

                appender.progress = progress
                newcomer.kill()
                await wait_until(lambda: not ledgers.services.pool.adds(newcomer.member).calm)
                faults.clear()
                await wait_until(lambda: told)
                await confirmed(appender)
                assert appender.confirmed == appender.appended == 3
                assert newcomer in seated(nodes, appender)

    run(main())
