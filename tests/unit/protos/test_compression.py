"""Codecs: round trips, the stated size as a bound, and corrupt payloads."""

import tracemalloc
import zlib

import pytest
import zstandard
from hypothesis import given
from hypothesis import strategies as st

from magnetar.protos.compression import (
    UNCOMPRESSED_BYTES_MAX,
    Compression,
    compress,
    decompress,
)
from magnetar.protos.errors import DecompressionError, EntryError, UncompressedSizeCorruption

CODECS = [codec for codec in Compression if codec is not Compression.NONE]
codecs = st.sampled_from(CODECS)
payloads = st.one_of(
    st.binary(max_size=2_000),
    st.builds(lambda piece, times: piece * times, st.binary(max_size=20), st.integers(0, 500)),
)


def outcome(codec: Compression, payload: bytes, size: int) -> bytes | EntryError:
    try:
        return decompress(codec, payload, size)
    except EntryError as error:
        return error


@given(st.sampled_from(Compression), payloads)
def test_compression_round_trip(codec: Compression, payload: bytes) -> None:
    assert decompress(codec, compress(codec, payload), len(payload)) == payload


# Thirty-two times "a" as unframed blocks. LZ4 and Snappy can be checked by hand: both have the
# literal "a" and a copy from one byte back. LZ4 copies 26 bytes and adds five literals. Snappy
# copies 31 bytes. The recordings of Apache's client prove the other two.
KNOWN = {
    Compression.LZ4: "1f 61 0100 07 50 6161616161",
    Compression.ZLIB: "789c 4b4cc40f 00 c8300c21",
    Compression.ZSTD: "28b52ffd 20 20 450000 10 6161 0100 22c002",
    Compression.SNAPPY: "20 00 61 7a 0100",
}


@pytest.mark.parametrize("codec", CODECS)
def test_recorded_bytes_are_decompressed(codec: Compression) -> None:
    assert decompress(codec, bytes.fromhex(KNOWN[codec]), 32) == b"a" * 32


@given(codecs, payloads, st.integers(-3, 3).filter(bool))
def test_a_wrong_size_is_noticed(codec: Compression, payload: bytes, off_by: int) -> None:
    stated = len(payload) + off_by
    if stated >= 0:
        assert isinstance(outcome(codec, compress(codec, payload), stated), EntryError)


@given(codecs, payloads, st.data())
def test_a_truncated_payload_is_noticed(
    codec: Compression, payload: bytes, data: st.DataObject
) -> None:
    compressed = compress(codec, payload)
    cut = data.draw(st.integers(0, len(compressed) - 1))
    found = outcome(codec, compressed[:cut], len(payload))
    assert isinstance(found, EntryError) or found == payload == b""


@given(codecs, st.binary(max_size=200), st.integers(0, 10_000))
def test_noise_is_refused_or_has_the_stated_size(
    codec: Compression, noise: bytes, size: int
) -> None:
    found = outcome(codec, noise, size)
    assert isinstance(found, DecompressionError | UncompressedSizeCorruption) or len(found) == size


@given(codecs, st.binary(min_size=1, max_size=20))
def test_bytes_after_the_block_are_refused(codec: Compression, extra: bytes) -> None:
    payload = b"some text, some text, some text"
    found = outcome(codec, compress(codec, payload) + extra, len(payload))
    assert isinstance(found, EntryError)


@pytest.mark.parametrize("codec", CODECS)
def test_a_payload_at_the_limit_is_decompressed_and_a_larger_one_refused(
    codec: Compression,
) -> None:
    payload = bytes(1_000)
    compressed = compress(codec, payload)
    assert decompress(codec, compressed, 1_000, bytes_max=1_000) == payload
    with pytest.raises(UncompressedSizeCorruption, match="the limit is 999 bytes"):
        decompress(codec, compressed, 1_000, bytes_max=999)
    with pytest.raises(UncompressedSizeCorruption):
        decompress(codec, compressed, UNCOMPRESSED_BYTES_MAX + 1)


@pytest.mark.parametrize("codec", CODECS)
def test_decompression_bomb_uses_at_most_the_stated_memory(codec: Compression) -> None:
    bomb = compress(codec, bytes(30_000_000))
    tracemalloc.start()
    try:
        found = outcome(codec, bomb, 1_000)
        _, peak_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert isinstance(found, EntryError)
    assert peak_bytes < 2_000_000


def test_a_frame_of_zstandard_without_its_own_size_is_bounded_too() -> None:
    stream = zstandard.ZstdCompressor().compressobj()  # writes no size into the frame
    frame = stream.compress(b"b" * 5_000) + stream.flush()
    assert zstandard.frame_content_size(frame) == -1
    assert decompress(Compression.ZSTD, frame, 5_000) == b"b" * 5_000
    for size in (0, 4_999, 5_001):
        assert isinstance(outcome(Compression.ZSTD, frame, size), EntryError)


def test_window_above_the_limit_is_refused() -> None:
    options = zstandard.ZstdCompressionParameters(window_log=27, enable_ldm=True)
    stream = zstandard.ZstdCompressor(compression_params=options).compressobj()
    frame = stream.compress(b"b" * 5_000) + stream.flush()
    found = outcome(Compression.ZSTD, frame, 5_000)
    assert isinstance(found, DecompressionError)


def test_a_zlib_stream_that_ends_early_is_refused() -> None:
    stream = zlib.compressobj()
    unfinished = stream.compress(b"c" * 100) + stream.flush(zlib.Z_SYNC_FLUSH)
    assert isinstance(outcome(Compression.ZLIB, unfinished, 100), DecompressionError)
