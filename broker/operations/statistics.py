"""Converts the statistics of topics to models and to JSON, also for topics with thousands of
clients.

pydantic holds the interpreter's lock during a call. One call for 10,000 clients takes 0.2 s, and
stops the event loop even when it runs in a thread. So each client is checked and encoded by a call
of its own, in a thread. Each cursor is encoded in the same way; the event loop checks it, some in
each turn (topics.py). The decoding of JSON calls a function of Python for each client, so that
other threads can run.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from pydantic_core import to_json

from magnetar.broker.operations.model import (
    ConsumerStats,
    CursorStats,
    InternalStats,
    LedgerInfo,
    PublisherStats,
    SubscriptionStats,
    TopicStats,
)

if TYPE_CHECKING:
    from collections.abc import Mapping

    from pydantic import BaseModel


def modelled(found: Mapping[str, Any]) -> TopicStats:
    """Return the checked statistics of a topic. Call this function in a thread."""
    clients = {
        "publishers": [PublisherStats.model_validate(each) for each in found["publishers"]],
        "subscriptions": _subscriptions(found["subscriptions"]),
        "hiddenSubscriptions": _subscriptions(found.get("hiddenSubscriptions", {})),
    }
    return TopicStats.model_validate({**found, **clients})


def encoded(model: BaseModel) -> bytes:
    """Return the JSON of a model. Call this function in a thread."""
    if not isinstance(model, TopicStats | SubscriptionStats | InternalStats):
        return model.model_dump_json(by_alias=True).encode()
    fields = type(model).model_fields
    names = {name: field.alias or name for name, field in fields.items()}
    return _object({names.get(name, name): value for name, value in model})


def decoded(text: bytes) -> Any:
    """Return the value of a JSON text. Call this function in a thread if the text may be large.
    Raises ValueError, RecursionError."""
    return json.loads(text, object_hook=_let_others_run)


def _let_others_run(found: dict[str, Any]) -> dict[str, Any]:
    """Called after each object of a JSON text. The interpreter passes its lock on in this call if
    another thread waits for the lock."""
    return found


def _subscriptions(found: Mapping[str, Mapping[str, Any]]) -> dict[str, SubscriptionStats]:
    return {name: _subscription(each) for name, each in found.items()}


def _subscription(found: Mapping[str, Any]) -> SubscriptionStats:
    consumers = [ConsumerStats.model_validate(each) for each in found["consumers"]]
    return SubscriptionStats.model_validate({**found, "consumers": consumers})


def _object(members: Mapping[str, Any]) -> bytes:
    return b"{%b}" % b",".join([to_json(name) + b":" + _value(it) for name, it in members.items()])


def _value(value: Any) -> bytes:
    match value:
        case TopicStats() | SubscriptionStats() | PublisherStats() | ConsumerStats():
            return encoded(value)
        case CursorStats() | LedgerInfo():
            return encoded(value)
        case list():
            return b"[%b]" % b",".join(map(_value, value))
        case dict():
            return _object(value)
        case _:
            return to_json(value)
