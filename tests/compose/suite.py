"""The image is built and the compose file runs in a real Docker engine, with faults under load.

`make compose` runs this file; `make test` does not, because it takes minutes. Where no engine
answers, every test is skipped with the reason.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import yaml
from compose.engine import (
    BUILD_S,
    DOCKER,
    Project,
    call,
    skip_without_engine,
    try_call,
    wait_for,
)

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = pytest.mark.timeout(900)  # seconds; the first test builds the image

ROOT = Path(__file__).resolve().parents[2]
COMPOSE = ROOT / "deploy" / "docker-compose.yml"
SERVICES: dict[str, dict[str, Any]] = yaml.safe_load(COMPOSE.read_text())["services"]
IMAGE: str = SERVICES["broker-1"]["image"]
SERVICE_URL = "grpc://broker-1:6660,broker-2:6661"
PROGRESS_S = 60.0  # a killed broker's topics are served again within about 2 s
TOPICS, MESSAGES_PER_SECOND = 8, 200
PROGRESS_MESSAGES = 100  # the messages of one topic: 4 s

# Kill the server process: the init process, which ends with it, is its parent.
CRASH = """
import os, signal
for pid in filter(str.isdigit, os.listdir("/proc")):
    with open(f"/proc/{pid}/stat") as file:
        parent = file.read().rpartition(")")[2].split()[1]
    if parent == "1" and int(pid) != os.getpid():
        os.kill(int(pid), signal.SIGKILL)
"""
HEALTH = """
import json, sys, urllib.error, urllib.request
try:
    answer = urllib.request.urlopen(sys.argv[1], timeout=3)
except urllib.error.HTTPError as error:
    answer = error
print(answer.status, json.load(answer)["state"])
"""


@pytest.fixture(scope="module")
def image() -> str:
    skip_without_engine()
    command = [DOCKER, "build", "--file", "deploy/Dockerfile", "--tag", IMAGE, "."]
    done = subprocess.run(
        command,
        cwd=ROOT,
        env=os.environ | {"DOCKER_BUILDKIT": "1"},
        capture_output=True,
        text=True,
        timeout=BUILD_S,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return IMAGE


@pytest.fixture(scope="module")
def cluster(image: str) -> Iterator[Project]:
    project = Project(COMPOSE, f"magnetar-test-{os.getpid()}")
    try:
        project.up()
        yield project
    finally:
        project.down()


class RunningLoad:
    def __init__(self, container: str) -> None:
        self._container = container

    def lines(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in call("logs", self._container).splitlines()]

    @property
    def fewest(self) -> int:
        """The number of acknowledged messages of the topic that has the fewest."""
        return max((line["fewest"] for line in self.lines() if "fewest" in line), default=0)

    def wait_progress(self) -> None:
        """Wait until every topic has received some seconds' worth of further messages."""
        goal = self.fewest + PROGRESS_MESSAGES
        wait_for(lambda: self.fewest >= goal, "progress on every topic", deadline_s=PROGRESS_S)

    def finish(self) -> dict[str, Any]:
        call("kill", "--signal", "TERM", self._container)
        call("wait", self._container, timeout_s=300)
        verdict: dict[str, Any] = self.lines()[-1]["verdict"]
        return verdict


@contextmanager
def load(cluster: Project) -> Iterator[RunningLoad]:
    name = f"{cluster.name}-load"
    call(
        *("run", "--detach", "--name", name, "--network", cluster.network),
        *("--volume", f"{ROOT / 'tests' / 'compose'}:/load:ro", "--entrypoint", "python"),
        *(IMAGE, "/load/load.py", SERVICE_URL, str(TOPICS), str(MESSAGES_PER_SECOND)),
    )
    try:
        yield RunningLoad(name)
    finally:
        call("rm", "--force", "--volumes", name)


# -- The image ---------------------------------------------------------------------------------


def test_the_image_runs_standalone_by_default(image: str) -> None:
    name = f"magnetar-test-standalone-{os.getpid()}"
    call("run", "--detach", "--name", name, image)
    try:
        wait_for(
            lambda: (
                try_call("exec", name, "magnetar", "produce", "t", "-m", "hello").returncode == 0
            ),
            "standalone serves",
            deadline_s=60,
        )
        said = call("exec", name, "magnetar", "consume", "t", "-s", "me", "-p", "earliest", "-n1")
        assert "hello" in said
        assert call("exec", name, "id", "-u").strip() == "10001"
        assert call("exec", name, "id", "-g").strip() == "10001"
    finally:
        call("rm", "--force", "--volumes", name)


