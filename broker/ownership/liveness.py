"""Decides whether a broker that owns a bundle is gone although it is still registered.

This broker first sends a PING to the owner's port. Every broker answers a PING without a CONNECT.
There are three outcomes:

- The port answers: the owner is alive.
- The port refuses several connections in a row: the owner is gone, because no process listens
  there. Its registration remains until its metadata session expires.
- The port is silent: the owner may be suspended, or the network may separate it from this broker.
  Then this broker asks the bookies.

Every broker sends a beat to each bookie every BEAT_S (bookie/witness.py). Each bookie tells this
broker how long ago it last heard the owner:

- A bookie has heard the owner just now: the owner is alive. It is busy, or the network separates it
  only from this broker.
- Most of the registered bookies answer, and none has heard the owner for `silence_s`: the owner is
  gone. Whatever the reason for its silence, it can neither append nor acknowledge.
- Most of the bookies answer, and the silence is shorter: this broker asks again, for `silence_s` at
  most. After that, the owner counts as alive.
- Too few bookies answer: the owner counts as alive until its registration expires.

A wrong decision loses no data: the epoch in the topic's record and the fencing at the bookies stop
the replaced broker. The clients only have to reconnect.
"""

from __future__ import annotations

import asyncio
from contextlib import suppress
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, Final, Generic, Protocol, TypeVar
from urllib.parse import urlsplit

from magnetar.bookie.contract import BEAT_S
from magnetar.protos import framing
from magnetar.protos import pulsar_pb2 as pb
from magnetar.runtime.log import get_logger
from magnetar.runtime.tcp_frames import HANDLE_ERRORS

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence

    from magnetar.bookie.contract import LastHeard
    from magnetar.metadata.model import BrokerId, BrokerRegistration

SILENCE_S: Final = 2.0
"""The silence in seconds after which a broker counts as gone: four beats. An event loop is never
busy for this long, except on an overloaded machine. A client that hears nothing for 2 s asks
another broker. With a longer SILENCE_S, the client would then have to wait."""

REFUSALS: Final = 3  # consecutive refusals after which an owner counts as gone
REFUSAL_PAUSE_S: Final = 0.1  # the pause between refusals: a broker may be restarting its listener
PING_S: Final = 0.25
"""The time limit in seconds for connecting and for the answer to a PING. A broker that is only busy
may exceed this limit. Then the bookies answer that they hear the broker."""

# The times in seconds for which this broker uses an answer without asking again:
ANSWER_FRESH_S: Final = 1.0  # the port has answered
SILENCE_FRESH_S: Final = 0.25  # the port is silent
REFUSAL_FRESH_S: Final = 0.5  # the port has refused connections
ALIVE_FRESH_S: Final = 0.5  # the bookies hear the broker, or cannot tell
GONE_FRESH_S: Final = 1.0  # the bookies do not hear the broker; long: all its bundles use it

JUST_NOW_S: Final = 1.5 * BEAT_S  # a beat within this time counts as "heard just now"
ASK_AGAIN_S: Final = 0.25  # the pause before this broker asks the bookies again

_PING: Final = framing.encode_command(pb.CommandPing())

T = TypeVar("T")

log = get_logger(__name__)


class Witnesses(Protocol):
    """The bookies (bookie/ledger/presence.py)."""

    async def ask(self, broker: str, incarnation: str) -> Sequence[LastHeard | None]:
        """Ask each registered bookie when it last heard the broker. None: the bookie cannot
        tell."""


class Finding(Enum):
    """The bookies' answer about a broker."""

    HEARD = "a bookie has heard it just now"
    SILENT = "most bookies answer, and none has heard it for `silence_s`"
    WAIT = "most bookies answer, and none has heard it just now"
    UNKNOWN = "too few bookies can tell"


def judge(answers: Sequence[LastHeard | None], silence_s: float) -> tuple[Finding, float]:
    """Return the meaning of the bookies' answers, and a time in seconds: the broker has been silent
    for at least this time (0.0: not known). Pure."""
    told = [answer for answer in answers if answer is not None]
    if any(answer.heard_s < JUST_NOW_S for answer in told):
        return Finding.HEARD, 0.0
    if 2 * len(told) <= len(answers):
        return Finding.UNKNOWN, 0.0
    silent_s = min(answer.silent_s for answer in told)
    return (Finding.SILENT if silent_s >= silence_s else Finding.WAIT), silent_s


class Port(Enum):
    """The behaviour of a broker's port."""

    ANSWERS = "answers"
    REFUSES = "refuses connections"
    SILENT = "does not answer"


