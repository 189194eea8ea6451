"""Asks the owner of a topic for the policies that a sink depends on. Blocks."""

from __future__ import annotations

import time
from dataclasses import dataclass
from random import Random
from typing import TYPE_CHECKING, Final

from magnetar.client.session.backoff import ReconnectDelay
from magnetar.spark.errors import WriteRefused, WriteStalled
from magnetar.spark.sink.notes import Note

if TYPE_CHECKING:
    from magnetar.spark.access import Access
    from magnetar.spark.sink.options import WriteOptions

REDIRECTS_MAX: Final = 4  # the redirects that one request follows


@dataclass(frozen=True, slots=True)
class Policies:
    """The policies of one topic."""

    deduplication: bool  # the owner drops messages that it has stored already
    message_bytes_max: int  # the limit of the payload of an entry; 0: the limit in CONNECTED
    note: Note | None = None  # the last note of the sink; None: no note


def policies_of(options: WriteOptions, topic: str, sink: str = "") -> Policies:
    """Ask the brokers in turn, until one answers. The answer has the last note of `sink`; if `sink`
    is empty, it has no note.

    Raises WriteRefused, WriteStalled.
    """
    from magnetar.spark.range_client import BrokerLost, BrokerRefused  # loads grpc

    began_s = time.monotonic()
    delay = ReconnectDelay(Random())
    while True:
        failure = ""
        for broker in options.brokers:
            try:
                return _follow(options.access, broker, topic, sink)
            except BrokerLost as error:
                failure = str(error)
            except BrokerRefused as error:
                raise WriteRefused(topic, str(error)) from error
        waited_s = time.monotonic() - began_s
        if waited_s >= options.send_timeout_s:
            raise WriteStalled(topic, waited_s, failure)
        time.sleep(delay.on_failed(time.monotonic()))


def _follow(access: Access, broker: str, topic: str, sink: str) -> Policies:
    from magnetar.spark.range_client import BrokerLost, topic_policies

    for _ in range(REDIRECTS_MAX + 1):
        found = topic_policies(access, broker, topic, sink)
        if not found.owner_url:
            has_note = found.HasField("noted")
            note = Note(found.noted.query, found.noted.batch) if has_note else None
            return Policies(found.deduplication, found.max_message_bytes, note)
        broker = found.owner_url
    raise BrokerLost(f"topic {topic}: no owner after {REDIRECTS_MAX} redirects")
