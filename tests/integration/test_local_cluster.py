"""`magnetar local-cluster`: what it prints, what it survives, and that nothing is left behind."""

from __future__ import annotations

import json
import os
import pty
import re
import shutil
import signal
import socket
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import httpx
import pytest
from support import skip_without_zookeeper, wait_for

import magnetar
import magnetar.asyncio
from magnetar.claim import DirectoryRefused
from magnetar.local_cluster import LocalCluster
from magnetar.local_process import ProcessFailed

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

pytestmark = [pytest.mark.cluster, pytest.mark.real_loop]

EARLIEST = magnetar.MessageId.earliest
READY_S = 90.0


@pytest.fixture(autouse=True)
def _java() -> None:
    skip_without_zookeeper()


class Launcher:
    """The command as a process."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory / "cluster"
        self.ready: dict[str, Any] = {}
        self._log = directory / "launcher.log"
        self._process: subprocess.Popen[str] | None = None

    def launch(self, *flags: str, stdout: int = subprocess.PIPE) -> subprocess.Popen[str]:
        command = [sys.executable, "-m", "magnetar.cli.main", "local-cluster"]
        with self._log.open("a") as log:
            self._process = subprocess.Popen(
                [*command, "--dir", str(self.directory), *flags],
                stdout=stdout,
                stderr=log,
                text=True,
            )
        return self._process

    def start(self, *flags: str) -> None:
        """Start the command. Returns when it has printed that the cluster is ready."""
        stdout = self.launch(*flags).stdout
        assert stdout is not None
        line = stdout.readline()
        assert line, self.log
        self.ready = json.loads(line)

    @property
    def process(self) -> subprocess.Popen[str]:
        assert self._process is not None
        return self._process

    @property
    def log(self) -> str:
        return self._log.read_text()

    def pids(self, *roles: str) -> list[int]:
        return [each["pid"] for each in self.ready["processes"] if each["role"] in roles]

    def description(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads((self.directory / "cluster.json").read_text())
        return found

    def stop(self) -> None:
        """Stop the command with SIGTERM, and check that it ends cleanly."""
        self.process.terminate()
        self.process.communicate(timeout=60)
        assert self.process.returncode == 0, self.log

    def end(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.communicate()


@pytest.fixture
def launcher(tmp_path: Path) -> Iterator[Launcher]:
    found = Launcher(tmp_path)
    yield found
    found.end()


def alive(pid: int) -> bool:
    """Return whether the process runs. A zombie does not run."""
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] not in ("Z", "X")
    except FileNotFoundError:
        return False


ALL = ("zookeeper", "bookie", "broker", "autorecovery")


def test_local_cluster_prints_its_servers_and_sigterm_stops_them_all(launcher: Launcher) -> None:
    launcher.start("--zookeepers", "1", "--bookies", "2", "--brokers", "2")
    ready = launcher.ready
    assert ready == launcher.description()
    roles = [each["role"] for each in ready["processes"]]
    assert roles == ["zookeeper", *["bookie"] * 2, *["broker"] * 2, "autorecovery"]
    assert [each["id"] for each in ready["processes"] if each["role"] == "bookie"] == [
        "bookie-1",
        "bookie-2",
    ]
    brokers = [each for each in ready["processes"] if each["role"] == "broker"]
    addresses = [f"127.0.0.1:{each['ports']['grpc']}" for each in brokers]
    assert ready["service_url"] == f"grpc://{','.join(addresses)}"
    addresses = [f"127.0.0.1:{each['ports']['http']}" for each in brokers]
    assert ready["admin_url"] == f"http://{','.join(addresses)}"
    zookeeper = ready["processes"][0]
    assert ready["zookeeper"] == f"127.0.0.1:{zookeeper['ports']['client']}"
    assert ready["metadata_url"] == f"zk://{ready['zookeeper']}/magnetar"
    told = subprocess.check_output(["sh", "-ec", f". {launcher.directory}/env.sh; env"], text=True)
    for role in ("service", "admin", "metadata"):
        assert f"MAGNETAR_{role.upper()}_URL={ready[f'{role}_url']}" in told.splitlines()
    assert all(alive(pid) for pid in launcher.pids(*ALL))
    with magnetar.Client(ready["service_url"]) as client:
        client.create_producer("greetings").send(b"hello")
        reader = client.create_reader("greetings", EARLIEST)
        assert reader.read_next(timeout_millis=30_000).data() == b"hello"
    launcher.process.send_signal(signal.SIGTERM)
    rest, _ = launcher.process.communicate(timeout=60)
    assert (launcher.process.returncode, rest) == (0, "")  # no further line, and a clean end
    assert not any(alive(pid) for pid in launcher.pids(*ALL))
    for name in ("cluster.json", "env.sh"):
        assert not (launcher.directory / name).exists()
    for role, name in (
        ("bookie", "bookie-1"),
        ("broker", "broker-2"),
        ("autorecovery", "autorecovery-1"),
    ):
        text = (launcher.directory / name / f"{role}.log").read_text()
        assert "stopped by" not in text
        assert '"stopping"' in text


def test_all_processes_end_when_the_launcher_is_killed(launcher: Launcher) -> None:
    launcher.start("--zookeepers", "1", "--bookies", "1", "--brokers", "1")
    launcher.process.kill()
    launcher.process.communicate()
    wait_for(lambda: not any(alive(pid) for pid in launcher.pids(*ALL)))
    # A cluster starts again after all its processes were killed.
    first = launcher.ready["zookeeper"]
    launcher.start("--zookeepers", "1", "--bookies", "1", "--brokers", "1")
    assert launcher.ready["zookeeper"] == launcher.description()["zookeeper"]
    assert first


def test_a_killed_process_stays_dead_or_is_started_again(launcher: Launcher) -> None:
    flags = ["--zookeepers", "1", "--bookies", "1", "--brokers", "1"]
    launcher.start(*flags)
    [broker] = launcher.pids("broker")
    os.kill(broker, signal.SIGKILL)
    wait_for(lambda: "process ended" in launcher.log)
    assert launcher.description() == launcher.ready
    launcher.process.send_signal(signal.SIGINT)
    launcher.process.communicate(timeout=60)
    assert launcher.process.returncode == 0

    launcher.start(*flags, "--restart")
    before = launcher.ready
    for role in ("broker", "bookie"):
        [pid] = [
            each["pid"] for each in launcher.description()["processes"] if each["role"] == role
        ]
        count = launcher.log.count("process restarted")
        os.kill(pid, signal.SIGKILL)
        wait_for(lambda count=count: launcher.log.count("process restarted") > count)
    after = launcher.description()
    for old, new in zip(before["processes"], after["processes"], strict=True):
        changed = old["role"] in ("broker", "bookie")
        assert (old["pid"] != new["pid"]) == changed
        assert old | {"pid": 0} == new | {"pid": 0}  # the same ports and the same data
        assert alive(new["pid"])
    with magnetar.Client(after["service_url"]) as client:
        client.create_producer("greetings").send(b"hello")


@pytest.mark.real_loop(deadline_s=240)
async def test_processes_are_killed_and_restarted_from_python(tmp_path: Path) -> None:
    """The writer continues with two of three bookies, and through the death of each broker in turn.
    All messages are read in the end, also after a stop of the whole cluster."""

    sent = []
    async with (
        LocalCluster(tmp_path / "c", zookeepers=3, bookies=3, brokers=2) as cluster,
        magnetar.asyncio.Client(cluster.service_url) as client,
    ):
        producer = await client.create_producer("numbers")

        async def send(count: int) -> None:
            for _ in range(count):
                content = b"%d" % len(sent)
                await producer.send(content)
                sent.append(content)

        await send(20)
        await cluster.kill("bookie", "bookie-2")
        assert not cluster.process("bookie", "bookie-2").running
        await send(20)
        for broker in ("broker-1", "broker-2"):
            pid = cluster.process("broker", broker).pid
            await cluster.kill("broker", broker)
            await send(20)
            await cluster.restart("broker", broker)
            assert cluster.process("broker", broker).pid != pid
        await cluster.kill("zookeeper", "zookeeper-1")
        await send(20)
        await cluster.restart("bookie", "bookie-2")
        await cluster.restart("zookeeper", "zookeeper-1")
    async with (
        LocalCluster(tmp_path / "c", zookeepers=3, bookies=3, brokers=2) as cluster,
        magnetar.asyncio.Client(cluster.service_url) as client,
    ):
        reader = await client.create_reader("numbers", EARLIEST)
        found = []
        while len(set(found)) < len(sent):
            found.append((await reader.read_next(timeout_millis=20_000)).data())
        assert list(dict.fromkeys(found)) == sent


# -- The same directory again ------------------------------------------------------------------

SMALL = ("--zookeepers", "1", "--bookies", "1", "--brokers", "1")


def ports_of(description: dict[str, Any]) -> dict[str, dict[str, int]]:
    return {each["id"]: each["ports"] for each in description["processes"]}


def test_ports_stay_the_same_until_another_process_takes_one(launcher: Launcher) -> None:
    launcher.start(*SMALL)
    before = ports_of(launcher.ready)
    launcher.stop()
    launcher.start(*SMALL, "--autorecoveries", "2")
    after = ports_of(launcher.ready)
    assert after.pop("autorecovery-2")
    assert after == before
    launcher.stop()
    assert "port is in use" not in launcher.log
    with socket.create_server(("127.0.0.1", before["broker-1"]["grpc"])):
        launcher.start(*SMALL)
    after = ports_of(launcher.ready)
    new = after["broker-1"].pop("grpc")
    old = before["broker-1"].pop("grpc")
    assert new != old
    assert after == before
    [line] = [json.loads(line) for line in launcher.log.splitlines() if "port is in use" in line]
    assert (line["process"], line["port"], line["new_port"]) == ("broker-1", old, new)


@pytest.mark.parametrize("text", ["{", "[]", '{"broker-1": 3}', '{"broker-1": {"grpc": null}}'])
async def test_damaged_record_of_ports_is_refused_with_what_to_do(
    tmp_path: Path, text: str
) -> None:
    (tmp_path / "local-cluster").write_text("magnetar local-cluster 1\n")
    (tmp_path / "ports.json").write_text(text)
    with pytest.raises(DirectoryRefused, match=r"ports\.json is damaged.*Delete it"):
        async with LocalCluster(tmp_path):
            pass


@pytest.mark.timeout(400)
def test_decommissioned_bookie_is_left_out_until_its_directory_is_deleted(
    launcher: Launcher,
) -> None:
    flags = ("--zookeepers", "1", "--bookies", "4", "--brokers", "1")
    launcher.start(*flags)
    with magnetar.Client(launcher.ready["service_url"]) as client:
        client.subscribe("greetings", "keeps")  # without a subscription, the topic keeps no message
        client.create_producer("greetings").send(b"hello")
    # Otherwise the decommissioning would wait 40 s, until the broker replaces the open ledger.
    unload = f"{launcher.ready['admin_url']}/admin/v2/persistent/public/default/greetings/unload"
    assert httpx.put(unload).status_code == 204
    [pid] = [each["pid"] for each in launcher.ready["processes"] if each["id"] == "bookie-3"]
    command = [sys.executable, "-m", "magnetar.cli.main", "bookies", "decommission", "bookie-3"]
    with subprocess.Popen(
        [*command, "--metadata-url", launcher.ready["metadata_url"]],
        stdout=subprocess.PIPE,
        text=True,
    ) as decommission:
        assert decommission.stdout is not None
        assert any("Stop it now" in line for line in decommission.stdout)
        os.kill(pid, signal.SIGTERM)
        assert decommission.wait(60) == 0
    launcher.stop()

    launcher.start(*flags)
    assert [each for each in ports_of(launcher.ready) if each.startswith("bookie")] == [
        *("bookie-1", "bookie-2", "bookie-4"),
    ]
    [line] = [json.loads(line) for line in launcher.log.splitlines() if "left out" in line]
    assert (line["bookie"], line["level"]) == ("bookie-3", "warning")
    with magnetar.Client(launcher.ready["service_url"]) as client:
        consumer = client.subscribe("greetings", "keeps")
        assert consumer.receive(timeout_millis=30_000).data() == b"hello"
        client.create_producer("greetings").send(b"again")
    launcher.stop()

    shutil.rmtree(line["directory"])
    launcher.start(*flags)
    assert "bookie-3" in ports_of(launcher.ready)
    assert launcher.log.count("left out") == 1


# -- What people see ---------------------------------------------------------------------------


def test_terminal_gets_a_table_instead_of_json(launcher: Launcher) -> None:
    terminal, other_end = pty.openpty()
    try:
        process = launcher.launch(*SMALL, stdout=other_end)
        os.close(other_end)
        said = ""
        while "Ctrl-C stops all processes" not in said:
            said += os.read(terminal, 4096).decode()  # OSError: the process ended
        description = launcher.description()
        assert not any(line.startswith("{") for line in said.splitlines())
        for each in description["processes"]:
            assert re.search(rf"{each['id']}\s+{each['pid']}\b", said)
        for url in ("service_url", "pulsar_url", "admin_url", "metadata_url"):
            assert description[url] in said
        assert f". {launcher.directory}/env.sh" in said
        process.send_signal(signal.SIGINT)
        assert process.wait(60) == 0
    finally:
        os.close(terminal)


# -- Refusals ----------------------------------------------------------------------------------


async def test_a_foreign_directory_is_refused(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("precious")

    with pytest.raises(DirectoryRefused, match=r"it holds thesis\.tex"):
        async with LocalCluster(tmp_path):
            pass


async def test_another_number_of_zookeepers_is_refused(tmp_path: Path) -> None:
    (tmp_path / "local-cluster").write_text("magnetar local-cluster 1\n")
    (tmp_path / "zookeeper-1").mkdir()

    with pytest.raises(DirectoryRefused, match="has 1 ZooKeepers, not 3"):
        async with LocalCluster(tmp_path):
            pass


@pytest.mark.real_loop(deadline_s=240)
async def test_a_server_that_does_not_start_ends_the_cluster(tmp_path: Path) -> None:
    (tmp_path / "local-cluster").write_text("magnetar local-cluster 1\n")
    data = tmp_path / "bookie-1" / "data"
    data.mkdir(parents=True)
    (data / "thesis.tex").write_text("precious")
    cluster = LocalCluster(tmp_path, zookeepers=1, bookies=1, brokers=1)

    with pytest.raises(ProcessFailed, match=r"bookie-1 ended with status 1.*thesis\.tex"):
        async with cluster:
            pass
    assert not any(process.running for process in cluster.processes)


def test_local_cluster_without_java_says_what_to_install(
    launcher: Launcher, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("JAVA_HOME", raising=False)
    process = launcher.launch()
    assert process.wait(60) == 1
    assert "apt-get install openjdk-17-jre-headless" in launcher.log
    assert "Traceback" not in launcher.log


def test_a_stop_before_the_cluster_is_ready_leaves_no_process(launcher: Launcher) -> None:
    process = launcher.launch("--zookeepers", "3")
    wait_for(lambda: (launcher.directory / "zookeeper-1" / "zookeeper.log").exists())
    process.send_signal(signal.SIGTERM)
    said, _ = process.communicate(timeout=60)
    assert (process.returncode, said) == (0, "")
    with_cluster = subprocess.run(
        ["pgrep", "-f", str(launcher.directory)], capture_output=True, text=True, check=False
    )
    assert with_cluster.stdout == ""
