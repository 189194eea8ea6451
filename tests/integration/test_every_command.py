"""Every command of the protocol gets the answer of its case over both transports."""

from __future__ import annotations

from typing import Any

import pytest
from fakes.broker import running_broker
from fakes.cluster_state import ClusterState
from fakes.command_cases import (
    CASES,
    CODES,
    ENDED,
    IGNORED,
    encoded,
    error_of,
    example,
    prepare,
    text_of,
)
from fakes.wire import TRANSPORTS, wire_to

from magnetar.broker.session.commands import COMMANDS, UNSUPPORTED
from magnetar.protos import pulsar_pb2 as pb

pytestmark = [pytest.mark.parametrize("transport", TRANSPORTS), pytest.mark.real_loop]

Type = pb.BaseCommand.Type


@pytest.mark.parametrize("kind", COMMANDS, ids=Type.Name)
async def test_command_is_answered(transport: str, kind: int) -> None:
    assert kind in CASES, "a command without a case"
    body, expected = CASES[kind]
    async with (
        running_broker(ClusterState()) as broker,
        wire_to(broker, transport) as client,
    ):
        await prepare(client)
        await client.wire.send(encoded(body))
        if expected == ENDED:
            assert await client.ended() == []
            return
        if expected is not IGNORED:
            assert isinstance(expected, type)
            answer: Any = await client.expect(expected)
            assert error_of(answer) == CODES.get(kind, 0)
        if kind == Type.SEEK:  # the broker sends CLOSE_CONSUMER before the answer
            await client.expect(pb.CommandSuccess)
        await client.send(pb.CommandPing())
        await client.expect(pb.CommandPong)


@pytest.mark.parametrize("kind", UNSUPPORTED, ids=Type.Name)
async def test_unsupported_command_is_refused_by_name(transport: str, kind: int) -> None:
    async with (
        running_broker(ClusterState()) as broker,
        wire_to(broker, transport) as client,
    ):
        await client.wire.send(encoded(example(kind)))
        if UNSUPPORTED[kind].ends_connection:
            assert await client.ended() == []
            return
        answer: Any = (await client.receive()).body
        assert error_of(answer) == pb.NotAllowedError
        assert f"{Type.Name(kind)} is not supported" in text_of(answer)
