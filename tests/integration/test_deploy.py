"""The files of deploy/, checked without a Docker engine: read, compared with the code, and each
service of ours run as it is written there, outside a container."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import yaml
from support import free_port, skip_without_zookeeper

import magnetar
from magnetar.bookie.bookie import STOP_GRACE_S
from magnetar.broker.broker import RELEASE_TIMEOUT_S
from magnetar.broker.topic.topic import CLOSE_TIMEOUT_S
from magnetar.local_process import STOP_S
from magnetar.zookeeper_server import ZooKeeperEnsemble

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = pytest.mark.cluster

ROOT = Path(__file__).resolve().parents[2]
COMPOSE = ROOT / "deploy" / "docker-compose.yml"
DOCKERFILE = ROOT / "deploy" / "Dockerfile"
READY_S = 60.0


def services() -> dict[str, dict[str, Any]]:
    found: dict[str, dict[str, Any]] = yaml.safe_load(COMPOSE.read_text())["services"]
    return found


def ours() -> dict[str, dict[str, Any]]:
    return {name: each for name, each in services().items() if "build" in each}


def instructions() -> list[tuple[str, str]]:
    """Of the Dockerfile: the word, and what follows it, with lines joined."""
    text = re.sub(r"\\\n\s*", "", re.sub(r"(?m)^#.*\n", "", DOCKERFILE.read_text()))
    return [tuple(line.split(maxsplit=1)) for line in text.splitlines() if line]  # type: ignore[misc]


# -- What is written ---------------------------------------------------------------------------


def test_the_services_are_a_cluster() -> None:
    kinds = [name.rpartition("-")[0] for name in services()]
    assert Counter(kinds) == {"zookeeper": 3, "bookie": 3, "broker": 2, "autorecovery": 1}
    for name, service in services().items():
        assert service["healthcheck"]["test"][0] == "CMD", name
        assert service["restart"] == "unless-stopped"
        if not name.startswith(("broker", "autorecovery")):
            assert service["volumes"], f"{name} keeps data"
    declared = set(yaml.safe_load(COMPOSE.read_text())["volumes"])
    used = [v.split(":")[0] for each in services().values() for v in each.get("volumes", [])]
    assert sorted(used) == sorted(declared), "a volume belongs to one service"


def test_names_and_ports_agree() -> None:
    ids = set()
    for name, service in ours().items():
        role, variables = service["command"][0], service["environment"]
        prefix = f"MAGNETAR_{role.upper()}"
        assert variables[f"{prefix}_ID"] == name
        if role != "autorecovery":  # nobody calls it
            assert variables[f"{prefix}_ADVERTISED_HOST"] == name
        ids.add(variables[f"{prefix}_ID"])
        http_port = variables[f"{prefix}_HTTP_PORT"]
        assert f"127.0.0.1:{http_port}/health" in service["healthcheck"]["test"][-1]
        ports = {value for key, value in variables.items() if key.endswith("_PORT")}
        for published in service.get("ports", []):
            address, outside, inside = published.split(":")
            assert address == "127.0.0.1", "there is no authentication yet"
            assert outside == inside
            assert inside in ports
        for zookeeper in (
            variables[f"{prefix}_METADATA_URL"].removeprefix("zk://").split("/")[0].split(",")
        ):
            assert zookeeper.removesuffix(":2181") in services()
    assert len(ids) == len(ours())
    brokers = [ours()["broker-1"]["environment"], ours()["broker-2"]["environment"]]
    named = brokers[0]["MAGNETAR_SERVICE_URL"]
    assert named == "grpc://" + ",".join(
        f"{each['MAGNETAR_BROKER_ADVERTISED_HOST']}:{each['MAGNETAR_BROKER_GRPC_PORT']}"
        for each in brokers
    )


def test_zookeepers_know_one_another() -> None:
    for number in (1, 2, 3):
        variables = services()[f"zookeeper-{number}"]["environment"]
        assert variables["ZOO_MY_ID"] == str(number)
        servers = variables["ZOO_SERVERS"].split()
        assert servers == [f"server.{n}=zookeeper-{n}:2888:3888;2181" for n in (1, 2, 3)]
        assert int(variables["ZOO_AUTOPURGE_PURGEINTERVAL"]) > 0, "logs are kept for ever"


def test_servers_have_the_time_to_stop_that_they_give_themselves() -> None:
    own_s = max(RELEASE_TIMEOUT_S, STOP_GRACE_S) + CLOSE_TIMEOUT_S
    for service in ours().values():
        assert service["init"], "signals reach the server before it has set its handlers"
        assert float(service["stop_grace_period"].removesuffix("s")) > own_s
    assert own_s < STOP_S


def test_what_a_service_waits_for_exists_and_says_when_it_is_healthy() -> None:
    for service in services().values():
        for other, wish in service.get("depends_on", {}).items():
            assert wish == {"condition": "service_healthy"}
            assert "healthcheck" in services()[other]


def test_the_image_has_the_name_of_this_version() -> None:
    [version] = re.findall(r'(?m)^version = "(.*)"$', (ROOT / "pyproject.toml").read_text())
    assert {each["image"] for each in ours().values()} == {f"magnetar:{version}"}


def test_the_image_runs_as_nobody_in_particular() -> None:
    words = dict(instructions())
    assert words["USER"] not in ("root", "0")
    assert json.loads(words["ENTRYPOINT"]) == ["magnetar"]
    assert {word for word, _ in instructions()} <= {
        *("FROM", "WORKDIR", "COPY", "RUN", "USER", "VOLUME", "ENV", "STOPSIGNAL"),
        *("ENTRYPOINT", "CMD"),
    }
    bases = {rest.split()[0] for word, rest in instructions() if word == "FROM"}
    assert bases == {"python:3.11-slim"}


def test_compose_itself_accepts_the_file() -> None:
    if shutil.which("docker") is None:
        pytest.skip("there is no docker command")
    command = ["docker", "compose", "--file", str(COMPOSE), "config", "--quiet"]
    if subprocess.run([*command[:2], "version"], capture_output=True, check=False).returncode != 0:
        pytest.skip("docker has no compose command here")
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr


# -- What runs ---------------------------------------------------------------------------------


class Service:
    """A service as it is written, but for its names, ports and folder, which are this machine's."""

    def __init__(self, name: str, service: dict[str, Any], zookeeper: str, directory: Path) -> None:
        self.name = name
        self.log_file = directory / f"{name}.log"
        self.ports: dict[str, str] = {}  # as written -> here
        self.variables: dict[str, str] = {}
        for key, value in service["environment"].items():
            if key.endswith("_PORT"):
                self.variables[key] = self.ports[value] = str(free_port())
            elif key.endswith("_ADVERTISED_HOST"):
                self.variables[key] = "127.0.0.1"
            elif key.endswith("_DATA_DIR"):
                self.variables[key] = f"{directory}/{name}{value}"
            elif key.endswith("_METADATA_URL"):
                self.variables[key] = re.sub(r"//[^/]+/", f"//{zookeeper}/", value)
            else:
                self.variables[key] = value
        self.command = [sys.executable, "-m", "magnetar.cli.main", *service["command"]]
        self._check = self._here(service["healthcheck"]["test"][1:])
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        with self.log_file.open("wb") as log:
            self._process = subprocess.Popen(
                self.command, env=os.environ | self.variables, stdout=log, stderr=log
            )

    def wait_healthy(self) -> None:
        """Until its health check, as it is written, says so."""
        end_s = time.monotonic() + READY_S
        while subprocess.run(self._check, capture_output=True, check=False).returncode != 0:
            assert self._process is not None
            assert self._process.poll() is None, self.log_file.read_text()
            assert time.monotonic() < end_s, self.log_file.read_text()

    def stop(self) -> int:
        assert self._process is not None
        self._process.terminate()
        return self._process.wait(60)

    def end(self) -> None:
        if self._process is not None and self._process.poll() is None:
            self._process.kill()
            self._process.wait()

    def _here(self, words: list[str]) -> list[str]:
        """The health check with this Python and this machine's port."""
        assert words[0] == "python"
        text = words[-1]
        for written, port in self.ports.items():
            text = text.replace(f":{written}/", f":{port}/")
        return [sys.executable, *words[1:-1], text]


