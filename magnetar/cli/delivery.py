"""`magnetar subscriptions explain | pending | key`: show why a message is not delivered."""

from __future__ import annotations

from typing import Annotated, Any, Final

import typer

from magnetar.cli.admin import (
    DEFAULT_ADMIN_URL,
    AdminUrl,
    Json,
    Topic,
    command,
    query_of,
    quoted,
    topic_path,
)
from magnetar.cli.output import print_json, print_table

PAGE_ENTRIES_MAX: Final = 100  # the entries of one request; the broker refuses more

Subscription = Annotated[str, typer.Argument(help="name of the subscription")]


def subscription_path(topic: str, subscription: str) -> str:
    """Return the path of a subscription below the address of a broker."""
    return f"{topic_path(topic)}/subscription/{quoted(subscription)}"


def add_delivery(app: typer.Typer) -> None:
    app.command("explain")(explain)
    app.command("pending")(pending)
    app.command("key")(key)


def explain(
    topic: Topic,
    subscription: Subscription,
    as_json: Json = False,
    admin_url: AdminUrl = DEFAULT_ADMIN_URL,
) -> None:
    """Print every reason why a subscription delivers no message now."""
    found = command(admin_url, "GET", f"{subscription_path(topic, subscription)}/explain")
    if as_json:
        print_json(found)
        return
    typer.echo(
        f"{found['subscription']} of {found['topic']}: type {found['type']},"
        f" consumers {found['consumers']}, backlog {found['backlog']} entries,"
        f" unacknowledged {found['unackedMessages']} messages"
    )
    _print_reasons(found["reasons"])
    if not found["reasons"]:
        typer.echo("nothing stops the delivery")


def pending(
    topic: Topic,
    subscription: Subscription,
    consumer: Annotated[
        str | None, typer.Option("--consumer", "-c", help="only messages of this consumer")
    ] = None,
    of_hash: Annotated[
        int | None,
        typer.Option("--hash", min=1, max=65_535, help="only keys of this hash (Key_Shared)"),
    ] = None,
    after: Annotated[
        str | None, typer.Option("--after", help="begin after this message id (3:15)")
    ] = None,
    limit: Annotated[
        int, typer.Option("--limit", "-n", min=1, max=PAGE_ENTRIES_MAX, help="entries to show")
    ] = 20,
    as_json: Json = False,
    admin_url: AdminUrl = DEFAULT_ADMIN_URL,
) -> None:
    """Print the messages that consumers have received and not acknowledged."""
    wanted = {"consumer": consumer, "hash": of_hash, "after": after, "limit": limit}
    path = f"{subscription_path(topic, subscription)}/pending?{query_of(wanted)}"
    found = command(admin_url, "GET", path)
    if as_json:
        print_json(found)
        return
    _print_pending(found["entries"])
    if not found["entries"]:
        typer.echo("no message is pending")
    if found["nextAfter"] is not None:
        typer.echo(f"more: --after {found['nextAfter']}")


def key(
    topic: Topic,
    subscription: Subscription,
    key_text: Annotated[str, typer.Argument(metavar="KEY", help="a partition or ordering key")],
    base64: Annotated[bool, typer.Option("--base64", help="the key is bytes in base64")] = False,
    as_json: Json = False,
    admin_url: AdminUrl = DEFAULT_ADMIN_URL,
) -> None:
    """Print the hash of a key, the consumer that gets its messages, and why messages wait."""
    query = query_of({"key": key_text, "base64": "true" if base64 else "false"})
    found = command(admin_url, "GET", f"{subscription_path(topic, subscription)}/key?{query}")
    if as_json:
        print_json(found)
        return
    typer.echo(
        f"key {found['key']} has hash {found['hash']};"
        f" consumer {found['consumer'] or '-'} gets its new messages"
    )
    if found["drainingConsumer"] is not None:
        typer.echo(f"consumer {found['drainingConsumer']} had the hash and drains it")
    typer.echo(f"pending {found['pending']} entries, waiting {found['waiting']}")
    _print_reasons(found["blockedBy"])
    _print_pending(found["oldestPending"])


def _print_reasons(reasons: list[dict[str, Any]]) -> None:
    for reason in reasons:
        consumer = f" (consumer {reason['consumer']})" if reason["consumer"] else ""
        until = reason["nextChangeMs"]
        changes = "" if until is None else f"; changes in {until / 1_000:.1f} s"
        typer.echo(f"- {reason['why']}{consumer}: {reason['sentence']}{changes}")


def _print_pending(entries: list[dict[str, Any]]) -> None:
    if entries:
        print_table(
            ("message id", "consumer", "hash", "key", "age", "redeliveries", "problem"),
            (
                (
                    each["messageId"],
                    each["consumer"],
                    str(each["hash"] or "-"),
                    each["key"] or each["orderingKey"] or "-",
                    "-" if each["ageMs"] is None else f"{each['ageMs'] / 1_000:.1f}s",
                    str(each["redeliveryCount"]),
                    each["problem"] or "",
                )
                for each in entries
            ),
        )
