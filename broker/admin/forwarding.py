"""Requests that a broker sends to other brokers for an administrator."""

import asyncio
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from http import HTTPStatus
from http.client import HTTPConnection, HTTPException
from typing import TYPE_CHECKING, Final, TypeVar
from urllib.parse import quote, urlsplit

from pydantic import TypeAdapter, ValidationError

from magnetar.broker.catalog.reserved import is_system
from magnetar.broker.errors import NamespaceNotFound
from magnetar.broker.operations.errors import NotForwarded
from magnetar.broker.operations.namespaces import namespace_record
from magnetar.broker.ownership.bundle import Bundle
from magnetar.protos.names import TopicName

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from magnetar.broker.broker import Broker
    from magnetar.metadata.model import BrokerRegistration
    from magnetar.protos.names import NamespaceName

T = TypeVar("T")

CALLS_MAX: Final = 16
"""The limit of concurrent requests to other brokers. Further requests wait."""

_THREADS: Final = ThreadPoolExecutor(CALLS_MAX, thread_name_prefix="forward")
"""Threads for requests to other brokers. With the few threads of asyncio.to_thread, a broker that
hangs would block the clients' schemas and the metrics until the requests time out."""

FORWARD_TIMEOUT_S: Final = 30.0
"""Time limit of one forwarded request. The administrator's request has 60 s, and may need several
forwarded requests."""

LISTS_MAX: Final = CALLS_MAX // 2
"""The limit of lists that one request fetches at once. So a broker that hangs leaves threads for
other requests."""

LISTS_TIMEOUT_S: Final = 20.0
"""Time limit of all lists of one request together."""

LIST_BYTES_MAX: Final = 16 << 20
"""The limit of one list: about 100,000 names of topics."""

_NAMES: Final = TypeAdapter(list[str])

_DONE: Final = (
    HTTPStatus.NO_CONTENT,
    HTTPStatus.NOT_FOUND,  # the topic or bundle was deleted meanwhile
    HTTPStatus.TEMPORARY_REDIRECT,  # the topic or bundle has moved meanwhile
)


async def in_thread(call: "Callable[..., T]", *arguments: object) -> T:
    """Run a blocking request to another broker in a thread."""
    loop = asyncio.get_running_loop()
    return await loop.run_in_executor(_THREADS, partial(call, *arguments))


async def forward(owner: "BrokerRegistration", method: str, path: str) -> None:
    """Send one request to `owner`. Raises NotForwarded if it fails, or its status is not in
    `_DONE`."""
    await in_thread(_send, owner.http_url, method, path)


async def open_elsewhere(broker: "Broker", name: "NamespaceName") -> list[str]:
    """Return the namespace's non-persistent topics that are open at other brokers, without system
    topics. Raises NotForwarded."""
    try:
        bundles = (await namespace_record(broker, name)).bundles
    except NamespaceNotFound:
        return []
    asked: list[tuple[str, str]] = []  # URL of a broker, and path
    for part in bundles.names:
        owner = await broker.owner_of(Bundle(name.tenant, name.namespace, part))
        if owner is not None and owner != broker.me:
            path = f"/admin/v2/non-persistent/{quote(name.tenant)}/{quote(name.namespace)}/{part}"
            asked.append((owner.http_url, path))
    found = await fetch_all(asked)
    return [it for it in found if not is_system(TopicName.parse(it))]


async def fetch_all(
    asked: "Sequence[tuple[str, str]]", *, timeout_s: float = LISTS_TIMEOUT_S
) -> list[str]:
    """Fetch the lists of names at these URLs and paths. Returns all names in one list. Raises
    NotForwarded for a failure, or if a list is missing after `timeout_s`."""
    room = asyncio.Semaphore(LISTS_MAX)
    waiting = dict.fromkeys(asked)
    found: list[str] = []
    failures: list[NotForwarded] = []

    async def fetch(url: str, path: str) -> None:
        try:
            async with room:
                found.extend(await in_thread(_fetch, url, path))
        except NotForwarded as error:
            failures.append(error)
        del waiting[url, path]

    try:
        async with asyncio.timeout(timeout_s), asyncio.TaskGroup() as group:
            for url, path in tuple(waiting):
                group.create_task(fetch(url, path))
    except TimeoutError:
        if waiting:  # otherwise the last answer arrived together with the timeout
            url, path = next(iter(waiting))
            why = f"was not answered within {timeout_s:g} s"
            raise NotForwarded(url, "GET", path, why) from None
    if failures:
        raise failures[0]
    return found


def _fetch(url: str, path: str) -> list[str]:
    address = urlsplit(url)
    connection = HTTPConnection(address.hostname or "", address.port, timeout=LISTS_TIMEOUT_S)
    try:
        connection.request("GET", path)
        reply = connection.getresponse()
        body = reply.read(LIST_BYTES_MAX + 1)
    except (OSError, HTTPException) as error:
        raise NotForwarded(url, "GET", path, f"failed: {error}") from error
    finally:
        connection.close()
    if reply.status == HTTPStatus.TEMPORARY_REDIRECT:
        return []  # the bundle has moved meanwhile, so its topics are closed
    if reply.status != HTTPStatus.OK:
        raise NotForwarded(url, "GET", path, f"was answered with status {reply.status}")
    if len(body) > LIST_BYTES_MAX:
        raise NotForwarded(url, "GET", path, f"was answered with more than {LIST_BYTES_MAX} bytes")
    try:
        return _NAMES.validate_json(body)
    except ValidationError:
        raise NotForwarded(url, "GET", path, "was not answered with a list of names") from None


def _send(url: str, method: str, path: str) -> None:
    address = urlsplit(url)
    connection = HTTPConnection(address.hostname or "", address.port, timeout=FORWARD_TIMEOUT_S)
    try:
        connection.request(method, path)
        status = connection.getresponse().status
    except (OSError, HTTPException) as error:
        raise NotForwarded(url, method, path, f"failed: {error}") from error
    finally:
        connection.close()
    if status not in _DONE:
        raise NotForwarded(url, method, path, f"was answered with status {status}")