@pytest.fixture
def running(tmp_path: Path) -> Iterator[dict[str, Service]]:
    skip_without_zookeeper()
    ensemble = ZooKeeperEnsemble(tmp_path / "zookeeper", size=3)
    with ensemble:
        found = {
            name: Service(name, service, ensemble.hosts, tmp_path)
            for name, service in ours().items()
        }
        try:
            for role in ("bookie", "broker", "autorecovery"):  # as depends_on has it
                group = [each for name, each in found.items() if name.startswith(role)]
                for service in group:
                    service.start()
                for service in group:
                    service.wait_healthy()
            yield found
        finally:
            for service in found.values():
                service.end()


def test_every_service_runs_as_written(running: dict[str, Service]) -> None:
    assert len(running) == 6
    brokers = [running["broker-1"], running["broker-2"]]
    url = "grpc://" + ",".join(
        f"127.0.0.1:{broker.variables['MAGNETAR_BROKER_GRPC_PORT']}" for broker in brokers
    )
    with magnetar.Client(url) as client:
        for topic in ("a", "b", "c", "d"):  # some of each broker's
            client.create_producer(topic).send(b"hello")
            reader = client.create_reader(topic, magnetar.MessageId.earliest)
            assert reader.read_next(timeout_millis=30_000).data() == b"hello"
    for name in ("autorecovery-1", "broker-2", "broker-1", "bookie-3", "bookie-2", "bookie-1"):
        assert running[name].stop() == 0
        said = running[name].log_file.read_text()
        if name != "autorecovery-1":  # it listens on loopback alone
            assert "without TLS or authentication" in said  # they listen on every address
        assert "stopped by" not in said


def test_the_image_serves_standalone_unless_told_otherwise(tmp_path: Path) -> None:
    words = dict(instructions())
    arguments = [word.replace("/data", str(tmp_path)) for word in json.loads(words["CMD"])]
    ports = {key: free_port() for key in ("grpc", "pulsar", "http")}
    flags = [f"--{key}-port={port}" for key, port in ports.items()]
    check = (
        "import urllib.request;"
        f" urllib.request.urlopen('http://127.0.0.1:{ports['http']}/health', timeout=3)"
    )
    service = {
        "environment": {},
        "command": arguments + flags,
        "healthcheck": {"test": ["CMD", "python", "-c", check]},
    }
    server = Service("standalone", service, "", tmp_path)
    server.start()
    try:
        server.wait_healthy()
        with magnetar.Client(f"grpc://localhost:{ports['grpc']}") as client:
            client.create_producer("greetings").send(b"hello")
        assert server.stop() == 0
    finally:
        server.end()


def test_commands_in_the_comments_are_commands() -> None:
    """The lines that a reader copies: their flags exist."""
    lines = re.findall(r"#     docker compose .* exec broker-1 (magnetar .*)", COMPOSE.read_text())
    assert len(lines) == 2
    for line in lines:
        words = shlex.split(line)
        flags = [word for word in words if word.startswith("-")]
        done = subprocess.run(
            [sys.executable, "-m", "magnetar.cli.main", words[1], "--help"],
            capture_output=True,
            text=True,
            check=True,
        )
        assert all(re.search(rf"{flag}\b", done.stdout) for flag in flags), flags
