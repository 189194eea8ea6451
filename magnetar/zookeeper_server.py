"""A real Apache ZooKeeper, one server or an ensemble, from jars of the PySpark wheel.

Tests and the local cluster use it. Nothing is installed on the system, and the servers listen on
loopback. A production cluster needs a ZooKeeper ensemble of its own.

The calls block: run them in a test's set-up or on a thread. A killed server keeps its data and its
ports, and can be started again.
"""

import importlib.util
import os
import shutil
import socket
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Final, Self

from magnetar.local_process import LocalProcess
from magnetar.runtime.ports import free_ports

READY_S: Final = 30.0
"""The time limit of a start. An ensemble of three answers after 1.0 to 2.2 s on two idle cores; a
busy machine takes longer."""

STOP_S: Final = 5.0
_ANSWER_S: Final = 1.0


_JARS: Final = (
    "zookeeper-[0-9]*.jar",
    "zookeeper-jute-*.jar",
    "slf4j-api-*.jar",
    "metrics-core-*.jar",  # the server loads classes of this jar and of the next one at start
    "snappy-java-*.jar",
)
_JVM_OPTIONS: Final = (
    "-Xmx64m",  # holds about 100,000 nodes; the process has 70 to 95 MiB resident
    "-Xss256k",
    "-XX:+UseSerialGC",
    "-XX:TieredStopAtLevel=1",  # halves the start time
    "-XX:-UsePerfData",
    "-Dzookeeper.jmx.log4j.disable=true",
    "-Dzookeeper.admin.enableServer=false",
)
_MAIN: Final = "org.apache.zookeeper.server.quorum.QuorumPeerMain"


class ZooKeeperServerError(Exception):
    """Base of the errors before a start: ZooKeeper cannot run on this machine."""

    definite = True


class JavaMissing(ZooKeeperServerError):
    def __init__(self) -> None:
        super().__init__(
            "ZooKeeper needs Java 17 or newer, and there is no `java` in JAVA_HOME or on the PATH:"
            " apt-get install openjdk-17-jre-headless"
        )


class ZooKeeperJarsMissing(ZooKeeperServerError):
    def __init__(self, missing: Sequence[str]) -> None:
        super().__init__(
            f"ZooKeeper's jars come with PySpark, and {', '.join(missing)} could not be found:"
            " pip install 'magnetar[spark]'"
        )
        self.missing = tuple(missing)


class ZooKeeperEnsemble:
    """One server (`size=1`) or several. A context manager that starts and stops them.

    The servers check sessions twice a second; a session timeout may be 1 to 60 s. With
    `force_sync=False` a server acknowledges a write before the write is on disk. This is faster,
    and enough for tests without power cuts. `tied`: see LocalProcess.
    """

    def __init__(
        self,
        directory: Path,
        *,
        size: int = 1,
        force_sync: bool = True,
        ready_s: float = READY_S,
        jars: Sequence[Path] | None = None,  # None: the jars of the installed PySpark
        # The ports of each server. None: free ports.
        ports: Sequence[Mapping[str, int]] | None = None,
        tied: bool = False,
    ) -> None:
        """Write the configuration of each server. Raises JavaMissing, ZooKeeperJarsMissing."""
        assert size >= 1, size
        java = find_java()
        jars = find_jars() if jars is None else jars
        if ports is None:
            kinds = port_kinds(size)
            ports = [dict(zip(kinds, free_ports(len(kinds)), strict=True)) for _ in range(size)]
        servers = [
            f"server.{number}=127.0.0.1:{each['quorum']}:{each['election']}"
            for number, each in enumerate(ports, 1)
            if size > 1
        ]
        self.nodes: list[LocalProcess] = []
        for number, each in enumerate(ports, 1):
            name = f"zookeeper-{number}"
            configuration = _write_configuration(directory / name, number, each["client"], servers)
            self.nodes.append(
                LocalProcess(
                    "zookeeper",
                    name,
                    directory / name,
                    _command(java, jars, configuration, force_sync=force_sync),
                    each,
                    partial(_serves, each["client"]),
                    ready_s=ready_s,
                    stop_s=STOP_S,
                    tied=tied,
                )
            )

    @property
    def hosts(self) -> str:
        """The addresses of all servers for clients: "host:port,…"."""
        return ",".join(map(address, self.nodes))

    def start(self) -> None:
        """Start the servers that do not run and wait until all answer. Raises ProcessFailed."""
        try:
            for node in self.nodes:
                if not node.running:
                    node.launch()
            for node in self.nodes:
                node.wait_ready()
        except BaseException:
            self.stop()
            raise

    def stop(self) -> None:
        """Stop all servers. Idempotent."""
        for node in self.nodes:
            node.terminate()
        for node in self.nodes:
            node.wait_stopped()

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()


