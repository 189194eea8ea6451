"""A real Apache Pulsar as a process, started from its published jars (`make pulsar` fetches them).

It has TLS beside plain TCP, and knows tokens, passwords and certificates. A client that says
nothing about itself may do everything, as the role "anonymous".
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import json
import os
import urllib.request
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from support import free_port

from magnetar.local_process import LocalProcess, ProcessFailed
from magnetar.zookeeper_server import find_java

if TYPE_CHECKING:
    from collections.abc import Callable

JARS = Path(os.environ.get("MAGNETAR_PULSAR_JARS", "~/.cache/magnetar/apache-pulsar")).expanduser()
FILES = Path(__file__).parents[1] / "fakes" / "tls"
SECRET = b"0123456789abcdef0123456789abcdef"
PASSWORDS = "admin:$apr1$abcdefgh$h9FWgUz3n9YxylKLlR5SQ/\n"  # "secret"

READY_S = 180.0  # it takes 7 s on a quiet machine, a minute on one that works for others

_OPENS = (
    "java.base/java.lang", "java.base/java.nio", "java.base/java.util.zip",
    "java.base/jdk.internal.misc", "java.base/jdk.internal.platform", "java.base/sun.net",
    "java.management/sun.management", "jdk.management/com.sun.management.internal",
)  # fmt: skip
_LOG = """
rootLogger.level = info
rootLogger.appenderRef.console.ref = console
appender.console.type = Console
appender.console.name = console
appender.console.layout.type = PatternLayout
appender.console.layout.pattern = %d{HH:mm:ss.SSS} %-5level %c{1} - %msg%n%throwable{5}
"""
_PROVIDER = "org.apache.pulsar.broker.authentication.AuthenticationProvider"


def token_of(role: str) -> str:
    """A JSON Web Token that the server accepts."""

    def part(content: bytes) -> str:
        return base64.urlsafe_b64encode(content).rstrip(b"=").decode()

    claims = json.dumps({"sub": role}).encode()
    signed = f"{part(json.dumps({'alg': 'HS256'}).encode())}.{part(claims)}"
    return f"{signed}.{part(hmac.digest(SECRET, signed.encode(), hashlib.sha256))}"


class ApachePulsar:
    """One broker with one bookie. It keeps acknowledged messages."""

    def __init__(self, directory: Path) -> None:
        if not list(JARS.glob("pulsar-broker-*.jar")):
            pytest.skip(f"no Apache Pulsar in {JARS}: `make pulsar` fetches it with Maven")
        try:
            java = find_java()
        except Exception as error:
            pytest.skip(f"Apache Pulsar needs Java 17: {error}")
        self._directory = directory
        self.port, self.tls_port, self.http_port, bookie_port = (free_port() for _ in range(4))
        settings = {
            "clusterName": "standalone",
            "advertisedAddress": "localhost",
            "brokerServicePort": self.port,
            "brokerServicePortTls": self.tls_port,
            "webServicePort": self.http_port,
            "tlsCertificateFilePath": FILES / "server.pem",
            "tlsKeyFilePath": FILES / "server-key.pem",
            "tlsTrustCertsFilePath": FILES / "ca.pem",
            "authenticationEnabled": "true",
            "authenticationProviders": ",".join(
                f"{_PROVIDER}{kind}" for kind in ("Token", "Basic", "Tls")
            ),
            "tokenSecretKey": f"data:;base64,{base64.b64encode(SECRET).decode()}",
            "basicAuthConf": f"data:;base64,{base64.b64encode(PASSWORDS.encode()).decode()}",
            "authorizationEnabled": "true",
            "anonymousUserRole": "anonymous",
            "superUserRoles": "admin,anonymous",
            "managedLedgerDefaultEnsembleSize": 1,
            "managedLedgerDefaultWriteQuorum": 1,
            "managedLedgerDefaultAckQuorum": 1,
            "defaultRetentionTimeInMinutes": -1,
            "defaultRetentionSizeInMB": -1,
            "brokerDeleteInactiveTopicsEnabled": "false",
            "loadBalancerEnabled": "false",
            "transactionCoordinatorEnabled": "false",
            "webSocketServiceEnabled": "false",
            # Of the bookie: without the second, it refuses messages of 5 MiB.
            "allowLoopback": "true",
            "nettyMaxFrameSizeBytes": 5_253_120,
            "journalSyncData": "false",
        }
        (directory / "standalone.conf").write_text(
            "".join(f"{name}={value}\n" for name, value in settings.items())
        )
        (directory / "log4j2.properties").write_text(_LOG)
        self._process = LocalProcess(
            "apache-pulsar",
            "apache-pulsar",
            directory,
            self._command(java, bookie_port),
            {},
            self._is_ready,
            ready_s=READY_S,
        )

    def _command(self, java: Path, bookie_port: int) -> list[str]:
        opens = [word for it in _OPENS for word in ("--add-opens", f"{it}=ALL-UNNAMED")]
        memory = ["-Xms128m", "-Xmx512m", "-XX:MaxDirectMemorySize=512m", "-XX:+UseSerialGC"]
        memory.append("-XX:TieredStopAtLevel=1")  # a short life: half of the CPU of a start
        return [
            str(java), *memory, *opens,
            "-Dio.netty.tryReflectionSetAccessible=true",
            f"-Dlog4j.configurationFile={self._directory / 'log4j2.properties'}",
            "-cp", f"{JARS}/*", "org.apache.pulsar.PulsarStandaloneStarter",
            "--config", str(self._directory / "standalone.conf"),
            "--metadata-dir", str(self._directory / "metadata"),
            "--bookkeeper-dir", str(self._directory / "bookkeeper"),
            "--bookkeeper-port", str(bookie_port),
            "--no-functions-worker", "--no-stream-storage", "--advertised-address", "localhost",
        ]  # fmt: skip

    def start(self) -> None:
        """Returns when it serves."""
        self._process.launch()
        try:
            self._process.wait_ready()
        except ProcessFailed:
            self._process.kill()
            raise

    def kill(self) -> None:
        self._process.kill()

    @property
    def url(self) -> str:
        return f"pulsar://localhost:{self.port}"

    @property
    def tls_url(self) -> str:
        return f"pulsar+ssl://localhost:{self.tls_port}"

    @property
    def put(self) -> Callable[[str, int], None]:
        """Make a topic of `public/default` with so many partitions."""

        def put(topic: str, count: int) -> None:
            path = f"admin/v2/persistent/public/default/{topic}/partitions"
            request = urllib.request.Request(
                f"http://localhost:{self.http_port}/{path}",
                method="PUT",
                data=b"%d" % count,
                headers={"Content-Type": "application/json"},
            )
            with urllib.request.urlopen(request, timeout=60):
                pass

        return put

    def _is_ready(self) -> bool:
        try:
            url = f"http://localhost:{self.http_port}/admin/v2/namespaces/public"
            with urllib.request.urlopen(url, timeout=5) as answer:
                return "public/default" in json.load(answer)
        except OSError:
            return False
