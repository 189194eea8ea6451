"""`magnetar topics`: list, create, delete, look at, terminate and truncate topics."""

from __future__ import annotations

from base64 import b64decode
from typing import Annotated, Any, Final

import typer

from magnetar.cli.admin import (
    DEFAULT_ADMIN_URL,
    USAGE,
    AdminUrl,
    Json,
    Refused,
    Topic,
    ask,
    command,
    quoted,
    topic_path,
)
from magnetar.cli.client import fail
from magnetar.cli.help import App
from magnetar.cli.output import print_json, print_table, size_of, time_of
from magnetar.cli.policies import add_topic_policies
from magnetar.protos.errors import InvalidNamespaceName
from magnetar.protos.names import DEFAULT_NAMESPACE, NamespaceName

PEEK_MAX: Final = 1_000  # each entry costs one request
RANGES_PRINTED: Final = 5  # the ranges of each cursor; --json prints all

Namespace = Annotated[str, typer.Argument(help="as tenant/namespace")]
Partitions = Annotated[int, typer.Option("--partitions", "-p", min=1, help="number of partitions")]


def add_to(app: typer.Typer) -> None:
    topics = App(
        help="List, create, delete, look at, terminate and truncate topics.", no_args_is_help=True
    )
    topics.callback()(lambda: None)
    topics.command("list")(list_topics)
    topics.command("create")(create)
    topics.command("delete")(delete)
    topics.command("peek")(peek)
    topics.command("stats")(stats)
    topics.command("stats-internal")(stats_internal)
    topics.command("terminate")(terminate)
    topics.command("partitioned-terminate")(partitioned_terminate)
    topics.command("truncate")(truncate)
    topics.command("lookup")(lookup)
    topics.command("unload")(unload)
    add_topic_policies(topics)
    topics.command("create-partitioned-topic")(create_partitioned_topic)
    topics.command("update-partitioned-topic")(update_partitioned_topic)
    topics.command("get-partitioned-topic-metadata")(get_partitioned_topic_metadata)
    topics.command("list-partitioned-topics")(list_partitioned_topics)
    topics.command("delete-partitioned-topic")(delete_partitioned_topic)
    topics.command("partitioned-stats")(partitioned_stats)
    app.add_typer(topics, name="topics")


def list_topics(
    namespace: Namespace = str(DEFAULT_NAMESPACE),
    include_system_topic: Annotated[
        bool, typer.Option("--include-system-topic", help="list system topics, too")
    ] = False,
    as_json: Json = False,
    admin_url: AdminUrl = DEFAULT_ADMIN_URL,
) -> None:
    """List the topics of a namespace, including partitions."""
    query = "?includeSystemTopic=true" if include_system_topic else ""
    found = command(admin_url, "GET", f"{namespace_path(namespace)}{query}")
    _print_names(found, as_json)
    if not found and not as_json:
        typer.echo(f"no topics in {namespace}", err=True)


def _print_names(names: list[str], as_json: bool) -> None:
    if as_json:
        print_json(names)
    else:
        for name in names:
            typer.echo(name)


def namespace_path(namespace: str) -> str:
    """Return the path of a namespace's persistent topics. Ends the command for an invalid name."""
    try:
        name = NamespaceName.parse(namespace)
    except InvalidNamespaceName as error:
        fail(str(error), code=USAGE)
    return f"/admin/v2/persistent/{quoted(name.tenant)}/{quoted(name.namespace)}"


def create(
    topic: Topic,
    partitions: Annotated[
        int | None,
        typer.Option(
            "--partitions", "-p", min=1, help="create a partitioned topic with this many partitions"
        ),
    ] = None,
    admin_url: AdminUrl = DEFAULT_ADMIN_URL,
) -> None:
    """Create a topic. Producers and consumers also create topics when they first use them."""
    if partitions is not None:
        create_partitioned_topic(topic, partitions, admin_url)
        return
    command(admin_url, "PUT", topic_path(topic))
    typer.echo(f"created {topic}")


