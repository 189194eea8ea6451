"""The synchronous client from several threads, with fake brokers in the client's thread."""

from __future__ import annotations

import gc
import os
import signal
import sys
import threading
import time
import weakref
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any

import pytest
from fakes.client_world import TOPIC, A, world_of
from fakes.session_broker import FakeBrokers

import magnetar
from magnetar.client.consuming.listeners import Listener, ListenerThread
from magnetar.client.message import Delivery, MessageId
from magnetar.client.options import ClientOptions
from magnetar.client.sync import Client
from magnetar.client.thread_bridge import Mailbox
from magnetar.protos import pulsar_pb2 as pb
from magnetar.protos.batch import ReceivedMessage

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

EARLIEST = magnetar.InitialPosition.Earliest
TIMEOUT_MS = 30_000


@contextmanager
def client_among(**options: Any) -> Iterator[tuple[Client, FakeBrokers]]:
    cluster = FakeBrokers(A)
    client = Client.in_environment(ClientOptions(A, **options), world_of(cluster))
    try:
        yield client, cluster
    finally:
        client.shutdown()


def wait_for(condition: Callable[[], object]) -> None:
    end = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.002)


def once(condition: Callable[[], object], function: Callable[[], object]) -> threading.Thread:
    """Call the function in another thread as soon as the condition is true."""

    def work() -> None:
        wait_for(condition)
        function()

    thread = threading.Thread(target=work)
    thread.start()
    return thread


def in_threads(count: int, function: Callable[[int], None]) -> list[BaseException]:
    """Run the function in this number of threads. Returns the errors that they raised."""
    errors: list[BaseException] = []

    def run(number: int) -> None:
        try:
            function(number)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(number,)) for number in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
        assert not thread.is_alive()
    return errors


def test_a_sent_message_is_received_and_acknowledged() -> None:
    with client_among() as (client, cluster):
        producer = client.create_producer("t")
        first = producer.send(b"one", properties={"a": "1"})
        assert first == magnetar.MessageId(-1, 1, 0)
        with client.subscribe("t", "s", initial_position=EARLIEST) as consumer:
            message = consumer.receive(TIMEOUT_MS)
            assert (message.data(), message.properties()) == (b"one", {"a": "1"})
            consumer.acknowledge(message)
        assert cluster.topic(TOPIC).subscriptions["s"].unacked == {}
        assert producer.last_sequence_id() == 0
        assert (producer.topic(), producer.producer_name()) == (TOPIC, "fake-1")
        assert producer.is_connected()
        assert client.get_topic_partitions("t") == [TOPIC]
        client.close()
        with pytest.raises(magnetar.AlreadyClosed):
            client.close()
        with pytest.raises(magnetar.AlreadyClosed):
            producer.send(b"late")
        with pytest.raises(magnetar.AlreadyClosed):
            client.create_producer("t")


def test_many_threads_send_and_receive() -> None:
    each, threads = 300, 4
    with client_among() as (client, _):
        producer = client.create_producer("t", block_if_queue_full=True, max_pending_messages=50)
        consumer = client.subscribe(
            "t",
            "s",
            magnetar.ConsumerType.Shared,
            initial_position=EARLIEST,
            receiver_queue_size=40,
        )
        told: list[tuple[magnetar.Result, magnetar.MessageId | None]] = []
        got: list[bytes] = []

        def work(number: int) -> None:
            if number < threads:
                for index in range(each):
                    content = b"%d-%d" % (number, index)
                    if index % 50:
                        producer.send_async(content, lambda *outcome: told.append(outcome))
                    else:
                        told.append((magnetar.Result.Ok, producer.send(content)))
            else:
                while len(got) < each * threads:
                    try:
                        message = consumer.receive(20)
                    except magnetar.Timeout:
                        continue
                    got.append(message.data())
                    consumer.acknowledge(message)

        assert in_threads(threads + 2, work) == []
        producer.flush()
        assert [result for result, _ in told] == [magnetar.Result.Ok] * (each * threads)
        assert len({message_id for _, message_id in told}) == each * threads
        assert sorted(got) == sorted(b"%d-%d" % (n, i) for n in range(threads) for i in range(each))


def test_each_threads_messages_keep_their_order() -> None:
    with client_among() as (client, _):
        producer = client.create_producer("t", max_pending_messages=0)

        def send(number: int) -> None:
            for index in range(200):
                producer.send_async(b"%d %d" % (number, index), None)

        assert in_threads(3, send) == []
        producer.flush()
        reader = client.create_reader("t", magnetar.MessageId.earliest)
        seen: list[tuple[int, int]] = []
        while reader.has_message_available():
            number, index = map(int, reader.read_next(TIMEOUT_MS).data().split())
            seen.append((number, index))
        for number in range(3):
            assert [index for who, index in seen if who == number] == list(range(200))


