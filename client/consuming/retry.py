"""The core of a consumer with a retry topic: it consumes its topics and the retry topic.

Theory of operation. `reconsume_later` publishes a copy of a message on the retry topic. The copy
has a delay, and a count of the message's passes through the retry topic. After the copy is stored,
the consumer acknowledges the message. The consumer is subscribed to the retry topic too, with the
same subscription name, and receives the copy when its delay is over. After the maximal number of
passes the copy goes to the dead-letter topic. A subscription to several topics has one retry topic
and one dead-letter topic for all of them. Acknowledgements go to the topic that the message id
names.
"""

from __future__ import annotations

import asyncio
from contextlib import suppress
from datetime import timedelta
from typing import TYPE_CHECKING

from magnetar.client.consuming.letters import (
    DELAY_TIME,
    RECONSUME_TIMES,
    letter,
    letter_properties,
    reconsume_times,
)
from magnetar.client.consuming.many import TopicsCore
from magnetar.client.consuming.statistics import ConsumerStatistics
from magnetar.client.errors import (
    AlreadyClosed,
    InvalidMessage,
    OperationNotSupported,
    PulsarException,
)
from magnetar.client.message import Message
from magnetar.client.together import together
from magnetar.protos.names import TopicName

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from magnetar.client.consuming.letter_producer import LetterProducer
    from magnetar.client.consuming.steps import Run
    from magnetar.client.consuming.subscriber import Subscriber
    from magnetar.client.environment import Parts
    from magnetar.client.message import MessageId


