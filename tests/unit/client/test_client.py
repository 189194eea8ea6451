"""The client as a whole: closing, cancellation, cleanup, and the cost of its import."""

from __future__ import annotations

import asyncio
import itertools
import subprocess
import sys
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any

import pytest
from fakes.client_world import TOPIC, A, B, client_among
from support import frames_of, settle

import magnetar
import magnetar.asyncio
from magnetar.client.consumer import LoopQueue
from magnetar.client.consuming.many import ManySubscriber
from magnetar.client.errors import (
    START_ADVICE,
    AlreadyClosed,
    ConnectError,
    Interrupted,
    InvalidConfiguration,
    PulsarException,
    Result,
    Timeout,
    UnknownError,
)
from magnetar.client.options import ConsumerOptions, ConsumerType, ProducerOptions, TableViewOptions
from magnetar.client.table_view import TableRows
from magnetar.protos import pulsar_pb2 as pb

if TYPE_CHECKING:
    from collections.abc import Coroutine

    from fakes.session_broker import Session


def own_tasks(before: set[asyncio.Task[Any]]) -> list[str]:
    return sorted(task.get_name() for task in asyncio.all_tasks() - before)


async def test_close_leaves_no_tasks_and_closes_everything() -> None:
    async with client_among() as (client, cluster):
        before = asyncio.all_tasks()
        producer = await client.create_producer("t")
        consumer = await client.subscribe("t", "s")
        reader = await client.create_reader("t", magnetar.MessageId.earliest)
        await producer.send(b"x")
        await client.close()
        await settle()
        assert {session.stream.ended for session in cluster.brokers[A].sessions} == {True}
        assert own_tasks(before | set(cluster._tasks)) == []
        for call in (producer.send(b"y"), consumer.receive(), reader.read_next()):
            with pytest.raises(AlreadyClosed):
                await call
        with pytest.raises(AlreadyClosed):
            await client.create_producer("t")
        with pytest.raises(AlreadyClosed):
            await client.close()


async def test_error_of_a_closed_object_keeps_no_earlier_calls_in_memory() -> None:
    """The frames of a failed `send` hold its content."""
    async with client_among() as (client, _):
        producer = await client.create_producer("t")
        consumer = await client.subscribe("t", "s")
        several = await client.subscribe(["t", "u"], "several")
        await client.close()
        for call in (
            partial(producer.send, b"x"),
            producer.flush,
            consumer.receive,
            partial(consumer.acknowledge, magnetar.MessageId(-1, 1, 0)),
            partial(several.acknowledge, magnetar.MessageId(-1, 1, 0)),
            partial(client.get_topic_partitions, "t"),
        ):
            frames = []
            for _ in range(3):
                with pytest.raises(AlreadyClosed) as raised:
                    await call()
                frames.append(frames_of(raised.value))
            assert len(set(frames)) == 1, (call, frames)


async def test_a_close_that_is_cancelled_ends_everything_at_once() -> None:
    async with client_among() as (client, cluster):
        before = asyncio.all_tasks()
        producer = await client.create_producer("t")
        cluster.topic(TOPIC).hold_receipts = True
        told: list[Result] = []
        producer.send_async(b"x", lambda result, _: told.append(result))
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(1):
                await client.close()
        assert told == [Result.Interrupted]
        await settle()
        assert own_tasks(before | set(cluster._tasks)) == []


class BrokenCore:
    """A core with a bug: it does not close."""

    topic = TOPIC
    ended: PulsarException | None = None

    async def close(self) -> None:
        raise ZeroDivisionError

    def shut_down(self, error: PulsarException) -> None:
        self.ended = error


async def test_bug_in_one_close_leaves_no_tasks_and_closes_everything_else() -> None:
    async with client_among() as (client, cluster):
        before = asyncio.all_tasks()
        consumer = await client.subscribe("t", "s")
        producer = await client.create_producer("t")
        await producer.send(b"x")
        message = await consumer.receive()
        await consumer.acknowledge(message)
        broken = BrokenCore()
        client.parts.live.add(broken)
        with pytest.raises(UnknownError, match="internal error: ZeroDivisionError"):
            await client.close()
        await settle()
        assert isinstance(broken.ended, UnknownError)
        assert cluster.topic(TOPIC).subscriptions["s"].unacked == {}
        assert {session.stream.ended for session in cluster.brokers[A].sessions} == {True}
        assert own_tasks(before | set(cluster._tasks)) == []


