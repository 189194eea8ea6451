"""A real Apache Pulsar as a process: one broker and its bookies in one JVM."""

from __future__ import annotations

import json
import os
import socket
import urllib.request
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Final

from magnetar.local_process import LocalProcess, ProcessFailed
from magnetar.zookeeper_server import find_java

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

JARS: Final = Path(
    os.environ.get("MAGNETAR_PULSAR_JARS", "~/.cache/magnetar/apache-pulsar")
).expanduser()
READY_S: Final = 180.0  # the start takes 7 s on an idle machine, a minute on a busy one
# The options of Pulsar's own conf/pulsar_env.sh, with less heap at the start.
MEMORY: Final = ("-Xms256m", "-Xmx2g", "-XX:MaxDirectMemorySize=4g", "-XX:+UseG1GC")

_OPENS: Final = (
    "java.base/java.lang", "java.base/java.nio", "java.base/java.util.zip",
    "java.base/jdk.internal.misc", "java.base/jdk.internal.platform", "java.base/sun.net",
    "java.management/sun.management", "jdk.management/com.sun.management.internal",
)  # fmt: skip
_LOG: Final = """
rootLogger.level = {level}
rootLogger.appenderRef.console.ref = console
appender.console.type = Console
appender.console.name = console
appender.console.layout.type = PatternLayout
appender.console.layout.pattern = %d{{HH:mm:ss.SSS}} %-5level %c{{1}} - %msg%n%throwable{{5}}
"""
_SETTINGS: Final = {
    "clusterName": "standalone",
    "advertisedAddress": "localhost",
    "defaultRetentionTimeInMinutes": -1,
    "defaultRetentionSizeInMB": -1,
    "brokerDeleteInactiveTopicsEnabled": "false",
    "loadBalancerEnabled": "false",
    "transactionCoordinatorEnabled": "false",
    "webSocketServiceEnabled": "false",
    # Settings of the bookies; without the second one, they refuse messages of 5 MiB.
    "allowLoopback": "true",
    "nettyMaxFrameSizeBytes": 5_253_120,
}


class JarsMissing(Exception):
    """The jars of Apache Pulsar are not on this machine: `make pulsar` fetches them."""

    def __init__(self) -> None:
        super().__init__(f"no Apache Pulsar in {JARS}: `make pulsar` fetches it with Maven")


class PulsarProcess:
    """Runs Pulsar's `PulsarStandaloneStarter`. `settings` (broker.conf) override _SETTINGS.

    With three `bookies`, entries are stored at 3/3/2. Raises JarsMissing, JavaMissing.
    """

    def __init__(
        self,
        directory: Path,
        *,
        settings: Mapping[str, object],
        bookies: int = 1,
        memory: Sequence[str] = MEMORY,
        log_level: str = "info",
    ) -> None:
        if not list(JARS.glob("pulsar-broker-*.jar")):
            raise JarsMissing
        self.port, self.http_port, bookie_port = free_ports(bookies)
        quorums = {
            "managedLedgerDefaultEnsembleSize": bookies,
            "managedLedgerDefaultWriteQuorum": bookies,
            "managedLedgerDefaultAckQuorum": min(bookies, 2),
        }
        ports = {"brokerServicePort": self.port, "webServicePort": self.http_port}
        lines = (_SETTINGS | quorums | ports | dict(settings)).items()
        directory.mkdir(parents=True, exist_ok=True)
        (directory / "standalone.conf").write_text("".join(f"{n}={v}\n" for n, v in lines))
        (directory / "log4j2.properties").write_text(_LOG.format(level=log_level))
        java = str(find_java())
        command = [
            java, *memory, *java_options(directory),
            "-cp", f"{JARS}/*", "org.apache.pulsar.PulsarStandaloneStarter",
            "--config", str(directory / "standalone.conf"),
            "--metadata-dir", str(directory / "metadata"),
            "--bookkeeper-dir", str(directory / "bookkeeper"),
            "--bookkeeper-port", str(bookie_port), "--num-bookies", str(bookies),
            "--no-functions-worker", "--no-stream-storage", "--advertised-address", "localhost",
        ]  # fmt: skip
        self._process = LocalProcess(
            "apache-pulsar", "apache-pulsar", directory, command, {}, self._ready, ready_s=READY_S
        )

    def start(self) -> None:
        """Start the process. Returns when Pulsar serves."""
        self._process.launch()
        try:
            self._process.wait_ready()
        except ProcessFailed:
            self._process.kill()
            raise

    def kill(self) -> None:
        self._process.kill()

    @property
    def pid(self) -> int:
        assert self._process.pid is not None
        return self._process.pid

    @property
    def url(self) -> str:
        return f"pulsar://localhost:{self.port}"

    def _ready(self) -> bool:
        try:
            url = f"http://localhost:{self.http_port}/admin/v2/namespaces/public"
            with urllib.request.urlopen(url, timeout=5) as answer:
                return "public/default" in json.load(answer)
        except OSError:
            return False


def java_options(directory: Path) -> list[str]:
    """Return the Java options of every program in Pulsar's jars, with the log settings that are in
    `directory`."""
    opens = [word for it in _OPENS for word in ("--add-opens", f"{it}=ALL-UNNAMED")]
    return [
        *opens,
        "-Dio.netty.tryReflectionSetAccessible=true",
        f"-Dlog4j.configurationFile={directory / 'log4j2.properties'}",
    ]


def free_ports(bookies: int) -> tuple[int, int, int]:
    """Return two free ports, and the first of `bookies` free ports in a row."""
    with ExitStack() as stack:
        while True:
            broker, http, first = (_bind(stack, 0) for _ in range(3))
            try:
                for port in range(first + 1, first + bookies):
                    _bind(stack, port)
            except (OSError, OverflowError):
                continue
            return broker, http, first


def _bind(stack: ExitStack, port: int) -> int:
    listener = stack.enter_context(socket.socket())
    listener.bind(("127.0.0.1", port))
    return int(listener.getsockname()[1])
