"""A real Apache ZooKeeper, alone or as an ensemble, from five jars that PySpark's wheel carries.

For tests and for the local cluster: nothing is installed on the system, everything listens on
loopback. Production points Magnetar at an ensemble of its own.

All calls block and are meant for a test's set-up or a thread. A node that was killed keeps its data
and its ports and can be started again.
"""

import importlib.util
import os
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Final, Self

from magnetar.runtime.ports import free_ports

READY_S: Final = 30.0
"""An ensemble of three answers after 1.0 to 2.2 s on two idle cores; busy machines take longer."""

STOP_S: Final = 5.0
_POLL_S: Final = 0.02
_ANSWER_S: Final = 1.0


_JARS: Final = (
    "zookeeper-[0-9]*.jar",
    "zookeeper-jute-*.jar",
    "slf4j-api-*.jar",
    "metrics-core-*.jar",  # this and the next are needed when classes are loaded
    "snappy-java-*.jar",
)
_JVM_OPTIONS: Final = (
    "-Xmx64m",  # holds some 100,000 nodes; resident 70 to 95 MiB in all
    "-Xss256k",
    "-XX:+UseSerialGC",
    "-XX:TieredStopAtLevel=1",  # starts in half the time
    "-XX:-UsePerfData",
    "-Dzookeeper.jmx.log4j.disable=true",
    "-Dzookeeper.admin.enableServer=false",
)
_MAIN: Final = "org.apache.zookeeper.server.quorum.QuorumPeerMain"


class ZooKeeperServerError(Exception):
    """Base of what can go wrong with starting a ZooKeeper. Nothing is left running."""

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


class ZooKeeperNotReady(ZooKeeperServerError):
    """It ended, or did not answer in time and was killed; `log_tail` is what it said."""

    def __init__(self, node: int, reason: str, log_tail: str) -> None:
        super().__init__(f"ZooKeeper {node} {reason}; its log ends:\n{log_tail}")
        self.node = node
        self.reason = reason
        self.log_tail = log_tail


class ZooKeeperEnsemble:
    """One node (`size=1`, a standalone server) or several. A context manager that starts and stops.

    Sessions are checked twice a second and may last from 1 to 60 s. `force_sync=False` acknowledges
    before the disk does: quicker, for tests that pull no power plug.
    """

    def __init__(
        self,
        directory: Path,
        *,
        size: int = 1,
        force_sync: bool = True,
        ready_s: float = READY_S,
        jars: Sequence[Path] | None = None,  # None: those of the installed PySpark
        ports: Sequence[int] | None = None,  # `ports_needed(size)` of them. None: free ones
    ) -> None:
        """Raises JavaMissing, ZooKeeperJarsMissing. Writes the configuration."""
        assert size >= 1, size
        java = find_java()
        jars = find_jars() if jars is None else jars
        self._ready_s = ready_s
        ports = free_ports(ports_needed(size)) if ports is None else ports
        self.nodes = [
            ZooKeeperNode(number, directory / f"zookeeper-{number}", ports[number - 1], [])
            for number in range(1, size + 1)
        ]
        quorum, election = ports[size::2], ports[size + 1 :: 2]
        servers = [
            f"server.{node.number}=127.0.0.1:{quorum[index]}:{election[index]}"
            for index, node in enumerate(self.nodes)
            if size > 1
        ]
        for node in self.nodes:
            node.command = _command(java, jars, node, force_sync=force_sync)
            _write_configuration(node, servers)

    @property
    def hosts(self) -> str:
        """ "host:port,…", as clients take it."""
        return ",".join(node.address for node in self.nodes)

    def start(self) -> None:
        """Start what is not running and wait until all answer. Raises ZooKeeperNotReady."""
        try:
            for node in self.nodes:
                if not node.running:
                    node.launch()
            deadline_s = time.monotonic() + self._ready_s
            for node in self.nodes:
                node.wait_ready(deadline_s)
        except BaseException:
            self.stop()
            raise

    def stop(self) -> None:
        """SIGTERM to all, SIGKILL to who is still there after STOP_S."""
        for node in self.nodes:
            node.terminate()
        for node in self.nodes:
            node.wait_stopped()

    def leader(self) -> "ZooKeeperNode":
        """The node that leads now. Raises ZooKeeperNotReady when none does within `ready_s`."""
        deadline_s = time.monotonic() + self._ready_s
        while time.monotonic() < deadline_s:
            for node in self.nodes:
                if node.mode() in ("leader", "standalone"):
                    return node
            time.sleep(_POLL_S)
        raise ZooKeeperNotReady(0, "has no leader", "")

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.stop()


