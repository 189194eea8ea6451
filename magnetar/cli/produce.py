"""`magnetar produce`, with the options of `pulsar-client produce`."""

from __future__ import annotations

import asyncio
from pathlib import Path  # noqa: TC003 - Typer reads the annotations
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

import magnetar
import magnetar.asyncio
from magnetar.cli.client import DEFAULT_SERVICE_URL, ServiceUrl, run_client
from magnetar.cli.lines import STDIN, LineSource
from magnetar.cli.pace import Pace

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Coroutine, Sequence

# Pending messages: enough for one full batch and for the next one, which is being filled.
IN_FLIGHT_MAX: Final = 2000


def add_to(app: typer.Typer) -> None:
    app.command("produce")(produce)


def produce(
    topic: Annotated[str, typer.Argument(help="topic name: greetings, or tenant/namespace/topic")],
    messages: Annotated[
        list[str] | None,
        typer.Option(
            "--messages", "-m", help="a message to send; - sends each line of standard input"
        ),
    ] = None,
    lines: Annotated[
        str | None,  # a Path would turn the file name ./- into -
        typer.Option(
            "--lines",
            "-l",
            metavar="PATH",
            help="send each line of this file; - for standard input, ./- for a file named -",
        ),
    ] = None,
    files: Annotated[
        list[Path] | None,
        typer.Option("--files", "-f", help="a file to send as one message"),
    ] = None,
    num_produce: Annotated[
        int, typer.Option("--num-produce", "-n", min=1, help="send all messages this many times")
    ] = 1,
    rate: Annotated[
        float, typer.Option("--rate", "-r", min=0, help="messages per second; 0: no limit")
    ] = 0.0,
    key: Annotated[str | None, typer.Option("--key", "-k", help="partition key")] = None,
    properties: Annotated[
        list[str] | None,
        typer.Option("--properties", "-p", help="message properties: name=value[,name=value...]"),
    ] = None,
    separator: Annotated[
        str | None,
        typer.Option("--separator", "-s", help="split each --messages at this text"),
    ] = None,
    disable_batching: Annotated[
        bool, typer.Option("--disable-batching", help="send each message without a batch")
    ] = False,
    service_url: ServiceUrl = DEFAULT_SERVICE_URL,
) -> None:
    """Send messages to a topic."""
    texts = [part for text in messages or [] if text != STDIN for part in split(text, separator)]
    if STDIN in (messages or []):
        if lines is not None:
            raise typer.BadParameter("--lines and `--messages -` cannot be combined")
        lines = STDIN
    if not texts and not files and lines is None:
        raise typer.BadParameter("give messages with --messages, --lines or --files")
    if lines == STDIN and num_produce > 1:
        raise typer.BadParameter("standard input can be sent only once: leave out --num-produce")
    labels = parse_properties(properties or [])
    sent = 0

    async def work() -> None:
        nonlocal sent
        contents = [text.encode() for text in texts] + [file.read_bytes() for file in files or []]
        async with magnetar.asyncio.Client(service_url) as client:
            producer = await client.create_producer(
                topic,
                batching_enabled=not disable_batching,
                max_pending_messages=IN_FLIGHT_MAX,
                block_if_queue_full=True,  # large messages may reach the limit in bytes first
            )

            async def send(content: bytes) -> None:
                nonlocal sent
                await producer.send(content, properties=labels, partition_key=key)
                sent += 1

            pace = Pace(rate)
            async for chunk in _chunks(contents, lines, num_produce):
                await send_paced(chunk, pace, send)

    try:
        run_client(service_url, work())
    finally:  # also after Ctrl-C, and after an error
        if sent or lines is not None:
            typer.echo(f"{sent} messages successfully produced")


def split(text: str, separator: str | None) -> list[str]:
    """Split `text` into messages at the separator; without a separator, it is one message."""
    return text.split(separator) if separator else [text]


def parse_properties(options: Sequence[str]) -> dict[str, str]:
    """Parse name=value pairs. Raises BadParameter."""
    labels = {}
    for pair in (pair for option in options for pair in option.split(",")):
        name, equals, value = pair.partition("=")
        if not (name and equals):
            raise typer.BadParameter(f"{pair!r} is not name=value", param_hint="--properties")
        labels[name] = value
    return labels


async def send_paced(
    contents: Sequence[bytes], pace: Pace, send: Callable[[bytes], Coroutine[Any, Any, None]]
) -> None:
    """Begin the sends at this pace. Returns when all messages have their receipts."""
    async with asyncio.TaskGroup() as group:
        for content in contents:
            await pace.wait()
            group.create_task(send(content))


async def _chunks(
    contents: Sequence[bytes], lines: str | None, times: int
) -> AsyncIterator[Sequence[bytes]]:
    """Yield all messages, `times` times, in chunks of at most IN_FLIGHT_MAX messages."""
    count = len(contents) * times
    if lines is None:
        for first in range(0, count, IN_FLIGHT_MAX):
            numbers = range(first, min(first + IN_FLIGHT_MAX, count))
            yield [contents[number % len(contents)] for number in numbers]
        return
    for _ in range(times):
        for first in range(0, len(contents), IN_FLIGHT_MAX):
            yield contents[first : first + IN_FLIGHT_MAX]
        with LineSource(lines) as source:
            while chunk := await source.read(IN_FLIGHT_MAX):
                yield chunk
