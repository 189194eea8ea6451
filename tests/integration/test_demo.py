"""The demo on a slice of the flights, as a user runs it."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

from magnetar.demo.__main__ import work_off
from magnetar.demo.flights import load_flights
from magnetar.local_process import ProcessFailed, standalone
from magnetar.spark.errors import JavaMissing
from magnetar.spark.session import require_java

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.timeout(300)


def demo(flights: int, picture: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [
            sys.executable,
            "-m",
            "magnetar.demo",
            "--flights",
            str(flights),
            "--picture",
            str(picture),
        ],
        capture_output=True,
        text=True,
        timeout=250,
        env={**os.environ, **environment},
        check=False,
    )


@pytest.mark.spark
def test_a_demo_of_6000_flights_ends_with_equal_results(tmp_path: Path) -> None:
    try:
        require_java()
    except JavaMissing as missing:
        pytest.skip(str(missing))
    picture = tmp_path / "delays.png"
    done = demo(6_000, picture)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "kill -9" in done.stdout
    assert "flights never acknowledged: 0; left over: 0" in done.stdout
    order = "1[0-9] carriers; flights processed out of their carrier's order: 0"
    assert re.search(order, done.stdout)
    assert re.search(r"│ UA .* yes │", done.stdout)
    assert "NO" not in done.stdout
    assert "Equal to the file: yes" in done.stdout
    assert re.search(
        r"The Parquet archive has [0-9,]+ messages. Equal to the topic: yes", done.stdout
    )
    assert picture.exists() or "no picture" in done.stdout


def test_demo_without_java_skips_spark_and_exits_with_3(tmp_path: Path) -> None:
    done = demo(4_000, tmp_path / "delays.png", PATH=str(tmp_path), JAVA_HOME="")
    assert done.returncode == 3, done.stdout + done.stderr
    assert "kill -9" in done.stdout
    assert "flights never acknowledged: 0; left over: 0" in done.stdout
    assert "Spark needs Java 17" in done.stdout
    assert "Exit status 3" in done.stdout


@pytest.mark.timeout(100)
def test_a_server_that_does_not_restart_ends_the_demo(tmp_path: Path) -> None:
    """The demo still has more flights to publish than may be pending."""
    with standalone(tmp_path) as server:
        server.command = [sys.executable, "-c", "raise SystemExit('it does not come back')"]
        with pytest.raises(ProcessFailed, match="come back"):
            work_off(server, load_flights(60_000))
