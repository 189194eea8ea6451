"""Payload compression as Pulsar's clients do it: one table of codecs, decompression with a bound.

A compressed payload is one complete block without a frame of its own; only its size before
compression travels beside it (`MessageMetadata.uncompressed_size`). That size is the receiver's
defence: a stated size above the limit is refused unseen, and no codec gives more than was stated.
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

# Pulsar limits a payload after compression, to 5 MiB. Text seldom shrinks more than tenfold, so
# sixteen times that lets honest messages pass, while a few hostile ones still fit into memory.
UNCOMPRESSED_BYTES_MAX: Final = 16 * 5 * 1024 * 1024


class Compression(IntEnum):
    """How a payload is compressed; the numbers are those of the wire."""

    NONE = 0
    LZ4 = 1
    ZLIB = 2
    ZSTD = 3
    SNAPPY = 4


def compress(compression: Compression, payload: bytes) -> bytes:
    """The payload compressed; itself when `compression` is NONE."""
    return _CODECS[compression].compress(payload)


def decompress(
    compression: Compression,
    payload: bytes,
    size: int,
    *,
    bytes_max: int = UNCOMPRESSED_BYTES_MAX,
) -> bytes:
    """The `size` bytes that `payload` was before compression; itself when `compression` is NONE.

    Raises UncompressedSizeCorruption when `size` exceeds `bytes_max` or is not what comes out, and
    DecompressionError when the codec refuses the bytes.
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
    # Stops at the stated size: an error, or a result that is never longer by more than a byte.
    decompress: Callable[[bytes, int], bytes]


_CODEC_ERRORS = (
    lz4.block.LZ4BlockError,
    zlib.error,
    zstandard.ZstdError,
    cramjam.DecompressionError,
)


class _ZstdContexts(threading.local):
    """One pair of contexts a thread: making one costs ten times what compressing 1 KB does."""

    def __init__(self) -> None:
        # Level 3 is what Pulsar's clients use. A window of 64 MiB is more than any of their levels
        # asks for; without a bound a frame could ask for 2 GiB.
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
    plain = stream.decompress(payload, size + 1)  # one more, so that a longer one is noticed
    if not stream.eof and len(plain) <= size:
        raise zlib.error("the stream is truncated")
    if stream.unused_data:
        raise zlib.error("bytes follow the end of the stream")
    return plain


def _zstd_decompress(payload: bytes, size: int) -> bytes:
    # The library trusts a size in the frame's own header, so it must be the stated one.
    own_size = zstandard.frame_content_size(payload)
    if own_size not in (-1, size):
        raise UncompressedSizeCorruption(size, f"the frame says {own_size} bytes")
    return _ZSTD.decompressor.decompress(
        payload,
        max_output_size=max(size, 1),  # 0 would mean "as the frame says"
        allow_extra_data=False,
    )


def _snappy_compress(payload: bytes) -> bytes:
    return bytes(cramjam.snappy.compress_raw(payload))


def _snappy_decompress(payload: bytes, size: int) -> bytes:
    own_size = cramjam.snappy.decompress_raw_len(payload)
    if own_size != size:
        raise UncompressedSizeCorruption(size, f"the block says {own_size} bytes")
    return bytes(cramjam.snappy.decompress_raw(payload))


_CODECS = {
    Compression.NONE: _Codec(lambda payload: payload, lambda payload, size: payload),
    Compression.LZ4: _Codec(_lz4_compress, _lz4_decompress),
    Compression.ZLIB: _Codec(zlib.compress, _zlib_decompress),
    Compression.ZSTD: _Codec(lambda payload: _ZSTD.compressor.compress(payload), _zstd_decompress),
    Compression.SNAPPY: _Codec(_snappy_compress, _snappy_decompress),
}