def create_partitioned_topic(
    topic: Topic, partitions: Partitions, admin_url: AdminUrl = DEFAULT_ADMIN_URL
) -> None:
    """Create a partitioned topic. The brokers share its partitions among themselves."""
    command(admin_url, "PUT", f"{topic_path(topic)}/partitions", partitions)
    typer.echo(f"created {topic} with {partitions} partitions")


def update_partitioned_topic(
    topic: Topic, partitions: Partitions, admin_url: AdminUrl = DEFAULT_ADMIN_URL
) -> None:
    """Add partitions to a topic. Keys may move to other partitions; the number never shrinks."""
    command(admin_url, "POST", f"{topic_path(topic)}/partitions", partitions)
    typer.echo(f"{topic} has {partitions} partitions")


def get_partitioned_topic_metadata(
    topic: Topic, as_json: Json = False, admin_url: AdminUrl = DEFAULT_ADMIN_URL
) -> None:
    """Print the number of partitions of a topic; 0: the topic is not partitioned."""
    found = command(admin_url, "GET", f"{topic_path(topic)}/partitions")
    if as_json:
        print_json(found)
    else:
        typer.echo(f"partitions: {found['partitions']}")


def list_partitioned_topics(
    namespace: Namespace = str(DEFAULT_NAMESPACE),
    as_json: Json = False,
    admin_url: AdminUrl = DEFAULT_ADMIN_URL,
) -> None:
    """List the partitioned topics of a namespace."""
    _print_names(command(admin_url, "GET", f"{namespace_path(namespace)}/partitioned"), as_json)


def delete_partitioned_topic(
    topic: Topic,
    force: Annotated[
        bool, typer.Option("--force", "-f", help="disconnect producers and consumers")
    ] = False,
    admin_url: AdminUrl = DEFAULT_ADMIN_URL,
) -> None:
    """Delete a partitioned topic with all its partitions and messages."""
    query = "?force=true" if force else ""
    command(admin_url, "DELETE", f"{topic_path(topic)}/partitions{query}")
    typer.echo(f"deleted {topic}")


def partitioned_stats(
    topic: Topic,
    per_partition: Annotated[
        bool, typer.Option("--per-partition", help="print each partition, too")
    ] = False,
    as_json: Json = False,
    admin_url: AdminUrl = DEFAULT_ADMIN_URL,
) -> None:
    """Print the sums of the statistics of all partitions."""
    query = f"perPartition={'true' if per_partition else 'false'}"
    found = command(admin_url, "GET", f"{topic_path(topic)}/partitioned-stats?{query}")
    if as_json:
        print_json(found)
        return
    typer.echo(f"partitions: {found['metadata']['partitions']}")
    _print_stats(found)
    for name, part in found["partitions"].items():
        typer.echo(f"\n{name}")
        _print_stats(part)


def delete(
    topic: Topic,
    force: Annotated[
        bool, typer.Option("--force", help="disconnect its producers and consumers")
    ] = False,
    admin_url: AdminUrl = DEFAULT_ADMIN_URL,
) -> None:
    """Delete a topic with its messages and subscriptions."""
    command(admin_url, "DELETE", f"{topic_path(topic)}?force={'true' if force else 'false'}")
    typer.echo(f"deleted {topic}")


def lookup(topic: Topic, admin_url: AdminUrl = DEFAULT_ADMIN_URL) -> None:
    """Print the broker that serves a topic, as JSON."""
    path = topic_path(topic).removeprefix("/admin/v2")
    print_json(command(admin_url, "GET", f"/lookup/v2/topic{path}"))


def unload(topic: Topic, admin_url: AdminUrl = DEFAULT_ADMIN_URL) -> None:
    """Close a topic at its broker. Its clients reconnect and open it again."""
    command(admin_url, "PUT", f"{topic_path(topic)}/unload")
    typer.echo(f"unloaded {topic}")


