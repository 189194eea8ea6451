"""Limits before and at CONNECT, over both transports."""

from __future__ import annotations

from contextlib import suppress

import pytest
from fakes.broker import running_broker
from fakes.cluster_state import ClusterState
from fakes.wire import TRANSPORTS, wire_to
from support import wait_until

from magnetar.broker.session.grpc import SERVICE
from magnetar.broker.session.limits import HANDSHAKE_BYTES_MAX, ConnectionLimits, address_of
from magnetar.protos import framing
from magnetar.protos import pulsar_pb2 as pb
from magnetar.runtime.errors import StreamClosed
from magnetar.runtime.grpc_frames import open_channel, open_frame_stream

pytestmark = pytest.mark.real_loop


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize(
    ("maxima", "text"),
    [((1, 0), "1 connections"), ((0, 1), "from 127.0.0.1")],
    ids=["in all", "per address"],
)
async def test_a_connection_beyond_the_limit_gets_an_error_and_is_closed(
    transport: str, maxima: tuple[int, int], text: str
) -> None:
    limits = ConnectionLimits(*maxima)
    async with running_broker(ClusterState(), limits=limits) as broker:
        async with wire_to(broker, transport):
            async with wire_to(broker, transport, connected=False) as refused:
                if transport == "grpc":  # the call begins with the first frame
                    with suppress(StreamClosed):  # the broker may end the call first
                        await refused.send(pb.CommandConnect(client_version="c"))
                error = await refused.expect(pb.CommandError)
                assert error.error == pb.NotAllowedError
                assert text in error.message
                assert await refused.ended() == []
            assert limits.refused == 1
        await wait_until(lambda: limits.connections == 0)
        async with wire_to(broker, transport):  # there is room again
            pass


@pytest.mark.parametrize("transport", TRANSPORTS)
async def test_a_large_frame_before_connect_ends_the_connection(transport: str) -> None:
    async with (
        running_broker(ClusterState()) as broker,
        wire_to(broker, transport, connected=False) as client,
    ):
        body = pb.CommandConnect(client_version="x" * HANDSHAKE_BYTES_MAX)
        try:
            await client.wire.send(framing.encode_command(body))
            assert await client.ended() == []
        except (OSError, StreamClosed):
            return  # closed while it was sent


@pytest.mark.parametrize(
    "first",
    [bytes(5 << 20), framing.encode_command(pb.CommandConnect(client_version="c"))],
    ids=["5 MB", "CONNECT"],
)
async def test_a_message_before_connect_is_not_read_over_grpc(
    first: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    reason = "CONNECT must be in the metadata of the call"
    async with running_broker(ClusterState()) as broker:
        channel = open_channel(broker.grpc_url.removeprefix("grpc://"))
        stream = open_frame_stream(channel, f"/{SERVICE}/Session", peer="the broker")
        with suppress(StreamClosed):  # the broker ends the call while it is sent
            await stream.send([first])
        with pytest.raises(StreamClosed) as ended:
            await stream.receive()
        await wait_until(lambda: reason in caplog.text, what="the broker's refusal")
        if len(first) < 1_000:  # gRPC can lose the status of a call that ends during a long send
            assert reason in str(ended.value)
        await stream.close()
        await channel.close()


@pytest.mark.parametrize(
    ("peer", "address"),
    [
        ("127.0.0.1:5000", "127.0.0.1"),
        ("::1:5000", "::1"),
        ("ipv4:10.0.0.1:5000", "10.0.0.1"),
        ("ipv6:%5B::1%5D:5000", "::1"),
        ("unknown", "unknown"),
    ],
)
async def test_both_transports_name_the_same_address(peer: str, address: str) -> None:
    assert address_of(peer) == address
