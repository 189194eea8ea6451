"""Partitioned topics over HTTP, and requests that concern all partitions of a topic.

`PartitionCalls` sends a request to the owner of one partition. If this broker's answer is a
redirect to the owner, the request goes to the owner over HTTP.

`fanned_out` passes some requests about a partitioned topic on to all its partitions: requests about
a subscription or all subscriptions, and requests that unload, truncate or terminate the topic. The
handlers of these requests get only topics without partitions.
"""

import asyncio
import json
import re
from functools import partial
from http.client import HTTPConnection, HTTPException
from typing import TYPE_CHECKING, Annotated, Any, Final
from urllib.parse import quote, unquote, unquote_plus, urlsplit

from fastapi import APIRouter, Body, Query
from fastapi.responses import JSONResponse, Response
from pydantic import ValidationError

from magnetar.broker.admin.forwarding import in_thread
from magnetar.broker.admin.paths import encoded, split_end
from magnetar.broker.admin.topics import PROPERTIES_FULL, REFUSALS, shown
from magnetar.broker.calls import call_each
from magnetar.broker.errors import IsPartitioned
from magnetar.broker.operations import partitions
from magnetar.broker.operations.arguments import (
    INT64_MAX,
    NO_BOOLEAN,
    namespace_name,
    topic_name,
)
from magnetar.broker.operations.errors import PartitionFailed, outcome_of
from magnetar.broker.operations.model import (
    MessagePosition,
    PartitionedMetadata,
    PartitionedStats,
    Refusal,
    TerminatedAt,
    WantedPartitions,
)
from magnetar.broker.operations.partitions import ASKED_MAX
from magnetar.broker.operations.statistics import decoded
from magnetar.broker.refusal import OPERATING_ERRORS
from magnetar.protos.names import Domain, TopicName
from magnetar.runtime.turns import run_in_thread

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Mapping, Sequence

    from magnetar.broker.broker import Broker
    from magnetar.broker.operations.partitions import Ask
    from magnetar.runtime.http import App, Message

    Merge = Callable[[Sequence[Mapping[str, Any]]], dict[str, Any]]

CALL_TIMEOUT_S: Final = 20.0
"""Time limit of a request about one partition to another broker."""

ANSWER_BYTES_MAX: Final = 16 << 20
"""The limit of an answer: statistics of one partition with thousands of consumers."""

DECODED_BYTES_MAX: Final = 64 << 10
"""The largest answer that is decoded in one step of the loop: 1 ms. Statistics of one partition
with 10,000 consumers have 12 MB, which takes 0.1 s."""

_Count = Annotated[int, Body(ge=-INT64_MAX, le=INT64_MAX), NO_BOOLEAN]
_Wanted = Annotated[WantedPartitions, Body(description="the number of partitions")]
_EXISTS = {"model": Refusal, "description": "The topic exists already."}
_COUNTS = {"model": Refusal, "description": "A topic cannot have this many partitions."}