def test_a_synchronous_send_closes_its_batch_at_once() -> None:
    with client_among() as (client, cluster):
        producer = client.create_producer("t", batching_max_publish_delay_ms=60_000)
        told: list[Any] = []
        producer.send_async(b"0", lambda *outcome: told.append(outcome))
        assert producer.send(b"1").entry_id() == 0
        wait_for(lambda: told)
        assert cluster.topic(TOPIC).messages_of((1, 0)) == (2, True)


def test_a_full_queue_refuses_further_sends() -> None:
    with client_among() as (client, cluster):
        producer = client.create_producer("t", max_pending_messages=1)
        cluster.topic(TOPIC).hold_receipts = True
        told: list[magnetar.Result] = []
        producer.send_async(b"0", lambda result, _: told.append(result))
        producer.send_async(b"1", lambda result, _: told.append(result))
        assert told == [magnetar.Result.ProducerQueueIsFull]
        with pytest.raises(magnetar.ProducerQueueIsFull):
            producer.send(b"2")


def test_shutdown_ends_a_send_that_waits_for_the_limit() -> None:
    with client_among() as (client, cluster):
        producer = client.create_producer("t", max_pending_messages=1, block_if_queue_full=True)
        cluster.topic(TOPIC).hold_receipts = True
        producer.send_async(b"0", None)
        ending = once(lambda: producer._limit._waiting, client.shutdown)
        (error,) = in_threads(1, lambda _: producer.send(b"1") and None)
        ending.join()
        assert isinstance(error, magnetar.AlreadyClosed)


def test_shutdown_fails_a_pending_send_with_interrupted() -> None:
    with client_among() as (client, cluster):
        producer = client.create_producer("t")
        cluster.topic(TOPIC).hold_receipts = True
        ending = once(lambda: cluster.sends, client.shutdown)
        (error,) = in_threads(1, lambda _: producer.send(b"1") and None)
        ending.join()
        assert isinstance(error, magnetar.Interrupted)


def test_a_callback_may_send_but_not_wait() -> None:
    with client_among() as (client, _):
        producer = client.create_producer("t")
        errors: list[BaseException] = []
        done = threading.Event()

        def callback(*_: object) -> None:
            for wait in (lambda: producer.send(b"x"), producer.flush, client.close):
                try:
                    wait()
                except magnetar.OperationNotSupported as error:
                    errors.append(error)
            producer.send_async(b"1", lambda *_: done.set())

        producer.send_async(b"0", callback)
        assert done.wait(30)
        assert len(errors) == 3


def test_a_refused_close_in_a_callback_leaves_the_object_open() -> None:
    with client_among() as (client, _):
        objects = [
            client.create_producer("t"),
            client.subscribe("t", "s"),
            client.create_reader("t", magnetar.MessageId.earliest),
            client.create_table_view("t"),
        ]
        errors: list[BaseException] = []
        done = threading.Event()

        def callback(*_: object) -> None:
            for one in objects:
                try:
                    one.close()
                except magnetar.OperationNotSupported as error:
                    errors.append(error)
            done.set()

        client.create_producer("u").send_async(b"0", callback)
        assert done.wait(30)
        assert len(errors) == 4
        for one in objects:
            one.close()


def test_close_waits_for_receipts_and_acknowledgements() -> None:
    with client_among() as (client, cluster):
        producer = client.create_producer("t", batching_max_publish_delay_ms=60_000)
        consumer = client.subscribe("t", "s", initial_position=EARLIEST)
        producer.send(b"0")
        told: list[magnetar.Result] = []
        for _ in range(10):
            producer.send_async(b"1", lambda result, _: told.append(result))
        consumer.acknowledge(consumer.receive(TIMEOUT_MS))
        client.close()
        assert told == [magnetar.Result.Ok] * 10
        assert (1, 0) not in cluster.topic(TOPIC).subscriptions["s"].unacked


def test_close_with_unconfirmed_acknowledgements_raises_timeout() -> None:
    with client_among(operation_timeout_seconds=1) as (client, cluster):
        producer = client.create_producer("t")
        consumer = client.subscribe("t", "s", initial_position=EARLIEST)
        producer.send(b"0")
        cluster.brokers[A].hold_acks = True
        consumer.acknowledge(consumer.receive(TIMEOUT_MS))
        with pytest.raises(magnetar.Timeout, match="did not confirm all acknowledgements"):
            client.close()


