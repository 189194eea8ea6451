"""HTTP requests about deliveries: why a subscription does not deliver. Pulsar has no such
paths."""

import re
from base64 import b64decode
from typing import TYPE_CHECKING, Annotated

from fastapi import APIRouter, Query

from magnetar.broker.admin.paths import SUBSCRIPTION, SubscriptionPart
from magnetar.broker.admin.topics import REFUSALS
from magnetar.broker.dispatch.sticky_hash import SLOTS
from magnetar.broker.log.position import EARLIEST, Position
from magnetar.broker.operations import arguments, delivery
from magnetar.broker.operations.arguments import subscription_name, topic_name
from magnetar.broker.operations.delivery import KEY_BYTES_MAX, PAGE_ENTRIES_MAX
from magnetar.broker.operations.delivery_model import Explanation, KeyShown, PendingPage
from magnetar.broker.operations.errors import InvalidArgument
from magnetar.broker.operations.model import Refusal

if TYPE_CHECKING:
    from magnetar.broker.broker import Broker

_NOT_ALLOWED = {
    "model": Refusal,
    "description": "The topic has partitions: name one of them. Or the subscription type has no"
    " hashes.",
}
_POSITION = re.compile(r"(\d{1,19}):(\d{1,19})")

_Consumer = Annotated[
    str | None, Query(max_length=1_024, description="only entries of this consumer")
]
_Hash = Annotated[
    int | None,
    Query(alias="hash", ge=1, lt=SLOTS, description="only entries of this hash (Key_Shared)"),
]
_Key = Annotated[str, Query(max_length=KEY_BYTES_MAX, description="partition or ordering key")]
_Base64 = Annotated[bool, Query(description="true: the key is bytes, encoded as base64")]
_After = Annotated[str | None, Query(description="begin after this message: ledger:entry")]
_Limit = Annotated[int, Query(ge=1, le=PAGE_ENTRIES_MAX, description="maximum entries per page")]


def delivery_router(broker: "Broker") -> APIRouter:
    """Make the routes `explain`, `pending` and `key` below
    `/admin/v2/persistent/{tenant}/{namespace}/{topic}/subscription/{subscription}`."""
    one = "/admin/v2/persistent/{tenant}/{namespace}/{topic}" + SUBSCRIPTION
    router = APIRouter(tags=["delivery"], responses={**REFUSALS, 405: _NOT_ALLOWED})

    @router.get(one + "/explain")
    async def explain(
        tenant: str, namespace: str, topic: str, subscription: SubscriptionPart
    ) -> Explanation:
        """Show every reason why the subscription delivers no message now."""
        name = topic_name(tenant, namespace, topic)
        return await delivery.explanation(broker, name, subscription_name(subscription))

    @router.get(one + "/pending")
    async def pending(
        tenant: str,
        namespace: str,
        topic: str,
        subscription: SubscriptionPart,
        consumer: _Consumer = None,
        of_hash: _Hash = None,
        after: _After = None,
        limit: _Limit = 20,
    ) -> PendingPage:
        """List the entries that were delivered to consumers and are not acknowledged, in the order
        of the topic."""
        name = topic_name(tenant, namespace, topic)
        of = subscription_name(subscription)
        begin = _position(after)
        return await delivery.pending(
            broker, name, of, consumer=consumer, slot=of_hash, after=begin, limit=limit
        )

    @router.get(one + "/key")
    async def key_holder(
        tenant: str,
        namespace: str,
        topic: str,
        subscription: SubscriptionPart,
        key: _Key,
        base64: _Base64 = False,
    ) -> KeyShown:
        """Show the hash of a key, the consumer that gets its messages, and the reasons why they
        wait."""
        name = topic_name(tenant, namespace, topic)
        of = subscription_name(subscription)
        return await delivery.key_holder(broker, name, of, _key(key, base64), shown=key)

    return router


def _position(text: str | None) -> Position:
    if text is None:
        return EARLIEST
    found = _POSITION.fullmatch(text)
    if found is None:
        raise InvalidArgument("after", text, "a message id as ledger:entry, such as 3:15")
    return arguments.position(int(found[1]), int(found[2]))


def _key(text: str, base64: bool) -> bytes:
    try:
        return b64decode(text, validate=True) if base64 else text.encode()
    except ValueError:  # UnicodeEncodeError and binascii.Error are ValueErrors
        expected = "base64" if base64 else "text of Unicode characters"
        raise InvalidArgument("key", text, expected) from None
