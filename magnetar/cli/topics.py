"""`magnetar topics`: questions to the admin port."""

from __future__ import annotations

import http.client
import json
import urllib.error
import urllib.request
from typing import Annotated, Any, Final
from urllib.parse import quote

import typer

from magnetar.cli.client import fail
from magnetar.protos.errors import InvalidTopicName
from magnetar.protos.names import Domain, TopicName

TIMEOUT_S: Final = 10.0
USAGE: Final = 2

AdminUrl = Annotated[
    str,
    typer.Option(
        "--admin-url",
        envvar="MAGNETAR_ADMIN_URL",
        help="HTTP port of any broker; it redirects to the one that knows",
    ),
]
DEFAULT_ADMIN_URL: Final = "http://localhost:8080"


def add_to(app: typer.Typer) -> None:
    topics = typer.Typer(help="Look at topics.", rich_markup_mode=None)
    topics.callback()(lambda: None)
    topics.command("stats")(stats)
    app.add_typer(topics, name="topics")


def stats(
    topic: Annotated[str, typer.Argument(help="for example greetings, or tenant/namespace/topic")],
    admin_url: AdminUrl = DEFAULT_ADMIN_URL,
) -> None:
    """Print a topic's statistics as JSON: producers, subscriptions, backlogs, rates."""
    try:
        name = TopicName.parse(topic)
    except InvalidTopicName as error:
        fail(str(error), code=USAGE)
    if name.domain != Domain.PERSISTENT:
        fail(f"{name}: only persistent topics have statistics", code=USAGE)
    path = "/".join(quote(part, safe="") for part in (name.tenant, name.namespace, name.topic))
    found = _get(f"{admin_url.rstrip('/')}/admin/v2/persistent/{path}/stats")
    typer.echo(json.dumps(found, indent=2))


def _get(url: str) -> Any:
    """The JSON there; redirects are followed."""
    if not url.startswith(("http://", "https://")):
        fail(f"--admin-url: {url} does not begin with http://", code=USAGE)
    try:
        with urllib.request.urlopen(url, timeout=TIMEOUT_S) as reply:
            return json.load(reply)
    except urllib.error.HTTPError as error:
        fail(_reason(error))
    except urllib.error.URLError as error:
        reason = getattr(error.reason, "strerror", None) or error.reason
        fail(
            f"cannot reach {url}: {reason}. Is a server running? `magnetar standalone --data-dir"
            " DIR` starts one; --admin-url or MAGNETAR_ADMIN_URL names another"
        )
    except (OSError, http.client.HTTPException, ValueError):
        fail(
            f"{url} did not answer as the HTTP port of a broker does: --admin-url or"
            " MAGNETAR_ADMIN_URL names another"
        )


def _reason(error: urllib.error.HTTPError) -> str:
    try:
        detail = json.load(error)["detail"]
    except (ValueError, KeyError, TypeError):
        detail = error.reason
    return f"{detail} (HTTP status {error.code})"
