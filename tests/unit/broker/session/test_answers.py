"""Lists of topics: equal requests share one answer. An answer is bounded and never truncated."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
from fakes.place import place
from support import settle, wait_until

from magnetar.broker.session.answers import KEEP_S, Answers
from magnetar.metadata import codec, paths
from magnetar.metadata.model import TopicRecord
from magnetar.metadata.store import ABSENT
from magnetar.protos import framing
from magnetar.protos import pulsar_pb2 as pb
from magnetar.protos.errors import FrameTooLarge
from magnetar.protos.names import Domain

if TYPE_CHECKING:
    from fakes.place import Place
    from fakes.wire import WireClient

TOPICS = 10_000


async def create(here: Place, number: int, *, name: str = "a-topic-with-a-longer-name") -> None:
    record = codec.encode_topic(TopicRecord(epoch=1))
    for place_ in range(number):
        path = paths.topic("public", "default", Domain.PERSISTENT, f"{name}-{place_:05}")
        await here.store.put(path, record, expected=ABSENT)


def request(number: int = 0) -> pb.CommandGetTopicsOfNamespace:
    return pb.CommandGetTopicsOfNamespace(request_id=number, namespace="public/default")


def count_reads(here: Place) -> list[str]:
    """Record the paths whose children are read."""
    reads: list[str] = []
    children = here.store.children

    async def counted(path: str) -> list[str]:
        reads.append(path)
        return await children(path)

    here.broker._store.children = counted  # type: ignore[method-assign]
    return reads


async def test_a_flood_of_equal_requests_costs_one_answer() -> None:
    async with place() as here:
        await create(here, TOPICS)
        reads = count_reads(here)
        client = await here.client()
        number = 500
        frame = b"".join(framing.encode_command(request(each)) for each in range(number))
        await client.wire.send(frame)
        seen = set()
        for _ in range(number):
            answer = await client.expect(pb.CommandGetTopicsOfNamespaceResponse)
            seen.add(answer.request_id)
            assert len(answer.topics) == TOPICS
            # 600 KB once, not 300 MB.
            assert here.endpoint.answers.held_bytes < 2_000_000
        assert seen == set(range(number))
        assert len(reads) <= 2
        await wait_until(lambda: here.endpoint.answers.held_bytes == 0)
        here.endpoint.answers.check()


async def listed(client: WireClient) -> Any:
    return await client.ask(request())


async def test_a_list_has_the_topics_created_before_the_request() -> None:
    async with place() as here:
        client = await here.client()
        for number in range(5):
            await client.produce(f"persistent://public/default/t{number}", producer_id=number)
            assert len((await listed(client)).topics) == number + 1
        await create(here, 1)  # another broker creates the topic: the watch reports the topic
        await settle()
        assert len((await listed(client)).topics) == 6


async def test_an_answer_is_kept_briefly() -> None:
    async with place() as here:
        client = await here.client()
        reads = count_reads(here)
        for _ in range(3):
            await listed(client)
        assert len(reads) == 1
        await asyncio.sleep(KEEP_S)
        await listed(client)
        assert len(reads) == 2


async def test_over_the_budget_the_broker_says_too_many_requests() -> None:
    async with place() as here:
        await create(here, 100)
        here.endpoint.answers = Answers(1_000)
        client = await here.client()
        answer = await listed(client)
        assert answer.error == pb.TooManyRequests
        assert here.endpoint.answers.refused == 1
        assert here.endpoint.answers.held_bytes == 0


async def test_an_answer_that_is_too_large_is_an_error_and_not_truncated() -> None:
    async with place() as here:
        await create(here, 6_000, name="x" * 1_000)
        answer = await listed(await here.client())
        assert isinstance(answer, pb.CommandError)
        assert answer.error == pb.NotAllowedError


async def test_an_answer_that_only_its_request_id_makes_too_large_is_not_held() -> None:
    async with place() as here:
        answers = Answers()
        body = pb.CommandGetTopicsOfNamespaceResponse(request_id=0, topics=[""])
        room = framing.COMMAND_FRAME_BYTES_MAX - len(framing.encode_command(body))
        body.topics[0] = "x" * (room - 6)  # two lengths take 3 bytes more each
        frame = framing.encode_command(body)
        assert len(frame) == framing.COMMAND_FRAME_BYTES_MAX

        async def handler(context: Any, asked: Any) -> bytes:
            return frame

        for _ in range(3):
            with pytest.raises(FrameTooLarge):
                await answers.get(
                    SimpleNamespace(broker=here.broker, answers=answers),
                    request(300),
                    handler,
                    lambda context, asked, on_change: lambda: None,
                )
            assert answers.held_bytes == 0


async def test_answers_of_a_client_that_leaves_are_released() -> None:
    async with place() as here:
        await create(here, 2_000)
        client = await here.client()
        for number in range(50):
            await client.send(request(number))
        await wait_until(lambda: here.endpoint.answers.held_bytes > 0)
        await client.wire.break_off()
        await here.serving[0]
        assert here.endpoint.answers.held_bytes == 0


@pytest.mark.parametrize("number", [1, 200, 2**64 - 1])
async def test_each_request_gets_its_own_id(number: int) -> None:
    async with place() as here:
        client = await here.client()
        await client.send(request(number))
        answer = await client.expect(pb.CommandGetTopicsOfNamespaceResponse)
        assert answer.request_id == number
