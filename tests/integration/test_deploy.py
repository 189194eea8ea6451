"""The files of deploy/, checked without a Docker engine: read, compared with the code, and each
service of ours run as it is written there, outside a container."""

from __future__ import annotations

import json
import re
import shlex
import shutil
import subprocess
import sys
import tomllib
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from support import free_port, skip_without_zookeeper, wait_for

import magnetar
from magnetar.bookie.bookie import STOP_GRACE_S
from magnetar.broker.broker import RELEASE_TIMEOUT_S
from magnetar.broker.topic.topic import CLOSE_TIMEOUT_S
from magnetar.local_process import STOP_S, LocalProcess
from magnetar.zookeeper_server import ZooKeeperEnsemble

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = pytest.mark.cluster

ROOT = Path(__file__).resolve().parents[2]
COMPOSE = ROOT / "deploy" / "docker-compose.yml"
DOCKERFILE = ROOT / "deploy" / "Dockerfile"
CONSTRAINTS = ROOT / "deploy" / "constraints.txt"


def services() -> dict[str, dict[str, Any]]:
    found: dict[str, dict[str, Any]] = yaml.safe_load(COMPOSE.read_text())["services"]
    return found


def ours() -> dict[str, dict[str, Any]]:
    return {name: each for name, each in services().items() if "magnetar" in each["image"]}


def instructions() -> list[tuple[str, str]]:
    """The instructions of the Dockerfile: each as its word and its arguments, with lines joined."""
    text = re.sub(r"\\\n\s*", "", re.sub(r"(?m)^#.*\n", "", DOCKERFILE.read_text()))
    return [tuple(line.split(maxsplit=1)) for line in text.splitlines() if line]  # type: ignore[misc]


# -- What is written ---------------------------------------------------------------------------


def test_the_services_are_a_cluster() -> None:
    kinds = [name.rpartition("-")[0] for name in services()]
    assert Counter(kinds) == {"zookeeper": 3, "bookie": 3, "broker": 2, "autorecovery": 1}
    for name, service in services().items():
        assert service["healthcheck"]["test"][0] == "CMD", name
        assert service["restart"] == "unless-stopped"
        assert service["logging"]["options"] == {"max-size": "10m", "max-file": "3"}
        check = service["healthcheck"]
        seconds = int(check["interval"].removesuffix("s")) * check["retries"]
        assert seconds <= 15, "a server that is not healthy is reported soon"
        assert check["start_period"], "a slow start is not a failure"
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
        if role != "autorecovery":  # no process calls it
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


def test_each_zookeeper_is_configured_with_all_three() -> None:
    for number in (1, 2, 3):
        variables = services()[f"zookeeper-{number}"]["environment"]
        assert variables["ZOO_MY_ID"] == str(number)
        servers = variables["ZOO_SERVERS"].split()
        assert servers == [f"server.{n}=zookeeper-{n}:2888:3888;2181" for n in (1, 2, 3)]
        assert int(variables["ZOO_AUTOPURGE_PURGEINTERVAL"]) > 0, "logs are never deleted"


def test_the_stop_grace_period_exceeds_the_time_that_servers_need() -> None:
    own_s = max(RELEASE_TIMEOUT_S, STOP_GRACE_S) + CLOSE_TIMEOUT_S
    for service in ours().values():
        assert service["init"], "an early signal reaches a server without handlers"
        assert float(service["stop_grace_period"].removesuffix("s")) > own_s
    assert own_s < STOP_S


def test_each_dependency_of_a_service_exists_and_has_a_health_check() -> None:
    for service in services().values():
        for other, wish in service.get("depends_on", {}).items():
            assert wish == {"condition": "service_healthy"}
            assert "healthcheck" in services()[other]


def test_the_image_has_the_name_of_this_version() -> None:
    [version] = re.findall(r'(?m)^version = "(.*)"$', (ROOT / "pyproject.toml").read_text())
    assert {each["image"] for each in ours().values()} == {f"magnetar:{version}"}