def test_receive_times_out_and_is_woken_by_close() -> None:
    with client_among() as (client, _):
        consumer = client.subscribe("t", "s")
        with pytest.raises(magnetar.Timeout):
            consumer.receive(timeout_millis=20)
        closing = once(lambda: consumer._inbox.mailbox._waiting == 3, consumer.close)
        errors = in_threads(3, lambda _: consumer.receive() and None)
        closing.join()
        assert [type(error) for error in errors] == [magnetar.AlreadyClosed] * 3


def test_queue_size_zero_requests_one_message_at_a_time() -> None:
    with client_among() as (client, cluster):
        producer = client.create_producer("t")
        consumer = client.subscribe("t", "s", initial_position=EARLIEST, receiver_queue_size=0)
        for number in range(3):
            producer.send(b"%d" % number)
        assert [consumer.receive(TIMEOUT_MS).data() for _ in range(2)] == [b"0", b"1"]
        assert sorted(cluster.topic(TOPIC).subscriptions["s"].out) == [(1, 0), (1, 1)]


@pytest.mark.parametrize("end", ["consumer", "reader", "unsubscribe", "refusal"])
def test_closed_consumers_and_readers_with_a_listener_are_freed(end: str) -> None:
    def listen(*_: object) -> None: ...

    def leave() -> weakref.ref[magnetar.Consumer | magnetar.Reader]:
        if end == "reader":
            reader = client.create_reader("t", magnetar.MessageId.earliest, reader_listener=listen)
            reader.close()
            return weakref.ref(reader)
        consumer = client.subscribe("t", "s", message_listener=listen)
        if end == "unsubscribe":
            consumer.unsubscribe()
        else:
            consumer.close()
        return weakref.ref(consumer)

    with client_among() as (client, cluster):
        if end == "refusal":
            refusal = pb.CommandError(error=pb.NotAllowedError, message="no")
            cluster.brokers[A].script(pb.CommandSubscribe, refusal)
            with pytest.raises(magnetar.NotAllowedError):
                client.subscribe("t", "s", message_listener=listen)
            assert not client._life.listening
            return
        left = leave()
        wait_for(lambda: gc.collect() >= 0 and left() is None)
        assert not client._engine._listeners


def test_queue_size_zero_serves_every_waiting_thread() -> None:
    with client_among() as (client, _):
        producer = client.create_producer("t")
        consumer = client.subscribe("t", "s", receiver_queue_size=0)
        got: list[bytes] = []

        def send() -> None:
            for number in range(3):
                producer.send(b"%d" % number)

        sending = once(lambda: consumer._inbox.mailbox._waiting == 3, send)
        errors = in_threads(3, lambda _: got.append(consumer.receive(TIMEOUT_MS).data()))
        sending.join()
        assert (errors, sorted(got)) == ([], [b"0", b"1", b"2"])


def test_a_listener_is_called_for_each_message_in_order_on_one_thread() -> None:
    with client_among() as (client, cluster):
        producer = client.create_producer("t")
        got: list[tuple[bytes, str]] = []

        def listen(consumer: magnetar.Consumer, message: magnetar.Message) -> None:
            # The test closes the consumer as soon as `got` has the last message.
            consumer.acknowledge(message)
            got.append((message.data(), threading.current_thread().name))
            if message.data() == b"2":
                raise RuntimeError("the user's")

        consumer = client.subscribe("t", "s", message_listener=listen, receiver_queue_size=10)
        for number in range(250):
            producer.send_async(b"%d" % number, None)
        wait_for(lambda: len(got) == 250)
        assert got == [(b"%d" % number, "magnetar-listener-0") for number in range(250)]
        with pytest.raises(magnetar.InvalidConfiguration):
            consumer.receive()
        consumer.close()
        assert cluster.topic(TOPIC).subscriptions["s"].unacked == {}


def test_a_paused_listener_gets_no_messages() -> None:
    with client_among() as (client, _):
        producer = client.create_producer("t")
        got: list[bytes] = []
        consumer = client.subscribe("t", "s", message_listener=lambda _, m: got.append(m.data()))
        producer.send(b"0")
        wait_for(lambda: got == [b"0"])
        consumer.pause_message_listener()
        producer.send(b"1")
        producer.send(b"2")
        assert got == [b"0"]
        consumer.resume_message_listener()
        wait_for(lambda: got == [b"0", b"1", b"2"])


class SlowMailbox(Mailbox):
    """A mailbox that runs another thread's action while a message is being taken."""

    def __init__(self, action: Callable[[], object], told: list[str]) -> None:
        super().__init__("t", lambda: None)
        self._told = told
        self.other = threading.Thread(target=action)

    def maybe_take(self) -> magnetar.Message | None:
        self.other.start()
        self.other.join(0.05)
        self._told.append("taken")
        return super().maybe_take()


