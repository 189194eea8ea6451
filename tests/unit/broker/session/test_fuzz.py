"""Commands with any values, and damaged frames. At most their own connection ends. The error names
the fault. No unexpected exception is raised."""

from __future__ import annotations

import asyncio
import os
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from fakes.command_cases import BODIES, TOPIC, encoded
from fakes.entries import entry_of
from fakes.place import place
from fakes.virtual_loop import run_virtual
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from magnetar.broker.session.commands import COMMANDS
from magnetar.protos import framing
from magnetar.protos import pulsar_pb2 as pb
from magnetar.protos.entry import checksums_of
from magnetar.runtime.errors import StreamClosed

if TYPE_CHECKING:
    from fakes.wire import WireClient
    from google.protobuf.descriptor import Descriptor, FieldDescriptor

NUMBERS = {
    "int32": (-(2**31), -1, 0, 1, 2, 7, 2**31 - 1),
    "uint32": (0, 1, 2, 1_000, 2**32 - 1),
    "int64": (-(2**63), -1, 0, 1, 3, 2**63 - 1),
    "uint64": (0, 1, 2, 1, 1, 2**32, 2**63 - 1, 2**63, 2**64 - 1),
}
TEXTS = st.sampled_from(
    ["", "t", TOPIC, "public/default", "a/b", "s", "x" * 1_024, "x" * 1_025, "\N{SNOWMAN}", "\0"]
)
BYTES = st.sampled_from([b"", b"x", b"\xff" * 100])


def values(field: FieldDescriptor) -> st.SearchStrategy[Any]:
    if field.message_type is not None:
        return bodies(field.message_type)
    if field.enum_type is not None:
        return st.sampled_from([it.number for it in field.enum_type.values])
    match field.cpp_type:
        case field.CPPTYPE_STRING:
            return TEXTS if field.type == field.TYPE_STRING else BYTES
        case field.CPPTYPE_BOOL:
            return st.booleans()
        case field.CPPTYPE_DOUBLE | field.CPPTYPE_FLOAT:
            return st.sampled_from([0.0, -1.0, float("inf"), float("nan")])
        case field.CPPTYPE_INT32:
            return st.sampled_from(NUMBERS["int32"])
        case field.CPPTYPE_UINT32:
            return st.sampled_from(NUMBERS["uint32"])
        case field.CPPTYPE_INT64:
            return st.sampled_from(NUMBERS["int64"])
    return st.sampled_from(NUMBERS["uint64"])


_seen: dict[str, st.SearchStrategy[Any]] = {}


def bodies(kind: Descriptor) -> st.SearchStrategy[Any]:
    """Messages of this kind, with all required fields and any of the others."""
    known = _seen.get(kind.full_name)
    if known is not None:
        return known
    _seen[kind.full_name] = st.deferred(lambda: _seen[kind.full_name + " built"])
    required, optional = {}, {}
    for field in kind.fields:
        if field.full_name == "magnetar.pulsar.MessageIdData.first_chunk_message_id":
            continue  # the message type contains itself
        strategy = values(field)
        if field.is_repeated:
            strategy = st.lists(strategy, max_size=3)
        (required if field.is_required else optional)[field.name] = strategy
    make = getattr(pb, kind.name, None) or getattr(pb.CommandConnect, kind.name)
    built = st.fixed_dictionaries(required, optional=optional).map(lambda it: make(**it))
    _seen[kind.full_name + " built"] = built
    return built


METADATA = bodies(pb.MessageMetadata.DESCRIPTOR)


@st.composite
def entries(draw: st.DrawFn) -> bytes:
    metadata = draw(METADATA).SerializeToString()
    body = len(metadata).to_bytes(4) + metadata + draw(st.binary(max_size=30))
    return b"\x0e\x01" + checksums_of([bytes(6) + body])[0].to_bytes(4) + body


@st.composite
def commands(draw: st.DrawFn) -> bytes:
    body = draw(st.sampled_from(sorted(BODIES)).flatmap(lambda it: bodies(BODIES[it].DESCRIPTOR)))
    if isinstance(body, pb.CommandSend):
        return b"".join(framing.encode_payload_command(body, [draw(entries())]))
    return encoded(body)


@st.composite
def handled(draw: st.DrawFn) -> bytes:
    """A command with a handler in the broker, mostly for an open producer or consumer."""
    kinds = sorted(set(COMMANDS) - {pb.BaseCommand.CONNECT, pb.BaseCommand.AUTH_RESPONSE})
    body = draw(st.sampled_from(kinds).flatmap(lambda it: bodies(BODIES[it].DESCRIPTOR)))
    for name in ("consumer_id", "producer_id"):
        if name in body.DESCRIPTOR.fields_by_name and draw(st.integers(0, 4)):
            setattr(body, name, 1)
    for item in body.message_id if isinstance(body, pb.CommandAck) else ():
        if draw(st.booleans()):
            item.ledgerId, item.entryId = 0, draw(st.integers(0, 3))
    if isinstance(body, pb.CommandSend):
        return b"".join(framing.encode_payload_command(body, [draw(entries())]))
    return encoded(body)


@st.composite
def damaged(draw: st.DrawFn) -> bytes:
    data = bytearray(draw(handled()))
    for _ in range(draw(st.integers(1, 4))):
        data[draw(st.integers(0, len(data) - 1))] = draw(st.integers(0, 255))
    return bytes(data[: draw(st.integers(1, len(data)))])


async def drain(client: WireClient) -> None:
    """Read until no more commands arrive, or the connection ends."""
    try:
        while True:
            async with asyncio.timeout(5):
                await client.receive()
    except (TimeoutError, EOFError, StreamClosed):
        return


async def play(frames: list[bytes]) -> None:
    async with place() as here:
        witness = await here.client()
        await witness.produce("witness")
        client = await here.client()
        await client.produce(TOPIC)
        for number, texts in enumerate((["a"], ["b", "c"], ["d"])):
            await client.publish(entry=bytes(entry_of(*texts).data), sequence_id=number)
            await client.expect(pb.CommandSendReceipt)
        await client.subscribe(TOPIC, subType=pb.CommandSubscribe.Shared)
        await client.flow(2)
        with suppress(StreamClosed):
            for data in frames:
                await client.wire.send(data)
        await drain(client)
        assert here.endpoint.failures == 0
        await witness.publish("still there")
        while not isinstance((await witness.receive()).body, pb.CommandSendReceipt):
            pass
        await client.wire.break_off()
        for topic in here.broker.topics:
            for subscription in topic.subscriptions.values():
                if subscription._dispatcher is not None:
                    subscription._dispatcher.check()
                    for machine in subscription.consumers:
                        machine.check()
        await drain(await here.client())
        assert here.endpoint.failures == 0


EXAMPLES = int(os.environ.get("FUZZ_EXAMPLES", "25"))  # built by hand, because it holds thousands
SETTINGS = settings(
    max_examples=EXAMPLES, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)


@SETTINGS
@given(st.lists(handled(), min_size=1, max_size=12))
def test_commands_with_any_values_end_at_most_their_connection(frames: list[bytes]) -> None:
    run_virtual(play(frames))


@SETTINGS
@given(st.lists(commands(), min_size=1, max_size=4))
def test_every_command_with_any_values_ends_at_most_its_connection(frames: list[bytes]) -> None:
    run_virtual(play(frames))


@SETTINGS
@given(st.lists(damaged(), min_size=1, max_size=3))
def test_damaged_frames_end_at_most_their_connection(frames: list[bytes]) -> None:
    run_virtual(play(frames))