class RetrySubscriber:
    """A core that consists of two: the core of the topics, and the core of the retry topic. `open`
    attaches both."""

    def __init__(
        self,
        main: TopicsCore,
        retry: TopicsCore,
        retry_letters: LetterProducer,
        dead_letters: LetterProducer,
        parts: Parts,
    ) -> None:
        assert main.subscription.dead_letters is not None
        self.topic = main.topic
        self.subscription = main.subscription
        self.retry_topic = retry.topic
        self._retry_partitions = f"{retry.topic}-partition-"
        self._main = main
        self._retry = retry
        self._times_max = main.subscription.dead_letters.max_redeliver_count
        self._retry_letters = retry_letters
        self._dead_letters = dead_letters
        self._letters_sent = ConsumerStatistics()  # has only the counts of letters
        self._parts = parts

    async def open(self) -> None:
        """Attach both. If one fails, close the consumer and raise the reason.

        No message arrives before the subscription to the retry topic exists. Otherwise a listener
        could send a copy to the retry topic while no subscription receives it.
        """
        self._main.pause()
        await self._main.open()
        try:
            self._main.check_open()  # the client may have been closed meanwhile
            await self._retry.open()
        except BaseException as error:
            reason = error if isinstance(error, PulsarException) else PulsarException(str(error))
            self._main.shut_down(reason)
            raise
        self._main.resume()

    async def reconsume_later(
        self, message: Message, delay: timedelta, properties: Mapping[str, str] | None = None
    ) -> None:
        """Publish a copy, then acknowledge the message.

        The copy goes to the retry topic, to be delivered after `delay`. After the maximal number of
        passes it goes to the dead-letter topic.

        Raises InvalidMessage for a delay that is not a timedelta of at least 0, and the errors of
        `Producer.send`: the message then stays unacknowledged.
        """
        given: object = delay
        if not isinstance(given, timedelta) or delay < timedelta(0):
            raise InvalidMessage(f"delay must be a timedelta of at least 0, not {delay!r}")
        self.check_open()
        delay_ms = delay // timedelta(milliseconds=1)
        times = reconsume_times(message) + 1
        # As in Apache's Java client, REAL_TOPIC names the topic without its partition.
        topic = str(TopicName.parse(message.topic_name()).base)
        values = letter_properties(message, properties, real_topic=topic)
        values[RECONSUME_TIMES] = str(times)
        values[DELAY_TIME] = str(delay_ms)
        if times > self._times_max:
            await self._dead_letters.send(letter(message, values), message)
            self._letters_sent.dead_lettered += 1
        else:
            at = self._parts.clock.now_ms() + delay_ms if delay_ms else None
            await self._retry_letters.send(letter(message, values, deliver_at_ms=at), message)
            self._letters_sent.reconsumed_later += 1
        if message.is_of(self.cluster):
            self.acknowledge(message.message_id())

    @property
    def is_attached(self) -> bool:
        return self._main.is_attached and self._retry.is_attached

    @property
    def is_active(self) -> bool:
        return self._main.is_active

    @property
    def is_over(self) -> bool:
        return self._main.is_over and self._retry.is_over

    @property
    def stats(self) -> ConsumerStatistics:
        return self._main.stats.plus(self._retry.stats).plus(self._letters_sent)

    async def statistics(self) -> ConsumerStatistics:
        """Return the sums of all topics."""
        return self.stats

    async def drain(self) -> None:
        """Like Subscriber.drain, for all topics at the same time."""
        await together(part.drain() for part in self._parts_of_both)

    def check_open(self) -> None:
        self._main.check_open()

    def on_taken(self, runs: Sequence[Run]) -> None:
        for run in runs:
            self._part_of(run[0].topic).on_taken((run,))

    def on_returned(self, messages: Sequence[Message]) -> None:
        for message in messages:
            self._part_of(message.delivery.topic).on_returned([message])

    def on_waiting(self, _: object = None) -> None:
        for part in self._parts_of_both:
            part.on_waiting()

    def check_id(self, message_id: MessageId) -> None:
        """Check an id that the user wants to acknowledge. An id without a topic counts as an id of
        the main topic.

        Raises OperationNotSupported if there are several main topics and the id's topic is unknown.
        """
        self._main.check_id(message_id)

    @property
    def cluster(self) -> int:
        """How often the client has moved to another cluster. A move makes earlier message ids
        invalid."""
        return self._main.cluster

    def acknowledge(self, message_id: MessageId) -> None:
        self._part(message_id).acknowledge(message_id)

    def on_acknowledged(self, runs: Sequence[Run]) -> None:
        for run in runs:
            self._part_of(run[0].topic).on_acknowledged((run,))

    def acknowledge_cumulative(self, message_id: MessageId) -> None:
        """Acknowledge a message and all before it in its topic or partition."""
        self._part(message_id).acknowledge_cumulative(message_id)

    def negative_acknowledge(self, message: Message | MessageId) -> None:
        message_id = message.message_id() if isinstance(message, Message) else message
        self._part(message_id).negative_acknowledge(message)

    def redeliver_unacknowledged(self, _: object = None) -> None:
        for part in self._parts_of_both:
            part.redeliver_unacknowledged()

    def pause(self, _: object = None) -> None:
        for part in self._parts_of_both:
            part.pause()

    def resume(self, _: object = None) -> None:
        for part in self._parts_of_both:
            part.resume()

    async def seek(self, target: MessageId | int) -> None:
        """Move the subscription in its topics. The retry topic stays where it is."""
        await self._main.seek(target)

    async def last_message_id(self) -> tuple[MessageId, MessageId]:
        """Return the id of the topic's last message, and the mark-delete position. The retry topic
        does not count.

        Raises OperationNotSupported if there are several topics or partitions.
        """
        return await self._main.last_message_id()

    async def last_message_ids(self) -> list[MessageId]:
        """Return the ids of the last messages of all topics; those of the retry topic come last."""
        answers = await together(part.last_message_ids() for part in self._parts_of_both)
        return [last for ids in answers for last in ids]

    async def has_message_available(self) -> bool:
        """Return whether a topic has a message after the last one that the user took of it. The
        retry topic does not count."""
        return await self._main.has_message_available()

    async def unsubscribe(self) -> None:
        """Delete the subscriptions of all topics and close the consumer.

        The subscription to the retry topic is deleted last, so that the copies are kept while a
        subscription to another topic exists. After an error, the next call continues with the
        remaining subscriptions.
        """
        if not self._main.is_over:
            await self._main.unsubscribe()
        await self._retry.unsubscribe()
        await self._close_letters()

    async def close(self) -> None:
        """Close both cores, then the producers of letters. Raises the first error of the cores."""
        try:
            await together(part.close() for part in self._parts_of_both)
        except asyncio.CancelledError:  # the caller no longer waits for an orderly end
            self.shut_down(AlreadyClosed("the consumer was closed", topic=self.topic))
            raise
        finally:
            await self._close_letters()  # returns at once after `shut_down`

    def shut_down(self, error: PulsarException) -> None:
        """Close both cores and the producers of letters at once."""
        self._main.shut_down(error)
        self._retry.shut_down(error)
        self._retry_letters.shut_down(error)
        self._dead_letters.shut_down(error)

    @property
    def cores(self) -> Sequence[Subscriber]:
        """The consumers of single topics that this one consists of."""
        return [*self._main.cores, *self._retry.cores]

    @property
    def _parts_of_both(self) -> tuple[TopicsCore, TopicsCore]:
        return self._main, self._retry

    async def _close_letters(self) -> None:
        with suppress(PulsarException):  # the call that sent the letter reported the error
            await together(it.close() for it in (self._retry_letters, self._dead_letters))

    def _part(self, message_id: MessageId) -> TopicsCore:
        return self._part_of(message_id.topic_name())

    def _part_of(self, topic: str) -> TopicsCore:
        is_retry = topic == self.retry_topic or topic.startswith(self._retry_partitions)
        return self._retry if is_retry else self._main


def not_enabled() -> OperationNotSupported:
    return OperationNotSupported("reconsume_later needs a consumer with enable_retry=True")


ConsumerCore = TopicsCore | RetrySubscriber
"""The core of any consumer or reader, also of a consumer with a retry topic."""
