"""The asyncio table view: the last value of each key of a topic, kept in memory.

The table holds all keys and values of the topic. The client does not limit its size.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final, Self

from magnetar.client.callbacks import call
from magnetar.client.consumer import next_message, take
from magnetar.client.errors import AlreadyClosed, PulsarException
from magnetar.client.guard import guarded
from magnetar.client.message import MessageId
from magnetar.client.options import ReaderOptions, TableViewOptions
from magnetar.client.reader import reader_subscription
from magnetar.client.session.backoff import RETRY_DELAY_S_FIRST
from magnetar.client.together import together
from magnetar.runtime.log import get_logger

if TYPE_CHECKING:
    import random

    from magnetar.client.consumer import LoopQueue
    from magnetar.client.consuming.retry import ConsumerCore
    from magnetar.client.consuming.subscription import Subscription
    from magnetar.client.message import Message
    from magnetar.client.scope import Scope

log = get_logger(__name__)

LOOK_AGAIN_S: Final = 1.0
"""The time in seconds that a new view waits for a message before it asks the broker again. The last
messages of a topic may never arrive: the client drops unreadable entries and incomplete messages.
"""

MESSAGES_AT_ONCE_MAX: Final = 100
"""Messages that a view reads in one turn of the loop: some 3 ms with a schema. A topic with many
partitions can have tens of thousands of messages in the queue."""

Changed = Callable[[str, Any], object]
"""Called as `callback(key, value)`. `value` is the value that the schema decoded; without a schema,
it is the payload."""


class TableRows:
    """The core of a table view: it reads the topic and keeps the rows."""

    def __init__(
        self, subscriber: ConsumerCore, queue: LoopQueue, options: TableViewOptions
    ) -> None:
        self._subscriber = subscriber
        self._queue = queue
        self._options = options
        self._rows: dict[str, Any] = {}
        self._listeners: list[Changed] = []
        self._task: asyncio.Task[None] | None = None  # None: not opened
        self._taken = 0  # messages so far

    async def open(self, scope: Scope) -> None:
        """Read the messages that the topic holds now, then begin to follow it. After an error,
        close the view and raise the error."""
        try:
            await self._read_backlog()
            work = guarded(self._subscriber, self._follow)
            self._task = scope.start(work, f"table view of {self._subscriber.topic}")
        except BaseException:
            error = AlreadyClosed("the table view was not created", topic=self._subscriber.topic)
            self._subscriber.shut_down(error)
            raise

    async def _read_backlog(self) -> None:
        """Read each topic up to the message that is its last one when the call begins. The call
        does not wait for later messages: on a busy topic, they arrive all the time."""
        begun = self._subscriber.cores
        lasts = await together(core.last_message_id() for core in begun)
        # Topic -> its last message when this call began, until this message is read.
        ends = {core.topic: last for core, (last, _) in zip(begun, lasts, strict=True)}
        while ends:
            if self._queue.first() is not None:
                message = await self._read_next()
                end = ends.get(message.topic_name())
                if end is None or message.message_id() < end:
                    continue
            cores = [core for core in self._subscriber.cores if core.topic in ends]
            cores = [core for core in cores if not core.has_passed(ends[core.topic])]
            ends = {core.topic: ends[core.topic] for core in cores}
            if ends and self._queue.first() is None:  # the missing messages may never arrive
                if not any(await together(core.has_message_available() for core in cores)):
                    return
                await next_message(self._subscriber, self._queue, LOOK_AGAIN_S)

    async def close(self) -> None:
        if self._task is not None:
            self._task.cancel()
        await self._subscriber.close()

    def get(self, key: str) -> Any:
        return self._rows.get(key)

    def for_each(self, callback: Changed) -> None:
        for key, value in list(self._rows.items()):  # a copy: the rows may change during a callback
            callback(key, value)

    async def for_each_and_listen(self, callback: Changed) -> None:
        for key, value in list(self._rows.items()):
            call(callback, key, value)
        self._listeners.append(callback)

    def __len__(self) -> int:
        return len(self._rows)

    def __str__(self) -> str:
        name = self._options.subscription_name
        more = "" if name is None else f", subscription={name}"
        return f"TableView(topic={self._options.topic}{more})"

    async def _follow(self) -> None:
        """Read until the view is closed. An error before that concerns one message or is temporary:
        log it and continue."""
        topic = self._subscriber.topic
        while True:
            try:
                await self._read_next()
            except PulsarException as error:
                if self._is_closed:
                    log.info("table view ended", topic=topic, reason=str(error))
                    return
                log.error("the table view cannot read a message", topic=topic, error=str(error))
                await asyncio.sleep(RETRY_DELAY_S_FIRST)

    async def _read_next(self) -> Message:
        """Read the next message; wait until there is one. Other tasks have their turn after
        MESSAGES_AT_ONCE_MAX messages."""
        message = await take(self._subscriber, self._queue, None)
        self._on_message(message)
        self._taken += 1
        if self._taken % MESSAGES_AT_ONCE_MAX == 0:
            await asyncio.sleep(0)
        return message

    @property
    def _is_closed(self) -> bool:
        try:
            self._subscriber.check_open()
        except PulsarException:
            return True
        return False

    def _on_message(self, message: Message) -> None:
        key = message.partition_key()
        value: Any = message.data()
        if not key:
            log.warning(
                "message without a key ignored",
                topic=message.topic_name(),
                message_id=str(message.message_id()),
            )
            return
        if value:
            try:
                value = message.value()
            except Exception as error:  # the schema may be the program's own
                log.error(
                    "message ignored: the schema does not decode it",
                    topic=message.topic_name(),
                    message_id=str(message.message_id()),
                    error=str(error),
                )
                return
            self._rows[key] = value
        else:
            self._rows.pop(key, None)
        for listener in self._listeners:
            call(listener, key, value)


class TableView:
    """The last value of each key of a topic, in memory. `Client.create_table_view` creates it.

    Reads do not use the network: the view follows the topic in the background.
    """

    def __init__(self, rows: TableRows) -> None:
        self._rows = rows
        self._closed = False

    def get(self, key: str) -> Any:
        """Return the value of the key, or None if the table does not have the key."""
        return self._rows.get(key)

    def for_each(self, callback: Changed) -> None:
        """Call `callback(key, value)` for each key of the table."""
        self._rows.for_each(callback)

    async def for_each_and_listen(self, callback: Changed) -> None:
        """Call `callback(key, value)` for each key of the table, and later for each change.

        For a deleted key, `value` is b"". The client calls the callback on its event loop, in the
        order of the messages in the topic.
        """
        await self._rows.for_each_and_listen(callback)

    async def close(self) -> None:
        """Close the table view. The values that it has read stay available.

        Raises AlreadyClosed if the view was closed before.
        """
        if self._closed:
            raise AlreadyClosed(f"{self} was closed")
        self._closed = True
        await self._rows.close()

    def __len__(self) -> int:
        return len(self._rows)

    def __str__(self) -> str:
        return str(self._rows)

    __repr__ = __str__

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        if not self._closed:
            await self.close()


def table_subscription(options: TableViewOptions, random: random.Random) -> Subscription:
    """Return the temporary subscription with which a view reads its topic from the beginning."""
    reader = ReaderOptions(options.topic, MessageId.earliest)
    subscription = reader_subscription(reader, random)
    if options.subscription_name is None:
        return subscription
    return replace(subscription, name=options.subscription_name)
