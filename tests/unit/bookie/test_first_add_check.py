"""The check of a ledger's first add: the required metadata, the waiting adds, and the effect of a
fence."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest
from fakes.bookies import Bookie, add, last_request, read_request, running_bookie, some
from support import settle, wait_until

from magnetar.bookie import first_add_check
from magnetar.bookie.errors import StorageFailed
from magnetar.bookie.first_add_check import (
    ADD_OVERHEAD_BYTES,
    STEPS_PER_TURN,
    WAITING_BYTES_MAX,
    FirstAddCheck,
    FirstAdds,
)
from magnetar.metadata import paths
from magnetar.metadata.codec import encode_ledger
from magnetar.metadata.errors import Unavailable
from magnetar.metadata.memory import MemoryStore, MemoryTree
from magnetar.metadata.model import (
    BookieId,
    EntryId,
    LedgerId,
    LedgerMetadata,
    LedgerState,
    Member,
    Segment,
)
from magnetar.metadata.store import ABSENT
from magnetar.protos.envelope import ACK, COPY, ENVELOPE, RECOVERY, BookieCode, decode_adds
from magnetar.runtime.frames import FRAME_BYTES_MAX, Outbox
from magnetar.runtime.grpc_frames import FRAME_LIMIT_BYTES

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Sequence

    from magnetar.bookie.admission import Admitted
    from magnetar.protos.envelope import Add

OK, FENCED, OVERLOADED = BookieCode.OK, BookieCode.FENCED, BookieCode.OVERLOADED
NO_SUCH_LEDGER, DELETED = BookieCode.NO_SUCH_LEDGER, BookieCode.DELETED
HERE = Member(BookieId("b1"), "a" * 32)
THERE = Member(BookieId("b2"), "b" * 32)


class Gate:
    """Metadata that answers when the test calls `answer`."""

    def __init__(self) -> None:
        self.asked: list[int] = []
        self.answers: dict[int, asyncio.Future[BookieCode]] = {}

    async def __call__(self, ledger: int) -> BookieCode:
        self.asked.append(ledger)
        return await self.answers.setdefault(ledger, asyncio.Future())

    def answer(self, ledger: int, code: BookieCode) -> None:
        self.answers.setdefault(ledger, asyncio.Future()).set_result(code)


@asynccontextmanager
async def gated_bookie() -> AsyncIterator[tuple[Bookie, Gate]]:
    gate = Gate()
    async with running_bookie(check_first_add=gate) as bookie:
        yield bookie, gate


@pytest.mark.real_loop
async def test_first_adds_wait_in_order_and_other_ledgers_do_not() -> None:
    async with gated_bookie() as (bookie, gate):
        gate.answer(2, OK)
        writer = await bookie.connect()
        await writer.send(add(1, 0), add(2, 0), add(1, 1))
        await writer.send(add(1, 2), add(2, 1))
        assert await writer.acks(2) == [(2, 0, OK), (2, 1, OK)]
        assert bookie.storage.ledger_record(1) is None
        gate.answer(1, OK)
        assert await writer.acks(3) == [(1, entry, OK) for entry in range(3)]
        assert gate.asked == [1, 2]
        assert await writer.add(add(1, 3)) == [OK]
        assert gate.asked == [1, 2]


@pytest.mark.real_loop
async def test_a_verified_ledger_stays_verified_after_a_restart() -> None:
    async def never(_: int) -> BookieCode:
        raise AssertionError("asked again")

    async with running_bookie() as bookie:
        assert await (await bookie.connect()).add(add(1, 0)) == [OK]
        disk = bookie.storage.crash()
    async with running_bookie(storage=disk, check_first_add=never) as bookie:
        assert await (await bookie.connect()).add(add(1, 1)) == [OK]


@pytest.mark.real_loop
async def test_a_fence_during_the_first_add_check_wins() -> None:
    async with gated_bookie() as (bookie, gate):
        writer = await bookie.connect()
        await writer.send(add(1, 0))
        await wait_until(lambda: gate.asked)
        await bookie.service.last_confirmed(last_request(fence=True))
        gate.answer(1, OK)
        assert await writer.acks(1) == [(1, 0, FENCED)]
        assert bookie.storage.entry(1, 0) is None


@pytest.mark.real_loop
@pytest.mark.parametrize("code", [NO_SUCH_LEDGER, FENCED, OVERLOADED])
async def test_a_refused_ledger_stores_nothing_and_is_checked_again(code: BookieCode) -> None:
    async with gated_bookie() as (bookie, gate):
        writer = await bookie.connect()
        gate.answer(1, code)
        assert await writer.add(add(1, 0), add(1, 1)) == [code, code]
        assert bookie.storage.sequence() == 0
        assert bookie.service.counts.adds_refused == 2
        del gate.answers[1]
        gate.answer(1, OK)
        assert await writer.add(add(1, 0)) == [OK]


@pytest.mark.real_loop
async def test_repair_adds_need_no_check_and_do_not_replace_the_check() -> None:
    async with gated_bookie() as (bookie, gate):
        writer = await bookie.connect()
        assert await writer.add(add(1, 0, flags=COPY), add(2, 0, flags=RECOVERY)) == [OK, OK]
        assert gate.asked == []
        gate.answer(1, NO_SUCH_LEDGER)
        assert await writer.add(add(1, 1), add(2, 1)) == [NO_SUCH_LEDGER, FENCED]
        assert await bookie.read(read_request(0, 0)) == some(0)


@pytest.mark.real_loop
async def test_a_deleted_ledger_stays_deleted() -> None:
    async with running_bookie() as bookie:
        writer = await bookie.connect()
        assert await writer.add(add(1, 0), add(2, 0)) == [OK, OK]
        bookie.service._admission.delete(1, for_good=True)
        bookie.service._admission.delete(2, for_good=False)
        for flags in (0, RECOVERY, COPY):
            assert await writer.add(add(1, 1, flags=flags)) == [DELETED]
        ((_, code, _),) = await bookie.read(read_request(0, 0))
        assert code is DELETED
        assert (await bookie.service.last_confirmed(last_request(1, fence=True))).code is DELETED
        assert (await bookie.service.last_confirmed(last_request(2))).code is NO_SUCH_LEDGER
        assert await writer.add(add(2, 5, flags=COPY)) == [OK]


@pytest.mark.real_loop
async def test_a_write_that_fails_later_ends_the_bookie() -> None:
    async with gated_bookie() as (bookie, gate):
        writer = await bookie.connect()
        await writer.send(add(1, 0))
        await wait_until(lambda: gate.asked)
        bookie.storage.failing["write"] = StorageFailed("write", "No space left on device")
        gate.answer(1, OK)
        await wait_until(lambda: bookie.deaths)


async def test_waiting_first_adds_are_bounded() -> None:
    gate = Gate()
    settled: list[int] = []
    size = len(decode_adds(add(1, 0))[0].envelope) + ADD_OVERHEAD_BYTES
    newcomers = FirstAdds(
        gate,
        lambda _code, adds, _outbox: settled.extend(each.entry for each in adds),
        waiting_bytes_max=3 * size,
        waiting_ledgers_max=2,
    )
    outbox = Outbox(_never, pending_bytes_max=1)
    adds = list(decode_adds(b"".join(add(ledger, 0) for ledger in (1, 2, 3))))
    assert [each.ledger for each in newcomers.take(adds, outbox)] == [3]
    more = list(decode_adds(add(1, 1) + add(1, 2)))
    assert [each.entry for each in newcomers.take(more, outbox)] == [2]
    async with asyncio.TaskGroup() as group:
        running = group.create_task(newcomers.run())
        gate.answer(1, OK)
        await settle()
        assert settled == [0, 1]
        assert newcomers.waiting_bytes == size
        running.cancel()


async def test_several_steps_of_waiting_adds_take_one_turn_of_the_loop(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(first_add_check, "SETTLED_BYTES", 1)
    gate, settled = Gate(), list[int]()
    newcomers = FirstAdds(
        gate, lambda _code, adds, _outbox: settled.extend(each.entry for each in adds)
    )
    count = 1 + 2 * STEPS_PER_TURN + 1
    adds = list(decode_adds(b"".join(add(1, entry) for entry in range(count))))
    assert newcomers.take(adds, Outbox(_never, pending_bytes_max=1)) == []
    async with asyncio.TaskGroup() as group:
        running = group.create_task(newcomers.run())
        gate.answer(1, OK)
        counts = [0]
        while counts[-1] < count:
            await asyncio.sleep(0)
            if len(settled) != counts[-1]:
                counts.append(len(settled))
        assert counts == [0, 1, 1 + STEPS_PER_TURN, 1 + 2 * STEPS_PER_TURN, count]
        assert settled == list(range(count))
        running.cancel()


@pytest.mark.real_loop
async def test_many_waiting_adds_are_settled_in_steps_and_keep_their_order(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Fences and other streams may have their turn before the last step; later adds of the stream
    may not."""
    size = len(decode_adds(add(1, 0))[0].envelope) + ADD_OVERHEAD_BYTES
    monkeypatch.setattr(first_add_check, "SETTLED_BYTES", 2 * size)
    async with gated_bookie() as (bookie, gate):
        steps: list[list[int]] = []
        admit = bookie.service._admission.admit

        def spied(adds: Sequence[Add], *, verified: bool = False) -> Admitted:
            steps.append([it.entry for it in adds])
            return admit(adds, verified=verified)

        monkeypatch.setattr(bookie.service._admission, "admit", spied)
        writer = await bookie.connect()
        await writer.send(*(add(1, entry) for entry in range(9)))
        await wait_until(lambda: gate.asked)
        gate.answer(1, OK)
        await writer.send(add(1, 9))
        assert await writer.acks(10) == [(1, entry, OK) for entry in range(10)]
        assert steps[0] == list(range(9)), "the adds wait"
        assert steps[1:] == [[0, 1], [2, 3], [4, 5], [6, 7], [8], [9]]
        assert bookie.service._first_adds._settling == {}
        assert bookie.service._first_adds.waiting_bytes == 0