def peek(
    topic: Topic,
    subscription: Annotated[
        str, typer.Option("--subscription-name", "-s", help="subscription whose backlog is shown")
    ],
    count: Annotated[
        int, typer.Option("--count", "-n", min=1, max=PEEK_MAX, help="messages to show")
    ] = 1,
    as_json: Json = False,
    admin_url: AdminUrl = DEFAULT_ADMIN_URL,
) -> None:
    """Print the next messages of a subscription's backlog. They stay in the backlog."""
    one = f"{topic_path(topic)}/subscription/{quoted(subscription)}"
    messages: list[dict[str, Any]] = []
    number = 1
    while len(messages) < count:
        try:
            messages += ask(admin_url, "GET", f"{one}/position/{number}")
        except Refused as error:
            if error.error == "MessageNotFound":
                break
            fail(str(error))
        number += 1
    del messages[count:]
    if as_json:
        print_json(messages)
        return
    for message in messages:
        typer.echo(describe(message))
    if not messages:
        typer.echo(f"the backlog of {subscription} is empty")


def describe(message: dict[str, Any]) -> str:
    """Describe a message in the form of `magnetar consume`; bytes that are not UTF-8 appear as
    escapes."""
    properties = ", ".join(f"{name}={value}" for name, value in message["properties"].items())
    if message["payload"] is None:
        content = f"not shown: {message['problem']}"
    else:
        content = b64decode(message["payload"]).decode(errors="backslashreplace")
    return (
        f"----- message {message['messageId']}, published {time_of(message['publishTime'])} -----\n"
        f"key:[{message['key'] or 'null'}], properties:[{properties}], content:{content}"
    )


def stats(topic: Topic, as_json: Json = False, admin_url: AdminUrl = DEFAULT_ADMIN_URL) -> None:
    """Print a topic's statistics: rates, backlogs, subscriptions, producers."""
    found = command(admin_url, "GET", f"{topic_path(topic)}/stats")
    if as_json:
        print_json(found)
    else:
        _print_stats(found)


def _print_stats(found: dict[str, Any]) -> None:
    rows = [_flow("in", found, "In"), _flow("out", found, "Out")]
    if found["managedLedger"] is None:  # the topic is not persistent
        dropped = str(found["msgDropCount"])
        rows.append(("dropped", f"{found['msgDropRate']:.1f}/s", "", dropped, ""))
    else:
        rows.append(("stored", "", "", str(found["msgCount"]), size_of(found["storageSize"])))
    print_table(("", "rate", "throughput", "messages", "bytes"), rows)
    if trouble := (found["managedLedger"] or {}).get("trouble"):
        typer.echo(f"trouble: {trouble}")
    if found["publishers"]:
        typer.echo()
        print_table(
            ("producer", "rate", "throughput", "access", "address"),
            (
                (
                    each["producerName"],
                    f"{each['msgRateIn']:.1f}/s",
                    f"{size_of(each['msgThroughputIn'])}/s",
                    each["accessMode"],
                    each["address"],
                )
                for each in found["publishers"]
            ),
        )
    if found["subscriptions"]:
        typer.echo()
        print_table(
            ("subscription", "type", "backlog", "unacked", "rate", "consumers", "waiting for"),
            (
                (
                    name,
                    each["type"],
                    str(each["msgBacklogMessages"]),
                    str(each["unackedMessages"]),
                    f"{each['msgRateOut']:.1f}/s",
                    str(len(each["consumers"])),
                    "; ".join(each["waitingFor"]) or "-",
                )
                for name, each in sorted(found["subscriptions"].items())
            ),
        )
        _print_consumers(found["subscriptions"])