def partitions_router(broker: "Broker", domain: Domain, ask: "Ask") -> APIRouter:
    """Make the routes for partitioned topics of one domain:
    `/admin/v2/{domain}/{tenant}/{namespace}/partitioned`, and the routes about all partitions of a
    topic."""
    router = APIRouter(prefix=f"/admin/v2/{domain}", tags=["partitions"], responses=REFUSALS)
    one = "/{tenant}/{namespace}/{topic}"

    @router.get("/{tenant}/{namespace}/partitioned")
    async def list_partitioned(tenant: str, namespace: str) -> list[str]:
        """List the partitioned topics of a namespace."""
        name = namespace_name(tenant, namespace)
        return await partitions.list_partitioned_topics(broker, name, domain)

    @router.put(
        one + "/partitions",
        status_code=204,
        responses={406: _COUNTS, 409: _EXISTS, 507: PROPERTIES_FULL},
    )
    async def create(tenant: str, namespace: str, topic: str, wanted: _Wanted) -> None:
        """Create a topic with this many partitions."""
        name = topic_name(tenant, namespace, topic, domain)
        await partitions.create_partitioned_topic(
            broker, name, wanted.partitions, wanted.properties
        )

    @router.post(one + "/partitions", status_code=204, responses={406: _COUNTS})
    async def update(tenant: str, namespace: str, topic: str, count: _Count) -> None:
        """Add partitions, up to this many. The number never shrinks."""
        name = topic_name(tenant, namespace, topic, domain)
        await partitions.update_partitioned_topic(broker, name, count)

    @router.get(one + "/partitions")
    async def metadata(
        tenant: str,
        namespace: str,
        topic: str,
        create: Annotated[
            bool,
            Query(
                alias="checkAllowAutoCreation",
                description="create a missing topic, as a client would",
            ),
        ] = False,
    ) -> PartitionedMetadata:
        """Show the number of partitions of a topic; 0: the topic is not partitioned."""
        name = topic_name(tenant, namespace, topic, domain)
        return await partitions.partitioned_metadata(broker, name, create=create)

    @router.delete(one + "/partitions", status_code=204)
    async def delete(
        tenant: str,
        namespace: str,
        topic: str,
        force: Annotated[bool, Query(description="disconnect producers and consumers")] = False,
    ) -> None:
        """Delete a partitioned topic with all its partitions."""
        name = topic_name(tenant, namespace, topic, domain)
        await partitions.delete_partitioned_topic(broker, name, ask, force=force)

    @router.get(one + "/partitioned-stats", response_model=PartitionedStats)
    async def stats(
        tenant: str,
        namespace: str,
        topic: str,
        per_partition: Annotated[
            bool, Query(alias="perPartition", description="show each partition, too")
        ] = True,
    ) -> Response:
        """Show the sums of the statistics of all partitions."""
        name = topic_name(tenant, namespace, topic, domain)
        return await shown(
            await partitions.partitioned_stats(broker, name, ask, per_partition=per_partition)
        )

    if domain is Domain.PERSISTENT:

        @router.post(one + "/terminate/partitions")
        async def terminate(tenant: str, namespace: str, topic: str) -> dict[int, TerminatedAt]:
            """Terminate all partitions: they accept no more messages, permanently. The answer has
            the last message of each partition."""
            name = topic_name(tenant, namespace, topic, domain)
            return await partitions.terminate_partitioned_topic(broker, name, ask)

    return router


class PartitionCalls:
    """Sends requests to the owners of single topics. `serve` is this broker's own API, set when the
    API is complete."""

    serve: "App"

    def __init__(self) -> None:
        self._turn = asyncio.Lock()  # held while a thread decodes or combines answers

    async def __call__(self, method: str, name: TopicName, rest: str) -> tuple[int, Any]:
        path, _, query = f"{path_of(name)}{rest}".partition("?")
        status, body, owner = await self._exchange(method, name, path, query.encode(), b"")
        return status, await self._decoded(name, owner, body)

    async def send(
        self, method: str, name: TopicName, path: str, query: bytes, body: bytes
    ) -> tuple[int, bytes]:
        """Send a request to the owner of a topic. Returns status and answer. `path` is quoted.
        Raises PartitionFailed."""
        status, answer, owner = await self._exchange(method, name, path, query, body)
        if owner is not None:
            # This raises, if the answer ends early or is not that of a broker.
            await self._decoded(name, owner, answer)
        return status, answer

    async def _exchange(
        self, method: str, name: TopicName, path: str, query: bytes, body: bytes
    ) -> tuple[int, bytes, str | None]:
        """Send a request like `send`, but do not decode the answer. Also returns the URL to which
        another broker answered; None: this broker answered."""
        status, headers, answer = await self._here(method, path, query, body)
        if status != 307:
            return status, answer, None
        location = headers.get(b"location", b"").decode()
        try:
            return *await in_thread(_send, method, location, body), location
        except (OSError, HTTPException, ValueError) as error:
            raise PartitionFailed(str(name), f"{location} did not answer: {error}") from error

    async def _decoded(self, name: TopicName, owner: str | None, answer: bytes) -> Any:
        """Decode an answer; None: it is empty. Raises PartitionFailed if another broker's answer is
        not JSON."""
        if not answer:
            return None
        try:
            if len(answer) <= DECODED_BYTES_MAX:
                return decoded(answer)
            return await self._decoded_in_turn(answer)
        except (ValueError, RecursionError) as error:
            if owner is None:
                raise
            raise PartitionFailed(str(name), f"{owner} did not answer: {error}") from error

    async def _decoded_in_turn(self, answer: bytes) -> Any:
        """Decode a large answer in a thread, one answer at a time: several threads that compete
        with the event loop for the interpreter's lock would stop it for 0.15 s."""
        return await run_in_thread(self._turn, partial(decoded, answer))

    async def combined(
        self, names: list[TopicName], answers: list[tuple[int, bytes]], merge: "Merge"
    ) -> Response:
        """Combine the answers of all partitions; see `_combined`. Answers of more than
        DECODED_BYTES_MAX together are combined in a thread, for one request at a time."""
        if sum(len(body) for _, body in answers) <= DECODED_BYTES_MAX:
            return _combined(names, answers, merge)
        return await run_in_thread(self._turn, partial(_combined, names, answers, merge))

    async def _here(
        self, method: str, path: str, query: bytes, body: bytes
    ) -> tuple[int, dict[bytes, bytes], bytes]:
        scope = {
            "type": "http",
            "asgi": {"version": "3.0"},
            "http_version": "1.1",
            "method": method,
            "scheme": "http",
            "path": unquote(path),
            "raw_path": path.encode(),
            "query_string": query,
            "root_path": "",
            "headers": [
                (b"content-type", b"application/json"),
                (b"content-length", b"%d" % len(body)),
            ],
            "client": None,
            "server": None,
        }
        started: list[Any] = []
        parts: list[bytes] = []

        async def receive() -> "Message":
            return {"type": "http.request", "body": body, "more_body": False}

        async def send(message: "Message") -> None:
            if message["type"] == "http.response.start":
                started.append(message)
            else:
                parts.append(message.get("body", b""))

        await self.serve(scope, receive, send)
        return started[0]["status"], dict(started[0]["headers"]), b"".join(parts)


