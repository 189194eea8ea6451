"""Subscriptions over HTTP.

A subscription's name may contain slashes (see `paths.py`). So routes with more parts after the name
come first.

The answer to a peek is a list of messages in JSON. Pulsar differs: it answers with the bytes of a
whole batch, and puts the metadata into headers.
"""

import asyncio
from typing import TYPE_CHECKING, Annotated

from fastapi import APIRouter, Body, Path, Query, Response
from pydantic import TypeAdapter

from magnetar.broker.admin.paths import SUBSCRIPTION, SubscriptionPart
from magnetar.broker.admin.topics import REFUSALS, GivenProperties
from magnetar.broker.log.position import LATEST
from magnetar.broker.operations import arguments, properties, subscriptions
from magnetar.broker.operations.arguments import INT64_MAX, subscription_name, topic_name
from magnetar.broker.operations.model import (
    MessagePosition,
    PeekedMessage,
    Refusal,
    SubscriptionStart,
)
from magnetar.broker.operations.subscriptions import AGE_S_MAX, PEEK_POSITION_MAX

if TYPE_CHECKING:
    from magnetar.broker.broker import Broker

PUBLISH_TIME = "milliseconds since 1970-01-01 UTC"

_Number = Annotated[int, Path(ge=1, le=PEEK_POSITION_MAX)]
_Count = Annotated[int, Path(ge=1, le=INT64_MAX, description="entries; a batch is one entry")]
_Age = Annotated[int, Path(ge=1, le=AGE_S_MAX, description="seconds")]
_Time = Annotated[int, Path(ge=0, le=INT64_MAX, description=PUBLISH_TIME)]
_Force = Annotated[bool, Query(description="true: disconnect the consumers")]
_Start = Annotated[
    SubscriptionStart | None,
    Body(description="the message to begin at, and properties; no body: the end of the topic"),
]
_MESSAGES = TypeAdapter(list[PeekedMessage])
_NOT_ALLOWED = {"model": Refusal, "description": "The subscription is that of a reader."}
_FULL = {"model": Refusal, "description": "The subscriptions of the topic would be too large."}
_EXISTS = {"model": Refusal, "description": "The subscription exists already."}


