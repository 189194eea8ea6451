"""Finds the broker that owns a topic: asks any broker and follows redirects."""

from __future__ import annotations

import asyncio
from contextlib import contextmanager
from typing import TYPE_CHECKING, Final, NamedTuple, TypeVar

from magnetar.client.errors import (
    ConnectError,
    LookupError,  # noqa: A004 - Apache's name
    PulsarException,
    Timeout,
    from_server_error,
    is_retriable,
)
from magnetar.client.session.pool import Purpose
from magnetar.client.session.service_url import parse_service_url, scheme_of
from magnetar.protos import pulsar_pb2 as pb
from magnetar.runtime.log import get_logger

if TYPE_CHECKING:
    from collections.abc import Iterator

    from google.protobuf.message import Message as Body

    from magnetar.client.session.connection import Connection
    from magnetar.client.session.pool import Pool

Answer = TypeVar("Answer", bound="Body")

log = get_logger(__name__)

REDIRECTS_MAX: Final = 20
"""Pulsar's limit. More redirects mean that brokers redirect to each other."""

QUESTIONS_MAX: Final = 6
"""A lookup divides the time limit of an operation among at most this many questions. With 30 s,
each question has at least 5 s. A broker takes over the topics of a dead broker in less time."""


OTHERS_MAX: Final = 3
"""The most brokers that the client asks about a silent broker."""

OTHERS_PAUSE_S: Final = 0.3
"""The time in seconds between two questions about a silent broker. The client asks the next broker
only if no broker has answered yet."""

OPINION_S: Final = 5.0
"""The time limit in seconds for the first answer about a silent broker. A broker needs up to 3 s to
find out whether a silent owner is alive."""


class Owner(NamedTuple):
    """The broker that serves a topic."""

    url: str
    through: str | None = None  # the URL of the proxy to connect to; None: connect to the broker


