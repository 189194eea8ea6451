from __future__ import annotations

import random

import pytest

from magnetar.client.consuming.dead_letters import CANDIDATES_MAX, Candidates
from magnetar.client.consuming.letters import (
    DEAD_LETTER_SUFFIX,
    RETRY_SUFFIX,
    dead_letter_producer_name,
    default_topic,
    id_text,
    is_letter_topic,
    legacy_topic,
    letter,
    letter_properties,
    reconsume_times,
)
from magnetar.client.errors import InvalidMessage
from magnetar.client.message import Delivery, Message, MessageId
from magnetar.protos.batch import ReceivedMessage
from magnetar.protos.names import TopicName

TOPIC = "persistent://public/default/t"


def message(properties: dict[str, str] | None = None, size: int = 1) -> Message:
    received = ReceivedMessage(bytes(size), properties or {}, "k", True, b"o", 7, 1, False, 2)
    delivery = Delivery(TOPIC, -1, "p", 1, b"", 0, None, 0)
    return Message(received, MessageId(-1, 1, 0, 2, 5), delivery)


def test_letter_topics_have_pulsars_names() -> None:
    assert default_topic(TOPIC, "s", RETRY_SUFFIX) == f"{TOPIC}-s-RETRY"
    assert default_topic(TOPIC, "s", DEAD_LETTER_SUFFIX) == f"{TOPIC}-s-DLQ"
    assert default_topic(f"{TOPIC}-partition-3", "s", RETRY_SUFFIX) == f"{TOPIC}-s-RETRY"
    assert legacy_topic(TOPIC, "s", RETRY_SUFFIX) == "persistent://public/default/s-RETRY"
    assert legacy_topic(TOPIC, "s", DEAD_LETTER_SUFFIX) == "persistent://public/default/s-DLQ"
    name = dead_letter_producer_name(TOPIC, "s", "c", random.Random(1))
    start, end = f"{TOPIC}-s-c-", "-DLQ"
    assert name.startswith(start)
    assert name.endswith(end)
    assert len(name) == len(start) + 5 + len(end)


@pytest.mark.parametrize(
    ("name", "is_one"),
    [
        ("t-s-DLQ", True),
        ("t-s-RETRY", True),
        ("s-DLQ", True),
        ("s-RETRY", True),
        ("t-s-DLQ-partition-1", True),
        ("trash", True),
        ("t", False),
        ("t-xs-DLQ", False),
        ("t-a-s-DLQ", False),  # for the subscription a-s: the pattern does not match t-a
        ("t-a-s-RETRY", False),
        ("xs-DLQ", False),
        ("t-s-DLQ-x", False),
        ("trash2", False),
    ],
)
def test_the_letter_topics_of_a_subscription_are_known_by_name(name: str, is_one: bool) -> None:
    topic, trash, matched = (TopicName.parse(it) for it in (name, "trash", "t"))
    assert is_letter_topic(topic, "s", {trash}, lambda it: it == matched) is is_one


def test_ids_are_written_as_in_java() -> None:
    assert id_text(MessageId(-1, 1, 0, 0, 3)) == "1:0:-1:0"
    assert id_text(MessageId(2, 1, 5)) == "1:5:2"


def test_a_letter_keeps_the_origin_of_its_first_publication() -> None:
    first = letter_properties(message({"a": "1"}), {"b": "2"})
    assert first == {"a": "1", "b": "2", "REAL_TOPIC": TOPIC, "ORIGIN_MESSAGE_ID": "1:0:-1:2"}
    again = letter_properties(message({"REAL_TOPIC": "x", "ORIGIN_MESSAGE_ID": "y"}))
    assert again == {"REAL_TOPIC": "x", "ORIGIN_MESSAGE_ID": "y"}


def test_a_letter_copies_keys_and_event_time() -> None:
    copy = letter(message(), {})
    assert (copy.partition_key, copy.partition_key_b64, copy.ordering_key) == ("k", True, b"o")
    assert copy.event_time_ms == 7
    with pytest.raises(InvalidMessage, match="properties"):
        letter(message(), {"a": 1})  # type: ignore[dict-item]


@pytest.mark.parametrize(("text", "times"), [("3", 3), ("", 0), ("x", 0), ("٣", 0), ("9" * 40, 0)])
def test_a_count_that_is_not_a_number_is_zero(text: str, times: int) -> None:
    assert reconsume_times(message({"RECONSUMETIMES": text})) == times


def test_candidates_are_limited() -> None:
    candidates = Candidates()
    for entry in range(CANDIDATES_MAX + 5):
        candidates.add((1, entry), [message()])
    candidates.check()
    assert (1, 4) not in candidates
    assert (1, 5) in candidates
    for entry in range(4):
        candidates.add((2, entry), [message(size=30 << 20)])
    candidates.check()
    assert (2, 3) in candidates
