"""The core of a consumer or reader of several topics: one subscriber for each topic.

A ManySubscriber has the methods of a Subscriber that consumers and readers call. The topics share
one queue, and each topic has a part of it. Each topic has its own permits, acknowledgements and
redeliveries. A source (sources.py) lists the topics. While the consumer runs, it *joins* new topics
(subscribes to them) and *leaves* deleted topics.
"""

from __future__ import annotations

import asyncio
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Final

from magnetar.client.consuming.permits import QUEUE_BYTES_MAX
from magnetar.client.consuming.statistics import ConsumerStatistics
from magnetar.client.consuming.subscriber import Subscriber
from magnetar.client.errors import (
    AlreadyClosed,
    InvalidConfiguration,
    OperationNotSupported,
    PulsarException,
    TopicNotFound,
    UnknownError,
    without_frames,
)
from magnetar.client.guard import guarded, guarding
from magnetar.client.message import Message, MessageId
from magnetar.client.message_queue import SourceQueue
from magnetar.client.options import ConsumerOptions, InitialPosition, RegexSubscriptionMode
from magnetar.client.together import together
from magnetar.runtime.log import get_logger

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Sequence

    from magnetar.client.consuming.letter_producer import LetterProducer
    from magnetar.client.consuming.sources import Source
    from magnetar.client.consuming.steps import Run
    from magnetar.client.consuming.subscription import Subscription
    from magnetar.client.environment import Parts
    from magnetar.client.message_queue import SharedQueue

log = get_logger(__name__)


@dataclass(frozen=True, slots=True)
class ManyOptions:
    """Options of a consumer that matter only with several topics."""

    total_messages_max: int = 50_000  # the limit of the consumer's queue
    regex_mode: RegexSubscriptionMode = RegexSubscriptionMode.PersistentOnly
    period_s: float = 60.0  # of a pattern: the pause between two checks for new topics


DEFAULT_MANY: Final = ManyOptions()


def many_of(options: ConsumerOptions) -> ManyOptions:
    """Return the options of a consumer that matter only with several topics."""
    return ManyOptions(
        options.max_total_receiver_queue_size_across_partitions,
        options.regex_subscription_mode,
        options.pattern_auto_discovery_period,
    )


OPENING_MAX: Final = 100
"""Topics that one consumer joins at the same time when it begins."""

DIVISION_DELAY_S: Final = 0.1
"""The time in seconds between the failure of a topic and the new division of the queue. A division
visits every topic. If thousands of listed topics are missing, the delay saves most divisions."""