def path_of(name: TopicName) -> str:
    parts = (name.domain, name.tenant, name.namespace, name.topic)
    return "/admin/v2/" + "/".join(quote(part, safe="") for part in parts)


def _send(method: str, url: str, body: bytes) -> tuple[int, bytes]:
    parts = urlsplit(url)
    connection = HTTPConnection(parts.hostname or "", parts.port, timeout=CALL_TIMEOUT_S)
    try:
        target = f"{parts.path}?{parts.query}" if parts.query else parts.path
        connection.request(method, target, body, {"content-type": "application/json"})
        reply = connection.getresponse()
        answer = reply.read(ANSWER_BYTES_MAX + 1)
        if len(answer) > ANSWER_BYTES_MAX:
            raise ValueError(f"more than {ANSWER_BYTES_MAX} bytes")
        if reply.status == 307:
            raise ValueError("the topic is moving")
        return reply.status, answer
    finally:
        connection.close()


# ---- requests to all partitions ------------------------------------------------------------------

_ABOUT_ALL: Final = re.compile(
    r"/admin/v2/(persistent|non-persistent)/([^/]+)/([^/]+)/([^/]+)"
    r"(/subscriptions?(?:/.*)?|/all_subscription/expireMessages/[^/]+|/unload|/truncate|/terminate)"
)
_PROPERTIES: Final = re.compile(r"/subscription/.+/properties")
_DELIVERY: Final = re.compile(r"/subscription/.+/(?:explain|pending|key)")
_ONE_PARTITION: Final = re.compile(
    r"/subscription/.+/(?:position|skip)/[^/]+|.*/(?:resetcursor|expireMessages)"
    rf"|{_DELIVERY.pattern}"
)
"""Requests with message ids, message counts or consumers, which are valid in one partition only."""

_ENDS: Final = frozenset({-1, INT64_MAX})


def fanned_out(app: "App", broker: "Broker", calls: PartitionCalls) -> "App":
    async def serve(
        scope: "Message",
        receive: "Callable[[], Awaitable[Message]]",
        send: "Callable[[Message], Awaitable[None]]",
    ) -> None:
        path, slash = split_end(scope)
        found = _ABOUT_ALL.fullmatch(path)
        name = None if found is None else _partitioned_name(found)
        rest = "" if found is None else encoded(found[5])
        if name is None or _needs_no_record(broker, name, rest):
            await app(scope, receive, send)
            return
        try:
            record = await broker.catalog.partitioned.find_fresh(name)
            if record is None or record.deleting:
                await app(scope, receive, send)
                return
            body = await _body_of(receive)
            if body is None:
                return
            method = scope["method"]
            answer: Response
            if (method, rest, name.domain) == ("POST", "/terminate", Domain.PERSISTENT):
                last = await partitions.terminate_partitioned_topic(broker, name, calls)
                answer = JSONResponse({it: at.model_dump(by_alias=True) for it, at in last.items()})
            elif _is_about_one(method, rest, body):
                raise IsPartitioned(str(name), record.partitions)
            else:
                names = [name.with_partition(index) for index in range(record.partitions)]
                if (method, rest) == ("PUT", "/unload"):
                    names = await broker.perhaps_open(names)
                query = scope["query_string"]
                # Send the slash at the end, too: each partition removes one slash, which otherwise
                # could be part of a subscription's name.
                answers = await _send_all(calls, method, names, rest + slash, query, body)
                about_properties = _PROPERTIES.fullmatch(rest) is not None
                answer = await calls.combined(
                    names, answers, partitions.united if about_properties else partitions.merged
                )
        except OPERATING_ERRORS as error:
            answer = _refused(error)
        await answer(scope, receive, send)

    return serve


