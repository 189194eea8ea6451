"""The source, the sink and the metrics on a Spark cluster, and in a Spark Connect session."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import httpx
import pytest
from fakes import spark_job

import magnetar
from magnetar.local_process import standalone
from magnetar.spark.errors import JavaMissing
from magnetar.spark.session import require_java

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

# The Java processes and the server share two cores.
pytestmark = [pytest.mark.spark, pytest.mark.night, pytest.mark.timeout(900)]

KEPT = {
    "MAGNETAR_STANDALONE_DEFAULT_RETENTION_TIME_IN_MINUTES": "-1",
    "MAGNETAR_STANDALONE_DEFAULT_RETENTION_SIZE_IN_MB": "-1",
}
VALUES = [b"%d" % number for number in range(300)]


@pytest.fixture
def url(tmp_path: Path) -> Iterator[str]:
    """In the namespace public/exact, deduplication is on."""
    try:
        require_java()
    except JavaMissing as missing:
        pytest.skip(str(missing))
    with standalone(tmp_path, KEPT) as server:
        admin = f"http://127.0.0.1:{server.ports['http']}/admin/v2/namespaces/public/exact"
        httpx.put(admin, timeout=60).raise_for_status()
        httpx.post(f"{admin}/deduplication", json=True, timeout=60).raise_for_status()
        yield f"grpc://127.0.0.1:{server.ports['grpc']}"


def run(kind: str, url: str, directory: Path) -> dict[str, Any]:
    """Run the job over `VALUES`; return what it prints."""
    with magnetar.Client(url) as client:
        producer = client.create_producer("in", batching_max_messages=10)
        for value in VALUES:
            producer.send_async(value, lambda *_: None)
        producer.flush()
    command = [sys.executable, spark_job.__file__, kind, url, str(directory / "checkpoint")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stderr[-4_000:]
    facts: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return facts


def stored(url: str, topic: str) -> list[bytes]:
    values = []
    with magnetar.Client(url) as client:
        name = f"persistent://public/exact/{topic}"
        reader = client.create_reader(name, magnetar.MessageId.earliest)
        while reader.has_message_available():
            values.append(reader.read_next(30_000).data())
    return values


def check_written_once(url: str) -> None:
    for topic in ("batch", "stream"):
        assert sorted(stored(url, topic), key=int) == VALUES


def test_executors_of_a_cluster_read_and_write_exactly_once(url: str, tmp_path: Path) -> None:
    facts = run("cluster", url, tmp_path)
    check_written_once(url)
    assert facts["failure"] is None
    assert facts["session"] == "pyspark.sql.session"
    assert facts["rows"] == len(VALUES)
    assert facts["tasks_in_executors"] == facts["tasks"] > 1
    assert facts["behind"] == 0


def test_connect_session_reads_writes_exactly_once_and_reports(url: str, tmp_path: Path) -> None:
    facts = run("connect", url, tmp_path)
    check_written_once(url)
    assert facts["failure"] is None
    assert facts["session"] == "pyspark.sql.connect.session"
    assert facts["rows"] == len(VALUES)
    assert facts["behind"] == 0
