"""What a process needs to be told before it starts Spark."""

from __future__ import annotations

import os
import subprocess
import sys

# What PySpark does with `preexec_fn`, in a process that has used gRPC. Each fork is aborted with a
# chance of a thirtieth unless gRPC was told to leave forks alone.
FORKS = """
import contextlib
import subprocess
import sys
import {module}
from magnetar.spark.session import fork_plainly
assert "grpc" not in sys.modules, "it reads the variable when it is imported"
fork_plainly()
import grpc
from concurrent.futures import ThreadPoolExecutor
server = grpc.server(ThreadPoolExecutor(2))
port = server.add_insecure_port("127.0.0.1:0")
server.start()
for _ in range(150):
    with grpc.insecure_channel(f"127.0.0.1:{{port}}") as channel:
        with contextlib.suppress(grpc.RpcError):
            channel.unary_unary("/nobody/there")(b"")
    assert subprocess.run(["true"], preexec_fn=lambda: None).returncode == 0
"""


def run(module: str) -> None:
    environment = {k: v for k, v in os.environ.items() if k != "GRPC_ENABLE_FORK_SUPPORT"}
    code = FORKS.format(module=module)
    subprocess.run([sys.executable, "-c", code], env=environment, check=True, timeout=100)


def test_the_archive_command_can_fork() -> None:
    run("magnetar.cli.spark")


def test_the_demo_can_fork() -> None:
    run("magnetar.demo.__main__")