def subscriptions_router(broker: "Broker") -> APIRouter:
    """Make the routes below `/admin/v2/persistent/{tenant}/{namespace}/{topic}/subscription`."""
    topic_path = "/admin/v2/persistent/{tenant}/{namespace}/{topic}"
    one = SUBSCRIPTION
    router = APIRouter(prefix=topic_path, tags=["subscriptions"], responses=REFUSALS)

    @router.get("/subscriptions")
    async def list_subscriptions(tenant: str, namespace: str, topic: str) -> list[str]:
        """List the subscriptions of a topic."""
        name = topic_name(tenant, namespace, topic)
        return await subscriptions.list_subscriptions(broker, name)

    @router.post(one + "/resetcursor/{timestamp}", status_code=204)
    async def reset_to_time(
        tenant: str, namespace: str, topic: str, subscription: SubscriptionPart, timestamp: _Time
    ) -> None:
        """Deliver again from the first message published at this time or later."""
        name = topic_name(tenant, namespace, topic)
        of = subscription_name(subscription)
        await subscriptions.reset_to_time(broker, name, of, timestamp)

    @router.post(one + "/resetcursor", status_code=204)
    async def reset_to_message(
        tenant: str,
        namespace: str,
        topic: str,
        subscription: SubscriptionPart,
        start: MessagePosition,
    ) -> None:
        """Deliver again from a message. ledgerId and entryId -1 are the beginning of the topic."""
        name = topic_name(tenant, namespace, topic)
        of = subscription_name(subscription)
        target = arguments.position(start.ledger_id, start.entry_id)
        await subscriptions.reset_to_message(
            broker, name, of, target, batch_index=start.batch_index, excluded=start.is_excluded
        )

    @router.post(one + "/skip/{count}", status_code=204)
    async def skip(
        tenant: str, namespace: str, topic: str, subscription: SubscriptionPart, count: _Count
    ) -> None:
        """Acknowledge the first `count` entries of the backlog."""
        name = topic_name(tenant, namespace, topic)
        await subscriptions.skip(broker, name, subscription_name(subscription), count)

    @router.post(one + "/skip_all", status_code=204)
    async def skip_all(
        tenant: str, namespace: str, topic: str, subscription: SubscriptionPart
    ) -> None:
        """Acknowledge the whole backlog."""
        name = topic_name(tenant, namespace, topic)
        await subscriptions.skip_all(broker, name, subscription_name(subscription))

    @router.post(one + "/expireMessages/{seconds}", status_code=204)
    async def expire(
        tenant: str, namespace: str, topic: str, subscription: SubscriptionPart, seconds: _Age
    ) -> None:
        """Acknowledge the entries that the broker appended more than this many seconds ago."""
        name = topic_name(tenant, namespace, topic)
        await subscriptions.expire(broker, name, subscription_name(subscription), seconds)

    @router.post(one + "/expireMessages", status_code=204)
    async def expire_through(
        tenant: str,
        namespace: str,
        topic: str,
        subscription: SubscriptionPart,
        last: MessagePosition,
    ) -> None:
        """Acknowledge every entry up to a message. A batch with later messages stays."""
        name = topic_name(tenant, namespace, topic)
        of = subscription_name(subscription)
        through = arguments.position(last.ledger_id, last.entry_id)
        await subscriptions.expire_through(
            broker, name, of, through, batch_index=last.batch_index, excluded=last.is_excluded
        )

    @router.post("/all_subscription/expireMessages/{seconds}", status_code=204)
    async def expire_all(tenant: str, namespace: str, topic: str, seconds: _Age) -> None:
        """Expire the messages of all subscriptions of the topic."""
        name = topic_name(tenant, namespace, topic)
        await subscriptions.expire(broker, name, None, seconds)

    @router.get(one + "/position/{position}", response_model=list[PeekedMessage])
    async def peek(
        tenant: str, namespace: str, topic: str, subscription: SubscriptionPart, position: _Number
    ) -> Response:
        """Show the messages of one entry of the backlog, and change nothing. `position` counts the
        entries from 1."""
        name = topic_name(tenant, namespace, topic)
        found = await subscriptions.peek(broker, name, subscription_name(subscription), position)
        body = await asyncio.to_thread(_MESSAGES.dump_json, found, by_alias=True)
        return Response(body, media_type="application/json")

    @router.get(one + "/properties")
    async def get_properties(
        tenant: str, namespace: str, topic: str, subscription: SubscriptionPart
    ) -> dict[str, str]:
        """Show the properties of a subscription."""
        name = topic_name(tenant, namespace, topic)
        of = subscription_name(subscription)
        return await properties.subscription_properties(broker, name, of)

    @router.put(one + "/properties", status_code=204, responses={405: _NOT_ALLOWED, 507: _FULL})
    async def set_properties(
        tenant: str,
        namespace: str,
        topic: str,
        subscription: SubscriptionPart,
        given: GivenProperties = None,
    ) -> None:
        """Replace all properties of a subscription."""
        name = topic_name(tenant, namespace, topic)
        of = subscription_name(subscription)
        await properties.set_subscription_properties(broker, name, of, given or {})

    @router.put(one, status_code=204, responses={409: _EXISTS})
    async def create(
        tenant: str,
        namespace: str,
        topic: str,
        subscription: SubscriptionPart,
        start: _Start = None,
    ) -> None:
        """Create a durable subscription, and the topic if it does not exist."""
        name = topic_name(tenant, namespace, topic)
        of = subscription_name(subscription)
        if start is None:
            await subscriptions.create_subscription(broker, name, of, LATEST)
            return
        await subscriptions.create_subscription(
            broker,
            name,
            of,
            arguments.position(start.ledger_id, start.entry_id),
            batch_index=start.batch_index,
            excluded=start.is_excluded,
            properties=start.properties,
        )

    @router.delete(one, status_code=204)
    async def delete(
        tenant: str,
        namespace: str,
        topic: str,
        subscription: SubscriptionPart,
        force: _Force = False,
    ) -> None:
        """Delete a subscription and drop its backlog."""
        name = topic_name(tenant, namespace, topic)
        of = subscription_name(subscription)
        await subscriptions.delete_subscription(broker, name, of, force=force)

    return router
