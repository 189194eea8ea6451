"""Planting a bug: while a world runs, a wrong function replaces a function of the real code. The
production code has no hook for it.

A mutant reports when it *fired*: when its result differed from that of the right code. A run in
which the mutant never fired proves nothing.
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
    # The wrong functions, keyed by the replaced function: "package.module:Class.function".
    wrong: Mapping[str, Wrong]
    caught_by: frozenset[str]  # oracles of the world that may catch it
    scene: Scenario
    seeds: int  # the number of seeds within which it must be caught


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
    """Plant the bug for the time of the block."""
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