def test_one_service_builds_the_image_that_all_use() -> None:
    assert [name for name, each in services().items() if "build" in each] == ["bookie-1"]


def test_commands_in_a_broker_find_everything_without_flags() -> None:
    for name in ("broker-1", "broker-2"):
        variables = ours()[name]["environment"]
        for other in ("SERVICE", "ADMIN", "METADATA"):
            assert f"MAGNETAR_{other}_URL" in variables
        assert variables["MAGNETAR_METADATA_URL"] == variables["MAGNETAR_BROKER_METADATA_URL"]


def test_the_image_runs_as_an_unprivileged_user_with_fixed_numbers() -> None:
    words = dict(instructions())
    user, group = words["USER"].split(":")
    assert int(user) >= 1000
    assert int(group) >= 1000
    making = next(rest for word, rest in instructions() if word == "RUN" and "useradd" in rest)
    assert f"--gid {group} magnetar" in making
    assert f"--uid {user} --gid {group}" in making
    assert "--system" not in making, "a system user has a number below 1000"
    assert json.loads(words["ENTRYPOINT"]) == ["magnetar"]
    # A VOLUME would be an anonymous volume of each broker.
    assert {word for word, _ in instructions()} <= {
        *("FROM", "WORKDIR", "COPY", "RUN", "USER", "ENV", "STOPSIGNAL", "ENTRYPOINT", "CMD"),
    }
    bases = {rest.split()[0] for word, rest in instructions() if word == "FROM"}
    assert bases == {"python:3.11-slim"}


def test_published_ports_in_the_comments_are_on_loopback() -> None:
    published = re.findall(r" -p (\S+)", "\n".join(re.findall(r"#     .*", DOCKERFILE.read_text())))
    assert len(published) == 3
    assert all(port.startswith("127.0.0.1:") for port in published)


def test_the_image_installs_locked_versions_of_all_dependencies() -> None:
    lines = [line for line in CONSTRAINTS.read_text().splitlines() if not line.startswith("#")]
    locked = {
        canonicalize_name(name): version for name, version in (line.split("==") for line in lines)
    }
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    for text in project["dependencies"]:
        wanted = Requirement(text)
        assert locked[canonicalize_name(wanted.name)] in wanted.specifier
    assert any("--requirement /constraints.txt" in rest for _, rest in instructions())
    ignored = (ROOT / "deploy" / "Dockerfile.dockerignore").read_text().splitlines()
    assert ignored.index("deploy") < ignored.index("!deploy/constraints.txt")


def test_directories_of_the_examples_are_not_committed() -> None:
    names = ["data/x", "cluster/x", "archive/x"]
    done = subprocess.run(
        ["git", "check-ignore", *names], cwd=ROOT, capture_output=True, text=True, check=False
    )
    if done.returncode == 128:
        pytest.skip(f"git does not answer here: {done.stderr.strip()}")
    assert done.stdout.split() == names
    done = subprocess.run(["git", "check-ignore", "tests/data/x"], cwd=ROOT, check=False)
    assert done.returncode == 1, "only the folders in the root are"


def test_zookeepers_health_check_asks_the_server_without_java(tmp_path: Path) -> None:
    skip_without_zookeeper()
    checks = [
        each["healthcheck"]["test"]
        for name, each in services().items()
        if name.startswith("zookeeper")
    ]
    assert len(checks) == 3
    assert checks[0] == checks[1] == checks[2]
    assert checks[0][:3] == ["CMD", "bash", "-c"]
    ensemble = ZooKeeperEnsemble(tmp_path, size=3)
    node = ensemble.nodes[0]
    check = [*checks[0][1:3], checks[0][3].replace("/2181", f"/{node.ports['client']}")]

    def healthy() -> bool:
        done = subprocess.run(check, capture_output=True, timeout=10, check=False)
        return done.returncode == 0

    assert not healthy(), "no server listens there"
    with ensemble:
        wait_for(healthy)
        for other in ensemble.nodes[1:]:
            other.kill()
        wait_for(lambda: not healthy())  # the server runs, but without a quorum
        assert node.running


