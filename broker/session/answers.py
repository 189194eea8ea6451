"""Shares large answers that many clients ask for: a list of 10,000 topics has half a megabyte.

Identical requests share one answer. The broker keeps an answer for KEEP_S, or for less time if the
broker opens a topic or the metadata store reports a change. A request may arrive while an answer is
being made. If the broker does not keep that answer, the answer may lack a change that the client
already knows of, so the request waits for the next answer. At most two answers are made for any
number of concurrent requests.

All connections whose clients have not taken an answer yet share its bytes. Each connection adds
only its request id. All answers that wait for clients have at most ANSWER_BYTES_MAX together;
beyond this limit the broker answers TooManyRequests. An answer is never truncated.
"""

from __future__ import annotations

import asyncio
import struct
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, Protocol

from magnetar.broker.errors import TooManyAnswers
from magnetar.protos import framing
from magnetar.protos import pulsar_pb2 as pb
from magnetar.protos.entry import read_varint, varint
from magnetar.protos.errors import FrameTooLarge
from magnetar.protos.names import NamespaceName

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from magnetar.broker.broker import Broker

ANSWER_BYTES_MAX: Final = 64 << 20
"""The limit of the bytes of distinct waiting answers: a hundred namespaces with 10,000 topics
each."""

REQUEST_BYTES: Final = 512
"""The memory of a waiting answer besides its shared bytes."""

KEEP_S: Final = 1.0
KEPT_MAX: Final = 16
"""The limit of kept answers."""

_SIZES: Final = struct.Struct(">II")


@dataclass(slots=True, eq=False)
class Shared:
    """The body of an answer, without a request id."""

    kind: int
    body: bytes
    holders: int = 0  # the number of answers with these bytes that are not sent yet


@dataclass(slots=True)
class Answer:
    """One client's answer. Call `Answers.release` after the answer was sent or dropped."""

    shared: Shared
    parts: tuple[bytes, ...]


@dataclass(slots=True, eq=False)
class _Kept:
    shared: Shared
    until: float
    opened: int  # `Broker.opened_topics` when the handler was called
    unwatch: Callable[[], None]


class Asking(Protocol):
    """The connection of a client (context.py)."""

    broker: Broker
    answers: Answers


class Answers:
    """The answers of one broker."""

    def __init__(self, bytes_max: int = ANSWER_BYTES_MAX) -> None:
        self.held_bytes = 0
        self.refused = 0
        self._bytes_max = bytes_max
        self._making: dict[bytes, asyncio.Future[Shared | Exception | None]] = {}
        self._kept: dict[bytes, _Kept] = {}

    async def get(
        self,
        context: Asking,
        body: Any,
        handler: Callable[[Any, Any], Awaitable[bytes]],
        watch: Callable[[Asking, Any, Callable[[], None]], Callable[[], None]],
    ) -> Answer:
        """Return the answer to `body`: a shared one, or a new one that `handler` makes. `watch`
        calls its last argument when the answer may have changed; it returns the function that ends
        these calls. Raises TooManyAnswers, FrameTooLarge, and the errors of `handler`."""
        asked = type(body)()
        asked.CopyFrom(body)
        asked.request_id = 0
        key: bytes = type(body).__name__.encode() + asked.SerializeToString()
        shared = await self._shared(key, context, asked, handler, watch)
        return self._answer(shared, body.request_id)

    def release(self, answer: Answer) -> None:
        shared = answer.shared
        shared.holders -= 1
        self.held_bytes -= REQUEST_BYTES + (len(shared.body) if shared.holders == 0 else 0)

    async def _shared(
        self, key: bytes, context: Asking, body: Any, handler: Any, watch: Any
    ) -> Shared:
        loop = asyncio.get_running_loop()
        before = self._making.get(key)
        while True:
            kept = self._kept.get(key)
            if (
                kept is not None
                and kept.opened == context.broker.opened_topics
                and loop.time() < kept.until
            ):
                return kept.shared
            making = self._making.get(key)
            if making is None:
                break
            await asyncio.wait({making})
            outcome = making.result()
            if making is before or outcome is None:  # begun before this request, or cancelled
                continue
            if isinstance(outcome, Exception):
                raise outcome
            return outcome
        self._forget(key)
        self._making[key] = made = loop.create_future()
        changed = False
        outcome = None

        def on_change() -> None:
            nonlocal changed
            changed = True
            self._forget(key)

        unwatch = watch(context, body, on_change)
        try:
            opened = context.broker.opened_topics
            outcome = shared = _divided(await handler(context, body))
            if changed:
                unwatch()
            else:
                until = loop.time() + KEEP_S
                self._kept[key] = _Kept(shared, until, opened, unwatch)
                if len(self._kept) > KEPT_MAX:
                    self._forget(next(iter(self._kept)))
        except BaseException as error:
            unwatch()
            outcome = error if isinstance(error, Exception) else None
            raise
        finally:
            del self._making[key]
            made.set_result(outcome)
        return shared

    def _forget(self, key: bytes) -> None:
        kept = self._kept.pop(key, None)
        if kept is not None:
            kept.unwatch()

    def _answer(self, shared: Shared, request_id: int) -> Answer:
        size = REQUEST_BYTES + (len(shared.body) if shared.holders == 0 else 0)
        if self.held_bytes + size > self._bytes_max:
            self.refused += 1
            raise TooManyAnswers(len(shared.body), self._bytes_max)
        answer = Answer(shared, _parts(shared, request_id))  # may raise: nothing is held yet
        self.held_bytes += size
        shared.holders += 1
        return answer

    def check(self) -> None:
        assert 0 <= self.held_bytes <= self._bytes_max
        assert len(self._kept) <= KEPT_MAX


def shared_list(
    handler: Callable[[Any, Any], Awaitable[bytes]],
) -> Callable[[Asking, Any], Awaitable[Answer]]:
    """Make a handler whose answers are shared. The answers of `handler` must depend only on the
    request and on the topics of its namespace."""

    def watch(context: Asking, body: Any, on_change: Callable[[], None]) -> Callable[[], None]:
        return context.broker.watch_topics(NamespaceName.parse(body.namespace), on_change)

    async def answer(context: Asking, body: Any) -> Answer:
        return await context.answers.get(context, body, handler, watch)

    return answer


def _divided(frame: bytes) -> Shared:
    """Return the type and body of the command in a frame that `framing.encode_command` made."""
    at = _SIZES.size
    kind, at = read_varint(frame, at + 1)  # the bytes after the tag of the type
    _, at = read_varint(frame, at)  # the tag of the body
    size, at = read_varint(frame, at)
    assert at + size == len(frame), "not a frame of one command"
    return Shared(kind, frame[at:])


def _parts(shared: Shared, request_id: int) -> tuple[bytes, ...]:
    """Return the frame with this request id, in parts. The id is appended to the body: if a field
    occurs twice, protobuf uses the last value."""
    field = pb.BaseCommand.DESCRIPTOR.fields_by_number[shared.kind].message_type
    assert field is not None, "an answer has fields"
    number = field.fields_by_name["request_id"].number
    tail = varint(number << 3) + varint(request_id)
    size = len(shared.body) + len(tail)
    head = b"\x08" + varint(shared.kind) + varint(shared.kind << 3 | 2) + varint(size)
    command = len(head) + size
    if command + _SIZES.size > framing.COMMAND_FRAME_BYTES_MAX:
        raise FrameTooLarge(command + _SIZES.size, framing.COMMAND_FRAME_BYTES_MAX)
    return _SIZES.pack(4 + command, command) + head, shared.body, tail