def mode(node: LocalProcess) -> str | None:
    """Return "standalone", "leader" or "follower". None: the server does not serve."""
    return _mode(node.ports["client"])


def address(node: LocalProcess) -> str:
    """Return the server's "host:port" for clients."""
    return f"127.0.0.1:{node.ports['client']}"


def port_kinds(size: int) -> tuple[str, ...]:
    """Return the kinds of ports of each server. A server of an ensemble also has a port to which
    followers connect while it leads, and a port for elections."""
    return ("client",) if size == 1 else ("client", "quorum", "election")


def find_java() -> Path:
    """Return the path of `java`, from JAVA_HOME or else from the PATH. Raises JavaMissing."""
    home = os.environ.get("JAVA_HOME")
    if home and (java := Path(home) / "bin" / "java").exists():
        return java
    found = shutil.which("java")
    if found is None:
        raise JavaMissing
    return Path(found)


def find_jars() -> list[Path]:
    """Return ZooKeeper's jars of the installed PySpark. Raises ZooKeeperJarsMissing."""
    spec = importlib.util.find_spec("pyspark")  # does not import it
    if spec is None or spec.origin is None:
        raise ZooKeeperJarsMissing(["pyspark"])
    folder = Path(spec.origin).parent / "jars"
    found = {pattern: sorted(folder.glob(pattern)) for pattern in _JARS}
    missing = [pattern for pattern, paths in found.items() if not paths]
    if missing:
        raise ZooKeeperJarsMissing(missing)
    return [paths[-1] for paths in found.values()]


def _command(
    java: Path, jars: Sequence[Path], configuration: Path, *, force_sync: bool
) -> list[str]:
    sync = [] if force_sync else ["-Dzookeeper.forceSync=no"]
    class_path = os.pathsep.join(map(str, jars))
    return [str(java), *_JVM_OPTIONS, *sync, "-cp", class_path, _MAIN, str(configuration)]


def _write_configuration(
    directory: Path, number: int, client_port: int, servers: Sequence[str]
) -> Path:
    data = directory / "data"
    data.mkdir(parents=True, exist_ok=True)
    lines = [
        f"dataDir={data}",
        f"clientPort={client_port}",
        "clientPortAddress=127.0.0.1",
        "tickTime=500",
        "initLimit=20",
        "syncLimit=10",
        "minSessionTimeout=1000",
        "maxSessionTimeout=60000",
        "maxClientCnxns=0",
        "admin.enableServer=false",
        "4lw.commands.whitelist=*",
        "autopurge.purgeInterval=1",  # hours; without it ZooKeeper keeps every log
        "autopurge.snapRetainCount=3",
        *servers,
    ]
    configuration = directory / "zoo.cfg"
    configuration.write_text("\n".join(lines) + "\n")
    (data / "myid").write_text(f"{number}\n")
    return configuration


def _serves(client_port: int) -> bool:
    return _mode(client_port) is not None


def _mode(client_port: int) -> str | None:
    for line in _ask(client_port, b"srvr").splitlines():
        if line.startswith("Mode: "):
            return line.removeprefix("Mode: ")
    return None


def _ask(port: int, word: bytes) -> str:
    """Return the answer to one of ZooKeeper's four-letter words. "": the server does not answer."""
    try:
        with socket.create_connection(("127.0.0.1", port), timeout=_ANSWER_S) as connection:
            connection.sendall(word)
            answer = b""
            while chunk := connection.recv(4096):
                answer += chunk
            return answer.decode(errors="replace")
    except OSError:
        return ""
