"""The base of the client's enumerations, and those that its lower layers use."""

from enum import Enum, IntEnum


class NamedEnum(IntEnum):
    """An enumeration that prints itself as Apache's: `str(ConsumerType.Shared)` has both names."""

    __str__ = Enum.__str__


class CompressionType(NamedEnum):
    """How a producer compresses its entries. A batch is compressed as a whole."""

    NONE = 0
    LZ4 = 1
    ZLib = 2
    ZSTD = 3
    SNAPPY = 4
