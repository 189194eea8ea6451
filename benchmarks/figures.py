"""The measured figures and how they are printed: rates, megabytes per second, latencies."""

from __future__ import annotations

import statistics
from dataclasses import dataclass
from typing import TYPE_CHECKING, Self

if TYPE_CHECKING:
    from collections.abc import Sequence


@dataclass(frozen=True, slots=True)
class Shape:
    """A load: `count` messages of `bytes` bytes each, at most `window` of them unacknowledged."""

    bytes: int
    count: int
    window: int

    def __str__(self) -> str:
        return f"{self.bytes:>6} B, {self.window:>5} in flight"


@dataclass(frozen=True, slots=True)
class Figure:
    """The result of a load."""

    shape: Shape
    per_s: float  # messages
    p50_ms: float
    p99_ms: float
    p999_ms: float

    @classmethod
    def of(cls, shape: Shape, seconds: float, latencies_s: Sequence[float]) -> Self:
        """Compute the figure of a load. An empty `latencies_s` means that none were measured."""
        ordered = sorted(latencies_s) or [0.0]
        p50, p99, p999 = (ordered[int(len(ordered) * share)] * 1e3 for share in (0.5, 0.99, 0.999))
        return cls(shape, shape.count / seconds, p50, p99, p999)

    @property
    def mb_per_s(self) -> float:
        return self.per_s * self.shape.bytes / 1e6

    def __str__(self) -> str:
        latency = f"  p50 {self.p50_ms:.2f} ms  p99 {self.p99_ms:.2f} ms" if self.p50_ms else ""
        return f"{self.shape}: {self.per_s:>9,.0f}/s {self.mb_per_s:>7.1f} MB/s{latency}"


def median(figures: Sequence[Figure]) -> Figure:
    """Return the medians of several runs of one shape."""
    return Figure(
        figures[0].shape,
        statistics.median(figure.per_s for figure in figures),
        statistics.median(figure.p50_ms for figure in figures),
        statistics.median(figure.p99_ms for figure in figures),
        statistics.median(figure.p999_ms for figure in figures),
    )
