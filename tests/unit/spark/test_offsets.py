from __future__ import annotations

import json

import pytest

from magnetar.spark.errors import InvalidOffsets
from magnetar.spark.offsets import Offsets, Place, parse_offsets, symbolic

B, A = "persistent://t/n/b", "persistent://t/n/a"


def test_offsets_survive_the_checkpoint_and_equal_ones_have_equal_text() -> None:
    one = Offsets({B: Place(7, 3, 90, 1_000), A: Place(5, 0, 0)}, {A: Place(5, 0, 0)}, (9, 2))
    other = Offsets({A: Place(5, 0, 0), B: Place(7, 3, 90, 1_000)}, {A: Place(5, 0, 0)}, (9, 2))
    text = json.dumps(one.to_json())
    assert text == json.dumps(other.to_json())
    assert parse_offsets(json.loads(text)) == one


def test_offsets_before_the_first_batch_are_a_constant() -> None:
    assert parse_offsets(symbolic("latest")) is None
    assert symbolic("latest") == symbolic("latest")


@pytest.mark.parametrize(
    "offsets",
    [
        {},
        {"v": 2, "t": {}},
        {"v": 1},
        {"v": 1, "t": [1]},
        {"v": 1, "t": {A: [1, 2, 3]}},
        {"v": 1, "t": {A: [1, 2, 3, "4"]}},
        {"v": 1, "t": {A: [1, 2, 3, True]}},
        {"v": 1, "t": {}, "from": 7},
        {"v": 1, "t": {}, "tasks": [0, 1]},
        {"v": 1, "t": {}, "tasks": [1, 2, 3]},
    ],
)
def test_offsets_of_another_source_are_refused(offsets: dict[str, object]) -> None:
    with pytest.raises(InvalidOffsets, match="checkpoint"):
        parse_offsets(offsets)