class NoTopics:
    """A source that has found no topics so far."""

    title = "none"
    creates_topics = False
    may_miss = True

    async def first(self) -> list[str]:
        return []

    async def follow(self, _: object) -> None:
        await asyncio.Event().wait()


async def test_core_that_cannot_start_its_task_is_not_kept() -> None:
    """The tasks of a client end before its cores do when the loop ends, or after a bug."""
    async with client_among() as (client, cluster):
        cluster.partitions[f"{TOPIC}s"] = 2
        cores = [
            await client.publisher(ProducerOptions("t")),
            await client.publisher(ProducerOptions("ts")),
            await client.consumer_core(ConsumerOptions("t", "s"), LoopQueue()),
        ]
        many = await client.consumer_core(ConsumerOptions("ts", "s"), LoopQueue())
        assert isinstance(many, ManySubscriber)
        many._source = NoTopics()
        client.parts.scope.cancel()
        await settle()
        for core in (*cores, many):
            with pytest.raises(AlreadyClosed):
                await core.open()
            assert not client.parts.live


async def test_table_view_that_cannot_follow_its_topic_is_closed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with client_among() as (client, _):
        await client.get_topic_partitions("t")  # the client has begun
        scope = client.parts.scope

        async def end_scope(_: object) -> None:
            scope.cancel()
            await settle()

        monkeypatch.setattr(TableRows, "_read_backlog", end_scope)
        with pytest.raises(AlreadyClosed):
            await client.table_rows(TableViewOptions("t"))
        assert not client.parts.live


