from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from magnetar.spark.admission import rows_of_bytes, share

backlogs = st.dictionaries(st.text(max_size=3), st.integers(0, 1_000), max_size=8)


@given(backlogs, st.integers(1, 3_000))
def test_shares_fit_the_limit_and_no_topic_starves(topics: dict[str, int], limit: int) -> None:
    shares = share(topics, limit)
    waiting = [topic for topic, backlog in topics.items() if backlog]
    assert all(0 < shares[topic] <= topics[topic] for topic in waiting)
    assert sum(shares.values()) == min(sum(topics.values()), max(limit, len(waiting))) or (
        len(waiting) > 1 and sum(shares.values()) <= limit + len(waiting)
    )


@given(backlogs)
def test_without_a_limit_everything_is_read(topics: dict[str, int]) -> None:
    assert share(topics, None) == topics


def test_shares_are_proportional() -> None:
    assert share({"a": 300, "b": 100, "c": 0}, 40) == {"a": 30, "b": 10, "c": 0}


def test_bytes_become_rows_at_the_mean_size_of_a_row() -> None:
    assert rows_of_bytes(100, 10_000, 1_000) == 10
    assert rows_of_bytes(100, 10_000, 1) == 1
    assert rows_of_bytes(100, 10_000, 10_000) == 100
    assert rows_of_bytes(100, 0, 0) == 100  # the size is not known
    assert rows_of_bytes(0, 0, 0) == 0
