"""Spark programs of the documentation and of examples/, in the Spark session of the tests: a start
of Java costs more CPU than a program. `make night` also runs the example as a program."""

from __future__ import annotations

import json
import os
import runpy
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from fakes.services import standalone_with_deduplication

import magnetar

if TYPE_CHECKING:
    from collections.abc import Iterator

    from pyspark.sql import SparkSession

    from magnetar.local_process import LocalProcess

pytestmark = [pytest.mark.spark, pytest.mark.timeout(300)]

ROOT = Path(__file__).parents[2]
AGGREGATION = ROOT / "examples" / "spark_aggregation.py"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalProcess]:
    with standalone_with_deduplication(tmp_path_factory.mktemp("standalone")) as server:
        yield server


@pytest.fixture(scope="module")
def url(server: LocalProcess) -> str:
    return f"grpc://127.0.0.1:{server.ports['grpc']}"


@pytest.fixture(autouse=True)
def _kept(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Keep the session of the tests, and its settings, when a program stops it or changes them."""
    if "spark" not in request.fixturenames:
        yield
        return
    spark: SparkSession = request.getfixturevalue("spark")
    shuffles = spark.conf.get("spark.sql.shuffle.partitions")
    monkeypatch.setattr(type(spark), "stop", lambda session: None)
    yield
    spark.conf.set("spark.sql.shuffle.partitions", shuffles)


def first_program(document: str, text: str = "") -> str:
    """Return the first Python program of a document that contains the text."""
    _, *programs = (ROOT / document).read_text().split("```python\n")
    return next(code for it in programs if text in (code := it.partition("```")[0]))


def test_the_example_of_the_guide_writes_each_row_once(
    spark: SparkSession, url: str, tmp_path: Path
) -> None:
    program = first_program("docs/spark-sink.md").replace("grpc://localhost:6660", url)
    exec(program.replace("./checkpoints", str(tmp_path)), {})
    reader = spark.read.format("magnetar").option("service.url", url)
    found = reader.option("topic", "persistent://public/exact/delays").load().orderBy("__index")
    assert [json.loads(row["value"]) for row in found.collect()] == [
        {"CARRIER": "UA", "DELAY": 4},
        {"CARRIER": "UA", "DELAY": 7},
    ]


def test_the_example_of_the_readme_shows_the_topic(
    spark: SparkSession, url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with magnetar.Client(url) as client:
        client.create_producer("greetings").send(b"Hello, Magnetar", partition_key="hello")
    program = first_program("README.md", "SparkSession").replace("grpc://localhost:6660", url)
    exec(program, {})
    assert "|Hello, Magnetar|" in capsys.readouterr().out


def test_spark_aggregation_counts_every_message(
    spark: SparkSession,
    url: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("MAGNETAR_SERVICE_URL", url)
    runpy.run_path(str(AGGREGATION), run_name="__main__")
    assert capsys.readouterr().out.splitlines() == aggregated()


@pytest.mark.night
def test_spark_aggregation_is_a_program(url: str) -> None:
    done = subprocess.run(
        [sys.executable, AGGREGATION],
        env=os.environ
        | {
            "MAGNETAR_SERVICE_URL": url,
            "PYSPARK_PYTHON": sys.executable,
            "SPARK_LOCAL_IP": "127.0.0.1",
            "TOPIC": "program",
        },
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == aggregated()


def aggregated() -> list[str]:
    """What the example of an aggregation prints."""
    by_customer = [
        [number for number in range(1_000) if number % 3 == customer] for customer in range(3)
    ]
    revenue = [
        f"c-{customer} {len(sales)} {sum(number % 10 for number in sales)}"
        for customer, sales in enumerate(by_customer)
    ]
    return [*revenue, *(f"stream: {line}" for line in revenue)]
