"""Floods of refused requests are slowed down; single refusals are not."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from fakes.place import place

from magnetar.broker.session.refusals import DELAY_S_FIRST, DELAY_S_MAX, FREE, Refusals
from magnetar.protos import pulsar_pb2 as pb

PRODUCER, LOOKUP = pb.BaseCommand.PRODUCER, pb.BaseCommand.LOOKUP
TOPIC = "persistent://public/default/t"


def delays(refusals: Refusals, count: int, code: int = pb.NotAllowedError) -> list[float]:
    return [refusals.on_refused(PRODUCER, code)[0] for _ in range(count)]


def test_delay_grows_to_its_limit_after_the_free_refusals() -> None:
    found = delays(Refusals(), FREE + 200)
    assert found[:FREE] == [0.0] * FREE
    assert found[FREE] == DELAY_S_FIRST
    assert found[FREE:] == sorted(found[FREE:])
    assert found[-1] == DELAY_S_MAX


def test_success_of_the_same_command_ends_the_delay() -> None:
    refusals = Refusals()
    delays(refusals, 100)
    refusals.on_success(LOOKUP)
    assert delays(refusals, 1) == [DELAY_S_MAX]
    refusals.on_success(PRODUCER)
    assert delays(refusals, FREE) == [0.0] * FREE


def test_retryable_refusals_are_not_delayed() -> None:
    refusals = Refusals()
    assert delays(refusals, 1_000, pb.ServiceNotReady) == [0.0] * 1_000
    assert delays(refusals, 1) == [0.0]


def test_first_refusal_of_a_kind_is_logged_and_the_others_are_counted() -> None:
    refusals = Refusals()
    logged = [refusals.on_refused(PRODUCER, pb.NotAllowedError)[1] for _ in range(5)]
    assert logged == [True, False, False, False, False]
    assert refusals.on_refused(PRODUCER, pb.TopicNotFound)[1]
    assert refusals.on_refused(LOOKUP, pb.NotAllowedError)[1]
    assert refusals.repeated() == [(PRODUCER, pb.NotAllowedError, 5)]


@pytest.mark.parametrize(
    "refused",
    [
        pb.CommandGetOrCreateSchema(
            topic=TOPIC,
            request_id=0,
            schema=pb.Schema(name="s", schema_data=b"{}", type=pb.Schema.External),
        ),
        pb.CommandNewTxn(request_id=0),
        pb.CommandUnsubscribe(consumer_id=77, request_id=0),
    ],
    ids=["by its handler", "unsupported", "by the session"],
)
async def test_a_session_delays_refusals_after_the_free_ones_and_no_accepted_request(
    refused: Any,
) -> None:
    now = asyncio.get_running_loop().time
    async with place() as here:
        client = await here.client()
        began_s = now()
        for _ in range(FREE):
            await client.ask(refused)
        assert now() == began_s
        for doublings in range(5):
            began_s = now()
            await client.ask(refused)
            assert now() - began_s == pytest.approx(DELAY_S_FIRST * 2**doublings)
        began_s = now()
        assert isinstance(await client.produce(TOPIC), pb.CommandProducerSuccess)
        assert now() == began_s