def _needs_no_record(broker: "Broker", name: TopicName, rest: str) -> bool:
    """Return True if the call explains the delivery of a topic that is open here. Such a topic is
    not partitioned, and the call must not wait for the metadata store."""
    return bool(_DELIVERY.fullmatch(rest)) and any(topic.name == name for topic in broker.topics)


def _partitioned_name(found: "re.Match[str]") -> TopicName | None:
    try:
        tenant, namespace, topic = unquote(found[2]), unquote(found[3]), unquote_plus(found[4])
        name = topic_name(tenant, namespace, topic, Domain(found[1]))
    except OPERATING_ERRORS:
        return None  # the route answers with the error
    return name if name.partition is None else None


async def _body_of(receive: "Callable[[], Awaitable[Message]]") -> bytes | None:
    """Return the whole body. app.py has already limited its size. None: the client disconnected
    before the end of the body."""
    parts = []
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            return None
        parts.append(message.get("body", b""))
        if not message.get("more_body", False):
            return b"".join(parts)


def _is_about_one(method: str, rest: str, body: bytes) -> bool:
    """Return True if the request has a meaning in one partition only."""
    if _PROPERTIES.fullmatch(rest):
        return False
    if method == "PUT" and rest.startswith("/subscription/"):
        # A new subscription; without a message id it begins at the end. Pulsar would use the id in
        # every partition. In another partition, the ledger number means another place: after unread
        # messages or beyond the end.
        return body not in (b"", b"null") and not _is_end(body)
    return bool(_ONE_PARTITION.fullmatch(rest)) and not _is_end(body)


def _is_end(body: bytes) -> bool:
    """Return True if the body is the message id of the beginning or of the end of any topic."""
    try:
        found = MessagePosition.model_validate_json(body)
    except ValidationError:
        return False
    return found.ledger_id in _ENDS and found.entry_id in _ENDS


async def _send_all(
    calls: PartitionCalls, method: str, names: list[TopicName], rest: str, query: bytes, body: bytes
) -> list[tuple[int, bytes]]:

    async def one(name: TopicName) -> tuple[int, bytes]:
        try:
            return await calls.send(method, name, path_of(name) + rest, query, body)
        except PartitionFailed as error:
            refusal = _refused(error)
            return refusal.status_code, bytes(refusal.body)

    return await call_each(names, one, at_once=ASKED_MAX)


def _combined(names: list[TopicName], answers: list[tuple[int, bytes]], merge: "Merge") -> Response:
    """Combine the answers of all partitions. The result is the first failure, if there is one. It
    is no failure that a subscription exists already in some partitions, or is missing in some: the
    request makes all partitions equal. `merge` combines objects."""
    done = [answer for answer in answers if answer[0] < 300]
    harmless = (404, 409) if done else ()
    for name, (status, body) in zip(names, answers, strict=True):
        if status >= 300 and status not in harmless:
            return _partly(name, status, body, f"{len(done)} of {len(answers)}")
    bodies = [json.loads(body) for _, body in done if body]
    if not bodies:
        return Response(status_code=204)
    lists = [body for body in bodies if isinstance(body, list)]
    if lists:
        return JSONResponse(sorted({item for found in lists for item in found}))
    return JSONResponse(merge([body for body in bodies if isinstance(body, dict)]))


def _partly(name: TopicName, status: int, body: bytes, done: str) -> Response:
    """Return the failure of one partition, with the number of partitions that carried out the
    request."""
    try:
        refusal = Refusal.model_validate_json(body)
    except ValueError:
        refusal = Refusal(reason=f"HTTP status {status}", error=PartitionFailed.__name__)
    reason = refusal.reason.removeprefix(f"{name}: ")
    told = {"reason": f"{name}: {reason} ({done} partitions succeeded)"}
    return _refusal(refusal.model_copy(update=told), status)


def _refused(error: Exception) -> Response:
    outcome = outcome_of(error)
    refusal = Refusal(reason=str(error), error=type(error).__name__, advice=outcome.advice)
    return _refusal(refusal, outcome.status)


def _refusal(refusal: Refusal, status: int) -> Response:
    return JSONResponse(refusal.model_dump(), status)
