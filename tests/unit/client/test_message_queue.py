"""The state of each topic in a queue of several topics."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from magnetar.client.consumer import LoopQueue
from magnetar.client.errors import CryptoError, Timeout
from magnetar.client.message import Delivery, Message
from magnetar.client.message_queue import SourceQueue, Sources
from magnetar.client.thread_bridge import Mailbox

if TYPE_CHECKING:
    from collections.abc import Callable

    from magnetar.client.errors import PulsarException


class CountedName(str):
    """The name of a topic. It counts the comparisons."""

    compared = 0
    __hash__ = str.__hash__

    def __eq__(self, other: object) -> bool:
        CountedName.compared += 1
        return super().__eq__(other)

    def __ne__(self, other: object) -> bool:
        CountedName.compared += 1
        return super().__ne__(other)


def source(topic: str, shared: LoopQueue | Mailbox, sources: Sources) -> SourceQueue:
    return SourceQueue(topic, shared, sources, ignore)


def ignore(topic: str, error: PulsarException) -> None:
    pass


def message_of(topic: str, queue: SourceQueue) -> Message:
    return Message(
        None, None, Delivery(topic, -1, "p", 0, b"", 0, None, queue.generation, key=(1, 0))
    )


def test_a_drop_makes_the_messages_of_its_topic_old_and_of_no_other() -> None:
    shared = LoopQueue()
    sources = shared.share()
    a, b = source("a", shared, sources), source("b", shared, sources)
    messages = [message_of("a", a), message_of("b", b)]
    shared.drop("a")
    assert sources.current(messages) == messages[1:]
    again = message_of("a", a)
    assert sources.current([*messages, again]) == [messages[1], again]


def test_messages_of_a_topic_that_was_left_stay_old_when_it_is_joined_again() -> None:
    shared = LoopQueue()
    sources = shared.share()
    old = message_of("a", source("a", shared, sources))
    shared.drop("a")
    sources.forget("a")
    assert sources.current([old]) == []
    new = message_of("a", source("a", shared, sources))
    assert sources.current([old, new]) == [new]


def test_a_topic_that_was_left_takes_no_memory() -> None:
    shared = LoopQueue()
    sources = shared.share()
    for number in range(10):
        topic = f"t{number}"
        queue = source(topic, shared, sources)
        sources.on_taken(message_of(topic, queue))
        shared.drop(topic)
        sources.forget(topic)
    assert not any(value for value in vars(sources).values() if isinstance(value, dict))


@pytest.mark.parametrize("kind", [LoopQueue, lambda: Mailbox("t")], ids=["loop", "threads"])
def test_the_cost_of_dropping_all_topics_does_not_grow_with_their_number(
    kind: Callable[[], LoopQueue | Mailbox],
) -> None:
    shared = kind()
    sources = shared.share()
    names = [CountedName(f"t{number}") for number in range(200)]
    queues = {name: source(name, shared, sources) for name in names}
    for name, queue in queues.items():
        shared.put([message_of(name, queue) for _ in range(5)])
    assert len(shared) == 1000
    kept = names.pop()
    CountedName.compared = 0
    for name in names:
        shared.drop(name)
    assert len(shared) == 5
    assert CountedName.compared < 3000
    shared.put([message_of(kept, queues[kept])])
    assert len(shared) == 6


def test_no_thread_takes_a_message_that_was_dropped() -> None:
    mailbox = Mailbox("t")
    a = source("a", mailbox, mailbox.share())

    def put_and_drop() -> None:  # while a thread begins to wait with the lock
        mailbox._messages.append(message_of("a", a))
        mailbox._has_dropped = True
        mailbox.share().on_dropped("a")

    mailbox.put([message_of("a", a)])
    mailbox.drop("a")
    assert mailbox.maybe_take() is None
    mailbox.on_waiting = put_and_drop
    with pytest.raises(Timeout):
        mailbox.take(0.01)
    assert len(mailbox) == 0


@pytest.mark.parametrize("waits", [False, True], ids=["at once", "waiting"])
def test_error_is_raised_by_threads_before_messages_that_wait(waits: bool) -> None:
    mailbox = Mailbox("t")
    message = Message(None, None, Delivery("t", -1, "p", 0, b"", 0, None, 0, key=(1, 0)))
    mailbox.put([message])
    mailbox.put_error(CryptoError("cannot be decrypted"))
    take = (lambda: mailbox.take(1.0)) if waits else mailbox.maybe_take
    with pytest.raises(CryptoError):
        take()
    assert take() is message