def test_image_has_the_locked_versions(image: str) -> None:
    frozen = call("run", "--rm", "--entrypoint", "pip", image, "freeze").splitlines()
    found = {line for line in frozen if re.fullmatch(r"[\w.-]+==[\w.]+", line)}
    locked = set((ROOT / "deploy" / "constraints.txt").read_text().splitlines())
    assert found >= {line for line in locked if not line.startswith("#")}


# -- The cluster -------------------------------------------------------------------------------


def test_all_nine_services_are_healthy(cluster: Project) -> None:
    assert len(SERVICES) == 9
    assert {name: cluster.health(name) for name in SERVICES} == dict.fromkeys(SERVICES, "healthy")


def test_commands_in_a_broker_need_no_flags(cluster: Project) -> None:
    cluster.run("broker-1", "magnetar", "produce", "greetings", "-m", "hello")
    said = cluster.run(
        *("broker-2", "magnetar", "consume", "greetings", "-s", "me", "-p", "earliest", "-n1")
    )
    assert "hello" in said
    for service in ("broker-1", "broker-2", "autorecovery-1"):
        rows = json.loads(cluster.run(service, "magnetar", "bookies", "list", "--json"))
        assert [row["bookie"] for row in rows] == ["bookie-1", "bookie-2", "bookie-3"]


def test_only_servers_with_data_have_volumes(cluster: Project) -> None:
    for name, service in SERVICES.items():
        if service["image"] == IMAGE:
            volumes = [mount["Name"] for mount in cluster.inspect(name)["Mounts"]]
            named = [volume.split(":")[0] for volume in service.get("volumes", [])]
            assert volumes == [f"{cluster.name}_{each}" for each in named]


def test_logs_have_a_limit(cluster: Project) -> None:
    for name in SERVICES:
        options = cluster.inspect(name)["HostConfig"]["LogConfig"]["Config"]
        assert options == {"max-size": "10m", "max-file": "3"}


def test_kills_under_load_lose_nothing_acknowledged(cluster: Project) -> None:
    """Kill each broker in turn (so each owner of a topic), and a bookie."""
    with load(cluster) as running:
        running.wait_progress()
        for broker in ("broker-1", "broker-2"):
            call("kill", cluster.container(broker))
            running.wait_progress()
            call("start", cluster.container(broker))
            cluster.wait_healthy(broker)
        restarts = cluster.inspect("bookie-2")["RestartCount"]
        cluster.run("bookie-2", "python", "-c", CRASH)
        running.wait_progress()
        wait_for(  # the restart policy starts it
            lambda: cluster.inspect("bookie-2")["RestartCount"] > restarts,
            "bookie-2 restarted",
            deadline_s=60,
        )
        cluster.wait_healthy("bookie-2")
        running.wait_progress()
        verdict = running.finish()
    print(verdict)
    assert verdict["acknowledged"] >= 5 * PROGRESS_MESSAGES * TOPICS
    assert (verdict["failed"], verdict["lost"], verdict["out_of_order"]) == ({}, 0, 0)


@pytest.mark.parametrize(("service", "port"), [("bookie-3", 8000), ("broker-2", 8081)])
def test_server_cut_off_from_the_network_says_unregistered(
    cluster: Project, service: str, port: int
) -> None:
    def says(answer: str) -> bool:
        url = f"http://127.0.0.1:{port}/health"
        return cluster.run(service, "python", "-c", HEALTH, url).strip() == answer

    container = cluster.container(service)
    assert says("200 serving")
    call("network", "disconnect", cluster.network, container)
    try:
        wait_for(lambda: says("503 unregistered"), "unregistered", deadline_s=15)
    finally:
        # Compose gives the alias; without it the reconnected container has only its own name.
        call("network", "connect", "--alias", service, cluster.network, container)
    wait_for(lambda: says("200 serving"), "serving again", deadline_s=60)
