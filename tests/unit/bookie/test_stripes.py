"""Reads of stripes, compared with a loop over all requested entries."""

from random import Random

import pytest

from magnetar.bookie.contract import STRIDE_MAX, ReadRequest
from magnetar.bookie.stripes import read_stripes
from magnetar.protos.envelope import BookieCode

NONE = BookieCode.NO_SUCH_ENTRY


def striped(first: int, last: int, run: int, stride: int) -> ReadRequest:
    return ReadRequest(
        incarnation="", ledger=1, master_key=0, first=first, last=last, run=run, stride=stride
    )


@pytest.mark.parametrize("seed", range(300))
def test_a_striped_read_ends_at_the_first_missing_entry_or_a_limit(seed: int) -> None:
    random = Random(seed)
    held = {entry: bytes(random.randrange(9)) for entry in range(60) if random.random() < 0.97}

    def read_run(
        first: int, last: int, *, bytes_max: int, entries_max: int
    ) -> tuple[list[bytes], BookieCode]:
        found: list[bytes] = []
        for entry in range(first, last + 1):
            if entry not in held or len(found) == entries_max or sum(map(len, found)) >= bytes_max:
                break
            found.append(held[entry])
        return found, NONE

    first, stride = random.randrange(20), random.randint(1, 7)
    request = striped(first, first + random.randrange(40), random.randint(1, stride), stride)
    bytes_max, entries_max = random.randint(1, 200), random.randint(1, 30)
    at = first
    given: list[tuple[int, bytes]] = []
    why: BookieCode | None = None
    while at <= request.last and why is None:
        pieces, at, why = read_stripes(
            read_run, request, at, bytes_max=bytes_max, entries_max=entries_max
        )
        part = [(n, value) for begin, run in pieces for n, value in enumerate(run, begin)]
        assert part or why is not None or at > request.last, "no progress"
        assert len(part) <= entries_max
        assert sum(len(value) for _, value in part[:-1]) < bytes_max or len(part) <= 1
        given += part
    asked = [n for n in range(first, request.last + 1) if (n - first) % stride < request.run]
    there = [n for n in asked if n in held]
    cut = next((n for n in asked if n not in held), None)
    expected = there if cut is None else [n for n in asked if n < cut]
    assert given == [(n, held[n]) for n in expected]
    assert why == (None if cut is None else NONE)
    assert cut is None or at == cut


@pytest.mark.parametrize(
    ("run", "stride"), [(1, 0), (0, 1), (3, 2), (-1, -1), (1, STRIDE_MAX + 1), (0, -1)]
)
def test_inconsistent_stripes_are_refused(run: int, stride: int) -> None:
    assert striped(0, 9, 0, 0).well_formed
    assert striped(0, 9, 2, 3).well_formed
    assert not striped(0, 9, run, stride).well_formed
    assert not striped(5, 4, 1, 2).well_formed
