"""The result of a checker: anomalies, each with a few examples."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

EXAMPLES_MAX: Final = 5


@dataclass(frozen=True, slots=True)
class Anomaly:
    """A kind of violation that happened `count` times. `examples` has the first violations."""

    kind: str
    count: int
    examples: tuple[str, ...]

    def __str__(self) -> str:
        return f"{self.kind}: {self.count} ({'; '.join(self.examples)})"


def anomalies(found: Mapping[str, Sequence[object]]) -> list[Anomaly]:
    """An anomaly for each kind that has an example."""
    return [
        Anomaly(kind, len(examples), tuple(map(str, examples[:EXAMPLES_MAX])))
        for kind, examples in found.items()
        if examples
    ]
