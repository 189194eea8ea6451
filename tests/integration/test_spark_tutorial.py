"""docs/tutorial.md, followed to the letter: every program and command, in order.

`make test` runs the Spark query in the tests' own Spark, because a start of Java costs more CPU
than all other commands together. `make night` runs it as a program.
"""

from __future__ import annotations

import io
import os
import re
import runpy
import subprocess
import sys
from contextlib import redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from fakes.standalone_process import StandaloneProcess

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

pytestmark = [pytest.mark.cluster, pytest.mark.spark]

TUTORIAL = Path(__file__).parents[2] / "docs" / "tutorial.md"
BLOCK = re.compile(r'^```(sh|python)(?: title="([a-z.]+)")?\n(.*?)^```$', re.MULTILINE | re.DOTALL)
DEFAULT_URL = "grpc://localhost:6660"
QUERY = "PYSPARK_PYTHON=$(which python) python query.py"


@dataclass
class Reader:
    """Does what the tutorial says, with the server on other ports."""

    server: StandaloneProcess
    folder: Path

    def save(self, name: str, program: str) -> None:
        text = program.replace(DEFAULT_URL, self.server.service_url)
        (self.folder / name).write_text(text)

    def run(self, command: str) -> str:
        bin_folder = Path(sys.executable).parent
        environment = os.environ | {
            "MAGNETAR_SERVICE_URL": self.server.service_url,
            "MAGNETAR_ADMIN_URL": f"http://localhost:{self.server.http_port}",
            "PATH": f"{bin_folder}:{os.environ['PATH']}",
            "SPARK_LOCAL_IP": "127.0.0.1",
        }
        done = subprocess.run(
            command,
            shell=True,
            cwd=self.folder,
            env=environment,
            capture_output=True,
            text=True,
            timeout=200,
            check=False,
        )
        assert done.returncode == 0, (command, done.stdout, done.stderr)
        return done.stdout

    def query(self) -> str:
        """Run the Spark query in this process."""
        with redirect_stdout(io.StringIO()) as said:
            runpy.run_path(str(self.folder / "query.py"), run_name="__main__")
        return said.getvalue()


@pytest.mark.night
def test_a_new_user_can_follow_the_tutorial(tmp_path: Path) -> None:
    _follow(tmp_path, in_this_process=False)


def test_the_tutorial_works_with_the_query_in_this_process(
    tmp_path: Path, spark: SparkSession
) -> None:
    """The query takes the Spark session of this process."""
    _follow(tmp_path, in_this_process=True)


def _follow(folder: Path, *, in_this_process: bool) -> None:
    (folder / "server").mkdir()
    server = StandaloneProcess(folder / "server")
    server.start()
    reader = Reader(server, folder)
    said: list[str] = []
    try:
        for kind, name, text in BLOCK.findall(TUTORIAL.read_text()):
            if kind == "python":
                reader.save(name, text)
                continue
            for command in text.splitlines():
                if command.startswith("magnetar standalone"):
                    continue  # the server runs already
                if command == QUERY and in_this_process:
                    said.append(reader.query())
                    continue
                said.append(reader.run(command))
                if "Lima 22" in command:
                    server.kill()
                    server.start()
    finally:
        server.end()
    told = "\n".join(said)
    assert said[1].count("content:") == 3
    assert re.search(r"weather", said[2])
    assert "shell" in said[3]
    unkeyed = ["(no key) Oslo 4", "(no key) Rome 19", "(no key) Cairo 31"]
    assert said[5].splitlines() == [*unkeyed, "Oslo 5", "Rome 21", "Cairo 30", "Oslo 6"]
    assert "Lima 22\n" in told
    assert re.search(r"\|\s*Oslo\|\s*6\|", said[-1])


def test_every_command_of_the_tutorial_is_known() -> None:
    blocks = BLOCK.findall(TUTORIAL.read_text())
    assert {name for kind, name, _ in blocks if kind == "python"} == {
        "publish.py",
        "work.py",
        "query.py",
    }
    assert [QUERY in text.splitlines() for _, _, text in blocks].count(True) == 1
    assert TUTORIAL.read_text().count("```") == 2 * len(blocks), "a block of another kind"
