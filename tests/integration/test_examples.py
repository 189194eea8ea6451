"""The programs of examples/, each run as its first lines say. `test_spark_programs.py` has those
with Spark."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import httpx
import pytest
from fakes.standalone_process import StandaloneProcess
from support import free_port

import magnetar

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = pytest.mark.cluster

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[StandaloneProcess]:
    process = StandaloneProcess(tmp_path_factory.mktemp("server"))
    process.start()
    yield process
    process.end()


@pytest.fixture
def environment(server: StandaloneProcess) -> dict[str, str]:
    return os.environ | {"MAGNETAR_SERVICE_URL": server.service_url}


def run(program: str, environment: dict[str, str]) -> list[str]:
    """The lines that the program prints."""
    done = subprocess.run(
        [sys.executable, EXAMPLES / program],
        env=environment,
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def test_every_example_is_listed_and_tested() -> None:
    listed = (EXAMPLES / "README.md").read_text()
    here = Path(__file__)
    tests = here.read_text() + here.with_name("test_spark_programs.py").read_text()
    for program in EXAMPLES.glob("*.py"):
        assert f"[{program.name}]({program.name})" in listed
        assert program.stem in tests


def test_web_service_stores_an_order_before_it_answers(
    server: StandaloneProcess, environment: dict[str, str]
) -> None:
    port = free_port()
    command = [sys.executable, "-m", "uvicorn", "web_service:app", "--app-dir", str(EXAMPLES)]
    order = {"customer": "c-17", "item": "telescope", "quantity": 2}
    with (
        magnetar.Client(server.service_url) as client,
        subprocess.Popen([*command, "--port", str(port)], env=environment) as service,
    ):
        try:
            consumer = client.subscribe(
                "orders", "test", initial_position=magnetar.InitialPosition.Earliest
            )
            transport = httpx.HTTPTransport(retries=8)  # retries while the service starts
            with httpx.Client(transport=transport, timeout=30) as http:
                answer = http.post(f"http://127.0.0.1:{port}/orders", json=order)
                assert answer.status_code == 201
                message = consumer.receive(timeout_millis=10_000)
                assert answer.json() == {"message_id": str(message.message_id())}
                assert json.loads(message.data()) == order
                assert message.partition_key() == "c-17"
                bad = http.post(f"http://127.0.0.1:{port}/orders", json=order | {"quantity": 0})
                assert bad.status_code == 422
        finally:
            service.terminate()


def test_worker_pool_does_every_job(environment: dict[str, str]) -> None:
    *shares, last = run("worker_pool.py", environment)
    assert last == "40 jobs done"
    assert len(shares) > 1, "one worker did everything"


def test_from_apache_client_receives_what_it_sent(environment: dict[str, str]) -> None:
    *received, last = run("from_apache_client.py", environment)
    assert received == [f"hello-{number} {{'number': '{number}'}}" for number in range(10)]
    assert last == "no more messages"
