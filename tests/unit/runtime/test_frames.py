"""The outbox: the order of items, the number of frames, and the items that wait."""

from __future__ import annotations

import asyncio
import random
from collections import deque
from itertools import pairwise
from typing import TYPE_CHECKING

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support import settle

from magnetar.runtime.frames import (
    CONTROL_BYTES,
    FRAME_BYTES_MAX,
    GATHER_S_MAX,
    GROUP_ITEMS_MAX,
    GROUP_ITEMS_MIN,
    GROWTH_PAUSE_MAX,
    HOLD_S_MAX,
    Buffer,
    GroupSize,
    Outbox,
    StreamClosed,
    is_stream_end,
    size_of,
)

if TYPE_CHECKING:
    from collections.abc import Sequence


class Wire:
    """Records frames; sends wait while `gate` is clear."""

    def __init__(self) -> None:
        self.frames: list[bytes] = []
        self.gate = asyncio.Event()
        self.gate.set()
        self.closed = False

    async def send(self, parts: Sequence[Buffer]) -> None:
        await self.gate.wait()
        if self.closed:
            raise StreamClosed("closed by the peer", clean=True)
        self.frames.append(b"".join(parts))


async def test_a_burst_is_one_frame_and_items_put_meanwhile_are_the_next() -> None:
    wire = Wire()
    outbox = Outbox(wire.send, pending_bytes_max=1000)
    async with asyncio.TaskGroup() as group:
        running = group.create_task(outbox.run())
        await settle()
        wire.gate.clear()
        outbox.put(b"a", b"b")
        outbox.put(b"c")
        await settle()
        outbox.put(b"d")
        outbox.put(b"e")
        wire.gate.set()
        await outbox.wait_sent()
        assert wire.frames == [b"abc", b"de"]
        running.cancel()


