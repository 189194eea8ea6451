"""The error of a job that cannot start Spark."""

from __future__ import annotations

import socket
import subprocess
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path

JOB = """
import typer
from magnetar.cli.spark_job import job_errors, run_job

def main(url: str) -> None:
    with job_errors():
        run_job("test", {"service.url": url}, "local[1]", lambda spark: None)

typer.run(main)
"""


def test_a_java_that_ends_at_once_ends_the_command_with_one_line(tmp_path: Path) -> None:
    """For example, a Java that is too old for Spark."""
    java = tmp_path / "bin" / "java"
    java.parent.mkdir()
    java.write_text("#!/bin/sh\nexit 1\n")
    java.chmod(0o755)
    with socket.create_server(("127.0.0.1", 0)) as server:
        url = f"grpc://127.0.0.1:{server.getsockname()[1]}"
        done = subprocess.run(
            [sys.executable, "-c", JOB, url],
            env={"JAVA_HOME": str(tmp_path), "PATH": "/usr/bin:/bin"},
            capture_output=True,
            text=True,
            check=False,
        )
    assert done.returncode == 1
    assert "JAVA_GATEWAY_EXITED" in done.stderr.splitlines()[-1]
    assert "Traceback" not in done.stderr
