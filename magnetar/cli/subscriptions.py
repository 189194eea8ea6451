"""`magnetar subscriptions`: list, delete and move the subscriptions of a topic."""

from __future__ import annotations

import re
from datetime import UTC, datetime, timedelta
from typing import Annotated, Final

import typer

from magnetar.cli.admin import (
    DEFAULT_ADMIN_URL,
    AdminUrl,
    Json,
    Topic,
    command,
    quoted,
    topic_path,
)
from magnetar.cli.help import App
from magnetar.cli.output import print_json

INT64_MAX: Final = (1 << 63) - 1
EARLIEST: Final = {"ledgerId": -1, "entryId": -1}
LATEST: Final = {"ledgerId": INT64_MAX, "entryId": INT64_MAX}

Subscription = Annotated[str, typer.Argument(help="its name")]

_MESSAGE_ID = re.compile(r"(\d{1,19}):(\d{1,19})(:\d{1,9})?")
_AGO = re.compile(r"(\d{1,9})([smhdw])")
_UNITS: Final = {"s": "seconds", "m": "minutes", "h": "hours", "d": "days", "w": "weeks"}


def add_to(app: typer.Typer) -> None:
    subscriptions = App(
        help="List, delete and move the subscriptions of a topic.", no_args_is_help=True
    )
    subscriptions.callback()(lambda: None)
    subscriptions.command("list")(list_subscriptions)
    subscriptions.command("delete")(delete)
    subscriptions.command("reset")(reset)
    app.add_typer(subscriptions, name="subscriptions")


def list_subscriptions(
    topic: Topic, as_json: Json = False, admin_url: AdminUrl = DEFAULT_ADMIN_URL
) -> None:
    """List the subscriptions of a topic."""
    found = command(admin_url, "GET", f"{topic_path(topic)}/subscriptions")
    if as_json:
        print_json(found)
    else:
        for name in found:
            typer.echo(name)
        if not found:
            typer.echo(f"no subscriptions of {topic}", err=True)


def delete(
    topic: Topic,
    subscription: Subscription,
    force: Annotated[bool, typer.Option("--force", help="disconnect its consumers")] = False,
    admin_url: AdminUrl = DEFAULT_ADMIN_URL,
) -> None:
    """Delete a subscription and drop its backlog."""
    path = _path(topic, subscription)
    command(admin_url, "DELETE", f"{path}?force={'true' if force else 'false'}")
    typer.echo(f"deleted {subscription} of {topic}")


def reset(
    topic: Topic,
    subscription: Subscription,
    to: Annotated[
        str,
        typer.Option(
            "--to",
            help="earliest, latest, a message id (3:15), how long ago (10m, 2h, 1d), or a time"
            " (2026-01-31T10:00:00Z)",
        ),
    ],
    admin_url: AdminUrl = DEFAULT_ADMIN_URL,
) -> None:
    """Move a subscription: its next message is the one at this position.

    The broker disconnects its consumers; they reconnect without help. In a batch, delivery starts
    with the first message of the batch.
    """
    target = parse_target(to, now=datetime.now(UTC))
    path = f"{_path(topic, subscription)}/resetcursor"
    if isinstance(target, int):
        command(admin_url, "POST", f"{path}/{target}")
    else:
        command(admin_url, "POST", path, target)
    typer.echo(f"moved {subscription} of {topic} to {to}")


def parse_target(text: str, *, now: datetime) -> int | dict[str, int]:
    """A publish time in milliseconds, or a message id for the request's body.

    Raises BadParameter.
    """
    if text in ("earliest", "latest"):
        return EARLIEST if text == "earliest" else LATEST
    if (found := _MESSAGE_ID.fullmatch(text)) is not None:
        return {"ledgerId": int(found[1]), "entryId": int(found[2])}
    try:
        if (found := _AGO.fullmatch(text)) is not None:
            time = now - timedelta(**{_UNITS[found[2]]: int(found[1])})
        else:
            time = datetime.fromisoformat(text)
    except (ValueError, OverflowError):
        raise typer.BadParameter(
            f"{text!r} is not earliest, latest, a message id such as 3:15, a span such as 10m, or"
            " a time such as 2026-01-31T10:00:00Z",
            param_hint="--to",
        ) from None
    if time.tzinfo is None:
        time = time.astimezone()  # as the clock on the wall says
    return max(int(time.timestamp() * 1000), 0)


def _path(topic: str, subscription: str) -> str:
    return f"{topic_path(topic)}/subscription/{quoted(subscription)}"
