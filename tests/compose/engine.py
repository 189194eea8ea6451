"""The Docker engine, through its command line."""

from __future__ import annotations

import json
import os
import subprocess
import time
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

DOCKER = os.environ.get("DOCKER", "docker")  # a `docker` other than the first on the PATH
BASE_IMAGES = ("python:3.11-slim", "zookeeper:3.9")
COMMAND_S = 60.0
BUILD_S = 600.0
UP_S = 400.0  # with the vfs driver the engine copies the image for each container
POLL_S = 0.2


def call(*words: str, timeout_s: float = COMMAND_S) -> str:
    """The output of `docker WORDS`. Fails with the error of the command."""
    done = subprocess.run(
        [DOCKER, *words], capture_output=True, text=True, timeout=timeout_s, check=False
    )
    assert done.returncode == 0, f"docker {' '.join(words)}: {done.stdout}{done.stderr}"
    return done.stdout


def try_call(*words: str, timeout_s: float = COMMAND_S) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [DOCKER, *words], capture_output=True, text=True, timeout=timeout_s, check=False
    )


def skip_without_engine() -> None:
    """Skip the tests, with the reason, if the compose file cannot run here."""
    try:
        server = try_call("version", "--format", "{{.Server.Version}}")
    except FileNotFoundError:
        pytest.skip(f"there is no command {DOCKER}")
    if server.returncode != 0:
        pytest.skip(f"no Docker engine answers: {server.stderr.strip()}")
    if try_call("compose", "version").returncode != 0:
        pytest.skip(f"{DOCKER} has no Compose v2 plugin")
    for image in BASE_IMAGES:
        if try_call("image", "inspect", image).returncode == 0:
            continue
        if try_call("pull", "--quiet", image, timeout_s=BUILD_S).returncode != 0:
            pytest.skip(
                f"there is no image {image}, and no registry has it;"
                " tests/compose/stand_in_images.sh makes a stand-in"
            )


def wait_for(predicate: Callable[[], object], what: str, *, deadline_s: float) -> None:
    end_s = time.monotonic() + deadline_s
    while not predicate():
        assert time.monotonic() < end_s, f"{what} was not true within {deadline_s:g} s"
        time.sleep(POLL_S)


class Project:
    """The compose file as a project with a name of its own."""

    def __init__(self, file: Path, name: str) -> None:
        self.name = name
        self._compose = ("compose", "--file", str(file), "--project-name", name)

    @property
    def network(self) -> str:
        return f"{self.name}_default"

    def up(self) -> None:
        """Start the services, and return when all are healthy. The image must exist."""
        wait = ("--wait", "--wait-timeout", f"{UP_S:.0f}")
        up = ("up", "--detach", "--no-build", *wait)
        done = try_call(*self._compose, *up, timeout_s=UP_S + COMMAND_S)
        if done.returncode != 0:
            raise AssertionError(f"{done.stderr}\n{self.compose('logs', '--tail', '10')}")

    def down(self) -> None:
        """Remove the containers, the network and the volumes."""
        self.compose("down", "--volumes", "--remove-orphans", timeout_s=UP_S)

    def compose(self, *words: str, timeout_s: float = COMMAND_S) -> str:
        return call(*self._compose, *words, timeout_s=timeout_s)

    def container(self, service: str) -> str:
        return f"{self.name}-{service}-1"

    def run(self, service: str, *command: str) -> str:
        """The output of a command in the container of a service."""
        return call("exec", self.container(service), *command)

    def inspect(self, service: str) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(call("inspect", self.container(service)))[0]
        return found

    def health(self, service: str) -> str:
        """The engine's word for the state: "starting", "healthy" or "unhealthy"."""
        return str(self.inspect(service)["State"]["Health"]["Status"])

    def wait_healthy(self, service: str) -> None:
        wait_for(lambda: self.health(service) == "healthy", f"{service} healthy", deadline_s=UP_S)
