from __future__ import annotations

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from magnetar.client.schema.key_value import KeyValue, KeyValueSchema
from magnetar.client.schema.schema import BytesSchema
from magnetar.spark.key_value import split

SCHEMA = KeyValueSchema(BytesSchema(), BytesSchema())
BAD = [b"", b"\0\0\0", b"\0\0\0\1", b"\0\0\0\1k", b"\0\0\0\1k\0\0\0\2v", b"\0\0\0\1k\0\0\0\1vx"]
BAD += [b"\xff\xff\xff\xfe\xff\xff\xff\xff", b"\x7f\xff\xff\xffk\0\0\0\0"]

parts = st.none() | st.binary(max_size=9)


@given(
    st.lists(st.none() | st.sampled_from(BAD) | st.tuples(parts, parts), max_size=20),
    st.integers(0, 3),
)
def test_payloads_of_the_clients_schema_are_split(
    rows: list[tuple[bytes | None, bytes | None] | bytes | None], skip: int
) -> None:
    payloads = [SCHEMA.encode(KeyValue(*it)) if isinstance(it, tuple) else it for it in rows]
    keys, values, bad = split(pa.array([b"before"] * skip + payloads, pa.binary()).slice(skip))
    pairs = list(zip(keys.to_pylist(), values.to_pylist(), strict=True))
    assert pairs == [it if isinstance(it, tuple) else (None, None) for it in rows]
    assert list(bad) == [at for at, it in enumerate(rows) if isinstance(it, bytes)]


@pytest.mark.parametrize("payload", BAD)
def test_a_payload_that_the_client_refuses_is_bad(payload: bytes) -> None:
    with pytest.raises(ValueError, match="bytes"):
        SCHEMA.decode(payload)
