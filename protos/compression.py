"""Payload compression as in Pulsar's clients: a table of codecs, and bounded decompression.

A compressed payload is one complete block of its codec, without a further header. The metadata
holds its size before compression (`MessageMetadata.uncompressed_size`). This size protects the
receiver: a size above the limit is refused before decompression, and each codec stops at the
stated size.
"""

import threading
import zlib
from collections.abc import Callable
from enum import IntEnum
from typing import Final, NamedTuple

import cramjam
import lz4.block
import zstandard

from magnetar.protos.errors import DecompressionError, UncompressedSizeCorruption

# Pulsar limits the compressed payload to 5 MiB. Text seldom shrinks more than tenfold, so a factor
# of sixteen admits regular messages. A few hostile messages of this size still fit into memory.
UNCOMPRESSED_FACTOR: Final = 16
UNCOMPRESSED_BYTES_MAX: Final = UNCOMPRESSED_FACTOR * 5 * 1024 * 1024


class Compression(IntEnum):
    """The compression of a payload. The numbers are those on the wire."""

    NONE = 0
    LZ4 = 1
    ZLIB = 2
    ZSTD = 3
    SNAPPY = 4


def compress(compression: Compression, payload: bytes) -> bytes:
    """Return the compressed payload, or the payload itself if `compression` is NONE."""
    return _CODECS[compression].compress(payload)


def decompress(
    compression: Compression,
    payload: bytes,
    size: int,
    *,
    bytes_max: int = UNCOMPRESSED_BYTES_MAX,
) -> bytes:
    """Return the `size` bytes before compression, or `payload` itself if `compression` is NONE.

    Raises UncompressedSizeCorruption if `size` exceeds `bytes_max` or is not the real size, and
    DecompressionError if the codec refuses the bytes.
    """
    if compression is Compression.NONE:
        return payload
    if size > bytes_max:
        raise UncompressedSizeCorruption(size, f"the limit is {bytes_max} bytes")
    try:
        plain = _CODECS[compression].decompress(payload, size)
    except _CODEC_ERRORS as error:
        raise DecompressionError(compression.name, str(error)) from error
    if len(plain) != size:
        raise UncompressedSizeCorruption(size, f"{compression.name} gave {len(plain)} bytes")
    return plain


class _Codec(NamedTuple):
    compress: Callable[[bytes], bytes]
    # Stops at the stated size: it raises an error or returns at most one byte more.
    decompress: Callable[[bytes, int], bytes]


_CODEC_ERRORS = (
    lz4.block.LZ4BlockError,
    zlib.error,
    zstandard.ZstdError,
    cramjam.DecompressionError,
)


class _ZstdContexts(threading.local):
    """One pair of contexts per thread: creating one costs ten times as much as compressing 1 KB."""

    def __init__(self) -> None:
        # Pulsar's clients use level 3. A window of 64 MiB is more than any of their levels needs;
        # without a bound, a frame could request 2 GiB.
        self.compressor = zstandard.ZstdCompressor(level=3)
        self.decompressor = zstandard.ZstdDecompressor(max_window_size=1 << 26)


_ZSTD = _ZstdContexts()


def _lz4_compress(payload: bytes) -> bytes:
    block: bytes = lz4.block.compress(payload, store_size=False)
    return block


def _lz4_decompress(payload: bytes, size: int) -> bytes:
    plain: bytes = lz4.block.decompress(payload, uncompressed_size=size)
    return plain


def _zlib_decompress(payload: bytes, size: int) -> bytes:
    stream = zlib.decompressobj()
    plain = stream.decompress(payload, size + 1)  # one byte more shows that the payload is longer
    if not stream.eof and len(plain) <= size:
        raise zlib.error("the stream is truncated")
    if stream.unused_data:
        raise zlib.error("bytes follow the end of the stream")
    return plain


def _zstd_decompress(payload: bytes, size: int) -> bytes:
    # The library trusts the size in the frame's header, so it must equal the stated size.
    own_size = zstandard.frame_content_size(payload)
    if own_size not in (-1, size):
        raise UncompressedSizeCorruption(size, f"the frame states {own_size} bytes")
    return _ZSTD.decompressor.decompress(
        payload,
        max_output_size=max(size, 1),  # 0 would mean the size in the frame
        allow_extra_data=False,
    )


def _snappy_compress(payload: bytes) -> bytes:
    return bytes(cramjam.snappy.compress_raw(payload))


def _snappy_decompress(payload: bytes, size: int) -> bytes:
    own_size = cramjam.snappy.decompress_raw_len(payload)
    if own_size != size:
        raise UncompressedSizeCorruption(size, f"the block states {own_size} bytes")
    return bytes(cramjam.snappy.decompress_raw(payload))


_CODECS = {
    Compression.NONE: _Codec(lambda payload: payload, lambda payload, size: payload),
    Compression.LZ4: _Codec(_lz4_compress, _lz4_decompress),
    Compression.ZLIB: _Codec(zlib.compress, _zlib_decompress),
    Compression.ZSTD: _Codec(lambda payload: _ZSTD.compressor.compress(payload), _zstd_decompress),
    Compression.SNAPPY: _Codec(_snappy_compress, _snappy_decompress),
}
