"""Planting a bug: a function of the real code is replaced by a wrong one, for as long as a world
runs, and put back. The production code knows nothing of it.

A mutant says when it *fired*: when what it did differed from what the right code would have done.
One that was planted and never fired has shown nothing.
"""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from world.scenario import Scenario

    Fired = Callable[[], None]
    Wrong = Callable[[Any, Fired], Any]
    """Makes the wrong function from the right one. It calls Fired when its result differs."""


@dataclass(frozen=True, kw_only=True)
class Mutant:
    name: str
    breaks: str  # the rule that it breaks
    wrong: Mapping[str, Wrong]  # by what it replaces: "package.module:Class.function"
    caught_by: frozenset[str]  # oracles of the world; any of them counts
    scene: Scenario
    seeds: int  # within so many it must be caught


MUTANTS: dict[str, Mutant] = {}


def enter(mutant: Mutant) -> None:
    assert mutant.name not in MUTANTS
    MUTANTS[mutant.name] = mutant


@dataclass
class Firings:
    count: int = 0

    def __call__(self) -> None:
        self.count += 1


@contextmanager
def planted(mutant: Mutant, fired: Firings) -> Iterator[None]:
    """The bug is there within the block."""
    undo: list[tuple[Any, str, Any]] = []
    try:
        for path, wrong in mutant.wrong.items():
            owner, name = _owner(path)
            right = vars(owner)[name]
            undo.append((owner, name, right))
            setattr(owner, name, wrong(right, fired))
        yield
    finally:
        for owner, name, right in reversed(undo):
            setattr(owner, name, right)


def _owner(path: str) -> tuple[Any, str]:
    module, _, names = path.partition(":")
    *classes, name = names.split(".")
    owner: Any = import_module(module)
    for each in classes:
        owner = getattr(owner, each)
    return owner, name
