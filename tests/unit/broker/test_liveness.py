"""The rule for silent brokers, and the one lookup that asks for all concurrent lookups."""

from __future__ import annotations

import asyncio
import itertools
from typing import TYPE_CHECKING

import pytest
from fakes.witnesses import FakeWitnesses

from magnetar.bookie.contract import LastHeard
from magnetar.broker.config import BrokerConfig
from magnetar.broker.ownership.liveness import (
    ALIVE_FRESH_S,
    ASK_AGAIN_S,
    GONE_FRESH_S,
    JUST_NOW_S,
    SILENCE_S,
    Finding,
    Liveness,
    Port,
    judge,
)
from magnetar.metadata.model import BrokerId, BrokerRegistration

if TYPE_CHECKING:
    from collections.abc import Sequence

LONG, SHORT = LastHeard(heard_s=2.5, listening_s=60.0), LastHeard(heard_s=1.0, listening_s=60.0)
NOW, DEAF = LastHeard(heard_s=0.4, listening_s=60.0), LastHeard(heard_s=9.0, listening_s=0.5)
OWNER = BrokerRegistration(BrokerId("owner"), "1" * 32, "grpc://h:1", "pulsar://h:2", "")


@pytest.mark.parametrize(
    ("answers", "finding"),
    [
        ([LONG, LONG, LONG], Finding.SILENT),
        ([LONG, LONG, None], Finding.SILENT),
        ([LONG, None, None], Finding.UNKNOWN),
        ([LONG, None], Finding.UNKNOWN),  # half of the bookies are not most of them
        ([LONG], Finding.SILENT),
        ([None, None, None], Finding.UNKNOWN),
        ([], Finding.UNKNOWN),
        ([LONG, LONG, NOW], Finding.HEARD),
        ([NOW, None, None], Finding.HEARD),
        ([LONG, LONG, SHORT], Finding.WAIT),
        ([LONG, SHORT, None], Finding.WAIT),
        ([LONG, LONG, DEAF], Finding.WAIT),
        ([SHORT, None, None], Finding.UNKNOWN),
    ],
)
def test_a_broker_is_judged_by_the_answers_of_the_bookies(
    answers: Sequence[LastHeard | None], finding: Finding
) -> None:
    assert judge(answers, 2.0)[0] is finding


def test_an_owner_is_silent_only_if_most_bookies_answer_and_none_contradicts() -> None:
    for count in range(1, 6):
        for answers in itertools.product((LONG, SHORT, NOW, DEAF, None), repeat=count):
            told = [answer for answer in answers if answer is not None]
            silent = judge(answers, 2.0)[0] is Finding.SILENT
            assert silent == (set(told) == {LONG} and len(told) > count / 2), answers


class Bookies(FakeWitnesses):
    """The bookies heard the owner at `heard_at`, and later if it `beats`."""

    def __init__(self, heard_at: float, *, beats_again_at: float = 1e9) -> None:
        super().__init__()
        self.heard_at = heard_at
        self.beats_again_at = beats_again_at

    async def ask(self, broker: str, incarnation: str) -> Sequence[LastHeard | None]:
        now = asyncio.get_running_loop().time()
        heard_s = 0.0 if now >= self.beats_again_at else now - self.heard_at
        self.answers = [LastHeard(heard_s=heard_s, listening_s=60.0)] * 3
        return await super().ask(broker, incarnation)


def liveness_of(bookies: FakeWitnesses, *ports: Port, silence_s: float = SILENCE_S) -> Liveness:
    """A liveness check. The owner's port gives these answers in order and is then silent."""
    left = list(ports)

    async def look(_: BrokerRegistration) -> tuple[Port, float]:
        return left.pop(0) if left else Port.SILENT, 0.25

    return Liveness(bookies, silence_s=silence_s, look_at_port=look)


async def test_the_bookies_are_asked_again_while_the_silence_is_too_short() -> None:
    now = asyncio.get_running_loop().time
    began, bookies = now(), Bookies(now() - 1.0)
    assert await liveness_of(bookies).is_gone(OWNER)
    assert SILENCE_S - 1.0 <= now() - began < SILENCE_S - 1.0 + ASK_AGAIN_S


