"""The errors in received bytes and names.

Every error here is definite: the input was refused during parsing, and it had no effect.
"""

from typing import ClassVar


class ProtocolError(Exception):
    """Input that does not follow the protocol."""

    definite: ClassVar[bool] = True


# Names


class InvalidTopicName(ProtocolError):
    """A topic name is invalid. The reason says what is expected."""

    def __init__(self, name: str, reason: str) -> None:
        super().__init__(f"invalid topic name {_shown(name)}: {reason}")
        self.name = name
        self.reason = reason


class InvalidNamespaceName(ProtocolError):
    """A namespace name is invalid. The reason says what is expected."""

    def __init__(self, name: str, reason: str) -> None:
        super().__init__(f"invalid namespace name {_shown(name)}: {reason}")
        self.name = name
        self.reason = reason


# Frames: the start of the next frame is unknown, so the connection must be closed.


class FrameError(ProtocolError):
    """A stream of frames cannot be read any further."""


class FrameTooLarge(FrameError):
    """A frame to send or to receive exceeds the limit. A receiver keeps none of the frame."""

    def __init__(self, size: int, limit: int) -> None:
        super().__init__(f"a frame of {size} bytes exceeds the limit of {limit} bytes")
        self.size = size
        self.limit = limit


class MalformedFrame(FrameError):
    """The sizes in a frame contradict each other or the received bytes."""


# Commands: the frame is whole, so the stream continues after it.


class CommandError(ProtocolError):
    """A frame is whole, but its command cannot be executed."""


class MalformedCommand(CommandError):
    """A command does not have the content that its type requires.

    `command` is the name of the type, or "unknown" if the type could not be read. `request_id` is
    the command's request id, if it has one, so that the broker can answer.
    """

    def __init__(self, command: str, reason: str, request_id: int | None = None) -> None:
        super().__init__(f"malformed command {command}: {reason}")
        self.command = command
        self.reason = reason
        self.request_id = request_id  # None: the command has none, or it was not readable


class UnknownCommand(CommandError):
    """A command has a type that this version does not know."""

    def __init__(self, number: int) -> None:
        super().__init__(f"unknown command of type {number}")
        self.number = number


# Entries


class EntryError(ProtocolError):
    """The bytes of an entry cannot be read."""


class EntryTooLarge(EntryError):
    """An entry to send or to receive, or its payload, exceeds the limit. A receiver keeps none of
    the entry."""

    def __init__(self, what: str, size: int, limit: int) -> None:
        super().__init__(f"the {what} of {size} bytes exceeds the limit of {limit} bytes")
        self.what = what
        self.size = size
        self.limit = limit


class MalformedEntry(EntryError):
    """The layout or the metadata of an entry is invalid."""


class SendNotSupported(EntryError):
    """A SEND carries something that clients may not send, or that the broker does not support."""

    def __init__(self, what: str, why: str) -> None:
        super().__init__(f"a SEND with {what}: {why}")
        self.what = what
        self.why = why


class ChecksumMismatch(EntryError):
    """The entry's CRC32C does not match its bytes: the entry is damaged."""

    def __init__(self, expected: int, actual: int) -> None:
        super().__init__(
            f"checksum mismatch: the entry states {expected:#010x}, its bytes have {actual:#010x}"
        )
        self.expected = expected
        self.actual = actual


class UncompressedSizeCorruption(EntryError):
    """The stated size of a payload before compression is too large or wrong."""

    def __init__(self, stated: int, reason: str) -> None:
        super().__init__(f"wrong uncompressed size, stated {stated} bytes: {reason}")
        self.stated = stated


class DecompressionError(EntryError):
    """The codec refuses a compressed payload."""

    def __init__(self, codec: str, reason: str) -> None:
        super().__init__(f"cannot decompress {codec}: {reason}")
        self.codec = codec


class BatchDeserializeError(EntryError):
    """The messages of a batch do not fill its payload exactly."""


class EntryEncrypted(EntryError):
    """The payload is encrypted, and the client has no key."""

    def __init__(self) -> None:
        super().__init__("the payload is encrypted, and the reader has no key")


def _shown(name: str) -> str:
    """Shorten a name for an error message: a hostile name may have megabytes."""
    return repr(name) if len(name) <= 200 else f"{name[:200]!r}... ({len(name)} characters)"