@dataclass(eq=False)
class ZooKeeperNode:
    """One server process. `start`, `stop`, `kill` in any order; the data stays."""

    number: int
    directory: Path
    client_port: int
    command: list[str]
    _process: subprocess.Popen[bytes] | None = None
    _log_start: int = 0  # where the present run's log begins

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.client_port}"

    @property
    def pid(self) -> int | None:
        """None: not running."""
        return self._process.pid if self._process is not None and self.running else None

    @property
    def running(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def start(self) -> None:
        """Start and wait until it answers. A node of an ensemble answers only within a majority."""
        self.launch()
        self.wait_ready(time.monotonic() + READY_S)

    def stop(self) -> None:
        self.terminate()
        self.wait_stopped()

    def kill(self) -> None:
        """SIGKILL, as a power cut that spares the page cache."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()

    def pause(self) -> None:
        """SIGSTOP: there, and silent. Returns when it is."""
        assert self._process is not None
        self._process.send_signal(signal.SIGSTOP)
        os.waitid(os.P_PID, self._process.pid, os.WSTOPPED | os.WNOWAIT)

    def resume(self) -> None:
        assert self._process is not None
        self._process.send_signal(signal.SIGCONT)

    def mode(self) -> str | None:
        """ "standalone", "leader", "follower"; None: it does not serve."""
        answer = _ask(self.client_port, b"srvr")
        for line in answer.splitlines():
            if line.startswith("Mode: "):
                return line.removeprefix("Mode: ")
        return None

    def launch(self) -> None:
        """Start without waiting."""
        assert not self.running, f"ZooKeeper {self.number} is running"
        with (self.directory / "zookeeper.log").open("ab") as log:
            self._log_start = log.tell()
            # A session of its own: a Ctrl-C in the terminal is for the launcher to act on.
            self._process = subprocess.Popen(
                self.command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                cwd=self.directory,
                start_new_session=True,
            )

    def wait_ready(self, deadline_s: float) -> None:
        """Until it answers; `deadline_s` is in `time.monotonic()`. Raises ZooKeeperNotReady, after
        killing it: with a jar missing, the main thread dies and the process stays."""
        assert self._process is not None
        log = self.directory / "zookeeper.log"
        while self.mode() is None:
            text = log.read_bytes()[self._log_start :].decode(errors="replace")
            if not self.running:
                raise ZooKeeperNotReady(
                    self.number, f"ended with status {self._process.returncode}", text[-2000:]
                )
            if 'Exception in thread "main"' in text or time.monotonic() > deadline_s:
                self.kill()
                raise ZooKeeperNotReady(self.number, "did not get ready", text[-2000:])
            time.sleep(_POLL_S)

    def terminate(self) -> None:
        if self._process is not None and self.running:
            self._process.send_signal(signal.SIGCONT)  # a paused one would not hear the next
            self._process.terminate()

    def wait_stopped(self) -> None:
        if self._process is None:
            return
        try:
            self._process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            self.kill()


def find_java() -> Path:
    """Raises JavaMissing."""
    home = os.environ.get("JAVA_HOME")
    if home and (java := Path(home) / "bin" / "java").exists():
        return java
    found = shutil.which("java")
    if found is None:
        raise JavaMissing
    return Path(found)


def find_jars() -> list[Path]:
    """Raises ZooKeeperJarsMissing."""
    spec = importlib.util.find_spec("pyspark")  # finds, does not import
    if spec is None or spec.origin is None:
        raise ZooKeeperJarsMissing(["pyspark"])
    folder = Path(spec.origin).parent / "jars"
    found = {pattern: sorted(folder.glob(pattern)) for pattern in _JARS}
    missing = [pattern for pattern, paths in found.items() if not paths]
    if missing:
        raise ZooKeeperJarsMissing(missing)
    return [paths[-1] for paths in found.values()]


def ports_needed(size: int) -> int:
    """A lone node listens to clients only; one of an ensemble also has a port for the leader's
    followers and one for elections."""
    return 1 if size == 1 else 3 * size


def _command(
    java: Path, jars: Sequence[Path], node: ZooKeeperNode, *, force_sync: bool
) -> list[str]:
    sync = [] if force_sync else ["-Dzookeeper.forceSync=no"]
    class_path = os.pathsep.join(map(str, jars))
    configuration = str(node.directory / "zoo.cfg")
    return [str(java), *_JVM_OPTIONS, *sync, "-cp", class_path, _MAIN, configuration]


def _write_configuration(node: ZooKeeperNode, servers: Sequence[str]) -> None:
    data = node.directory / "data"
    data.mkdir(parents=True, exist_ok=True)
    lines = [
        f"dataDir={data}",
        f"clientPort={node.client_port}",
        "clientPortAddress=127.0.0.1",
        "tickTime=500",
        "initLimit=20",
        "syncLimit=10",
        "minSessionTimeout=1000",
        "maxSessionTimeout=60000",
        "maxClientCnxns=0",
        "admin.enableServer=false",
        "4lw.commands.whitelist=*",
        "autopurge.purgeInterval=1",  # hours; else every log there ever was is kept
        "autopurge.snapRetainCount=3",
        *servers,
    ]
    (node.directory / "zoo.cfg").write_text("\n".join(lines) + "\n")
    (data / "myid").write_text(f"{node.number}\n")


def _ask(port: int, word: bytes) -> str:
    """The answer to one of ZooKeeper's four-letter words; "" when there is none."""
    try:
        with socket.create_connection(("127.0.0.1", port), timeout=_ANSWER_S) as connection:
            connection.sendall(word)
            answer = b""
            while chunk := connection.recv(4096):
                answer += chunk
            return answer.decode(errors="replace")
    except OSError:
        return ""
