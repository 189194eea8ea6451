"""The names of topics and subscriptions in the paths of requests.

A subscription's name may contain slashes, which clients encode as %2F. FastAPI matches decoded
paths, in which such a name has several parts: the path of `skip_all` of the subscription `a/skip`
also fits the route `skip/{count}` of the subscription `a`. So the parts after `/subscription/` stay
encoded until a route is chosen. A client may also send the slashes of a name as they are. Then the
first route that fits decides.

As in Pulsar, a slash at the end of a path has no meaning, and a plus sign in the name of a topic or
subscription stands for a blank: Pulsar's Java tools encode blanks in this way. They encode a plus
sign as %2B.
"""

import re
from typing import TYPE_CHECKING, Annotated, Final
from urllib.parse import quote, unquote, unquote_plus

from pydantic import AfterValidator

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from magnetar.runtime.http import App, Message

SUBSCRIPTION: Final = "/subscription/{subscription:path}"
"""The last parts of the path of a subscription. The parameter has the type SubscriptionPart."""

SubscriptionPart = Annotated[str, AfterValidator(unquote)]

_OF_TOPIC: Final = re.compile(
    r"(/(?:admin/v2/(?:persistent|non-persistent|schemas)|lookup/v2/topic/[^/]+)/[^/]+/[^/]+/)"
    r"([^/]+)(/.*)?",
    re.DOTALL,
)
_BELOW: Final = "/subscription/"
_NO_ROUTE: Final = ""


class EncodedNames:
    """An ASGI application that passes requests on with the path that the routes expect."""

    def __init__(self, app: "App") -> None:
        self._app = app

    async def __call__(
        self,
        scope: "Message",
        receive: "Callable[[], Awaitable[Message]]",
        send: "Callable[[Message], Awaitable[None]]",
    ) -> None:
        await self._app({**scope, "path": _routed(scope)}, receive, send)


def encoded(path: str) -> str:
    """Decode each part of an encoded path and encode it anew: all its encodings become equal."""
    return "/".join(quote(unquote_plus(part), safe="") for part in path.split("/"))


def split_end(scope: "Message") -> tuple[str, str]:
    """Return the encoded path without the slash at its end, and this slash, or nothing."""
    raw: str = scope["raw_path"].decode("latin-1")
    path = raw.removesuffix("/")
    return path, raw[len(path) :]


def _routed(scope: "Message") -> str:
    raw, slash = split_end(scope)
    path: str = scope["path"].removesuffix(slash)
    found = _OF_TOPIC.fullmatch(raw)
    if found is not None:
        above, topic, rest = unquote(found[1]), unquote_plus(found[2]), found[3] or ""
        is_below = rest.startswith(_BELOW)
        if "%2f" in f"{found[1]}{found[2]}{'' if is_below else rest}".lower():
            return _NO_ROUTE  # only the name of a subscription contains slashes
        return f"{above}{topic}{encoded(rest) if is_below else unquote(rest)}"
    found = _OF_TOPIC.fullmatch(path)
    if found is not None and (found[3] or "").startswith(_BELOW):
        # The client has encoded a fixed part of the path, too, such as `persistent`.
        return f"{found[1]}{found[2]}{quote(found[3])}"
    return path
