"""`magnetar produce`, after `pulsar-client produce`."""

from __future__ import annotations

import asyncio
from pathlib import Path  # noqa: TC003 (Typer needs it at run time)
from typing import TYPE_CHECKING, Annotated, Final

import typer

import magnetar
import magnetar.asyncio
from magnetar.cli.client import DEFAULT_SERVICE_URL, ServiceUrl, run_client

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

# Messages on their way at once: a full batch, and one that fills meanwhile.
IN_FLIGHT_MAX: Final = 2000


def add_to(app: typer.Typer) -> None:
    app.command("produce")(produce)


def produce(
    topic: Annotated[str, typer.Argument(help="for example greetings, or tenant/namespace/topic")],
    messages: Annotated[
        list[str] | None,
        typer.Option("--messages", "-m", help="messages to send, separated by SEPARATOR"),
    ] = None,
    files: Annotated[
        list[Path] | None,
        typer.Option("--files", "-f", help="files to send, each as one message"),
    ] = None,
    num_produce: Annotated[
        int, typer.Option("--num-produce", "-n", min=1, help="how often to send all of them")
    ] = 1,
    rate: Annotated[
        float, typer.Option("--rate", "-r", min=0, help="messages a second; 0: no limit")
    ] = 0.0,
    key: Annotated[str | None, typer.Option("--key", "-k", help="partition key")] = None,
    properties: Annotated[
        list[str] | None,
        typer.Option("--properties", "-p", help="name=value[,name=value...]"),
    ] = None,
    separator: Annotated[
        str, typer.Option("--separator", "-s", help="between messages; empty: none")
    ] = ",",
    disable_batching: Annotated[
        bool, typer.Option("--disable-batching", help="send each message by itself")
    ] = False,
    service_url: ServiceUrl = DEFAULT_SERVICE_URL,
) -> None:
    """Send messages to a topic."""
    texts = [part for text in messages or [] for part in split(text, separator)]
    if not texts and not files:
        raise typer.BadParameter("give messages with --messages or files with --files")
    labels = parse_properties(properties or [])

    async def work() -> None:
        contents = [text.encode() for text in texts] + [file.read_bytes() for file in files or []]
        async with magnetar.asyncio.Client(service_url) as client:
            producer = await client.create_producer(
                topic,
                batching_enabled=not disable_batching,
                max_pending_messages=IN_FLIGHT_MAX,
                block_if_queue_full=True,  # large ones fill it by their bytes
            )
            count = len(contents) * num_produce
            await _send_all(producer, contents, count, labels, key=key, rate=rate)
        typer.echo(f"{count} messages successfully produced")

    run_client(service_url, work())


def split(text: str, separator: str) -> list[str]:
    return text.split(separator) if separator else [text]


def parse_properties(options: Sequence[str]) -> dict[str, str]:
    """Raises BadParameter."""
    labels = {}
    for pair in (pair for option in options for pair in option.split(",")):
        name, equals, value = pair.partition("=")
        if not (name and equals):
            raise typer.BadParameter(f"{pair!r} is not name=value", param_hint="--properties")
        labels[name] = value
    return labels


async def _send_all(
    producer: magnetar.asyncio.Producer,
    contents: Sequence[bytes],
    count: int,
    labels: Mapping[str, str],
    *,
    key: str | None,
    rate: float,
) -> None:
    """`count` messages: the contents in turn, again and again."""
    loop = asyncio.get_running_loop()
    began_s = loop.time()
    step = 1 if rate else IN_FLIGHT_MAX
    for first in range(0, count, step):
        if rate:
            await asyncio.sleep(began_s + first / rate - loop.time())
        async with asyncio.TaskGroup() as group:
            for number in range(first, min(first + step, count)):
                content = contents[number % len(contents)]
                group.create_task(producer.send(content, properties=labels, partition_key=key))