class NoThread:
    def schedule(self, listener: Listener) -> None:
        return


def test_after_a_pause_a_listener_takes_nothing() -> None:
    told: list[str] = []
    mailbox = SlowMailbox(lambda: (listener.pause(), told.append("paused")), told)
    listener = Listener(mailbox, lambda _: None, NoThread())  # type: ignore[arg-type]
    listener.run_burst()
    mailbox.other.join()
    assert told == ["taken", "paused"]


def test_listener_gets_messages_after_an_error_from_before_it_began() -> None:
    """A reader is open, and may fail to decrypt a message, before it has its listener."""
    mailbox, got = Mailbox("t"), list[magnetar.Message]()
    mailbox.put_error(magnetar.CryptoError("scripted"))
    thread = ListenerThread("listener")
    Listener(mailbox, got.append, thread)
    delivery = Delivery("t", -1, "p", 0, b"", 0, None, 0)
    message = ReceivedMessage(b"x", {}, None, False, None, 0, 0, False, -1)
    mailbox.put([magnetar.Message(message, MessageId(), delivery)])
    wait_for(lambda: [one.data() for one in got] == [b"x"])
    thread.stop(10)


def test_close_lets_a_listener_finish_its_message() -> None:
    with client_among() as (client, cluster):
        producer = client.create_producer("t")
        began, go_on = threading.Event(), threading.Event()
        failures: list[BaseException] = []

        def listen(consumer: magnetar.Consumer, message: magnetar.Message) -> None:
            began.set()
            go_on.wait(30)
            try:
                consumer.acknowledge(message)
            except magnetar.PulsarException as error:
                failures.append(error)

        listening = client.subscribe("t", "s", message_listener=listen).listener
        assert listening is not None
        producer.send(b"0")
        producer.send(b"1")
        assert began.wait(30)
        letting_go = once(lambda: listening._paused, go_on.set)  # the close has begun
        client.close()
        letting_go.join()
        assert failures == []
        assert sorted(cluster.topic(TOPIC).subscriptions["s"].unacked) == [(1, 1)]


def test_a_batch_receive_that_is_interrupted_loses_nothing() -> None:
    with client_among() as (client, _):
        producer = client.create_producer("t")
        consumer = client.subscribe(
            "t",
            "s",
            initial_position=EARLIEST,
            receiver_queue_size=4,
            batch_receive_policy=magnetar.ConsumerBatchReceivePolicy(100, -1, -1),
        )
        for number in range(7):
            producer.send(b"%d" % number)
        taken = consumer._inbox.mailbox
        main = threading.get_ident()
        interrupt = once(
            lambda: str(taken.last_taken) == "(1,6,-1,-1)" and taken._waiting,
            lambda: signal.pthread_kill(main, signal.SIGINT),
        )
        with pytest.raises(magnetar.Interrupted):
            consumer.batch_receive()
        interrupt.join()
        for number in range(7, 20):
            producer.send(b"%d" % number)
        assert [consumer.receive(TIMEOUT_MS).data() for _ in range(20)] == [
            b"%d" % number for number in range(20)
        ]


def test_a_reader_listener_gets_every_message() -> None:
    with client_among() as (client, _):
        producer = client.create_producer("t")
        for number in range(3):
            producer.send(b"%d" % number)
        got: list[bytes] = []
        client.create_reader(
            "t", magnetar.MessageId.earliest, reader_listener=lambda _, m: got.append(m.data())
        )
        wait_for(lambda: got == [b"0", b"1", b"2"])


def test_a_list_of_messages_is_acknowledged() -> None:
    with client_among() as (client, cluster):
        producer = client.create_producer("t")
        for number in range(3):
            producer.send(b"%d" % number)
        consumer = client.subscribe("t", "s", initial_position=EARLIEST)
        messages = [consumer.receive(TIMEOUT_MS) for _ in range(3)]
        with pytest.raises(magnetar.OperationNotSupported):
            consumer.acknowledge([messages[0], magnetar.MessageId(-1, 1, 1, 2)])
        consumer.acknowledge([messages[0], messages[1].message_id()])
        consumer.close()
        assert list(cluster.topic(TOPIC).subscriptions["s"].unacked) == [(1, 2)]
        with pytest.raises(magnetar.AlreadyClosed):
            consumer.acknowledge([])


