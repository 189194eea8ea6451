"""The state of each topic in a queue of several topics."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from magnetar.client.consumer import LoopQueue
from magnetar.client.errors import CryptoError
from magnetar.client.message import Delivery, Message
from magnetar.client.message_queue import SourceQueue, Sources
from magnetar.client.thread_bridge import Mailbox

if TYPE_CHECKING:
    from magnetar.client.errors import PulsarException


def source(topic: str, shared: LoopQueue, sources: Sources) -> SourceQueue:
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