class ManySubscriber:
    """The core of one consumer or reader of several topics. `open` joins the topics."""

    def __init__(
        self,
        source: Source,
        subscription: Subscription,
        total_messages_max: int,
        queue: SharedQueue,
        parts: Parts,
        letters: Callable[[str, Subscription], LetterProducer | None] = lambda *_: None,
    ) -> None:
        """`total_messages_max`: the limit of the queue. `letters` creates the producer of the dead
        letters of a topic. It returns None for a subscription without a dead-letter policy.

        Raises InvalidConfiguration for a queue of size 0. Raises OperationNotSupported for a reader
        that begins at a message, because an id names a place in one topic only.
        """
        if subscription.queue_messages_max == 0:
            raise InvalidConfiguration("receiver_queue_size: several topics need at least 1")
        if subscription.start not in (None, MessageId.earliest, MessageId.latest):
            raise OperationNotSupported(
                "start_message_id: a reader of several partitions begins at earliest or latest",
                topic=source.title,
            )
        self.topic = source.title
        self.subscription = replace(subscription, creates_topic=source.creates_topics)
        self._source = source
        self._total_messages_max = total_messages_max
        self._queue = queue
        self._sources = queue.share()
        self._parts = parts
        self._letters = letters
        self._paused = False
        self._past = ConsumerStatistics()  # the statistics of topics whose subscribers ended
        self._children: dict[str, Subscriber] = {}
        self._wanted: set[str] = set()  # the topics that the source reports
        self._failed: dict[str, PulsarException] = {}  # wanted topics whose consumers ended
        self._follower: asyncio.Task[None] | None = None  # None: not opened
        self._unsubscribing = 0  # the calls of `unsubscribe` under way
        self._has_deleted = False  # an `unsubscribe` that failed has deleted some subscriptions
        self._failure: PulsarException | None = None  # None: neither closed nor failed
        self._over = asyncio.Event()
        # Divides the queue anew. None: no division is due.
        self._division: asyncio.TimerHandle | None = None

    async def open(self) -> None:
        """List and join the topics. If one step fails, close the consumer and raise the error.

        A source may allow that topics are missing; the consumer joins these topics later.
        """
        self._parts.live.add(self)
        try:
            names = await self._source.first()
            self.check_open()
            self._wanted.update(names)
            await self._join_all(names)
            self.check_open()
            self._follow()
        except BaseException:
            self.shut_down(AlreadyClosed("the consumer was not created", topic=self.topic))
            raise

    @property
    def cores(self) -> Sequence[Subscriber]:
        """The subscribers of the single topics."""
        return list(self._children.values())

    @property
    def is_attached(self) -> bool:
        return all(child.is_attached for child in self.cores)

    @property
    def is_active(self) -> bool:
        """Return whether the broker delivers messages of at least one topic to this consumer."""
        return any(child.is_active for child in self.cores)

    @property
    def is_over(self) -> bool:
        """Return whether the consumer is closed and detached: no call has an effect any more."""
        return self._failure is not None and all(child.is_over for child in self.cores)

    def check_open(self) -> None:
        """Raise AlreadyClosed if the consumer is closed, or the error that ended it."""
        if self._failure is not None:
            raise without_frames(self._failure)

    # Messages taken and acknowledged by the user

    def on_taken(self, runs: Sequence[Run]) -> None:
        for run in runs:
            child = self._children.get(run[0].topic)
            if child is not None:  # None: the consumer has left the topic
                child.on_taken((run,))

    def on_returned(self, messages: Sequence[Message]) -> None:
        for message in messages:
            child = self._children.get(message.delivery.topic)
            if child is not None:
                child.on_returned([message])

    def on_waiting(self, _: object = None) -> None:
        """Do nothing: only a queue of size 0 needs this call, and this consumer has none."""

    def check_id(self, message_id: MessageId) -> None:
        """Check an id that the user wants to acknowledge.

        Raises OperationNotSupported if the topic of the id is unknown.
        """
        if not self._topic_of(message_id):
            raise OperationNotSupported(
                f"{message_id} names no topic; use MessageId.deserialize(..., topic=...)",
                topic=self.topic,
            )

    @property
    def cluster(self) -> int:
        """How often the client has moved to another cluster. A move makes earlier message ids
        invalid."""
        return self._parts.lookup.cluster

    def acknowledge(self, message_id: MessageId) -> None:
        child = self._child(message_id)
        if child is not None:
            child.acknowledge(message_id)

    def on_acknowledged(self, runs: Sequence[Run]) -> None:
        for run in runs:
            child = self._children.get(run[0].topic)
            if child is not None:
                child.on_acknowledged((run,))

    def acknowledge_cumulative(self, message_id: MessageId) -> None:
        """Acknowledge a message and all earlier messages of its topic or partition."""
        child = self._child(message_id)
        if child is not None:
            child.acknowledge_cumulative(message_id)

    def negative_acknowledge(self, message: Message | MessageId) -> None:
        child = self._child(message.message_id() if isinstance(message, Message) else message)
        if child is not None:
            child.negative_acknowledge(message)

    def redeliver_unacknowledged(self, _: object = None) -> None:
        for child in self.cores:
            child.redeliver_unacknowledged()

    def pause(self, _: object = None) -> None:
        """Stop requesting messages, also of topics that the consumer joins later."""
        self._paused = True
        for child in self.cores:
            child.pause()

    def resume(self, _: object = None) -> None:
        """Continue to request messages of all topics."""
        self._paused = False
        for child in self.cores:
            child.resume()

    @property
    def stats(self) -> ConsumerStatistics:
        total = self._past
        for child in self.cores:
            total = total.plus(child.stats)
        return total

    async def statistics(self) -> ConsumerStatistics:
        """Return the sums of all topics, including those that the consumer has left."""
        return replace(self.stats)

    def _topic_of(self, message_id: MessageId) -> str:
        """Return the topic of an id, "" if it is unknown."""
        if message_id.topic_name():
            return message_id.topic_name()
        found = f"{self.topic}-partition-{message_id.partition()}"
        return found if found in self._children else ""

    def _child(self, message_id: MessageId) -> Subscriber | None:
        """Return the subscriber of the id's topic. None: the topic is unknown, or the consumer has
        left it."""
        return self._children.get(self._topic_of(message_id))

    # Requests

    async def seek(self, target: MessageId | int) -> None:
        """Move the subscription to a time or to an id.

        A time, `earliest` and `latest` apply to all topics. Another id applies to the topic that
        the id names.

        Raises OperationNotSupported if the id does not name one of the topics.
        """
        self.check_open()
        children: Iterable[Subscriber] = self.cores
        everywhere = (MessageId.earliest, MessageId.latest)
        if isinstance(target, MessageId) and target not in everywhere:
            child = self._child(target)
            if child is None:
                raise OperationNotSupported(
                    f"{target} names none of the consumer's topics", topic=self.topic
                )
            children = [child]
        await together(child.seek(target) for child in children)

    async def pin_start(self) -> None:
        await together(child.pin_start() for child in self.cores)

    async def last_message_id(self) -> tuple[MessageId, MessageId]:
        """Raises OperationNotSupported: each topic has its own last message."""
        raise OperationNotSupported(
            "the consumer has several topics; use get_last_message_ids", topic=self.topic
        )

    async def last_message_ids(self) -> list[MessageId]:
        """Return the ids of the last messages of all topics."""
        self.check_open()
        answers = await together(child.last_message_id() for child in self.cores)
        return [last for last, _ in answers]

    async def has_message_available(self) -> bool:
        """Return whether at least one topic has a message that the user has not taken yet."""
        self.check_open()
        if len(self._queue):
            return True
        return any(await together(child.has_message_available() for child in self.cores))

    async def unsubscribe(self) -> None:
        """Delete the subscription of each topic, and close the consumer.

        If this fails for some topics, their subscriptions stay. Raises the first error. If this
        fails for all topics, the consumer continues to join and leave topics. Otherwise it does
        not: it would create deleted subscriptions again.
        """
        self.check_open()
        self._stop_following()
        self._unsubscribing += 1
        children = self.cores
        try:
            await together(child.unsubscribe() for child in children)
        except BaseException:
            self._has_deleted = self._has_deleted or self.cores != children
            is_last = self._unsubscribing == 1
            if is_last and self._failure is None and not self._has_deleted:
                with suppress(AlreadyClosed):  # the client ends
                    self._follow()
            raise
        finally:
            self._unsubscribing -= 1
        self.shut_down(AlreadyClosed("the consumer was unsubscribed", topic=self.topic))

    async def drain(self) -> None:
        """Like Subscriber.drain, for all topics at the same time."""
        await together(child.drain() for child in self.cores)

    async def close(self) -> None:
        """Close the consumers of all topics. Raises the first error."""
        if self._failure is not None:
            await self._over.wait()  # another task is closing the consumer
            return
        self._failure = AlreadyClosed("the consumer was closed", topic=self.topic)
        self._stop_following()
        self._queue.fail(self._failure)
        try:
            await together(child.close() for child in self.cores)
        finally:
            self.shut_down(self._failure)

    def shut_down(self, error: PulsarException) -> None:
        """Close at once. Acknowledgements that the broker has not confirmed may be lost."""
        self._parts.live.discard(self)
        self._failure = self._failure or error
        self._stop_following()
        self._queue.fail(self._failure)
        self._cancel_division()
        for child in self.cores:
            child.shut_down(error)
        self._over.set()

    def _follow(self) -> None:
        """Start the task that joins new topics and leaves deleted topics."""
        name = f"topics of {self.topic}, {self.subscription.name}"
        self._follower = self._parts.scope.start(
            guarded(self, partial(self._source.follow, self)), name
        )

    def _stop_following(self) -> None:
        if self._follower is not None:
            self._follower.cancel()

    def _cancel_division(self) -> None:
        if self._division is not None:
            self._division.cancel()
            self._division = None

    # Topics that join and leave

    @property
    def is_missing_some(self) -> bool:
        """Return whether the consumer lacks a subscription to at least one reported topic."""
        return bool(self._failed) or not self.is_attached

    def on_topics(self, topics: Collection[str]) -> None:
        """Join the new and the failed topics among `topics`. Leave the topics not in `topics`."""
        names = set(topics)
        self.on_topics_changed(names - self._children.keys(), self._wanted - names)

    def on_topics_changed(self, new: Collection[str], gone: Collection[str]) -> None:
        if self._failure is not None:
            return
        for topic in gone:
            self._leave(topic)
        joining = [topic for topic in new if topic not in self._children]
        for topic in joining:
            self._wanted.add(topic)
            self._add(topic, self._later).begin()
        if joining:
            log.info("topics joined", subscription=self.subscription.name, topics=len(joining))
        if gone or joining:
            self._share_queue()

    async def _join_all(self, topics: Sequence[str]) -> None:
        """Join the first topics. Raises the first error, except for topics that may be missing."""
        turn = asyncio.Semaphore(OPENING_MAX)
        children: list[Subscriber] = []
        for topic in topics:
            children.append(self._add(topic, self.subscription))
            if len(children) % OPENING_MAX == 0:  # 7 ms: let other tasks have their turn
                await asyncio.sleep(0)
                self.check_open()
        self._share_queue()

        async def join(child: Subscriber) -> None:
            async with turn:
                try:
                    await child.open()
                except TopicNotFound:
                    if not self._source.may_miss:
                        raise

        await together(join(child) for child in children)

    @property
    def _later(self) -> Subscription:
        """The subscription to a topic that the consumer joins later. It begins at the topic's first
        message."""
        start = None if self.subscription.is_durable else MessageId.earliest
        return replace(self.subscription, initial_position=InitialPosition.Earliest, start=start)

    def _add(self, topic: str, subscription: Subscription) -> Subscriber:
        self._failed.pop(topic, None)
        queue = SourceQueue(topic, self._queue, self._sources, self._on_child_failed)
        letters = self._letters(topic, subscription)
        child = Subscriber(topic, subscription, queue, self._parts, letters)
        if self._paused:
            child.pause()
        self._children[topic] = child
        return child

    def _on_child_failed(self, topic: str, error: PulsarException) -> None:
        """Remove a topic's consumer that ended with `error`: it could not join, failed, or was
        closed. After an unexpected exception (guard.py), end the whole consumer."""
        child = self._children.get(topic)
        if child is None or self._failure is not None:
            return
        if isinstance(error, UnknownError):  # from guard.py: a broker's UnknownError is retriable
            self.shut_down(error)
            return
        del self._children[topic]
        self._past = self._past.plus(child.stats)
        self._failed[topic] = error
        if child.is_closing:  # its acknowledgements must still become durable
            return
        child.shut_down(error)
        log.info("topic not joined", topic=topic, reason=str(error))
        if self._division is None:
            self._division = asyncio.get_running_loop().call_later(
                DIVISION_DELAY_S, guarding(self, self._share_queue)
            )

    def _leave(self, topic: str) -> None:
        """Close the consumer of a deleted topic, and drop its messages in the queue."""
        self._wanted.discard(topic)
        self._failed.pop(topic, None)
        child = self._children.pop(topic, None)
        if child is None:
            return
        self._past = self._past.plus(child.stats)
        child.shut_down(AlreadyClosed("the topic was deleted", topic=topic))
        self._queue.drop(topic)
        self._sources.forget(topic)
        if self.subscription.decoder is not None:
            self.subscription.decoder.forget(topic)
        log.info("topic left", topic=topic, subscription=self.subscription.name)

    def _share_queue(self) -> None:
        """Divide the limits of the queue among the topics."""
        self._cancel_division()
        count = max(1, len(self._children))
        messages_max = max(1, self._total_messages_max // count)
        messages_max = min(self.subscription.queue_messages_max, messages_max)
        for child in self.cores:
            child.limit_queue(messages_max, max(1, QUEUE_BYTES_MAX // count))


TopicsCore = Subscriber | ManySubscriber
"""The core of a consumer or reader of one topic or of several."""