async def test_bug_in_the_close_of_one_session_ends_all_sessions(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with client_among() as (client, cluster):
        before = asyncio.all_tasks()
        await client.create_producer("t")
        await client.subscribe("t", "s")
        first = next(iter(client.parts.pool._connections.values()))

        async def fail() -> None:
            raise ZeroDivisionError

        monkeypatch.setattr(first._stream, "close", fail)
        with pytest.raises(ZeroDivisionError):
            await client.close()
        await settle()
        assert {session.stream.ended for session in cluster.brokers[A].sessions} == {True}
        assert own_tasks(before | set(cluster._tasks)) == []


async def test_client_close_waits_for_producers_that_are_closing() -> None:
    async with client_among() as (client, cluster):
        topic = cluster.topic(TOPIC)
        producer = await client.create_producer("t")
        consumer = await client.subscribe("t", "s")
        await producer.send(b"1")
        message = await consumer.receive()
        cluster.brokers[A].hold_acks = topic.hold_receipts = True
        await consumer.acknowledge(message)
        async with asyncio.TaskGroup() as group:
            sending = group.create_task(producer.send(b"2"))
            await settle()
            for close in (consumer.close, producer.close):
                group.create_task(close())
                await settle()
            closing = group.create_task(client.close())
            await asyncio.sleep(1)
            assert not closing.done()
            for session in cluster.brokers[A].sessions:
                answer_all(session)
        assert sending.result() == magnetar.MessageId(-1, 1, 1)


def answer_all(session: Session) -> None:
    """Release the receipts and answers that the broker holds back."""
    for body in list(session.commands):
        if isinstance(body, pb.CommandAck):
            ids = {"consumer_id": body.consumer_id, "request_id": body.request_id}
            session.send(pb.CommandAckResponse(**ids))
        elif isinstance(body, pb.CommandSend) and body.sequence_id == 1:
            stored = pb.MessageIdData(ledgerId=1, entryId=1)
            receipt = pb.CommandSendReceipt(
                producer_id=body.producer_id, sequence_id=1, message_id=stored
            )
            session.send(receipt)


async def test_close_after_timeout_closes_the_consumer_at_the_broker() -> None:
    async with client_among(operation_timeout_seconds=2) as (client, cluster):
        topic = cluster.topic(TOPIC)
        producer = await client.create_producer("t")
        consumer = await client.subscribe("t", "s")
        await producer.send(b"1")
        cluster.brokers[A].hold_acks = topic.hold_receipts = True
        await consumer.acknowledge(await consumer.receive())
        producer.send_async(b"2", None)
        for close in (producer.close(), consumer.close()):
            with pytest.raises(Timeout):
                await close
        await settle()
        assert topic.subscriptions["s"].consumers == []
        assert [session.producers for session in cluster.brokers[A].sessions] == [{}, {}]


async def test_create_reader_at_latest_that_fails_closes_the_reader() -> None:
    async with client_among(operation_timeout_seconds=2) as (client, cluster):
        cluster.brokers[A].script(pb.CommandGetLastMessageId, None)
        with pytest.raises(Timeout):
            await client.create_reader("t", magnetar.MessageId.latest)
        await settle()
        (subscription,) = cluster.topic(TOPIC).subscriptions.values()
        assert subscription.consumers == []
        assert client.parts.live == set()


async def test_text_that_is_not_utf8_is_refused_and_does_not_end_the_client() -> None:
    async with client_among() as (client, _):
        producer = await client.create_producer("t")
        lone = "\ud800"
        wrong: tuple[dict[str, Any], ...] = (
            {"producer_name": lone},
            {"properties": {"a": lone}},
        )
        for options in wrong:
            with pytest.raises(InvalidConfiguration, match="UTF-8"):
                await client.create_producer("t", **options)
        with pytest.raises(InvalidConfiguration, match="UTF-8"):
            await client.subscribe("t", lone)
        await producer.send(b"x")


async def test_shutdown_does_not_wait_for_receipts() -> None:
    async with client_among() as (client, cluster):
        cluster.topic(TOPIC).hold_receipts = True
        before = asyncio.all_tasks()
        producer = await client.create_producer("t")
        told: list[Result] = []
        producer.send_async(b"x", lambda result, _: told.append(result))
        client.shutdown()
        assert told == [Result.Interrupted]
        await settle()
        assert own_tasks(before | set(cluster._tasks)) == []


async def test_cancelled_create_producer_leaves_no_producer() -> None:
    async with client_among() as (client, cluster):
        await client.create_producer("u")
        before = asyncio.all_tasks()
        for broker in cluster.brokers.values():
            broker.kill()
        creating = asyncio.get_running_loop().create_task(client.create_producer("t"))
        await asyncio.sleep(1)
        creating.cancel()
        with pytest.raises(asyncio.CancelledError):
            await creating
        await settle()
        names = own_tasks(before)
        assert not [name for name in names if "t" in name.split("/")]
        assert len(client.parts.live) == 1


@pytest.mark.parametrize("ends_at_once", [False, True])
@pytest.mark.parametrize("retries", [False, True])
async def test_the_end_of_a_client_ends_a_call_that_creates(
    ends_at_once: bool, retries: bool
) -> None:
    """The client ends at any turn of the loop during the call."""
    for turns in itertools.count():
        async with client_among() as (client, _):
            creating = asyncio.get_running_loop().create_task(
                client.subscribe("t", "s", ConsumerType.Shared, enable_retry=retries)
            )
            await settle(turns)
            is_late = creating.done()
            if ends_at_once:
                client.shutdown()
            else:
                await client.close()
            done, _ = await asyncio.wait({creating}, timeout=100)
            assert done, f"after {turns} turns"
            if is_late:
                return
            with suppress(PulsarException):  # any other error is a bug
                await creating
            await settle()
            assert not client.parts.live, f"after {turns} turns"


async def test_context_manager_closes_the_client() -> None:
    async with client_among() as (client, cluster):
        async with client, await client.create_producer("t") as producer:
            producer.send_async(b"x", None)
        assert len(cluster.topic(TOPIC).entries) == 1
        with pytest.raises(AlreadyClosed):
            await producer.send(b"y")


async def test_failed_task_ends_the_client_and_is_reported() -> None:
    stray: list[dict[str, Any]] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: stray.append(context))
    async with client_among() as (client, cluster):
        cluster.topic(TOPIC).hold_receipts = True
        producer = await client.create_producer("t")
        sending = asyncio.get_running_loop().create_task(producer.send(b"x"))
        await settle()

        async def bug() -> None:
            raise AssertionError("a bug")

        client.parts.scope.start(bug(), "bug")
        with pytest.raises(Interrupted, match="a bug"):
            await sending
        with pytest.raises(Interrupted):
            await client.create_producer("t")
        await settle()
        assert [context["message"] for context in stray] == ["a task of the client failed"]


