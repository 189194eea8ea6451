"""A real Apache Pulsar as a process, started from its published jars (`make pulsar` fetches them).

It listens with TLS and with plain TCP, and accepts tokens, passwords and certificates. A client
without credentials has the role "anonymous", which may do everything.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import json
import urllib.request
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from support import free_port

from benchmarks.peers.pulsar.server import JarsMissing, PulsarProcess
from magnetar.zookeeper_server import JavaMissing

if TYPE_CHECKING:
    from collections.abc import Callable

FILES = Path(__file__).parents[1] / "fakes" / "tls"
SECRET = b"0123456789abcdef0123456789abcdef"
PASSWORDS = "admin:$apr1$abcdefgh$h9FWgUz3n9YxylKLlR5SQ/\n"  # "secret"

# For a short run with little memory: these options halve the CPU of a start.
MEMORY = (
    "-Xms128m", "-Xmx512m", "-XX:MaxDirectMemorySize=512m", "-XX:+UseSerialGC",
    "-XX:TieredStopAtLevel=1",
)  # fmt: skip

_PROVIDER = "org.apache.pulsar.broker.authentication.AuthenticationProvider"


def token_of(role: str) -> str:
    """A JSON Web Token that the server accepts."""

    def part(content: bytes) -> str:
        return base64.urlsafe_b64encode(content).rstrip(b"=").decode()

    claims = json.dumps({"sub": role}).encode()
    signed = f"{part(json.dumps({'alg': 'HS256'}).encode())}.{part(claims)}"
    return f"{signed}.{part(hmac.digest(SECRET, signed.encode(), hashlib.sha256))}"


class ApachePulsar(PulsarProcess):
    """One broker with one bookie. It keeps acknowledged messages."""

    def __init__(self, directory: Path) -> None:
        self.tls_port = free_port()
        settings = {
            "brokerServicePortTls": self.tls_port,
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
            "journalSyncData": "false",
        }
        try:
            super().__init__(directory, settings=settings, memory=MEMORY)
        except (JarsMissing, JavaMissing) as missing:
            pytest.skip(str(missing))

    @property
    def tls_url(self) -> str:
        return f"pulsar+ssl://localhost:{self.tls_port}"

    @property
    def put(self) -> Callable[[str, int], None]:
        """Create a topic of `public/default` with this number of partitions."""

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
