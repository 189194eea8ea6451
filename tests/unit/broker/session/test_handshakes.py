"""The gate of gRPC streams before CONNECT: at most HANDSHAKES_MAX are read at once."""

from __future__ import annotations

import asyncio

from fakes.place import place

from magnetar.broker.session.limits import HANDSHAKE_FAIR_S, HANDSHAKES_MAX
from magnetar.protos import pulsar_pb2 as pb


async def test_silent_streams_hold_the_gate_until_others_wait() -> None:
    async with place() as here:
        handshakes = here.endpoint.handshakes
        silent = [await here.client(connected=False) for _ in range(HANDSHAKES_MAX)]
        await asyncio.sleep(10 * HANDSHAKE_FAIR_S)
        assert (len(handshakes._running), handshakes._waiting) == (HANDSHAKES_MAX, 0)
        loop = asyncio.get_running_loop()
        began = loop.time()
        honest = await here.client()
        await honest.send(pb.CommandPing())
        await honest.expect(pb.CommandPong)
        assert loop.time() - began < 2 * HANDSHAKE_FAIR_S
        assert await silent[0].ended() == []


async def test_a_connected_client_leaves_its_place_in_the_gate() -> None:
    async with place() as here:
        for _ in range(HANDSHAKES_MAX + 1):
            await here.client()
        handshakes = here.endpoint.handshakes
        assert (len(handshakes._running), handshakes._waiting) == (0, 0)


async def test_a_new_stream_has_its_time_while_others_wait() -> None:
    async with place() as here:
        for _ in range(HANDSHAKES_MAX + 8):
            await here.client(connected=False)
        handshakes = here.endpoint.handshakes
        await asyncio.sleep(HANDSHAKE_FAIR_S / 2)
        assert (len(handshakes._running), handshakes._waiting) == (HANDSHAKES_MAX, 8)
        await asyncio.sleep(2 * HANDSHAKE_FAIR_S)
        assert (len(handshakes._running), handshakes._waiting) == (8, 0)