def test_a_client_may_be_made_before_its_loop_and_closed_unused() -> None:
    client = magnetar.asyncio.Client("grpc://localhost:1")

    async def main() -> None:
        await client.close()

    asyncio.run(main())


def test_every_public_name_exists_and_is_in_the_stub() -> None:
    import ast
    from pathlib import Path

    for name in magnetar.__all__:
        assert getattr(magnetar, name) is not None
    with pytest.raises(AttributeError):
        magnetar.Nothing  # type: ignore[attr-defined]  # noqa: B018
    stub = ast.parse(Path(magnetar.__file__).with_suffix(".pyi").read_text())
    imported = {
        alias.name for node in stub.body if isinstance(node, ast.ImportFrom) for alias in node.names
    }
    assert imported == set(magnetar.__all__)


def test_import_does_not_load_grpc_or_server_libraries() -> None:
    script = (
        "import sys, magnetar, magnetar.asyncio; magnetar.Client, magnetar.MessageId;"
        " print([name for name in sys.modules if name.split('.')[0] in"
        " ('grpc', 'rich', 'kazoo', 'rocksdict', 'pydantic', 'fastapi')])"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "[]"


async def test_get_topic_partitions_without_answer_raises_connect_error() -> None:
    async with client_among(operation_timeout_seconds=3) as (client, cluster):
        silence = [None] * 10
        cluster.brokers[A].script(pb.CommandPartitionedTopicMetadata, *silence)
        assert await client.get_topic_partitions("t") == [TOPIC]  # the other told
        cluster.brokers[B].script(pb.CommandPartitionedTopicMetadata, *silence)
        with pytest.raises(ConnectError, match="the broker did not answer within 1 s"):
            await client.get_topic_partitions("t")


async def test_a_client_without_a_server_warns_once_within_a_second(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with client_among(operation_timeout_seconds=5) as (client, cluster):
        for broker in cluster.brokers.values():
            broker.alive = False
        await _find_no_server(client, caplog)


async def _find_no_server(
    client: magnetar.asyncio.Client, caplog: pytest.LogCaptureFixture
) -> None:
    loop = asyncio.get_running_loop()
    began_s = loop.time()
    async with asyncio.TaskGroup() as group:
        tries = [group.create_task(_failure(client.create_producer(topic))) for topic in "tu"]
        await asyncio.sleep(1.0)
        [warning] = [record for record in caplog.records if record.levelname == "WARNING"]
        assert "no broker has answered yet" in warning.getMessage()
        assert A in warning.getMessage()
    assert loop.time() - began_s <= 6
    for attempt in tries:
        assert isinstance(attempt.result(), ConnectError)
        assert str(attempt.result()).endswith(START_ADVICE)
    assert len([record for record in caplog.records if record.levelname == "WARNING"]) == 1


async def test_a_client_whose_broker_refuses_for_the_moment_logs_its_answer(
    caplog: pytest.LogCaptureFixture,
) -> None:
    refusal = pb.CommandError(error=pb.ServiceNotReady, message="the topic is being opened")
    async with client_among(A, service_url=A) as (client, cluster):
        cluster.brokers[A].script(pb.CommandProducer, *[refusal] * 8)
        await client.create_producer("t")
        [warning] = [record for record in caplog.records if record.levelname == "WARNING"]
        assert "the broker cannot serve the topic yet" in warning.getMessage()
        assert "the topic is being opened" in warning.getMessage()


async def test_a_client_with_a_server_does_not_warn(caplog: pytest.LogCaptureFixture) -> None:
    async with client_among() as (client, _):
        await client.create_producer("t")
        await asyncio.sleep(5)
    assert not [record for record in caplog.records if record.levelname == "WARNING"]


async def _failure(work: Coroutine[Any, Any, object]) -> BaseException | None:
    try:
        await work
    except PulsarException as error:
        return error
    return None


def test_a_result_prints_its_name() -> None:
    assert str(Result.Ok) == "Result.Ok"
    assert f"{Result.Timeout}" == str(Result.Timeout) == "Result.Timeout"
