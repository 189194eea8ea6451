from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from magnetar.client.ids import bits_of, id_data, key_of, message_id_of, words_of
from magnetar.client.message import MessageId


@given(st.sets(st.integers(0, 300)))
def test_bits_survive_the_conversion_to_words(places: set[int]) -> None:
    bits = sum(1 << place for place in places)
    words = words_of(bits)
    assert bits_of(words) == bits
    for place in range(301):  # Java's BitSet.toLongArray: 64 bits a word, the lowest first
        word = words[place // 64] if place // 64 < len(words) else 0
        assert bool(word >> place % 64 & 1) == (place in places)
    assert not words or words[-1] != 0


def test_unsigned_ids_of_the_protocol_are_read_as_signed() -> None:
    assert key_of(id_data((-1, -1))) == (-1, -1)
    assert id_data((-1, 3)).ledgerId == 2**64 - 1
    data = id_data((4, 5), 0b101)
    assert list(data.ack_set) == [5]
    assert message_id_of(data) == MessageId(-1, 4, 5)
