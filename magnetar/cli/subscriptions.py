"""`magnetar subscriptions`: list, create, delete, skip, expire, reset and explain."""

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
    topic_path,
)
from magnetar.cli.delivery import Subscription, add_delivery, subscription_path
from magnetar.cli.help import App
from magnetar.cli.output import print_json

INT64_MAX: Final = (1 << 63) - 1
AGE_S_MAX: Final = 1 << 40  # the broker's limit
EARLIEST: Final = {"ledgerId": -1, "entryId": -1}
LATEST: Final = {"ledgerId": INT64_MAX, "entryId": INT64_MAX}

_MESSAGE_ID = re.compile(r"(\d{1,19}):(\d{1,19})(?::(\d{1,9}))?")
_AGO = re.compile(r"(\d{1,9})([smhdw])")
_SECONDS: Final = {"s": 1, "m": 60, "h": 3_600, "d": 86_400, "w": 604_800}


def add_to(app: typer.Typer) -> None:
    subscriptions = App(
        help="List, create, delete, skip, expire, reset and explain the subscriptions of a topic.",
        no_args_is_help=True,
    )
    subscriptions.callback()(lambda: None)
    subscriptions.command("list")(list_subscriptions)
    subscriptions.command("create")(create)
    subscriptions.command("delete")(delete)
    subscriptions.command("skip")(skip)
    subscriptions.command("clear-backlog")(clear_backlog)
    subscriptions.command("expire")(expire)
    subscriptions.command("reset")(reset)
    add_delivery(subscriptions)
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


def create(
    topic: Topic,
    subscription: Subscription,
    start: Annotated[
        str,
        typer.Option("--message-id", "-m", help="earliest, latest, or a message id (3:15)"),
    ] = "latest",
    admin_url: AdminUrl = DEFAULT_ADMIN_URL,
) -> None:
    """Create a subscription, and the topic if it does not exist."""
    target = parse_message_id(start)
    if target is None:
        raise typer.BadParameter(
            f"{start!r} is not earliest, latest or a message id such as 3:15",
            param_hint="--message-id",
        )
    command(admin_url, "PUT", subscription_path(topic, subscription), target)
    typer.echo(f"created {subscription} of {topic} at {start}")


def delete(
    topic: Topic,
    subscription: Subscription,
    force: Annotated[bool, typer.Option("--force", help="disconnect its consumers")] = False,
    admin_url: AdminUrl = DEFAULT_ADMIN_URL,
) -> None:
    """Delete a subscription and drop its backlog."""
    path = subscription_path(topic, subscription)
    command(admin_url, "DELETE", f"{path}?force={'true' if force else 'false'}")
    typer.echo(f"deleted {subscription} of {topic}")


def reset(
    topic: Topic,
    subscription: Subscription,
    to: Annotated[
        str,
        typer.Option(
            "--to",
            help="earliest, latest, a message id (3:15, 3:15:2), how long ago (10m, 2h, 1d), or a"
            " time (2026-01-31T10:00:00Z)",
        ),
    ],
    admin_url: AdminUrl = DEFAULT_ADMIN_URL,
) -> None:
    """Reset a subscription to a position: it continues with the message at this position.

    The broker disconnects the consumers of the subscription, and they reconnect by themselves. A
    message id with a third number (3:15:2) names a message of a batch.
    """
    target = parse_target(to, now=datetime.now(UTC))
    path = f"{subscription_path(topic, subscription)}/resetcursor"
    if isinstance(target, int):
        command(admin_url, "POST", f"{path}/{target}")
    else:
        command(admin_url, "POST", path, target)
    typer.echo(f"moved {subscription} of {topic} to {to}")


def skip(
    topic: Topic,
    subscription: Subscription,
    count: Annotated[
        int | None,
        typer.Option("--count", "-n", min=1, max=INT64_MAX, help="entries; a batch is one entry"),
    ] = None,
    everything: Annotated[
        bool, typer.Option("--all", help="skip the whole backlog, as clear-backlog does")
    ] = False,
    admin_url: AdminUrl = DEFAULT_ADMIN_URL,
) -> None:
    """Acknowledge the first entries of a subscription's backlog."""
    if everything == (count is not None):
        raise typer.BadParameter("give either --count or --all", param_hint="--count")
    if everything:
        clear_backlog(topic, subscription, admin_url)
        return
    command(admin_url, "POST", f"{subscription_path(topic, subscription)}/skip/{count}")
    typer.echo(f"skipped up to {count} entries of {subscription} of {topic}")


def clear_backlog(
    topic: Topic, subscription: Subscription, admin_url: AdminUrl = DEFAULT_ADMIN_URL
) -> None:
    """Acknowledge the whole backlog of a subscription."""
    command(admin_url, "POST", f"{subscription_path(topic, subscription)}/skip_all")
    typer.echo(f"cleared the backlog of {subscription} of {topic}")


def expire(
    topic: Topic,
    age: Annotated[str, typer.Option("--older-than", help="an age: 30s, 10m, 2h, 1d, or seconds")],
    subscription: Annotated[
        str | None,
        typer.Argument(help="name of the subscription; without it, all subscriptions"),
    ] = None,
    admin_url: AdminUrl = DEFAULT_ADMIN_URL,
) -> None:
    """Acknowledge the messages that are older than an age."""
    seconds = parse_age(age)
    if subscription is None:
        path = f"{topic_path(topic)}/all_subscription"
    else:
        path = subscription_path(topic, subscription)
    command(admin_url, "POST", f"{path}/expireMessages/{seconds}")
    of = "all subscriptions" if subscription is None else subscription
    typer.echo(f"expired the messages of {of} of {topic} that are older than {age}")


def parse_age(text: str) -> int:
    """Parse an age into seconds. Raises BadParameter."""
    found = _AGO.fullmatch(text if not text.isdigit() else f"{text}s")
    seconds = int(found[1]) * _SECONDS[found[2]] if found is not None else 0
    if not 1 <= seconds <= AGE_S_MAX:
        raise typer.BadParameter(f"{text!r} is not an age such as 10m", param_hint="--older-than")
    return seconds


def parse_message_id(text: str) -> dict[str, int] | None:
    """Parse a message id, for the body of a request. None: `text` is not a message id."""
    if text in ("earliest", "latest"):
        return EARLIEST if text == "earliest" else LATEST
    found = _MESSAGE_ID.fullmatch(text)
    if found is None:
        return None
    target = {"ledgerId": int(found[1]), "entryId": int(found[2])}
    return target if found[3] is None else {**target, "batchIndex": int(found[3])}


def parse_target(text: str, *, now: datetime) -> int | dict[str, int]:
    """Parse the target of a reset: a publish time in milliseconds since 1970, or a message id for
    the body of the request. Raises BadParameter."""
    if (target := parse_message_id(text)) is not None:
        return target
    try:
        if (found := _AGO.fullmatch(text)) is not None:
            time = now - timedelta(seconds=int(found[1]) * _SECONDS[found[2]])
        else:
            time = datetime.fromisoformat(text)
        if time.tzinfo is None:
            time = time.astimezone()  # without a zone: local time
    except (ValueError, OverflowError):
        raise typer.BadParameter(
            f"{text!r} is not earliest, latest, a message id such as 3:15, a span such as 10m, or"
            " a time such as 2026-01-31T10:00:00Z",
            param_hint="--to",
        ) from None
    return max(int(time.timestamp() * 1000), 0)
