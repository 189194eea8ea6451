"""`magnetar consume`, with the options of `pulsar-client consume`."""

from __future__ import annotations

import base64
import json
from enum import StrEnum
from typing import Annotated, Final

import typer

import magnetar
import magnetar.asyncio
from magnetar.cli.client import DEFAULT_SERVICE_URL, ServiceUrl, run_client
from magnetar.cli.pace import Pace

SAVED_S: Final = 1.0
"""With --rate: after an idle time, the command receives at once up to as many messages as the rate
allows in this time."""


class SubscriptionType(StrEnum):
    """The types of subscriptions, with the names that the option accepts."""

    EXCLUSIVE = "Exclusive"
    SHARED = "Shared"
    FAILOVER = "Failover"
    KEY_SHARED = "KeyShared"


class Position(StrEnum):
    """Where a new subscription begins."""

    LATEST = "Latest"
    EARLIEST = "Earliest"


def add_to(app: typer.Typer) -> None:
    app.command("consume")(consume)


def consume(
    topic: Annotated[str, typer.Argument(help="topic name: greetings, or tenant/namespace/topic")],
    subscription_name: Annotated[
        str,
        typer.Option("--subscription-name", "-s", help="subscription; created if it is missing"),
    ],
    num_messages: Annotated[
        int,
        typer.Option("--num-messages", "-n", min=0, help="messages to receive; 0: until Ctrl-C"),
    ] = 1,
    subscription_type: Annotated[
        SubscriptionType,
        typer.Option(
            "--subscription-type",
            "-t",
            case_sensitive=False,
            help="how consumers share the subscription",
        ),
    ] = SubscriptionType.EXCLUSIVE,
    subscription_position: Annotated[
        Position,
        typer.Option(
            "--subscription-position",
            "-p",
            case_sensitive=False,
            help="where a new subscription begins",
        ),
    ] = Position.LATEST,
    rate: Annotated[
        float, typer.Option("--rate", "-r", min=0, help="messages per second; 0: no limit")
    ] = 0.0,
    queue_size: Annotated[
        int, typer.Option("--queue-size", "-q", min=1, help="messages to fetch ahead")
    ] = 1000,
    hide_content: Annotated[
        bool, typer.Option("--hide-content", help="count messages without printing them")
    ] = False,
    as_json: Annotated[
        bool,
        typer.Option(
            "--json", help="print one JSON object per message: id, key, times, properties, content"
        ),
    ] = False,
    quiet: Annotated[
        bool, typer.Option("--quiet", help="print only the contents, one per line")
    ] = False,
    service_url: ServiceUrl = DEFAULT_SERVICE_URL,
) -> None:
    """Receive, print and acknowledge messages of a topic."""
    if as_json + quiet + hide_content > 1:
        raise typer.BadParameter("--json, --quiet and --hide-content cannot be combined")
    show = describe_json if as_json else content_of if quiet else describe
    consumed: int | None = None  # None: the consumer is not subscribed yet

    async def work() -> None:
        async with magnetar.asyncio.Client(service_url) as client:
            consumer = await client.subscribe(
                topic,
                subscription_name,
                consumer_type=magnetar.ConsumerType[subscription_type.value],
                initial_position=magnetar.InitialPosition[subscription_position.value],
                receiver_queue_size=queue_size,
            )
            await receive(consumer)

    async def receive(consumer: magnetar.asyncio.Consumer) -> None:
        nonlocal consumed
        consumed = 0
        pace = Pace(rate, saved_s=SAVED_S)
        while num_messages == 0 or consumed < num_messages:
            await pace.wait()
            message = await consumer.receive()
            if not hide_content:
                typer.echo(show(message))
            await consumer.acknowledge(message)
            consumed += 1

    try:
        run_client(service_url, work())
    finally:  # also after Ctrl-C, and after an error
        if consumed is not None and not (as_json or quiet):
            typer.echo(f"{consumed} messages successfully consumed")


def describe(message: magnetar.Message) -> str:
    """Describe a message in the format of `pulsar-client consume`."""
    properties = ", ".join(f"{name}={value}" for name, value in message.properties().items())
    return (
        "----- got message -----\n"
        f"key:[{message.partition_key() or 'null'}], properties:[{properties}],"
        f" content:{content_of(message)}"
    )


def describe_json(message: magnetar.Message) -> str:
    """Describe a message as one line of JSON.

    `content` is the text of a UTF-8 payload; any other payload is `contentBase64`.
    """
    found: dict[str, object] = {
        "id": id_of(message),
        "topic": message.topic_name(),
        "key": message.partition_key() or None,
        "publishTime": message.publish_timestamp(),
        "eventTime": message.event_timestamp() or None,  # 0: none was set
        "redeliveryCount": message.redelivery_count(),
        "properties": message.properties(),
    }
    try:
        found["content"] = message.data().decode()
    except UnicodeDecodeError:
        found["contentBase64"] = base64.b64encode(message.data()).decode()
    return json.dumps(found, ensure_ascii=False)


def id_of(message: magnetar.Message) -> str:
    """Return the id of a message, in the form that `topics peek` prints and
    `subscriptions reset --to` reads."""
    found = message.message_id()
    batch = f":{found.batch_index()}" if found.batch_index() >= 0 else ""
    return f"{found.ledger_id()}:{found.entry_id()}{batch}"


def content_of(message: magnetar.Message) -> str:
    """Return the content as text; bytes that are not UTF-8 appear as escapes."""
    return message.data().decode(errors="backslashreplace")
