"""The base class of the client's enumerations, and the enumerations that its lower layers use."""

from enum import Enum, IntEnum


class NamedEnum(IntEnum):
    """An enumeration whose `str()` is as in Apache's client, for example "ConsumerType.Shared"."""

    __str__ = Enum.__str__


class CompressionType(NamedEnum):
    """The compression of a producer's entries. A producer compresses a batch as a whole."""

    NONE = 0
    LZ4 = 1
    ZLib = 2
    ZSTD = 3
    SNAPPY = 4
