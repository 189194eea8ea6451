"""`magnetar consume`, after `pulsar-client consume`."""

from __future__ import annotations

import asyncio
from enum import StrEnum
from typing import Annotated

import typer

import magnetar
import magnetar.asyncio
from magnetar.cli.client import DEFAULT_SERVICE_URL, ServiceUrl, run_client


class SubscriptionType(StrEnum):
    EXCLUSIVE = "Exclusive"
    SHARED = "Shared"
    FAILOVER = "Failover"
    KEY_SHARED = "KeyShared"


class Position(StrEnum):
    LATEST = "Latest"
    EARLIEST = "Earliest"


def add_to(app: typer.Typer) -> None:
    app.command("consume")(consume)


def consume(
    topic: Annotated[str, typer.Argument(help="for example greetings, or tenant/namespace/topic")],
    subscription_name: Annotated[
        str, typer.Option("--subscription-name", "-s", help="made unless it is there")
    ],
    num_messages: Annotated[
        int, typer.Option("--num-messages", "-n", min=0, help="how many; 0: until interrupted")
    ] = 1,
    subscription_type: Annotated[
        SubscriptionType, typer.Option("--subscription-type", "-t", case_sensitive=False)
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
        float, typer.Option("--rate", "-r", min=0, help="messages a second; 0: no limit")
    ] = 0.0,
    queue_size: Annotated[
        int, typer.Option("--queue-size", "-q", min=1, help="messages that are fetched ahead")
    ] = 1000,
    hide_content: Annotated[
        bool, typer.Option("--hide-content", help="count messages, do not print them")
    ] = False,
    service_url: ServiceUrl = DEFAULT_SERVICE_URL,
) -> None:
    """Receive messages from a topic, print and acknowledge them."""

    async def work() -> None:
        async with magnetar.asyncio.Client(service_url) as client:
            consumer = await client.subscribe(
                topic,
                subscription_name,
                consumer_type=magnetar.ConsumerType[subscription_type.value],
                initial_position=magnetar.InitialPosition[subscription_position.value],
                receiver_queue_size=queue_size,
            )
            await _receive(consumer, num_messages, rate=rate, hide_content=hide_content)

    run_client(service_url, work())


def describe(message: magnetar.Message) -> str:
    """As Apache's tool prints it; bytes that are no UTF-8 as escapes."""
    properties = ", ".join(f"{name}={value}" for name, value in message.properties().items())
    content = message.data().decode(errors="backslashreplace")
    return (
        "----- got message -----\n"
        f"key:[{message.partition_key() or 'null'}], properties:[{properties}], content:{content}"
    )


async def _receive(
    consumer: magnetar.asyncio.Consumer, count: int, *, rate: float, hide_content: bool
) -> None:
    loop = asyncio.get_running_loop()
    began_s = loop.time()
    received = 0
    try:
        while count == 0 or received < count:
            if rate:
                await asyncio.sleep(began_s + received / rate - loop.time())
            message = await consumer.receive()
            received += 1
            if not hide_content:
                typer.echo(describe(message))
            await consumer.acknowledge(message)
    finally:
        typer.echo(f"{received} messages successfully consumed")