class Liveness:
    """Tells which other brokers are alive. Concurrent calls for the same broker share one check and
    its result."""

    def __init__(
        self,
        witnesses: Witnesses,
        *,
        silence_s: float = SILENCE_S,
        look_at_port: Callable[[BrokerRegistration], Awaitable[tuple[Port, float]]] | None = None,
    ) -> None:
        """`silence_s` 0: a silent broker counts as alive until its registration expires.
        `look_at_port`: returns the behaviour of a port, and the seconds for which this answer is
        valid; None: ask over TCP."""
        self.found_silent = 0  # how often the bookies found a broker to be gone
        self._witnesses = witnesses
        self._silence_s = silence_s
        self._ports = _Shared(look_at_port or _look_at_port)
        self._silences = _Shared(self._look_into_silence)

    async def responds(self, broker: BrokerRegistration) -> bool:
        """Return whether the broker's port answers now, so that the broker can own a free
        bundle."""
        if self._silences.known(broker):  # the broker is gone: another PING would only cost time
            return False
        return await self._ports.get(broker) is Port.ANSWERS

    async def is_gone(self, broker: BrokerRegistration) -> bool:
        """Return whether the broker is gone, so that this broker may take its bundles. False: the
        broker is alive, or its state is unknown. A call takes at most `silence_s` plus one
        second."""
        match await self._ports.get(broker):
            case Port.ANSWERS:
                return False
            case Port.REFUSES:
                return True
            case Port.SILENT:
                return self._silence_s > 0 and await self._silences.get(broker)

    async def _look_into_silence(self, broker: BrokerRegistration) -> tuple[bool, float]:
        """Return whether the broker is gone, and the seconds for which this answer is valid."""
        loop = asyncio.get_running_loop()
        end_at = loop.time() + self._silence_s
        while True:
            answers = await self._witnesses.ask(broker.broker, broker.incarnation)
            finding, silent_s = judge(answers, self._silence_s)
            if finding is Finding.SILENT:
                self.found_silent += 1
                log.warning(
                    "a broker is silent",
                    broker=broker.broker,
                    silent_s=round(silent_s, 2),
                    bookies=len(answers),
                )
                return True, GONE_FRESH_S
            if finding is not Finding.WAIT or loop.time() >= end_at:
                log.info("a broker's port is silent", broker=broker.broker, known=finding.value)
                return False, ALIVE_FRESH_S
            await asyncio.sleep(min(self._silence_s - silent_s, ASK_AGAIN_S))


@dataclass(frozen=True, slots=True)
class _Known(Generic[T]):
    incarnation: str
    answer: T
    until: float


class _Shared(Generic[T]):
    """Calls `ask` once for all callers, and keeps one answer for each broker while it is valid.

    The first caller calls `ask`, and the other callers wait for the answer. If the first caller is
    cancelled, another caller calls `ask`.
    """

    def __init__(self, ask: Callable[[BrokerRegistration], Awaitable[tuple[T, float]]]) -> None:
        self._ask = ask
        self._known: dict[BrokerId, _Known[T]] = {}
        self._asking: dict[tuple[BrokerId, str], asyncio.Event] = {}

    def known(self, broker: BrokerRegistration) -> T | None:
        """Return the kept answer. None: there is no valid answer."""
        known = self._known.get(broker.broker)
        if known is None or known.incarnation != broker.incarnation:
            return None
        return known.answer if asyncio.get_running_loop().time() < known.until else None

    async def get(self, broker: BrokerRegistration) -> T:
        now, key = asyncio.get_running_loop().time, (broker.broker, broker.incarnation)
        while True:
            known = self.known(broker)
            if known is not None:
                return known
            asking = self._asking.get(key)
            if asking is None:
                break
            await asking.wait()
        self._asking[key] = asyncio.Event()
        try:
            answer, fresh_s = await self._ask(broker)
            self._known = {id_: it for id_, it in self._known.items() if it.until > now()}
            self._known[broker.broker] = _Known(broker.incarnation, answer, now() + fresh_s)
            return answer
        finally:
            self._asking.pop(key).set()


async def _look_at_port(broker: BrokerRegistration) -> tuple[Port, float]:
    for attempt in range(REFUSALS):
        if attempt:
            await asyncio.sleep(REFUSAL_PAUSE_S)
        port = await _ping(broker)
        if port is not Port.REFUSES:
            return port, ANSWER_FRESH_S if port is Port.ANSWERS else SILENCE_FRESH_S
    log.warning("a broker's port refuses connections", broker=broker.broker)
    return Port.REFUSES, REFUSAL_FRESH_S


async def _ping(broker: BrokerRegistration) -> Port:
    """Ping a broker, or only connect to it if it has no Pulsar port. An end of the connection
    counts as an answer: the connections of a suspended process stay open."""
    has_pulsar = bool(broker.pulsar_url)
    address = urlsplit(broker.pulsar_url if has_pulsar else broker.grpc_url)
    assert address.hostname is not None
    assert address.port is not None
    writer: asyncio.StreamWriter | None = None
    try:
        async with asyncio.timeout(PING_S):
            reader, writer = await asyncio.open_connection(address.hostname, address.port)
            if has_pulsar:
                writer.write(_PING)
                await reader.read(1)
    except ConnectionRefusedError:
        return Port.REFUSES
    except ConnectionResetError:
        return Port.ANSWERS
    except (TimeoutError, *HANDLE_ERRORS):
        return Port.SILENT
    finally:
        if writer is not None:
            with suppress(*HANDLE_ERRORS):
                writer.transport.abort()
    return Port.ANSWERS
