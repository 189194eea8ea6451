"""Asks the brokers a question about topics, and repeats it after errors that may be temporary."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, TypeVar

from magnetar.client.errors import PulsarException, Timeout, is_retriable
from magnetar.client.session.attachment import WARN_AFTER_S, out_of_time
from magnetar.client.session.backoff import ReconnectDelay
from magnetar.runtime.log import get_logger

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from magnetar.client.environment import Parts

log = get_logger(__name__)

Answer = TypeVar("Answer")


async def partitions_of(topic: str, parts: Parts) -> int:
    """Return the number of a topic's partitions, 0 if it is not partitioned.

    The broker may create the topic. Raises the errors of `asking`.
    """
    return await asking(lambda: parts.lookup.partitions(topic), parts, topic)


async def asking(ask: Callable[[], Awaitable[Answer]], parts: Parts, topic: str) -> Answer:
    """Call `ask` until it returns an answer. Repeat the call after a temporary error.

    Raises the broker's refusal if it is final. Raises ConnectError or Timeout if no broker answers
    within `parts.timeout_s`. Logs one warning if no answer arrives within WARN_AFTER_S.
    """
    loop = asyncio.get_running_loop()
    delay = ReconnectDelay(parts.random)
    give_up_at = loop.time() + parts.timeout_s
    trouble: PulsarException | None = None  # None: no error yet
    warning = loop.call_later(
        WARN_AFTER_S, lambda: parts.lookup.warn_unreachable(trouble, parts.timeout_s)
    )
    try:
        async with asyncio.timeout_at(give_up_at):
            while True:
                parts.scope.check_open()
                try:
                    return await ask()
                except PulsarException as error:
                    if not is_retriable(error):
                        raise
                    trouble = error
                delay_s = delay.on_failed(loop.time())
                if loop.time() + delay_s >= give_up_at:
                    raise out_of_time(trouble, parts.timeout_s, topic)
                log.info(
                    "asking again",
                    topic=topic,
                    reason=str(trouble) or type(trouble).__name__,
                    in_s=round(delay_s, 3),
                )
                await asyncio.sleep(delay_s)
    except TimeoutError:
        silence = Timeout(f"the broker did not answer within {parts.timeout_s:g} s", topic=topic)
        raise out_of_time(trouble or silence, parts.timeout_s, topic) from None
    finally:
        warning.cancel()