async def test_a_broker_that_beats_again_while_a_lookup_waits_is_alive() -> None:
    now = asyncio.get_running_loop().time
    began = now()
    assert not await liveness_of(Bookies(began - 1.0, beats_again_at=began + 0.5)).is_gone(OWNER)
    assert now() - began < 0.5 + ASK_AGAIN_S + 0.01


async def test_bookies_that_repeatedly_hear_no_broker_do_not_delay_a_lookup() -> None:
    now, bookies = asyncio.get_running_loop().time, FakeWitnesses()
    bookies.answers, began = [DEAF, DEAF, DEAF], now()
    assert not await liveness_of(bookies).is_gone(OWNER)
    assert now() - began <= SILENCE_S + ASK_AGAIN_S


async def test_without_a_limit_of_silence_a_silent_broker_is_alive() -> None:
    bookies = Bookies(-100.0)
    assert not await liveness_of(bookies, silence_s=0.0).is_gone(OWNER)
    assert not bookies.asked


async def test_a_port_that_answers_or_refuses_needs_no_bookies() -> None:
    bookies = Bookies(-100.0)
    answering = liveness_of(bookies, Port.ANSWERS)
    assert not await answering.is_gone(OWNER)
    assert await answering.responds(OWNER)
    refusing = liveness_of(bookies, Port.REFUSES)
    assert await refusing.is_gone(OWNER)
    assert not await refusing.responds(OWNER)
    assert not bookies.asked


async def test_the_answer_is_kept_for_a_bounded_time() -> None:
    now = asyncio.get_running_loop().time
    bookies = Bookies(now() - 100.0)
    liveness = liveness_of(bookies)
    for _ in range(10):
        assert await liveness.is_gone(OWNER)
    assert len(bookies.asked) == 1
    bookies.beats_again_at = now()
    await asyncio.sleep(GONE_FRESH_S + 0.01)
    assert not await liveness.is_gone(OWNER)
    assert len(bookies.asked) == 2
    await asyncio.sleep(ALIVE_FRESH_S + 0.01)
    assert not await liveness.is_gone(OWNER)
    assert len(bookies.asked) == 3


async def test_a_broker_that_is_gone_is_not_pinged_again() -> None:
    liveness = liveness_of(Bookies(-100.0), Port.SILENT, Port.ANSWERS)
    assert await liveness.is_gone(OWNER)
    assert not await liveness.responds(OWNER)
    await asyncio.sleep(GONE_FRESH_S + 0.01)
    assert await liveness.responds(OWNER)


async def test_another_incarnation_of_the_broker_is_asked_about_again() -> None:
    bookies = Bookies(asyncio.get_running_loop().time() - 100.0)
    liveness = liveness_of(bookies)
    await liveness.is_gone(OWNER)
    again = BrokerRegistration(OWNER.broker, "2" * 32, OWNER.grpc_url, OWNER.pulsar_url, "")
    await liveness.is_gone(again)
    assert bookies.asked == [("owner", "1" * 32), ("owner", "2" * 32)]


async def test_another_lookup_asks_when_the_asking_one_is_cancelled() -> None:
    now = asyncio.get_running_loop().time
    bookies = Bookies(now() - SILENCE_S + 1.0)
    liveness = liveness_of(bookies)
    async with asyncio.TaskGroup() as group:
        first = group.create_task(liveness.is_gone(OWNER))
        others = [group.create_task(liveness.is_gone(OWNER)) for _ in range(100)]
        await asyncio.sleep(0.1)
        first.cancel()
    assert first.cancelled()
    assert all(other.result() for other in others)
    assert len(bookies.asked) <= 2 + (SILENCE_S - 1.0) / ASK_AGAIN_S + 1


def test_the_default_of_the_setting_equals_the_constant() -> None:
    assert BrokerConfig.model_fields["broker_silence_in_seconds"].default == SILENCE_S


def test_a_beat_may_be_late_by_half_of_its_time_without_a_wait() -> None:
    assert judge([LastHeard(heard_s=JUST_NOW_S - 0.01, listening_s=60.0)], SILENCE_S) == (
        Finding.HEARD,
        0.0,
    )
