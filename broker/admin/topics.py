"""Topics over HTTP, at the paths of Pulsar's admin API."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any
from urllib.parse import quote

from magnetar.broker.errors import TopicNotFound
from magnetar.broker.session.refusal import OPERATING_ERRORS
from magnetar.protos.errors import ProtocolError
from magnetar.protos.names import Domain, TopicName

if TYPE_CHECKING:
    from fastapi import APIRouter

    from magnetar.broker.broker import Broker


def topics_router(broker: Broker) -> APIRouter:
    """`GET /admin/v2/persistent/{tenant}/{namespace}/{topic}/stats`.

    Any broker answers: one that does not serve the topic redirects (307) to the one that does. 404
    for a topic that does not exist, 412 for a name that cannot be one, 503 while its bundle moves.
    """
    from fastapi import APIRouter, HTTPException
    from fastapi.responses import JSONResponse, RedirectResponse, Response

    router = APIRouter(prefix="/admin/v2/persistent")

    @router.get("/{tenant}/{namespace}/{topic}/stats", response_model=None)
    async def stats(tenant: str, namespace: str, topic: str) -> Response:
        try:
            name = TopicName.parse(f"{Domain.PERSISTENT}://{tenant}/{namespace}/{topic}")
            located = await broker.locate(name, authoritative=False)
            if located.broker != broker.me:
                # Of a topic's name, "?", "#" and "%" mean something else in a URL.
                quoted = quote(topic, safe="")
                path = f"/admin/v2/persistent/{tenant}/{namespace}/{quoted}/stats"
                return RedirectResponse(f"{located.broker.http_url}{path}", status_code=307)
            found: dict[str, Any] = await (await broker.topic(name, create=False)).stats()
            return JSONResponse(found)
        except ProtocolError as error:
            raise HTTPException(412, str(error)) from error
        except TopicNotFound as error:
            raise HTTPException(404, str(error)) from error
        except OPERATING_ERRORS as error:
            raise HTTPException(503, str(error)) from error

    return router
