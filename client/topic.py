"""Parses the topic names that a user gives."""

from __future__ import annotations

from magnetar.client.errors import InvalidTopicName, WrongType
from magnetar.protos.errors import InvalidTopicName as InvalidName
from magnetar.protos.names import TopicName


def topic_name(text: object) -> TopicName:
    """Parse a topic's name. Raises WrongType if `text` is no str, and InvalidTopicName."""
    if not isinstance(text, str):
        raise WrongType(f"topic must be str, not {type(text).__name__}")
    try:
        return TopicName.parse(text)
    except InvalidName as error:
        raise InvalidTopicName(str(error)) from None