Put = tuple[bool, int]  # control?, size
puts = st.lists(
    st.tuples(
        st.booleans(),
        st.one_of(
            st.integers(1, 100),
            st.integers(FRAME_BYTES_MAX // 3, FRAME_BYTES_MAX // 2),
            st.integers(FRAME_BYTES_MAX - 2, FRAME_BYTES_MAX + 2),
        ),
    ),
    max_size=12,
)


@given(bursts=st.lists(puts, max_size=4))
async def test_items_stay_whole_in_order_control_first_and_frames_are_full(
    bursts: list[list[Put]],
) -> None:
    wire = Wire()
    outbox = Outbox(wire.send, pending_bytes_max=1)
    async with asyncio.TaskGroup() as group:
        running = group.create_task(outbox.run())
        for burst in bursts:
            wire.frames.clear()
            items = [bytes([i]) * size for i, (_, size) in enumerate(burst)]
            for item, (control, _) in zip(items, burst, strict=True):
                put = outbox.put_control if control else outbox.put
                put(item[:1], memoryview(item)[1:])
            controls = sum(control for control, _ in burst)
            assert outbox.pending_bytes == size_of(items) + controls * CONTROL_BYTES
            await outbox.wait_sent()
            assert outbox.pending_bytes == 0
            first = [item for item, (control, _) in zip(items, burst, strict=True) if control]
            then = [item for item, (control, _) in zip(items, burst, strict=True) if not control]
            check_frames(wire.frames, first + then)
        running.cancel()


def check_frames(frames: list[bytes], items: list[bytes]) -> None:
    """Check that each frame consists of whole items and ends with the item that fills it.

    No two neighbours could have been one frame. One short frame is allowed after the control items.
    """
    assert b"".join(frames) == b"".join(items)
    rest = list(items)
    for frame in frames:
        taken = [rest.pop(0)]
        while size_of(taken) < len(frame):
            taken.append(rest.pop(0))
        assert size_of(taken) == len(frame), "an item was split"
        assert size_of(taken[:-1]) < FRAME_BYTES_MAX
    short = sum(len(a) + len(b) <= FRAME_BYTES_MAX for a, b in pairwise(frames))
    assert short <= 1


async def test_control_overtakes_bulk_that_is_waiting() -> None:
    wire = Wire()
    wire.gate.clear()
    outbox = Outbox(wire.send, pending_bytes_max=1 << 20)
    async with asyncio.TaskGroup() as group:
        running = group.create_task(outbox.run())
        outbox.put(b"1" * FRAME_BYTES_MAX)
        await settle()  # the first is being sent
        outbox.put(b"2" * FRAME_BYTES_MAX)
        outbox.put(b"3" * 10)
        outbox.put_control(b"ping")
        wire.gate.set()
        await outbox.wait_sent()
        running.cancel()
    assert [frame[:1] for frame in wire.frames] == [b"1", b"p", b"2", b"3"]


async def test_wait_room_returns_when_less_than_the_limit_is_pending() -> None:
    wire = Wire()
    wire.gate.clear()
    outbox = Outbox(wire.send, pending_bytes_max=100)
    async with asyncio.TaskGroup() as group:
        running = group.create_task(outbox.run())
        outbox.put(bytes(99))
        await outbox.wait_room()
        outbox.put(bytes(1))
        waiting = [group.create_task(outbox.wait_room()) for _ in range(3)]
        await settle()
        assert not any(task.done() for task in waiting)
        wire.gate.set()
        await asyncio.wait(waiting)
        running.cancel()


async def test_the_end_of_the_stream_ends_run_and_wakes_all_waiters() -> None:
    wire = Wire()
    wire.closed = True
    outbox = Outbox(wire.send, pending_bytes_max=10)
    outbox.put(bytes(10))
    async with asyncio.TaskGroup() as group:
        room = group.create_task(ended(outbox.wait_room()))
        sent = group.create_task(ended(outbox.wait_sent()))
        await outbox.run()  # returns
        assert await room
        assert await sent
    outbox.put(b"dropped")
    outbox.put_control(b"dropped")
    assert outbox.pending_bytes == 0


async def test_cancelling_run_wakes_all_waiters() -> None:
    wire = Wire()
    wire.gate.clear()
    outbox = Outbox(wire.send, pending_bytes_max=10)
    outbox.put(bytes(10))
    async with asyncio.TaskGroup() as group:
        running = group.create_task(outbox.run())
        room = group.create_task(ended(outbox.wait_room()))
        await settle()
        running.cancel()
        assert await room


@pytest.mark.parametrize("turns", range(6))
async def test_a_put_while_run_is_being_cancelled_does_no_harm(turns: int) -> None:
    wire = Wire()
    outbox = Outbox(wire.send, pending_bytes_max=10)
    async with asyncio.TaskGroup() as group:
        running = group.create_task(outbox.run())
        await settle(turns)
        running.cancel()
        outbox.put(b"x")
        outbox.put_control(b"y")
    assert running.cancelled()


async def ended(waiting: asyncio.Future[None] | object) -> bool:
    with pytest.raises(StreamClosed):
        await waiting
    return True


def test_only_stream_closed_and_groups_of_it_are_a_stream_end() -> None:
    closed = StreamClosed("x", clean=True)
    assert is_stream_end(closed)
    assert is_stream_end(ExceptionGroup("", [closed, ExceptionGroup("", [closed])]))
    assert not is_stream_end(ExceptionGroup("", [closed, KeyError()]))


# ---- holding -------------------------------------------------------------------------------------


async def held_after_one_frame(
    wire: Wire, group: asyncio.TaskGroup
) -> tuple[Outbox, asyncio.Task[None]]:
    outbox = Outbox(wire.send, pending_bytes_max=1000, hold_bytes=8)
    running = group.create_task(outbox.run())
    outbox.put(b"a")
    await settle()
    outbox.put(b"b")
    outbox.put(b"c")
    await settle()
    assert wire.frames == [b"a"]
    return outbox, running


async def test_small_items_wait_for_the_answer_to_the_previous_frame() -> None:
    wire = Wire()
    async with asyncio.TaskGroup() as group:
        outbox, running = await held_after_one_frame(wire, group)
        outbox.on_answer()
        await settle()
        assert wire.frames == [b"a", b"bc"]
        running.cancel()


async def test_an_answer_while_nothing_waits_lets_the_next_item_go_at_once() -> None:
    wire = Wire()
    outbox = Outbox(wire.send, pending_bytes_max=1000, hold_bytes=4)
    async with asyncio.TaskGroup() as group:
        running = group.create_task(outbox.run())
        for item in (b"a", b"b", b"c"):
            outbox.put(item)
            await settle()
            outbox.on_answer()
        assert wire.frames == [b"a", b"b", b"c"]
        running.cancel()


async def test_held_items_are_sent_once_they_reach_the_limit() -> None:
    wire = Wire()
    async with asyncio.TaskGroup() as group:
        outbox, running = await held_after_one_frame(wire, group)
        outbox.put(b"defghi")
        await settle()
        assert wire.frames == [b"a", b"bcdefghi"]
        running.cancel()


async def test_a_control_item_takes_held_items_with_it() -> None:
    wire = Wire()
    async with asyncio.TaskGroup() as group:
        outbox, running = await held_after_one_frame(wire, group)
        outbox.put_control(b"!")
        await settle()
        assert wire.frames == [b"a", b"!bc"]
        running.cancel()


async def test_a_silent_peer_holds_items_for_a_bounded_time() -> None:
    wire = Wire()
    loop = asyncio.get_running_loop()
    async with asyncio.TaskGroup() as group:
        began_s = loop.time()
        outbox, running = await held_after_one_frame(wire, group)
        await outbox.wait_sent()
        assert wire.frames == [b"a", b"bc"]
        assert loop.time() - began_s == pytest.approx(HOLD_S_MAX, abs=1e-6)
        running.cancel()


async def answered_pair(wire: Wire, group: asyncio.TaskGroup) -> tuple[Outbox, asyncio.Task[None]]:
    """An outbox whose items come more often than answers: the frame "bc" has just been answered.

    It gathers a group of three.
    """
    outbox, running = await held_after_one_frame(wire, group)
    outbox.on_answer()
    await settle()
    assert wire.frames.pop() == b"bc"
    outbox.on_answer()
    return outbox, running


async def test_items_wait_for_a_whole_group_where_they_come_often() -> None:
    wire = Wire()
    async with asyncio.TaskGroup() as group:
        outbox, running = await answered_pair(wire, group)
        outbox.put(b"d")
        outbox.put(b"e")
        await settle()
        assert wire.frames == [b"a"]
        outbox.put(b"f")
        await settle()
        assert wire.frames == [b"a", b"def"]
        running.cancel()


async def test_several_items_of_one_put_are_a_whole_group() -> None:
    wire = Wire()
    async with asyncio.TaskGroup() as group:
        outbox, running = await answered_pair(wire, group)
        outbox.put(b"d", b"e", items=2)
        await settle()
        assert wire.frames == [b"a"]
        outbox.put(b"f", b"g", items=2)
        await settle()
        assert wire.frames == [b"a", b"defg"]
        running.cancel()


async def test_a_single_item_waits_for_a_bounded_time_and_the_next_one_not_at_all() -> None:
    wire = Wire()
    loop = asyncio.get_running_loop()
    async with asyncio.TaskGroup() as group:
        began_s = loop.time()
        outbox, running = await answered_pair(wire, group)
        outbox.put(b"d")
        await outbox.wait_sent()
        assert wire.frames == [b"a", b"d"]
        assert loop.time() - began_s == pytest.approx(GATHER_S_MAX, abs=1e-6)
        outbox.on_answer()
        outbox.put(b"e")
        await settle()
        assert wire.frames == [b"a", b"d", b"e"]
        running.cancel()


@pytest.mark.parametrize("alone", [True, False])
async def test_items_are_gathered_only_for_a_sender_that_does_not_wait_for_each_outcome(
    alone: bool,
) -> None:
    """The outcome may come from other peers, before the answer of this one."""
    wire = Wire()
    outbox = Outbox(wire.send, pending_bytes_max=1000, hold_bytes=8)
    async with asyncio.TaskGroup() as group:
        running = group.create_task(outbox.run())
        for item in (b"a", b"b", b"c"):
            outbox.put(item, alone=alone)
            await settle()
        outbox.on_answer()
        await settle()
        assert wire.frames == [b"a", b"bc"]
        outbox.on_answer()
        outbox.put(b"d", alone=alone)
        await settle()
        outbox.on_answer()
        outbox.put(b"e", alone=alone)
        await settle()
        assert wire.frames == ([b"a", b"bc", b"d", b"e"] if alone else [b"a", b"bc"])
        running.cancel()


async def test_a_whole_group_that_came_before_the_answer_goes_with_it() -> None:
    wire = Wire()
    async with asyncio.TaskGroup() as group:
        outbox, running = await answered_pair(wire, group)
        for item in (b"d", b"e", b"f", b"g", b"h", b"i", b"j"):
            outbox.put(item)
            await settle()
        assert wire.frames == [b"a", b"def"]
        outbox.on_answer()
        await settle()
        assert wire.frames == [b"a", b"def", b"ghij"]
        running.cancel()


async def test_a_large_item_ends_the_wait_for_a_group() -> None:
    wire = Wire()
    async with asyncio.TaskGroup() as group:
        outbox, running = await answered_pair(wire, group)
        outbox.put(b"defghijk")
        await settle()
        assert wire.frames == [b"a", b"defghijk"]
        running.cancel()


async def test_an_item_long_after_the_previous_frame_is_sent_at_once() -> None:
    wire = Wire()
    async with asyncio.TaskGroup() as group:
        outbox, running = await answered_pair(wire, group)
        await asyncio.sleep(2 * GATHER_S_MAX)
        outbox.put(b"d")
        await settle()
        assert wire.frames == [b"a", b"d"]
        running.cancel()


async def steady_frames(items: int, every_s: float) -> list[int]:
    """Send `items` single items, one each `every_s`, to a peer that answers after 1.5 ms.

    Returns the number of items in each frame.
    """
    loop = asyncio.get_running_loop()
    sizes: list[int] = []

    async def send(parts: Sequence[Buffer]) -> None:
        sizes.append(len(parts))
        loop.call_later(0.0015, outbox.on_answer)

    outbox = Outbox(send, pending_bytes_max=1000, hold_bytes=100)
    async with asyncio.TaskGroup() as group:
        running = group.create_task(outbox.run())
        for _ in range(items):
            outbox.put(b"x")
            await asyncio.sleep(every_s)
        await outbox.wait_sent()
        running.cancel()
    assert sum(sizes) == items
    return sizes


async def test_a_thousand_items_a_second_travel_in_groups_of_four() -> None:
    sizes = await steady_frames(200, 0.001)
    assert sizes[-20:-1] == [GROUP_ITEMS_MAX] * 19
    assert len(sizes) < 60


async def test_an_item_after_the_answer_to_the_previous_one_is_sent_alone() -> None:
    assert await steady_frames(20, 0.002) == [1] * 20


async def test_three_senders_that_wait_for_their_answers_seldom_wait_for_a_fourth_item() -> None:
    loop = asyncio.get_running_loop()
    sizes: list[int] = []
    waiting: deque[asyncio.Future[None]] = deque()

    async def send(parts: Sequence[Buffer]) -> None:
        sizes.append(len(parts))
        loop.call_later(0.001, answer, [waiting.popleft() for _ in parts])

    def answer(items: list[asyncio.Future[None]]) -> None:
        outbox.on_answer()
        for item in items:
            item.set_result(None)

    async def send_items() -> None:
        for _ in range(500):
            waiting.append(loop.create_future())
            sent = waiting[-1]
            outbox.put(b"x")
            await sent

    outbox = Outbox(send, pending_bytes_max=1000, hold_bytes=100)
    async with asyncio.TaskGroup() as group:
        running = group.create_task(outbox.run())
        began_s = loop.time()
        async with asyncio.TaskGroup() as senders:
            for _ in range(3):
                senders.create_task(send_items())
                await asyncio.sleep(0.0003)
        took_s = loop.time() - began_s
        running.cancel()
    assert took_s < 1.2 * 500 * 0.001  # nearly each frame carries the items of all three


def test_a_group_grows_while_it_fills_and_shrinks_to_the_items_that_arrived() -> None:
    size = GroupSize()
    sizes = []
    for _ in range(4):
        sizes.append(size.items)
        size.on_full()
    assert sizes == [2, 3, 4, 4]
    size.on_short(3)
    assert size.items == 3
    size.on_short(0)
    assert size.items == GROUP_ITEMS_MIN


def groups_until_growth(size: GroupSize) -> int:
    before, groups = size.items, 0
    while size.items == before:
        size.on_full()
        groups += 1
    return groups


def test_each_short_group_doubles_the_pause_before_the_next_growth_up_to_a_limit() -> None:
    size = GroupSize()
    pauses = []
    for _ in range(11):
        assert groups_until_growth(size)
        size.on_short(2)
        pauses.append(groups_until_growth(size) - 1)
        size.on_short(2)
    assert pauses == [1, 4, 16, 64] + [GROWTH_PAUSE_MAX] * 7


def test_a_full_group_of_a_new_size_ends_the_long_pauses() -> None:
    size = GroupSize()
    for _ in range(5):
        groups_until_growth(size)
        size.on_short(2)
    groups_until_growth(size)
    size.on_full()
    size.on_short(2)
    assert groups_until_growth(size) == 2


async def test_an_outbox_that_ends_leaves_no_timer() -> None:
    wire = Wire()
    async with asyncio.TaskGroup() as group:
        outbox, running = await held_after_one_frame(wire, group)
        running.cancel()
        await asyncio.wait([running])
    outbox.on_answer()
    await asyncio.sleep(2 * HOLD_S_MAX)
    assert wire.frames == [b"a"]


@pytest.mark.parametrize("seed", range(40))
async def test_no_item_is_held_beyond_the_limit_in_any_sequence_of_events(seed: int) -> None:
    """Small and large items of several senders, control items, answers that arrive in time, late or
    never, and a peer that is behind."""
    chance, loop = random.Random(seed), asyncio.get_running_loop()
    due: dict[bytes, float] = {}
    free_at = 0.0  # when the peer had caught up

    async def send(parts: Sequence[Buffer]) -> None:
        nonlocal free_at
        for part in parts:
            assert loop.time() <= max(due.pop(bytes(part[:8])), free_at + HOLD_S_MAX) + 1e-9
        if chance.random() < 0.1:
            await asyncio.sleep(chance.expovariate(1 / 0.01))
            free_at = loop.time()
        if chance.random() < 0.8:
            loop.call_later(chance.expovariate(1 / 0.002), outbox.on_answer)

    outbox = Outbox(send, pending_bytes_max=1 << 20, hold_bytes=16 << 10)
    async with asyncio.TaskGroup() as group:
        running = group.create_task(outbox.run())
        for number in range(500):
            pause_s = chance.choice((0.0, 0.0002, 0.001, 0.01))
            await asyncio.sleep(chance.expovariate(1 / pause_s) if pause_s else 0)
            name = number.to_bytes(8)
            if chance.random() < 0.05:
                due[name] = loop.time()
                outbox.put_control(name)
            else:
                due[name] = loop.time() + HOLD_S_MAX
                outbox.put(name + bytes(chance.choice((0, 0, 0, 1_000, 20_000))))
        await asyncio.sleep(1)
        assert due == {}, "an item is held without a timer"
        running.cancel()
