"""Several writers in one process write to bookies with all kinds of faults. A seed chooses the
faults.

At the end, every ledger has its confirmed entries, and the process has noted each missing copy for
repair. No repair has to wait until the auditor compares all replicas.
"""

import asyncio
from contextlib import suppress
from dataclasses import replace
from random import Random

import pytest
from fakes.ledger_bookies import BookieCluster, FakeBookie, bookie_cluster
from fakes.ledger_lives import QUICK, append, create, payload, read_all
from fakes.virtual_loop import stand_still
from support import settle

from magnetar.bookie.ledger.appender import LedgerAppender
from magnetar.bookie.ledger.errors import LedgerError
from magnetar.bookie.ledger.ledgers import Ledgers
from magnetar.metadata.errors import MetadataError
from magnetar.metadata.memory import Fault, MemoryStore
from magnetar.metadata.model import EntryId, LedgerId, LedgerMetadata, Member

SIZES = [(3, 3, 2), (4, 3, 2), (3, 2, 2), (2, 2, 1), (3, 3, 3), (1, 1, 1), (5, 3, 2)]
FAULTS = [Fault.NOT_SENT, Fault.REQUEST_LOST, Fault.REPLY_LOST]
FAILURES = (LedgerError, MetadataError)


class Life:
    def __init__(
        self,
        random: Random,
        nodes: BookieCluster,
        ledgers: Ledgers,
        others: Ledgers,
        faults: list[Fault],
        group: asyncio.TaskGroup,
    ) -> None:
        self.appenders: list[LedgerAppender] = []
        # The confirmed entries as the appenders reported them.
        self.confirmed: dict[LedgerId, int] = {}
        self._random = random
        self._nodes = nodes
        self._ledgers = ledgers
        self._others = others
        self._faults = faults  # faults of ledger metadata changes; pop() takes the next
        self._group = group
        self._calm = False

    async def begin(self) -> None:
        for _ in range(3):
            appender = await create(self._ledgers)
            self.appenders.append(appender)
            self.confirmed[appender.ledger] = -1
            appender.progress = lambda it=appender: self._on_progress(it)

    def _on_progress(self, appender: LedgerAppender) -> None:
        assert appender.confirmed >= self.confirmed[appender.ledger]
        self.confirmed[appender.ledger] = appender.confirmed
        if not self._calm and self._random.random() < 0.3:
            self._append(self._random.choice(self.appenders), self._random.randrange(3))

    def _append(self, appender: LedgerAppender, count: int) -> None:
        with suppress(LedgerError):
            append(appender, count)

    async def _close(self, appender: LedgerAppender) -> None:
        with suppress(*FAILURES):
            await appender.close()

    async def _take_over(self, appender: LedgerAppender) -> None:
        with suppress(*FAILURES):
            await self._others.recover(appender.ledger)

    async def event(self) -> None:
        random = self._random
        bookie, appender = random.choice(self._nodes.bookies), random.choice(self.appenders)
        match random.choices(range(9), [5, 14, 15, 9, 3, 3, 2, 3, 46])[0]:
            case 0:
                bookie.kill()
            case 1:
                bookie.restart()
            case 2:
                random.choice([bookie.may_ack, bookie.may_take, bookie.may_open]).clear()
            case 3:
                release(bookie)
            case 4:
                read_only = random.random() < 0.3
                epoch = random.randrange(100)
                await self._nodes.register(bookie, read_only=read_only, boot_epoch=epoch)
            case 5:
                self._faults.append(random.choice(FAULTS))
            case 6:
                stand_still(random.choice([0.3, 0.7, 3.0]))
            case 7:
                self._end(appender)
            case _:
                self._append(appender, random.randrange(6))
        if random.random() < 0.3:
            await asyncio.sleep(random.choice([0.01, 0.1, 0.3, 1.0]))
        await settle(random.randrange(6))

    def _end(self, appender: LedgerAppender) -> None:
        match self._random.randrange(3):
            case 0:
                self._group.create_task(self._close(appender))
            case 1:
                self._group.create_task(self._take_over(appender))
            case _:
                appender.abandon()

    async def heal(self) -> None:
        self._calm = True
        self._faults.clear()
        for bookie in self._nodes.bookies:
            release(bookie)
            bookie.restart()
            await self._nodes.register(bookie, boot_epoch=1000)
        await asyncio.sleep(self._random.choice([0.1, 5.0]))

    async def judge(self) -> int:
        """Check all ledgers. Returns the number of their entries."""
        both, ends = (self._ledgers, self._others), list[LedgerMetadata]()
        for appender in self.appenders:
            metadata = await recovered(self._random.choice(both), appender.ledger)
            assert metadata.last_entry is not None
            assert metadata.last_entry >= self.confirmed[appender.ledger]
            found = await read_all(self._others, appender.ledger)
            assert found == [payload(entry) for entry in range(metadata.last_entry + 1)]
            assert metadata.length == sum(map(len, found))
            ends.append(metadata)
            appender.abandon()  # the appender reports missing copies when its ledger ends
        await asyncio.sleep(2 * QUICK.add_timeout_s)  # a process waits this long for late acks
        notes = [note for each in both for note in each.bad_copies.drain()]
        noted = {
            (ledger, note.member, entry)
            for ledger, note in notes
            for entry in range(note.first_entry, note.last_entry + 1)
        }
        entries = [
            (metadata, entry)
            for metadata in ends
            if metadata.last_entry is not None
            for entry in range(metadata.last_entry + 1)
        ]
        for metadata, entry in entries:
            lacking = self._lacking(metadata, entry)
            assert len(lacking) <= metadata.write_quorum - metadata.ack_quorum
            assert lacking <= noted, (entry, metadata)
        return len(entries)

    def _lacking(self, metadata: LedgerMetadata, entry: int) -> set[tuple[LedgerId, Member, int]]:
        ledger, size = metadata.ledger, metadata.ensemble_size
        members = metadata.segment_of(EntryId(entry)).members
        seats = [(entry + step) % size for step in range(metadata.write_quorum)]
        return {
            (ledger, members[seat], entry)
            for seat in seats
            if entry not in self._nodes.bookie(members[seat]).entries(ledger)
        }