@pytest.mark.real_loop
async def test_a_ledger_that_is_deleted_between_two_steps_is_checked_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The collector deletes a left-over copy together with its fence."""
    monkeypatch.setattr(first_add_check, "SETTLED_BYTES", 1)
    async with gated_bookie() as (bookie, gate):
        admission = bookie.service._admission
        admit = admission.admit

        def admit_and_delete(adds: Sequence[Add], *, verified: bool = False) -> Admitted:
            admitted = admit(adds, verified=verified)
            if verified:
                admission.delete(1, for_good=False)
                gate.answers[1] = asyncio.Future()
            return admitted

        monkeypatch.setattr(admission, "admit", admit_and_delete)
        writer = await bookie.connect()
        await writer.send(add(1, 0), add(1, 1), add(1, 2))
        await wait_until(lambda: gate.asked)
        gate.answer(1, OK)
        await wait_until(lambda: gate.asked == [1, 1])
        gate.answers[1].set_result(FENCED)
        acks = await writer.acks(3)
        assert sorted(acks) == [(1, 0, OK), (1, 1, FENCED), (1, 2, FENCED)]
        assert bookie.storage.entry(1, 2) is None


def test_the_acks_of_all_waiting_adds_fit_into_one_frame() -> None:
    smallest = ENVELOPE.size + ADD_OVERHEAD_BYTES
    assert WAITING_BYTES_MAX // smallest * ACK.size + FRAME_BYTES_MAX <= FRAME_LIMIT_BYTES


async def _never(_: object) -> None:
    raise AssertionError


# -- What the metadata must say ------------------------------------------------------------------

OPEN = LedgerMetadata(
    ledger=LedgerId(7),
    state=LedgerState.OPEN,
    ensemble_size=1,
    write_quorum=1,
    ack_quorum=1,
    segments=(Segment(EntryId(0), (HERE,)),),
    master_key=1,
    creator_token=1,
    created_ms=1,
)
ELSEWHERE = replace(OPEN, segments=(Segment(EntryId(0), (THERE,)),))
MOVED = OPEN.with_ensemble(EntryId(5), (THERE,))
BACK = MOVED.with_ensemble(EntryId(9), (HERE,))
CLOSED = replace(OPEN, state=LedgerState.CLOSED, last_entry=EntryId(-1), length=0)


@pytest.mark.parametrize(
    ("metadata", "code"),
    [
        (None, NO_SUCH_LEDGER),
        (OPEN, OK),
        (BACK, OK),
        (MOVED, OVERLOADED),
        (ELSEWHERE, OVERLOADED),
        (replace(OPEN, state=LedgerState.IN_RECOVERY), FENCED),
        (CLOSED, FENCED),
        (b"nonsense", BookieCode.IO_ERROR),
    ],
)
async def test_the_first_add_check_answers_by_ledger_metadata(
    metadata: LedgerMetadata | bytes | None, code: BookieCode
) -> None:
    store = MemoryStore(MemoryTree())
    if metadata is not None:
        value = metadata if isinstance(metadata, bytes) else encode_ledger(metadata)
        await store.put(paths.ledger(LedgerId(7)), value, expected=ABSENT)
    assert await FirstAddCheck(store, HERE)(7) is code


class Lagging(MemoryStore):
    """A store whose reads return old values until `sync`."""

    def __init__(self, past: bytes | None, present: bytes) -> None:
        super().__init__(MemoryTree())
        self.shown, self.present = past, present

    async def get(self, path: str):  # type: ignore[no-untyped-def]
        return None if self.shown is None else _Value(self.shown)

    async def sync(self, path: str) -> None:
        self.shown = self.present


class _Value:
    def __init__(self, value: bytes) -> None:
        self.value = value


@pytest.mark.parametrize(
    ("past", "present", "code"),
    [(None, OPEN, OK), (ELSEWHERE, OPEN, OK), (OPEN, CLOSED, FENCED), (OPEN, MOVED, OVERLOADED)],
)
async def test_an_outdated_read_of_the_metadata_decides_nothing(
    past: LedgerMetadata | None, present: LedgerMetadata, code: BookieCode
) -> None:
    store = Lagging(None if past is None else encode_ledger(past), encode_ledger(present))
    assert await FirstAddCheck(store, HERE)(7) is code


class Away(MemoryStore):
    def __init__(self, *, hangs: bool) -> None:
        super().__init__(MemoryTree())
        self.hangs = hangs

    async def get(self, path: str):  # type: ignore[no-untyped-def]
        if self.hangs:
            await asyncio.Event().wait()
        raise Unavailable("no connection")


@pytest.mark.parametrize("hangs", [False, True])
async def test_the_check_answers_unknown_while_the_metadata_store_is_away(hangs: bool) -> None:
    assert await FirstAddCheck(Away(hangs=hangs), HERE, timeout_s=0.02)(7) is OVERLOADED
