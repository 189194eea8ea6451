"""The Key_Shared policy of a consumer, from its SUBSCRIBE command."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum


class KeySharedMode(IntEnum):
    """The way in which consumers get hash ranges. The numbers are those of Pulsar's protocol."""

    AUTO_SPLIT = 0  # the broker assigns the ranges
    STICKY = 1  # each consumer brings its own ranges


@dataclass(frozen=True, slots=True)
class HashRange:
    """Hash slots first..last, both ends included. The class does not check them: the dispatcher
    accepts or refuses the ranges of a consumer."""

    first: int
    last: int


@dataclass(frozen=True, slots=True)
class KeySharedPolicy:
    """The Key_Shared attributes of one consumer."""

    mode: KeySharedMode = KeySharedMode.AUTO_SPLIT
    ranges: tuple[HashRange, ...] = ()  # STICKY only
    allow_out_of_order: bool = False
    ordered_nacks: bool = False  # a negative acknowledgement withholds later entries of its key

    @property
    def of_all(self) -> KeySharedPolicy:
        """The policy without the ranges, which belong to one consumer."""
        return KeySharedPolicy(self.mode, (), self.allow_out_of_order, self.ordered_nacks)

    def agrees(self, other: KeySharedPolicy) -> bool:
        """Returns True when consumers with these two policies can be in one subscription. They may
        differ in their ranges and in `allow_out_of_order`."""
        return (self.mode, self.ordered_nacks) == (other.mode, other.ordered_nacks)

    def __str__(self) -> str:
        order = "out of order allowed" if self.allow_out_of_order else "ordered by key"
        nacks = ", also after negative acknowledgements" if self.ordered_nacks else ""
        return f"{self.mode.name}, {order}{nacks}"
