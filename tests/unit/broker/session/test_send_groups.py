"""SENDs of a producer that does not wait for receipts are carried out in groups."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import TYPE_CHECKING

import pytest
from fakes.place import FRAMES_MAX, place
from fakes.wire import StreamWire, WireClient
from support import settle

from magnetar.broker.session.connection import Connection, Transport
from magnetar.broker.session.send_groups import (
    INTERVAL_S_MAX,
    INTERVAL_S_MIN,
    OUTSTANDING_MIN,
    SendGroups,
)
from magnetar.protos import pulsar_pb2 as pb
from magnetar.runtime.frames import GROUP_ITEMS_MAX, GROUP_ITEMS_MIN
from magnetar.runtime.memory_stream import memory_stream_pair

if TYPE_CHECKING:
    from collections.abc import Callable

TOPIC = "persistent://public/default/groups"


class Sender:
    """Sends a frame of `sends` SENDs every `interval_s` each, whatever the groups are."""

    def __init__(self, *, interval_s: float = 0.001, outstanding: int = OUTSTANDING_MIN) -> None:
        self.groups = SendGroups()
        self.outstanding = outstanding
        self._interval_s = interval_s
        self._now = 1_000.0
        for _ in range(100):  # the mean interval is known
            self.wanted()

    def wanted(self, sends: int = 1) -> int:
        self._now += sends * self._interval_s
        self.groups.on_publish(sends, outstanding=self.outstanding)
        return self.groups.take_wanted(self._now)


def test_a_producer_that_waits_for_each_receipt_is_never_gathered() -> None:
    sender = Sender(outstanding=0)
    assert sender.wanted() == 0


@pytest.mark.parametrize(
    ("interval_s", "wanted"),
    [
        (INTERVAL_S_MIN / 2, 0),
        (INTERVAL_S_MIN * 1.01, GROUP_ITEMS_MIN),
        (INTERVAL_S_MAX * 0.99, GROUP_ITEMS_MIN),
        (INTERVAL_S_MAX * 1.5, 0),
        (1.0, 0),
    ],
)
def test_only_sends_at_a_modest_rate_are_gathered(interval_s: float, wanted: int) -> None:
    assert Sender(interval_s=interval_s).wanted() == wanted


def test_a_frame_without_a_send_begins_no_group() -> None:
    sender = Sender()
    assert sender.wanted() == GROUP_ITEMS_MIN
    assert sender.groups.take_wanted(2_000.0) == 0


def test_full_groups_grow_to_the_limit() -> None:
    sender, sizes = Sender(), []
    sender.outstanding = 0  # the receipts of a whole group come together
    for _ in range(5):
        sizes.append(sender.wanted(sizes[-1] if sizes else 1))
        sender.groups.on_gathered(sizes[-1])
    assert sizes == [*range(GROUP_ITEMS_MIN, GROUP_ITEMS_MAX + 1), *[GROUP_ITEMS_MAX] * 2]


def test_a_wait_for_one_send_ends_the_gathering() -> None:
    sender = Sender()
    sender.groups.on_gathered(1)
    sender.outstanding = 0
    assert sender.wanted() == 0
    sender.outstanding = OUTSTANDING_MIN
    assert sender.wanted() == GROUP_ITEMS_MIN


def test_another_command_says_nothing_about_the_group() -> None:
    sender = Sender()
    sender.outstanding = 0
    sender.groups.on_gathered(None)
    assert sender.wanted() == GROUP_ITEMS_MIN


async def test_a_connection_gathers_only_behind_sends_without_receipts() -> None:
    wanted: list[int] = []

    def gather(sends: int, _until_s: float, _ended: Callable[[int | None], None]) -> None:
        wanted.append(sends)

    async with place() as here, asyncio.TaskGroup() as group:
        ours, theirs = memory_stream_pair("client", "broker", frames_max=FRAMES_MAX)
        connection = Connection(theirs, here.endpoint, Transport.PULSAR, gather=gather)
        group.create_task(connection.run())
        client = WireClient(StreamWire(ours, ours.close))
        await client.connect()
        await client.produce(TOPIC)
        count = 50
        for number in range(count):
            await client.publish(sequence_id=number)
            await client.expect(pb.CommandSendReceipt)
            await asyncio.sleep(0.001)
        assert wanted == []
        here.ledgers.hold()
        for number in range(count, count + OUTSTANDING_MIN):
            await client.publish(sequence_id=number)
            await asyncio.sleep(0.001)
        assert wanted == []
        await client.publish(sequence_id=count + OUTSTANDING_MIN)
        await settle()
        assert wanted == [GROUP_ITEMS_MIN]
        await client.send(pb.CommandPong())
        await settle()
        assert wanted == [GROUP_ITEMS_MIN]
        here.ledgers.release()
        for number in range(count, count + OUTSTANDING_MIN + 1):
            assert (await client.expect(pb.CommandSendReceipt)).sequence_id == number
        with suppress(EOFError):
            await ours.close()
