"""Requests to the admin ports of brokers. Any broker of a cluster carries a request out, or
redirects it to the broker that can.

The command tries several addresses in turn. It sends a request to the next address only if that is
safe: no connection was made, the server is not a broker, or the request changes nothing (GET).
"""

from __future__ import annotations

import json
from http.client import (
    BadStatusLine,
    HTTPConnection,
    HTTPException,
    HTTPResponse,
    HTTPSConnection,
    IncompleteRead,
)
from typing import TYPE_CHECKING, Annotated, Any, Final
from urllib.parse import quote, urlencode, urlsplit

import typer

from magnetar.cli.client import fail
from magnetar.protos.errors import InvalidTopicName
from magnetar.protos.names import TopicName

if TYPE_CHECKING:
    from collections.abc import Mapping

READ_TIMEOUT_S: Final = 10.0  # for GET, which another broker may answer
CHANGE_TIMEOUT_S: Final = 65.0  # a broker ends a request after 60 s; until then it may succeed
CONNECT_S: Final = 3.0  # a user waits, and there may be other addresses to try
REDIRECTS_MAX: Final = 5  # a topic may move meanwhile, and brokers then redirect to each other
ANSWER_BYTES_MAX: Final = 64 << 20  # 500,000 topic names; a peeked entry has at most 22 MB
USAGE: Final = 2

AdminUrl = Annotated[
    str,
    typer.Option(
        "--admin-url",
        envvar="MAGNETAR_ADMIN_URL",
        help="HTTP ports of brokers, tried in turn: http://host:port[,host2:port]",
    ),
]
DEFAULT_ADMIN_URL: Final = "http://localhost:8080"
Json = Annotated[bool, typer.Option("--json", help="print JSON, for programs")]
Topic = Annotated[str, typer.Argument(help="for example greetings, or tenant/namespace/topic")]

_ANOTHER: Final = "--admin-url or MAGNETAR_ADMIN_URL sets another address"


class Refused(Exception):
    """The broker answered that it did not carry out the request. `error` names the error's kind."""

    def __init__(self, status: int, reason: str, error: str, advice: str) -> None:
        super().__init__(f"{reason} (HTTP status {status}){'; ' if advice else ''}{advice}")
        self.error = error


class NoConnection(Exception):
    """The request was not sent."""


class NoAnswer(Exception):
    """The request was sent, but no whole answer came: its outcome is unknown."""


class NotABroker(Exception):
    """The server that answered does not speak HTTP, or is not the admin port of a broker."""


def ask(urls: str, method: str, path: str, body: object = None) -> Any:
    """Return the JSON of a broker's answer; None: the answer has no body. Ends the command if no
    broker answers. Raises Refused.
    """
    brokers = parse_urls(urls)
    problems: list[str] = []
    for broker in brokers:
        try:
            return _follow(broker, method, path, body)
        except NoConnection as error:
            problems.append(str(error))
        except (NoAnswer, NotABroker) as error:
            if method != "GET" and isinstance(error, NoAnswer):
                fail(f"{error}. Whether the request was carried out is unknown")
            problems.append(str(error))
    if len(brokers) == 1:
        fail(f"{problems[0]}. {_advice_for(problems[0])}")
    for problem in problems:
        typer.echo(f"Warning: {problem}", err=True)
    fail(f"none of {len(brokers)} brokers answered. {_advice_for(problems[0])}")


def command(urls: str, method: str, path: str, body: object = None) -> Any:
    """Like `ask`, but a refusal also ends the command."""
    try:
        return ask(urls, method, path, body)
    except Refused as error:
        fail(str(error))


def topic_path(topic: str) -> str:
    """Return the path of a topic below the address of a broker. Ends the command for an invalid
    name."""
    try:
        name = TopicName.parse(topic)
    except InvalidTopicName as error:
        fail(str(error), code=USAGE)
    return "/admin/v2/" + "/".join(
        quoted(part) for part in (name.domain, name.tenant, name.namespace, name.topic)
    )


def quoted(part: str) -> str:
    """Return one part of a path, percent-encoded. Ends the command for a part that is not UTF-8."""
    try:
        return quote(part, safe="")
    except UnicodeEncodeError:
        fail(f"{part!r} is not UTF-8", code=USAGE)


def query_of(parameters: Mapping[str, object]) -> str:
    """Return a query string, without the parameters that are None. Ends the command for a value
    that is not UTF-8."""
    given = {name: value for name, value in parameters.items() if value is not None}
    try:
        return urlencode(given)
    except UnicodeEncodeError:
        fail(f"{given} is not UTF-8", code=USAGE)