class Lookup:
    """Asks the brokers of the service URL in turn, beginning with the broker that answered last.

    Each question has its own time limit. Thus an operation can succeed although some brokers do not
    answer.
    """

    def __init__(
        self,
        service_url: str,
        pool: Pool,
        *,
        timeout_s: float,
        silence_s: float,
        listener_name: str | None = None,
    ) -> None:
        """`timeout_s`: the time limit of an operation, which includes its lookups. `silence_s`:
        with several addresses, the time in which a broker must accept a session; the lookup passes
        over a slower broker.

        `listener_name`: the name of the advertised address to use; None: the default address.
        """
        self._listener_name = listener_name
        self._brokers = parse_service_url(service_url)
        self._scheme = scheme_of(service_url)
        self._pool = pool
        self._silence_s = silence_s
        self._question_s = timeout_s / min(len(self._brokers) + 1, QUESTIONS_MAX)
        self._first = 0
        self._warned = False
        self.cluster = 0  # counts the moves to another cluster

    def move(self, service_url: str) -> None:
        """Ask the brokers of another cluster from now on. Raises InvalidUrl."""
        self._brokers, self._scheme = parse_service_url(service_url), scheme_of(service_url)
        self.cluster += 1
        self._first = 0
        self._warned = False

    def warn_unreachable(self, trouble: PulsarException | None, give_up_s: float) -> None:
        """Log that no broker has answered yet, or that a broker refuses for the moment. Later calls
        log nothing until a broker answers.

        `trouble`: the last error. None: no error yet.
        """
        if not self._warned:
            self._warned = True
            is_silent = trouble is None or isinstance(trouble, ConnectError | Timeout)
            log.warning(
                "no broker has answered yet; the client keeps trying"
                if is_silent
                else "the broker cannot serve the topic yet; the client keeps trying",
                brokers=",".join(self._brokers),
                last=str(trouble or "no answer"),
                gives_up_after_s=give_up_s,
            )

    async def owner(self, topic: str) -> Owner:
        """Return the broker that serves `topic`.

        Raises ConnectError if no broker of the service URL is reachable, or if the asked broker
        does not answer. Raises the broker's error if it answers with one. After an error, the next
        question goes to the next broker, because this broker may be cut off from the cluster.
        """
        connection = await self.any_broker()
        try:
            return await self._ask(topic, connection)
        except (PulsarException, asyncio.CancelledError):  # cancelled: the broker may be silent
            self._turn_from(connection.broker)
            raise

    def knows_others(self, broker: str) -> bool:
        """Return whether the service URL names an address other than `broker`."""
        return any(it != broker for it in self._brokers)

    async def owner_besides(self, topic: str, broker: str) -> str | None:
        """Ask the brokers other than `broker` which broker serves `topic`. Return its URL.

        None: no other broker answers within OPINION_S.

        The next lookups begin with the broker that has answered.
        """
        others = [it for it in self._in_turn() if it != broker][:OTHERS_MAX]
        async with asyncio.TaskGroup() as group:
            asked = {
                group.create_task(
                    self._opinion(other, topic, besides=broker, pause_s=number * OTHERS_PAUSE_S)
                )
                for number, other in enumerate(others)
            }
            waiting = set(asked)
            try:
                async with asyncio.timeout(OPINION_S):
                    while waiting:
                        done, waiting = await asyncio.wait(
                            waiting, return_when=asyncio.FIRST_COMPLETED
                        )
                        for task in done:
                            if task.result() is not None:
                                return task.result()
            except TimeoutError:
                pass
            finally:
                for task in waiting:
                    task.cancel()
        return None

    async def _opinion(
        self, broker: str, topic: str, *, besides: str, pause_s: float
    ) -> str | None:
        await asyncio.sleep(pause_s)
        try:
            connection = await self._session(broker, Purpose.PUBLISH)
            owner = await self._ask(topic, connection, besides=besides)
        except PulsarException as error:
            log.info(
                "no answer about a silent broker", topic=topic, broker=broker, reason=str(error)
            )
            return None
        if broker in self._brokers:
            self._first = self._brokers.index(broker)
        return owner.url

    async def _ask(self, topic: str, connection: Connection, *, besides: str = "") -> Owner:
        """Ask for the owner of `topic`, and follow redirects. If a broker redirects to `besides`,
        return `besides` as the owner without asking it."""
        authoritative = False
        for _ in range(REDIRECTS_MAX):
            answer = await self._answer(
                connection,
                pb.CommandLookupTopic(
                    topic=topic,
                    authoritative=authoritative,
                    advertised_listener_name=self._listener_name,
                ),
                pb.CommandLookupTopicResponse,
            )
            if answer.response == pb.CommandLookupTopicResponse.Failed:
                raise from_server_error(
                    answer.error, answer.message, topic=topic, broker=connection.broker
                )
            owner = self._named(answer)
            if answer.response == pb.CommandLookupTopicResponse.Connect:
                proxied = answer.proxy_through_service_url and owner != connection.broker
                return Owner(owner, connection.broker if proxied else None)
            if owner == besides:
                return Owner(owner)
            authoritative = answer.authoritative
            connection = await self._session(owner, Purpose.PUBLISH)
        raise LookupError(f"no owner after {REDIRECTS_MAX} redirects", topic=topic)

    async def partitions(self, topic: str, *, creates: bool = True) -> int:
        """Return the number of the topic's partitions. 0: the topic is not partitioned, or does not
        exist yet.

        `creates`: True: the broker may create the topic if its policies allow it.

        Every broker can answer. If a broker does not answer, the client asks the next one. Raises
        the errors of `owner`.
        """
        for _ in self._brokers[1:]:
            try:
                return await self._ask_partitions(topic, creates=creates)
            except ConnectError:
                pass
        return await self._ask_partitions(topic, creates=creates)

    async def _ask_partitions(self, topic: str, *, creates: bool) -> int:
        connection = await self.any_broker()
        with self._turning_after_error(connection.broker):
            answer = await self._answer(
                connection,
                pb.CommandPartitionedTopicMetadata(
                    topic=topic, metadata_auto_creation_enabled=None if creates else False
                ),
                pb.CommandPartitionedTopicMetadataResponse,
            )
            if answer.response == pb.CommandPartitionedTopicMetadataResponse.Failed:
                raise from_server_error(
                    answer.error, answer.message, topic=topic, broker=connection.broker
                )
        return answer.partitions

    async def topics(
        self, namespace: str, mode: pb.CommandGetTopicsOfNamespace.Mode.ValueType
    ) -> list[str]:
        """Return the full names of a namespace's topics of the kinds that `mode` selects. Raises
        the errors of `owner`."""
        connection = await self.any_broker()
        with self._turning_after_error(connection.broker):
            answer = await self._answer(
                connection,
                pb.CommandGetTopicsOfNamespace(namespace=namespace, mode=mode),
                pb.CommandGetTopicsOfNamespaceResponse,
            )
        return list(answer.topics)

    async def schema(self, topic: str, version: bytes) -> pb.Schema:
        """Return a version of a topic's schema.

        Raises TopicNotFound if the topic does not have the version, and the errors of `owner`.
        """
        connection = await self.any_broker()
        with self._turning_after_error(connection.broker):
            answer = await self._answer(
                connection,
                pb.CommandGetSchema(topic=topic, schema_version=version),
                pb.CommandGetSchemaResponse,
            )
            if answer.HasField("error_code"):
                raise from_server_error(
                    answer.error_code, answer.error_message, topic=topic, broker=connection.broker
                )
        return answer.schema

    async def _answer(self, connection: Connection, body: Body, answer: type[Answer]) -> Answer:
        cluster = self.cluster
        try:
            async with asyncio.timeout(self._question_s):
                found = await connection.request(body, answer)
        except TimeoutError:
            reason = f"the broker did not answer within {self._question_s:g} s"
            raise ConnectError(reason, broker=connection.broker) from None
        if cluster != self.cluster:  # the answer may name a broker of the former cluster
            raise ConnectError("the client moved to another cluster", broker=connection.broker)
        return found

    async def any_broker(self, purpose: Purpose = Purpose.PUBLISH) -> Connection:
        """Try the brokers of the service URL in turn. Return a session with the first broker that
        accepts a session.

        Raises ConnectError if no broker is reachable. Raises any other error of a broker at once.
        """
        failures: list[str] = []
        for broker in self._in_turn():
            try:
                connection = await self._session(broker, purpose)
            except ConnectError as error:
                failures.append(f"{broker}: {error.reason}")
                self._turn_from(broker)
            except (PulsarException, asyncio.CancelledError):  # it refuses sessions, or is silent
                self._turn_from(broker)
                raise
            else:
                self._warned = False
                return connection
        raise ConnectError("no broker is reachable: " + "; ".join(failures))

    async def _session(self, broker: str, purpose: Purpose) -> Connection:
        """Return a session with the broker.

        If the service URL names another broker, raises ConnectError after `silence_s`. If the
        session opens later, the next call uses it.
        """
        patience_s = self._silence_s if self.knows_others(broker) else None
        try:
            async with asyncio.timeout(patience_s):
                return await self._pool.connection(broker, purpose)
        except TimeoutError:
            reason = f"the broker did not accept a session within {patience_s:g} s"
            raise ConnectError(reason, broker=broker) from None

    def _in_turn(self) -> list[str]:
        """Return the brokers of the service URL, beginning with the next one to ask."""
        return [*self._brokers[self._first :], *self._brokers[: self._first]]

    @contextmanager
    def _turning_after_error(self, broker: str) -> Iterator[None]:
        """After an error that may be temporary, let the next question go to the next broker:
        `broker` may be cut off from the cluster, or silent."""
        try:
            yield
        except asyncio.CancelledError:
            self._turn_from(broker)
            raise
        except PulsarException as error:
            if is_retriable(error):
                self._turn_from(broker)
            raise

    def _turn_from(self, broker: str) -> None:
        """Let the next search begin with the broker after `broker` in the list, unless a concurrent
        question has done so already."""
        if self._brokers[self._first] == broker:
            self._first = (self._first + 1) % len(self._brokers)

    def _named(self, answer: pb.CommandLookupTopicResponse) -> str:
        """Return the owner's URL from a broker's answer, for this client's transport. Raises
        ConnectError if the answer has no such URL."""
        text = answer.brokerServiceUrlTls if self._scheme.is_tls else answer.brokerServiceUrl
        try:
            (url,) = parse_service_url(text)
        except (PulsarException, ValueError):
            raise ConnectError(f"the broker named an invalid owner address: {text!r}") from None
        if scheme_of(url) is not self._scheme:
            raise ConnectError(f"the broker named an owner address of another transport: {text!r}")
        return url
