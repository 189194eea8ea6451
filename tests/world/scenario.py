"""A scenario: a name, the quorums it is played with, and its events, which the seed draws."""

from __future__ import annotations

import logging
from contextlib import contextmanager
from dataclasses import dataclass, field
from random import Random
from typing import TYPE_CHECKING

from world.checked import checked
from world.cluster import World
from world.loop import RUNNING, SimLoop, run_seeded
from world.net import Host
from world.oracle import Violation

from magnetar.bookie.ledger.quorum import Quorum

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Iterable, Iterator

    Play = Callable[[World], Coroutine[object, object, None]]

QUORUMS = {
    "2/2/2": Quorum(2, 2, 2),
    "3/3/2": Quorum(3, 3, 2),
    "3/2/2": Quorum(3, 2, 2),
    "5/3/2": Quorum(5, 3, 2),
    "3/3/3": Quorum(3, 3, 3),
    "1/1/1": Quorum(1, 1, 1),
}
ALL = tuple(QUORUMS)
DEADLINE_S = 600.0  # the virtual time of the whole scenario


@dataclass(frozen=True)
class Scenario:
    name: str
    title: str
    quorums: tuple[str, ...]
    play: Play


SCENARIOS: dict[str, Scenario] = {}


def scenario(name: str, title: str, quorums: Iterable[str] = ALL) -> Callable[[Play], Play]:
    """Add a scenario to the list. `play` raises violations of its own checks; the oracle raises its
    own."""

    def enter(play: Play) -> Play:
        assert name not in SCENARIOS, name
        SCENARIOS[name] = Scenario(name, title, tuple(quorums), play)
        return play

    return enter


@dataclass
class Outcome:
    scenario: str
    seed: int
    quorum: str
    digest: str
    violation: Violation | None
    virtual_s: float
    bitten: dict[str, int] = field(default_factory=dict)
    confirmed: int = 0  # entries whose confirmation a writer received
    reads: int = 0
    story: list[str] = field(default_factory=list)


def play(chosen: Scenario, seed: int, *, tell: bool = False) -> Outcome:
    """Play a scenario with a seed, to its end or to its first violation."""
    draw = Random(f"{seed} {chosen.name} world")
    quorum = draw.choice(chosen.quorums)
    worlds: list[World] = []
    violation: Violation | None = None

    async def main(loop: SimLoop) -> None:
        world = World(loop, seed, QUORUMS[quorum], tell=tell)
        worlds.append(world)
        await world.run(chosen.play(world), deadline_s=DEADLINE_S)

    try:
        with _logs_told(worlds) if tell else _logs_off(), checked():
            run_seeded(main, draw)
    except Violation as found:
        violation = found
    [world] = worlds
    violation = world.oracle.first or violation
    return Outcome(
        scenario=chosen.name,
        seed=seed,
        quorum=quorum,
        digest=world.trace.digest,
        violation=violation,
        virtual_s=world.loop.time(),
        bitten=dict(world.trace.bitten),
        confirmed=sum(life.confirmed + 1 for life in world.oracle.lives.values()),
        reads=world.oracle.reads,
        story=world.trace.story(),
    )


class _Teller(logging.Handler):
    """Adds the log lines of the real code to the story, each with the process that logged it."""

    def __init__(self, worlds: list[World]) -> None:
        super().__init__()
        self._worlds = worlds

    def emit(self, record: logging.LogRecord) -> None:
        host = RUNNING.get()
        name = host.name if isinstance(host, Host) else "-"
        for world in self._worlds:
            world.trace.tell(name, f"    ({record.getMessage()})")


@contextmanager
def _logs_told(worlds: list[World]) -> Iterator[None]:
    logger, teller = logging.getLogger("magnetar"), _Teller(worlds)
    before = logger.level, logger.propagate
    logger.addHandler(teller)
    logger.setLevel(logging.INFO)
    logger.propagate = False
    try:
        yield
    finally:
        logger.removeHandler(teller)
        logger.level, logger.propagate = before
        logger.setLevel(before[0])


@contextmanager
def _logs_off() -> Iterator[None]:
    before = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        yield
    finally:
        logging.disable(before)
