"""What a checker says: anomalies, each with a few examples."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

EXAMPLES_MAX: Final = 5


@dataclass(frozen=True, slots=True)
class Anomaly:
    """Something that must not happen. `count` times; the first ones in `examples`."""

    kind: str
    count: int
    examples: tuple[str, ...]

    def __str__(self) -> str:
        return f"{self.kind}: {self.count} ({'; '.join(self.examples)})"


def anomalies(found: Mapping[str, Sequence[object]]) -> list[Anomaly]:
    """One for each kind of which there is at least one example."""
    return [
        Anomaly(kind, len(examples), tuple(map(str, examples[:EXAMPLES_MAX])))
        for kind, examples in found.items()
        if examples
    ]