def test_every_call_of_a_consumer_has_its_effect() -> None:
    with client_among() as (client, cluster):
        producer = client.create_producer("t")
        for number in range(4):
            producer.send(b"%d" % number)
        consumer = client.subscribe(
            "t",
            "s",
            initial_position=EARLIEST,
            negative_ack_redelivery_delay_ms=10,
            batch_receive_policy=magnetar.ConsumerBatchReceivePolicy(3, -1, TIMEOUT_MS),
        )
        messages = consumer.batch_receive()
        assert [message.data() for message in messages] == [b"0", b"1", b"2"]
        consumer.acknowledge_cumulative(messages[0])
        consumer.negative_acknowledge(messages[1])
        wait_for(lambda: cluster.topic(TOPIC).subscriptions["s"].deliveries[1, 1] == 2)
        assert consumer.receive(TIMEOUT_MS).data() == b"1"
        consumer.redeliver_unacknowledged_messages()
        wait_for(lambda: cluster.topic(TOPIC).subscriptions["s"].deliveries[1, 1] == 3)
        assert consumer.get_last_message_id() == magnetar.MessageId(-1, 1, 3)
        consumer.seek(messages[1].message_id())
        assert consumer.receive(TIMEOUT_MS).data() == b"2"
        assert (consumer.topic(), consumer.subscription_name()) == (TOPIC, "s")
        consumer.unsubscribe()
        assert cluster.topic(TOPIC).subscriptions == {}


def test_call_in_a_forked_process_is_refused() -> None:
    with client_among() as (client, _):
        producer, consumer = client.create_producer("t"), client.subscribe("t", "s")
        message_id = producer.send(b"x")
        calls: list[Callable[[], object]] = [
            lambda: client.create_producer("t"),
            lambda: producer.send(b"x"),
            lambda: producer.send_async(b"x", None),
            lambda: consumer.acknowledge(message_id),
            lambda: consumer.receive(1),
        ]
        child = os.fork()
        if child == 0:
            refused = 0
            for call in calls:
                with suppress(magnetar.OperationNotSupported):
                    call()
                    break
                refused += 1
            client.shutdown()  # must not touch the threads of the parent process
            os._exit(refused)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == len(calls)
        assert consumer.receive(TIMEOUT_MS).data() == b"x"
        client.create_producer("t").send(b"still there")


def test_a_bad_url_leaves_no_thread_behind() -> None:
    before = set(threading.enumerate())  # threads of earlier tests may end meanwhile
    with pytest.raises(magnetar.InvalidUrl):
        magnetar.Client("http://nowhere")
    assert set(threading.enumerate()) <= before


def test_callback_that_exits_ends_neither_the_loop_nor_waiting_calls() -> None:
    def leave(*_: object) -> None:
        sys.exit(1)

    with client_among() as (client, _):
        producer = client.create_producer("t")
        producer.send_async(b"0", leave)
        producer.send(b"1")
        assert producer.last_sequence_id() == 1
        client.close()


def test_a_listener_that_raises_systemexit_gets_the_next_message() -> None:
    got: list[bytes] = []

    def listen(_: object, message: magnetar.Message) -> None:
        got.append(message.data())
        sys.exit(1)

    with client_among() as (client, _):
        client.subscribe("t", "s", message_listener=listen)
        producer = client.create_producer("t")
        for number in range(3):
            producer.send(b"%d" % number)
        wait_for(lambda: len(got) == 3)
        client.close()


def test_partitioned_topic_from_threads() -> None:
    with client_among() as (client, cluster):
        cluster.partitions[TOPIC] = 3
        consumer = client.subscribe("t", "s", initial_position=EARLIEST)
        producer = client.create_producer("t", max_pending_messages=0)

        def work(number: int) -> None:
            for _ in range(10):
                producer.send(b"%d" % number, partition_key=str(number))

        assert in_threads(4, work) == []
        messages = [consumer.receive(TIMEOUT_MS) for _ in range(40)]
        assert sorted(message.data() for message in messages) == sorted(
            b"%d" % number for number in range(4) for _ in range(10)
        )
        of_keys = {(message.data(), message.topic_name()) for message in messages}
        assert len(of_keys) == 4  # a key, a partition
        for message in messages:
            consumer.acknowledge(message)
        assert len(consumer.get_last_message_ids()) == 3
        with pytest.raises(magnetar.OperationNotSupported):
            consumer.acknowledge(magnetar.MessageId(-1, 1, 0))
        consumer.close()
        for index in range(3):
            topic = cluster.topic(f"{TOPIC}-partition-{index}")
            assert not topic.subscriptions["s"].unacked
        with client.create_table_view("t") as table:
            assert {key: table.get(key) for key in "0123"} == {key: key.encode() for key in "0123"}
