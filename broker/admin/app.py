"""The admin API: the routers over `broker/operations`, and what they share.

The answer to a failed request is a `Refusal`. The answer about a topic of another broker is a
redirect (307) to the same path at that broker. This module limits the body and the time of a
request.
"""

import asyncio
from functools import partial
from http import HTTPStatus
from typing import TYPE_CHECKING, Any, Final

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, Response
from fastapi_offline import FastAPIOffline
from starlette.exceptions import HTTPException

from magnetar.broker.admin.cluster import cluster_router, lookup_router, unload_router
from magnetar.broker.admin.delivery import delivery_router
from magnetar.broker.admin.ledgers import ledgers_router
from magnetar.broker.admin.namespaces import namespaces_router, tenants_router
from magnetar.broker.admin.non_persistent import health_router, non_persistent_router
from magnetar.broker.admin.partitions import PartitionCalls, fanned_out, partitions_router
from magnetar.broker.admin.paths import EncodedNames
from magnetar.broker.admin.policies import policies_router
from magnetar.broker.admin.schemas import schemas_router
from magnetar.broker.admin.subscriptions import subscriptions_router
from magnetar.broker.admin.topics import topics_router
from magnetar.broker.operations.errors import InvalidArgument, ServedElsewhere, outcome_of
from magnetar.broker.operations.model import Refusal
from magnetar.broker.refusal import OPERATING_ERRORS
from magnetar.protos.names import Domain
from magnetar.runtime.http import App, Message

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Mapping

    from magnetar.broker.broker import Broker

BODY_BYTES_MAX: Final = 64 << 10
"""The largest body of a request. The body for a new namespace with policies has about 2 KB. If a
body of this size is invalid, the broker needs 10 ms of the loop to list all wrong values."""

SCHEMA_BODY_BYTES_MAX: Final = 320 << 10
"""The largest body of a request about schemas: a definition of 128 KiB with escaped quotes."""

SCHEMAS: Final = "/admin/v2/schemas/"

REQUEST_TIMEOUT_S: Final = 60.0
"""Time limit of a request, the same as for a client's command (`session/connection.py`). It equals
the default time limit of the load of a topic."""


ROUTERS: Final = (
    health_router,
    non_persistent_router,
    ledgers_router,
    tenants_router,
    policies_router,
    unload_router,
    lookup_router,
    schemas_router,
    topics_router,
    delivery_router,
    subscriptions_router,
)
"""The first route that matches a request answers it. A subscription's name may contain slashes, so
the routes of subscriptions come last (see `paths.py`)."""


def admin_app(broker: "Broker", settings: "Mapping[str, str] | None" = None) -> App:
    """Make the admin API. Its page /docs works without the internet. `settings`: the broker's
    settings, by Pulsar's names."""
    calls = PartitionCalls()
    api = admin_api(broker, settings, calls)
    return bounded(fanned_out(prepared(api), broker, calls))


def admin_api(
    broker: "Broker",
    settings: "Mapping[str, str] | None",
    calls: PartitionCalls,
) -> FastAPI:
    """Make the API, without the limits of `bounded`. `calls` sends requests to the owners of
    partitions."""
    api = FastAPIOffline(
        docs_url="/docs",
        redoc_url=None,
        redirect_slashes=False,  # FastAPI would redirect to the decoded path
        title="Magnetar admin API",
        description="Paths and verbs are those of Apache Pulsar's admin API.",
        responses={400: {"model": Refusal}, 404: {"model": Refusal}},
    )
    for domain in Domain:
        api.include_router(partitions_router(broker, domain, calls))
    api.include_router(namespaces_router(broker, calls))
    for router in ROUTERS:
        api.include_router(router(broker))
    api.include_router(cluster_router(broker, settings or {}))
    for kind in OPERATING_ERRORS:
        api.add_exception_handler(kind, _answer_failure)
    api.add_exception_handler(RequestValidationError, _answer_invalid)
    api.add_exception_handler(HTTPException, _answer_http)
    api.add_middleware(EncodedNames)
    calls.serve = api
    api.openapi = partial(_document, api)  # type: ignore[method-assign]
    return api


def prepared(api: FastAPI) -> App:
    """Make the routes at the first request, and the OpenAPI document at the first request for it.
    Each takes up to a second of CPU, in a thread."""
    routes = _Once(partial(_resolve_routes, api))
    document = _Once(api.openapi)

    async def serve(scope: Message, receive: Any, send: Any) -> None:
        await routes.done()
        if scope["path"].removesuffix("/") == api.openapi_url:  # see paths.py
            await document.done()
        await api(scope, receive, send)

    return serve