def release(bookie: FakeBookie) -> None:
    for gate in (bookie.may_ack, bookie.may_take, bookie.may_open):
        gate.set()


async def recovered(ledgers: Ledgers, ledger: LedgerId) -> LedgerMetadata:
    for _ in range(30):
        with suppress(*FAILURES):
            return await ledgers.recover(ledger)
        await asyncio.sleep(0.3)
    raise AssertionError(f"ledger {ledger} is never recovered")


async def live(seed: int) -> int:
    random = Random(seed)
    sizes = random.choice(SIZES)
    config = replace(
        QUICK,
        ensemble_size=sizes[0],
        write_quorum=sizes[1],
        ack_quorum=sizes[2],
        quorum_timeout_s=random.choice([1.5, 20.0]),
        ensemble_change_delay_s=random.choice([0.0, 0.0, 0.4]),
    )
    async with bookie_cluster(sizes[0] + random.randrange(3)) as nodes:
        faults: list[Fault] = []
        store = MemoryStore(
            nodes.tree,
            faults=lambda op, path: (
                faults.pop() if faults and op == "put" and "/ledgers/meta" in path else None
            ),
        )
        async with (
            nodes.process(config, seed=1, store=store) as ledgers,
            nodes.process(config, seed=2) as others,
        ):
            async with asyncio.TaskGroup() as group:
                life = Life(random, nodes, ledgers, others, faults, group)
                await life.begin()
                for _ in range(random.randrange(40, 120)):
                    await life.event()
                await life.heal()
            return await life.judge()


@pytest.mark.virtual_loop(deadline_s=20_000)
@pytest.mark.parametrize("start", [0, 20])
async def test_nothing_confirmed_is_lost_and_no_missing_copy_goes_unnoticed(start: int) -> None:
    assert sum([await live(seed) for seed in range(start, start + 20)]) > 300