def test_compose_itself_accepts_the_file() -> None:
    if shutil.which("docker") is None:
        pytest.skip("there is no docker command")
    command = ["docker", "compose", "--file", str(COMPOSE), "config", "--quiet"]
    if subprocess.run([*command[:2], "version"], capture_output=True, check=False).returncode != 0:
        pytest.skip("docker has no compose command here")
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr


# -- What runs ---------------------------------------------------------------------------------


def as_written(name: str, service: dict[str, Any], zookeeper: str, directory: Path) -> LocalProcess:
    """A service as the file writes it, with names, ports and a folder of this machine."""
    ports: dict[str, str] = {}  # the written port -> the port here
    variables: dict[str, str] = {}
    for key, value in service["environment"].items():
        if key.endswith("_PORT"):
            variables[key] = ports[value] = str(free_port())
        elif key.endswith("_ADVERTISED_HOST"):
            variables[key] = "127.0.0.1"
        elif key.endswith("_DATA_DIR"):
            variables[key] = f"{directory}/{name}{value}"
        elif key.endswith("_METADATA_URL"):
            variables[key] = re.sub(r"//[^/]+/", f"//{zookeeper}/", value)
        else:
            variables[key] = value
    _, python, *arguments, check = service["healthcheck"]["test"]
    assert python == "python"
    for written, port in ports.items():
        check = check.replace(f":{written}/", f":{port}/")

    def healthy() -> bool:
        command = [sys.executable, *arguments, check]
        return subprocess.run(command, capture_output=True, check=False).returncode == 0

    command = [sys.executable, "-m", "magnetar.cli.main", *service["command"]]
    return LocalProcess(name, name, directory, command, {}, healthy, variables)


@pytest.fixture
def running(tmp_path: Path) -> Iterator[dict[str, LocalProcess]]:
    skip_without_zookeeper()
    ensemble = ZooKeeperEnsemble(tmp_path / "zookeeper", size=3)
    with ensemble:
        found = {
            name: as_written(name, service, ensemble.hosts, tmp_path)
            for name, service in ours().items()
        }
        try:
            for role in ("bookie", "broker", "autorecovery"):  # the order of depends_on
                group = [each for name, each in found.items() if name.startswith(role)]
                for service in group:
                    service.launch()
                for service in group:
                    service.wait_ready()
            yield found
        finally:
            for service in found.values():
                service.kill()


def test_every_service_runs_as_written(running: dict[str, LocalProcess]) -> None:
    assert len(running) == 6
    brokers = [running["broker-1"], running["broker-2"]]
    url = "grpc://" + ",".join(
        f"127.0.0.1:{broker.variables['MAGNETAR_BROKER_GRPC_PORT']}" for broker in brokers
    )
    with magnetar.Client(url) as client:
        for topic in ("a", "b", "c", "d"):  # each broker owns some of them
            client.create_producer(topic).send(b"hello")
            reader = client.create_reader(topic, magnetar.MessageId.earliest)
            assert reader.read_next(timeout_millis=30_000).data() == b"hello"
    for name in ("autorecovery-1", "broker-2", "broker-1", "bookie-3", "bookie-2", "bookie-1"):
        running[name].stop()
        assert running[name].status == 0
        said = running[name].log.read_text()
        if name != "autorecovery-1":  # autorecovery listens on loopback alone
            assert "without TLS or authentication" in said  # the others listen on every address
        assert "stopped by" not in said


def test_the_image_runs_standalone_without_a_command(tmp_path: Path) -> None:
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
    server = as_written("standalone", service, "", tmp_path)
    with server, magnetar.Client(f"grpc://localhost:{ports['grpc']}") as client:
        client.create_producer("greetings").send(b"hello")
    assert server.status == 0


def test_commands_in_the_comments_are_commands() -> None:
    """A reader copies these lines, so their flags must exist."""
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
