"""The invariants of a closed ledger, each as a function that raises `Violation`."""

from __future__ import annotations


class Violation(Exception):
    """An invariant does not hold. `then`: the steps that follow until the violation shows.
    `closing`: the recoverer that closes (None: the writer) and the last entry; None if no process
    closes."""

    def __init__(self, invariant: str, then: list[str]) -> None:
        super().__init__(invariant, then)
        self.invariant = invariant
        self.then = then
        self.closing: tuple[int | None, int] | None = None

    def __str__(self) -> str:
        return f"{self.invariant}: {'; '.join(self.then)}"


def acked_entries_are_readable(last: int, confirmed: int, what: str) -> None:
    if last < confirmed:
        raise Violation(
            "acked entries are readable", [what, f"entry {last + 1} was acknowledged before"]
        )


def nothing_is_acked_beyond(last: int, confirmable: int, what: str) -> None:
    if confirmable > last:
        raise Violation(
            "nothing is acknowledged beyond the end",
            [
                what,
                f"the add of entry {last + 1} arrives at bookies that are not fenced, and is"
                " acknowledged",
            ],
        )


def told_entries_stay(last: int, seen: int, what: str) -> None:
    if last < seen:
        raise Violation(
            "entries that a reader was told of stay",
            [what, f"a reader was told of entry {seen} before"],
        )


def closed_entries_have_copies(first: int, copies: list[int], needed: int, what: str) -> None:
    for entry, count in enumerate(copies, start=first):
        if count < needed:
            raise Violation(
                "closed entries have Qa copies", [what, f"entry {entry} has {count} copies"]
            )


def closed_entries_are_readable(first: int, copies: list[int], what: str) -> None:
    for entry, count in enumerate(copies, start=first):
        if not count:
            raise Violation("closed entries are readable", [what, f"entry {entry} is lost"])