class _Once:
    """Runs a function once, in a thread."""

    def __init__(self, function: "Callable[[], object]") -> None:
        self._function = function
        self._running = asyncio.Lock()
        self._is_done = False

    async def done(self) -> None:
        """Run the function unless it has run. Concurrent callers wait for the same run."""
        if self._is_done:
            return
        async with self._running:
            if not self._is_done:
                await asyncio.to_thread(self._function)
                self._is_done = True


def _resolve_routes(api: FastAPI) -> None:
    """Make FastAPI build all routes. FastAPI builds the routes of an included router, with their
    models, when it first looks for a match in it: up to half a second in one step."""
    for route in api.routes:
        route.matches(
            {"type": "http", "method": "GET", "path": "/", "root_path": "", "headers": []}
        )


def _document(api: FastAPI) -> dict[str, Any]:
    """Return the OpenAPI document without FastAPI's status 422: the broker answers invalid requests
    with 400."""
    document = FastAPI.openapi(api)  # FastAPI keeps the document
    for operations in document["paths"].values():
        for operation in operations.values():
            if "HTTPValidationError" in str(operation["responses"].get("422")):
                del operation["responses"]["422"]
    for name in ("HTTPValidationError", "ValidationError"):
        document["components"]["schemas"].pop(name, None)
    return document


def bounded(app: App, *, timeout_s: float = REQUEST_TIMEOUT_S) -> App:
    """Refuse large bodies and bodies of unknown length, and end requests that take longer than
    `timeout_s`."""

    async def serve(
        scope: Message,
        receive: "Callable[[], Awaitable[Message]]",
        send: "Callable[[Message], Awaitable[None]]",
    ) -> None:
        begun = False

        async def watched(message: Message) -> None:
            nonlocal begun
            begun = True
            await send(message)

        headers = dict(scope["headers"])
        size = headers.get(b"content-length", b"0")
        size_max = SCHEMA_BODY_BYTES_MAX if scope["path"].startswith(SCHEMAS) else BODY_BYTES_MAX
        if b"transfer-encoding" in headers:
            await _respond(scope, receive, send, 411, "a request body must state its length")
        elif not size.isdigit() or int(size) > size_max:
            reason = f"a request body has at most {size_max} bytes"
            await _respond(scope, receive, send, 413, reason)
        else:
            try:
                async with asyncio.timeout(timeout_s):
                    await app(scope, receive, watched)
            except TimeoutError:
                if begun:
                    raise
                reason = f"the request took longer than {timeout_s:g} s"
                await _respond(scope, receive, send, 503, reason)

    return serve


async def _respond(scope: Any, receive: Any, send: Any, status: int, reason: str) -> None:
    refusal = Refusal(reason=reason, error=_name_of(status))
    await JSONResponse(refusal.model_dump(), status)(scope, receive, send)


async def _answer_failure(request: Request, error: Exception) -> Response:
    outcome = outcome_of(error)
    if isinstance(error, ServedElsewhere):
        # Use the encoded path: "?", "#" and "%" in a topic's name mean something else in a URL.
        path = request.scope["raw_path"].decode("latin-1")
        query = request.scope["query_string"].decode("latin-1")
        location = f"{error.owner.http_url}{path}{'?' if query else ''}{query}"
        return Response(status_code=outcome.status, headers={"location": location})
    refusal = Refusal(reason=str(error), error=type(error).__name__, advice=outcome.advice)
    return JSONResponse(refusal.model_dump(), outcome.status)


async def _answer_invalid(request: Request, error: Exception) -> Response:
    assert isinstance(error, RequestValidationError)
    first = error.errors()[0]
    place = first["loc"][1:] or ("request body",)
    match first["type"]:
        case "json_invalid":
            reason = f"the request body is not JSON: {first['ctx']['error']}"
        case _ if isinstance(first["input"], bytes):  # FastAPI did not read it as JSON
            reason = "the request body must be JSON, with content-type: application/json"
        case _:
            reason = str(InvalidArgument.of(place, first))
    return JSONResponse(Refusal(reason=reason, error=InvalidArgument.__name__).model_dump(), 400)


def _name_of(status: int) -> str:
    """Return the name of a status in the form of the other errors, for example NotFound."""
    return HTTPStatus(status).phrase.title().replace(" ", "")


async def _answer_http(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    path = request.scope["raw_path"].decode("latin-1")[:200]
    reason = f"{request.method} {path}: {error.detail}; /docs lists the paths"
    refusal = Refusal(reason=reason, error=_name_of(error.status_code))
    return JSONResponse(refusal.model_dump(), error.status_code, headers=error.headers)