def parse_urls(text: str) -> list[str]:
    """Parse `http://a:1,b:2` or `http://a:1,http://b:2` into a list of URLs without a slash at the
    end. Ends the command for an invalid URL."""
    urls: list[str] = []
    scheme = ""
    for part in text.split(","):
        found, separator, address = part.strip().rpartition("://")
        scheme = found if separator else scheme
        url = f"{scheme}://{address.rstrip('/')}"
        if scheme not in ("http", "https"):
            fail(f"--admin-url: {part} does not begin with http://", code=USAGE)
        try:
            urlsplit(url).port  # noqa: B018 (raises)
        except ValueError as error:
            fail(f"--admin-url: {url}: {error}", code=USAGE)
        if not urlsplit(url).hostname:
            fail(f"--admin-url: {part} names no host", code=USAGE)
        urls.append(url)
    return urls


def _follow(broker: str, method: str, path: str, body: object) -> Any:
    url = broker + path
    for _ in range(REDIRECTS_MAX):
        status, location, answer = _send(url, method, body)
        if status != 307:
            return _read(url, status, answer)
        if urlsplit(location).scheme not in ("http", "https"):
            raise NotABroker(f"{url} redirects to {location!r}, which is not a URL")
        url = location
    fail(f"{broker} and others redirected {REDIRECTS_MAX} times: the topic is moving; try again")


def _send(url: str, method: str, body: object) -> tuple[int, str, bytes]:
    """Send a request. Returns the status, the URL of a redirect ("": none) and the body. Raises
    NoConnection, NoAnswer, NotABroker."""
    parts = urlsplit(url)
    kind = HTTPSConnection if parts.scheme == "https" else HTTPConnection
    address = f"{parts.scheme}://{parts.netloc}"
    connection = kind(parts.hostname or "", parts.port, timeout=CONNECT_S)
    try:
        try:
            connection.connect()
        except OSError as error:
            reason = error.strerror or str(error)
            raise NoConnection(f"cannot reach {address}: {reason}") from error
        timeout_s = READ_TIMEOUT_S if method == "GET" else CHANGE_TIMEOUT_S
        connection.sock.settimeout(timeout_s)
        target = f"{parts.path}?{parts.query}" if parts.query else parts.path
        headers = {} if body is None else {"content-type": "application/json"}
        try:
            data = None if body is None else json.dumps(body)
            connection.request(method, target, data, headers)
            reply = connection.getresponse()
            return reply.status, reply.headers.get("location", ""), _bounded(reply, address)
        except TimeoutError as error:
            raise NoAnswer(f"{address} did not answer within {timeout_s:g} s") from error
        except OSError as error:
            raise NoAnswer(f"{address} ended the connection without an answer") from error
        except HTTPException as error:
            if _is_cut(error):
                raise NoAnswer(_cut(address)) from error
            raise NotABroker(_strange(address)) from error
    finally:
        connection.close()


def _bounded(reply: HTTPResponse, address: str) -> bytes:
    """Return the body of an answer. Raises NoAnswer if the connection ended before the end of the
    headers or of the body."""
    answer = reply.read(ANSWER_BYTES_MAX + 1)
    if len(answer) > ANSWER_BYTES_MAX:
        fail(f"the answer of {address} is larger than {ANSWER_BYTES_MAX} bytes")
    # http.client counts `length` down to the end of the body. None: the headers have no length. If
    # the connection ends within the headers, http.client reports this as the end of the headers.
    if reply.length or (reply.length is None and not reply.chunked and not answer):
        raise NoAnswer(_cut(address))
    return answer


def _is_cut(error: HTTPException) -> bool:
    """Return whether the connection ended within the first line or within a chunk of the body."""
    if isinstance(error, BadStatusLine):
        line = str(error)
        return "HTTP/".startswith(line[:5]) and not line.endswith("\n")
    return isinstance(error, IncompleteRead)


def _cut(address: str) -> str:
    return f"{address} ended the connection within its answer"


def _read(url: str, status: int, answer: bytes) -> Any:
    if status == 204:
        return None
    try:
        found = json.loads(answer)
        if status == 200:
            return found
        refusal = found["reason"], found.get("error", ""), found.get("advice", "")
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        if status >= 500:  # a proxy between here and the broker may have passed the request on
            raise NoAnswer(f"{_strange(url)} (HTTP status {status})") from error
        raise NotABroker(_strange(url)) from error
    raise Refused(status, *refusal)


def _strange(address: str) -> str:
    return f"{address} did not answer like the HTTP port of a broker"


def _advice_for(problem: str) -> str:
    if problem.startswith("cannot reach"):
        return f"Is a server running? `magnetar standalone --data-dir DIR` starts one; {_ANOTHER}"
    return _ANOTHER
