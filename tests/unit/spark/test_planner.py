from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from magnetar.spark.planner import ENTRY_BYTES_GUESS, Span, plan_tasks

spans = st.builds(
    lambda first, entries, size: (first, entries, size),
    st.integers(0, 50),
    st.integers(1, 200),
    st.integers(0, 10_000),
)


@st.composite
def topics(draw: st.DrawFn) -> list[Span]:
    """Ledgers in order. The size of some of them is unknown."""
    return [
        Span(ledger, first, first + entries - 1, size)
        for ledger, (first, entries, size) in enumerate(draw(st.lists(spans, max_size=8)))
    ]


def entries_of(parts: list[Span] | tuple[Span, ...]) -> list[tuple[int, int]]:
    return [(span.ledger, entry) for span in parts for entry in range(span.first, span.last + 1)]


@given(topics(), st.integers(1, 5_000), st.integers(1, 20))
def test_every_entry_is_in_one_task_and_in_order(
    ledgers: list[Span], target_bytes: int, tasks_max: int
) -> None:
    tasks = plan_tasks(ledgers, target_bytes=target_bytes, tasks_max=tasks_max)
    assert [entry for task in tasks for entry in entries_of(task)] == entries_of(ledgers)
    assert len(tasks) <= tasks_max
    assert all(tasks)


@given(topics(), st.integers(1, 5_000), st.integers(1, 20))
def test_no_task_is_larger_than_its_share_and_one_entry(
    ledgers: list[Span], target_bytes: int, tasks_max: int
) -> None:
    tasks = plan_tasks(ledgers, target_bytes=target_bytes, tasks_max=tasks_max)
    sizes = [sum(span.bytes for span in task) for task in tasks]
    total = sum(sizes)
    count = min(-(-total // target_bytes), tasks_max)
    # If entries are larger than a share, the last task takes the rest.
    largest = max((-(-span.bytes // span.entries) for task in tasks for span in task), default=0)
    if largest <= total / max(count, 1) / 2:
        assert max(sizes, default=0) <= total / max(count, 1) + 2 * largest + 1


def test_an_empty_topic_needs_no_task() -> None:
    assert plan_tasks([]) == []


def test_many_small_ledgers_become_one_task() -> None:
    ledgers = [Span(ledger, 0, 0, 100) for ledger in range(1_000)]
    [task] = plan_tasks(ledgers, target_bytes=1 << 20)
    assert len(task) == 1_000


def test_a_large_ledger_is_cut_evenly() -> None:
    tasks = plan_tasks([Span(7, 0, 999, 1_000_000)], target_bytes=250_000)
    assert [(task[0].first, task[-1].last) for task in tasks] == [
        (0, 249),
        (250, 499),
        (500, 749),
        (750, 999),
    ]


def test_the_number_of_tasks_has_a_limit() -> None:
    tasks = plan_tasks([Span(7, 0, 9_999, 1 << 40)], target_bytes=1 << 20, tasks_max=16)
    assert len(tasks) == 16
    assert {sum(span.entries for span in task) for task in tasks} == {625}


def test_a_task_may_span_the_end_of_a_ledger() -> None:
    tasks = plan_tasks([Span(1, 0, 9, 1_000), Span(2, 0, 9, 1_000)], target_bytes=700)
    assert [[(span.ledger, span.first, span.last) for span in task] for task in tasks] == [
        [(1, 0, 5)],
        [(1, 6, 9), (2, 0, 2)],
        [(2, 3, 9)],
    ]


@pytest.mark.parametrize(
    ("known", "expected"), [([], ENTRY_BYTES_GUESS), ([Span(1, 0, 9, 500)], 50)]
)
def test_an_open_ledger_counts_as_its_closed_siblings_do(known: list[Span], expected: int) -> None:
    tasks = plan_tasks([*known, Span(2, 0, 9, 0)], target_bytes=1 << 40)
    assert tasks[0][-1].bytes == 10 * expected


def test_an_entry_larger_than_several_shares_is_one_task() -> None:
    tasks = plan_tasks([Span(1, 0, 0, 10_000), Span(2, 0, 2, 3)], target_bytes=100, tasks_max=16)
    assert [entry for task in tasks for entry in entries_of(task)] == [
        (1, 0),
        (2, 0),
        (2, 1),
        (2, 2),
    ]