def _print_consumers(subscriptions: dict[str, Any]) -> None:
    rows = [
        (
            name,
            each["consumerName"],
            str(each["availablePermits"]),
            str(each["unackedMessages"])
            + (" (blocked)" if each["blockedConsumerOnUnackedMsgs"] else ""),
            f"{each['msgRateOut']:.1f}/s",
            f"{each['messageAckRate']:.1f}/s",
            str(each["drainingHashesCount"]),
            each["address"],
        )
        for name, subscription in sorted(subscriptions.items())
        for each in subscription["consumers"]
    ]
    if rows:
        typer.echo()
        header = ("subscription", "consumer", "permits", "unacked", "rate", "acks", "draining")
        print_table((*header, "address"), rows)


def stats_internal(
    topic: Topic, as_json: Json = False, admin_url: AdminUrl = DEFAULT_ADMIN_URL
) -> None:
    """Print how a topic is stored: its ledgers and cursors."""
    found = command(admin_url, "GET", f"{topic_path(topic)}/internalStats")
    if as_json:
        print_json(found)
        return
    typer.echo(
        f"{found['state']}, epoch {found['epoch']}, {found['numberOfEntries']} entries,"
        f" {size_of(found['totalSize'])}, last {found['lastConfirmedEntry']}"
    )
    if found["ledgers"]:
        typer.echo()
        print_table(
            ("ledger", "entries", "size", "first index", "closed"),
            (
                (
                    str(each["ledgerId"]),
                    str(each["entries"]),
                    size_of(each["size"]),
                    str(each["firstIndex"]),
                    time_of(each["closedAt"]) if each["closedAt"] else "open",
                )
                for each in found["ledgers"]
            ),
        )
    if found["cursors"]:
        typer.echo()
        print_table(
            ("cursor", "mark-delete", "reads at", "backlog", "acknowledged beyond"),
            (
                (
                    name,
                    each["markDeletePosition"],
                    each["readPosition"] or "-",
                    str(each["numberOfEntriesInBacklog"]),
                    " ".join(each["individuallyDeletedMessages"][:RANGES_PRINTED]) or "-",
                )
                for name, each in sorted(found["cursors"].items())
            ),
        )
    for lost in found["lost"]:
        typer.echo(f"lost: {lost}")


def terminate(topic: Topic, admin_url: AdminUrl = DEFAULT_ADMIN_URL) -> None:
    """Terminate a topic: it accepts no more messages. Stored messages can still be read."""
    last = command(admin_url, "POST", f"{topic_path(topic)}/terminate")
    if "entryId" not in last:  # it is partitioned
        _print_last_of_each(topic, last)
        return
    at = f"{last['ledgerId']}:{last['entryId']}"
    where = "it has no message" if last["entryId"] < 0 else f"its last message is {at}"
    typer.echo(f"terminated {topic}: {where}")


def partitioned_terminate(topic: Topic, admin_url: AdminUrl = DEFAULT_ADMIN_URL) -> None:
    """Terminate all partitions of a topic: they accept no more messages."""
    last = command(admin_url, "POST", f"{topic_path(topic)}/terminate/partitions")
    _print_last_of_each(topic, last)


def _print_last_of_each(topic: str, last: dict[str, Any]) -> None:
    typer.echo(f"terminated {topic}; the last messages of its partitions:")
    rows = [
        (index, "none" if at["entryId"] < 0 else f"{at['ledgerId']}:{at['entryId']}")
        for index, at in last.items()
    ]
    print_table(("partition", "last message"), rows)


def truncate(topic: Topic, admin_url: AdminUrl = DEFAULT_ADMIN_URL) -> None:
    """Delete all messages of a topic, even unacknowledged ones."""
    command(admin_url, "DELETE", f"{topic_path(topic)}/truncate")
    typer.echo(f"truncated {topic}")


def _flow(title: str, found: dict[str, Any], direction: str) -> tuple[str, ...]:
    return (
        title,
        f"{found[f'msgRate{direction}']:.1f}/s",
        f"{size_of(found[f'msgThroughput{direction}'])}/s",
        str(found[f"msg{direction}Counter"]),
        size_of(found[f"bytes{direction}Counter"]),
    )
