"""A server under attack by hostile programs, and the service that its honest clients get.

    python -m siege.run --commands 100000 --seed 1

One standalone server, hostile programs over both transports, and an honest producer with a consumer
on each transport: three processes. Oracles:

    1. The server runs until the end, and stops cleanly.
    2. No callback of its loop takes more than CPU_S_MAX of CPU, without garbage collections. No
       garbage collection takes more either.
    3. Each honest message is delivered once and in order, within LATENCY_S_MAX.
    4. The server's memory stays below MEMORY_MB_MAX.
    5. The siege ends. STUCK_S without a command is a finding, which lists what all tasks wait for.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import signal
import sys
import tempfile
from collections import Counter
from collections.abc import Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from siege.calls import CALLS
from siege.features import FEATURES, prepare
from siege.honest import TRANSPORTS, Service
from siege.programs import PROGRAMS, Target
from siege.stuck import tasks_text

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

Program = Callable[[Target, str, random.Random], Awaitable[None]]

ALL: list[Program] = [*PROGRAMS, *FEATURES, *CALLS]
AT_ONCE = 8  # hostile programs that run at the same time
STUCK_S = 30.0
REPORT_S = 10.0  # the time between two lines of progress
PROGRAM_S = 10.0  # a program that the broker does not read any more is ended
CPU_S_MAX = 0.05
LATENCY_S_MAX = 5.0
MEMORY_MB_MAX = 700


@dataclass
class Report:
    seed: int
    sent: dict[str, int]
    late: dict[str, int]
    services: list[Service]
    server: dict[str, Any]
    exit_code: int | None
    wall_s: float
    stuck: str = ""

    @property
    def problems(self) -> list[str]:
        found = [] if len(self.services) == len(TRANSPORTS) else ["an honest client died"]
        if self.exit_code != 0:
            found.append(f"the server ended with {self.exit_code}")
        if self.stuck:
            found.append(f"no command for {STUCK_S:g} s: {self.stuck}")
        for cpu_s, name in self.server.get("slowest", []):
            if cpu_s > CPU_S_MAX:
                found.append(f"a callback took {cpu_s * 1_000:.0f} ms of CPU: {name}")
        if self.server.get("collection_s", 0) > CPU_S_MAX:
            found.append(f"a garbage collection took {self.server['collection_s']:.3f} s of CPU")
        if self.server.get("peak_mb", 0) > MEMORY_MB_MAX:
            found.append(f"the server took {self.server['peak_mb']} MB")
        stray = Counter(self.server.get("stray", []))
        found += [f"stray error, {count} times: {error}" for error, count in stray.items()]
        for service in self.services:
            if service.trouble or len(service.latencies) != service.sent or not service.sent:
                found.append(f"not served: {service.describe()}")
            elif max(service.latencies) > LATENCY_S_MAX:
                found.append(f"served late: {service.describe()}")
        return found

    def text(self) -> str:
        lines = [
            f"siege with seed {self.seed}: {sum(self.sent.values())} commands in"
            f" {self.wall_s:.0f} s",
            *(f"    {name}: {count}" for name, count in sorted({**self.sent, **self.late}.items())),
            *(service.describe() for service in self.services),
            f"server: {self.server.get('callbacks')} callbacks,"
            f" peak {self.server.get('peak_mb')} MB, longest collection"
            f" {self.server.get('collection_s', 0) * 1_000:.0f} ms,"
            f" exit {self.exit_code}; slowest:",
            *(f"    {cpu * 1_000:.1f} ms {name}" for cpu, name in self.server.get("slowest", [])),
            *(f"PROBLEM: {problem}" for problem in self.problems),
        ]
        return "\n".join(lines)


async def besiege(seed: int, commands: int) -> Report:
    loop = asyncio.get_running_loop()
    began = loop.time()
    services: list[Service] = []
    stuck = ""
    with tempfile.TemporaryDirectory() as directory:
        async with _process("siege.server", directory) as server:
            target = Target(json.loads(await _line(server)))
            await prepare(target)
            async with _process("siege.honest", json.dumps(target.urls)) as honest:
                for _ in TRANSPORTS:
                    await _line(honest)
                stuck = await _attack(target, random.Random(seed), commands)
                for process in (server, honest):  # write the rest to the log
                    process.send_signal(signal.SIGUSR1)
                honest.send_signal(signal.SIGTERM)
                services = [Service(**each) for each in json.loads(await _line(honest) or b"[]")]
                await honest.wait()
            server.send_signal(signal.SIGTERM)
            result = json.loads(await _line(server) or b"{}")
            exit_code = await server.wait()
    wall_s = loop.time() - began
    return Report(seed, target.sent, target.late, services, result, exit_code, wall_s, stuck)


@asynccontextmanager
async def _process(module: str, argument: str) -> AsyncIterator[asyncio.subprocess.Process]:
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        module,
        argument,
        stdout=asyncio.subprocess.PIPE,
        stderr=_log_of(module),
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[1])},
        limit=64 << 20,
    )
    try:
        yield process
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()


def _log_of(module: str) -> Any:
    """The log of the process, in the directory that MAGNETAR_SIEGE_LOGS names."""
    directory = os.environ.get("MAGNETAR_SIEGE_LOGS")
    if directory is None:
        return asyncio.subprocess.DEVNULL
    return (Path(directory) / f"{module}.log").open("wb")


async def _line(process: asyncio.subprocess.Process) -> bytes:
    """The next line that the process prints; b"": the process has ended."""
    assert process.stdout is not None
    return await process.stdout.readline()


async def _attack(target: Target, rng: random.Random, commands: int) -> str:
    """Run the siege. Returns the waits of all tasks if it is stuck; "": it reached its end."""

    deck: list[Program] = []

    async def attack() -> None:
        while target.commands < commands:
            if not deck:  # each program runs, also in a short siege
                deck.extend(rng.sample(ALL, len(ALL)))
            program, transport = deck.pop(), rng.choice(TRANSPORTS)
            try:
                async with asyncio.timeout(PROGRAM_S):
                    await program(target, transport, random.Random(rng.random()))
            except TimeoutError:
                name = f"(ended after {PROGRAM_S:g} s) {program.__name__} over {transport}"
                target.late[name] = target.late.get(name, 0) + 1
            except OSError:
                if target.commands == 0:
                    raise
                return  # the server has ended: its exit code says why

    async with asyncio.TaskGroup() as group:
        attacks = [group.create_task(attack()) for _ in range(AT_ONCE)]
        before, since = 0, 0.0
        while not all(task.done() for task in attacks):
            await asyncio.wait(attacks, timeout=REPORT_S)
            since = 0.0 if target.commands > before else since + REPORT_S
            before = target.commands
            print(f"{before} of {commands} commands", file=sys.stderr, flush=True)
            if since >= STUCK_S:
                text = tasks_text()
                for task in attacks:
                    task.cancel()
                return text
    return ""


def main() -> int:
    parser = argparse.ArgumentParser(prog="siege")
    parser.add_argument("--commands", type=int, default=100_000)
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(1_000_000))
    given = parser.parse_args()
    report = asyncio.run(besiege(given.seed, given.commands))
    print(report.text())
    return 1 if report.problems else 0


if __name__ == "__main__":
    sys.exit(main())
