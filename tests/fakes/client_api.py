"""Apache's client over Pulsar's protocol and ours over gRPC, with one standalone server.

Both clients have the same interface, so one test can run with either.
"""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import pulsar

import magnetar

if TYPE_CHECKING:
    from collections.abc import Iterator

    from fakes.standalone_process import StandaloneProcess

CLIENTS = ("apache", "ours")
OURS_OVER_TCP = "ours over 6650"
OURS = ("ours", OURS_OVER_TCP)
"""The client for features that Apache's client lacks."""
TIMEOUT_S = 20
QUIET_MS = 300


@dataclass
class Api:
    """A client, the module that has its names, and the admin API of its server."""

    module: Any
    client: Any
    admin: str  # the URL of the broker's HTTP port

    def subscribe(
        self,
        topic: str,
        kind: str = "Exclusive",
        name: str = "",
        *,
        subscription: str = "s",
        **options: Any,
    ) -> Any:
        """`name`: the consumer's name; "": the client chooses one."""
        options.setdefault("initial_position", self.module.InitialPosition.Earliest)
        return self.client.subscribe(
            topic,
            subscription,
            consumer_type=getattr(self.module.ConsumerType, kind),
            consumer_name=name or None,
            **options,
        )

    def publish(self, topic: str, numbers: range, **options: Any) -> list[Any]:
        """Returns the ids of the messages. `options`: of the producer."""
        producer = self.client.create_producer(topic, **options)
        ids = [producer.send(b"%d" % number) for number in numbers]
        producer.close()
        return ids

    def drain(self, consumer: Any) -> list[Any]:
        """The messages that the consumer gets until none arrives for a while."""
        found = []
        while True:
            try:
                found.append(consumer.receive(timeout_millis=QUIET_MS))
            except self.module.Timeout:
                return found

    def is_quiet(self, consumer: Any) -> bool:
        """True if the consumer gets no message for a while."""
        try:
            consumer.receive(timeout_millis=QUIET_MS)
        except self.module.Timeout:
            return True
        return False

    def call(self, topic: str, path: str, body: Any = None, *, method: str | None = None) -> Any:
        """A request to the admin API, below the path of the topic; without a method GET, or POST if
        it has a body. Raises AssertionError with the
        answer of the server if that is an error."""
        name = topic if "://" in topic else f"persistent://public/default/{topic}"
        request = urllib.request.Request(
            f"{self.admin}/admin/v2/{name.replace('://', '/')}{path and '/'}{path}",
            None if body is None else json.dumps(body).encode(),
            {"content-type": "application/json"},
            method=method,
        )
        try:
            with urllib.request.urlopen(request, timeout=TIMEOUT_S) as answer:
                text = answer.read()
                return json.loads(text) if text else None
        except urllib.error.HTTPError as error:
            raise AssertionError(f"{error.code}: {error.read().decode()}") from error

    def stats(self, topic: str, subscription: str = "s") -> dict[str, Any]:
        return dict(self.call(topic, "stats")["subscriptions"][subscription])


@contextmanager
def client_api(server: StandaloneProcess, client: str) -> Iterator[Api]:
    """One of CLIENTS or of OURS."""
    admin = f"http://localhost:{server.http_port}"
    if client == "apache":
        apache = pulsar.Client(
            server.pulsar_url,
            operation_timeout_seconds=TIMEOUT_S,
            logger=pulsar.ConsoleLogger(pulsar.LoggerLevel.Error),
        )
        yield Api(pulsar, apache, admin)
        apache.close()
    else:
        url = server.pulsar_url if client == OURS_OVER_TCP else server.service_url
        with magnetar.Client(url, operation_timeout_seconds=TIMEOUT_S) as ours:
            yield Api(magnetar, ours, admin)
