"""What can be wrong with bytes and names that arrive.

Every error here is definite: the input was refused while it was read, and nothing was done.
"""

from typing import ClassVar


class ProtocolError(Exception):
    """Input that does not follow the protocol."""

    definite: ClassVar[bool] = True


# Names


class InvalidTopicName(ProtocolError):
    """A topic name that cannot be; says what was expected."""

    def __init__(self, name: str, reason: str) -> None:
        super().__init__(f"invalid topic name {_shown(name)}: {reason}")
        self.name = name
        self.reason = reason


class InvalidNamespaceName(ProtocolError):
    """A namespace name that cannot be; says what was expected."""

    def __init__(self, name: str, reason: str) -> None:
        super().__init__(f"invalid namespace name {_shown(name)}: {reason}")
        self.name = name
        self.reason = reason


# Frames: where the next one begins is not known any more, so the connection must be closed.


class FrameError(ProtocolError):
    """A stream of frames that cannot be followed any further."""


class FrameTooLarge(FrameError):
    """A frame announces more bytes than are taken; nothing of it was kept."""

    def __init__(self, size: int, limit: int) -> None:
        super().__init__(f"a frame of {size} bytes exceeds the limit of {limit} bytes")
        self.size = size
        self.limit = limit


class MalformedFrame(FrameError):
    """The sizes in a frame contradict each other or the bytes that are there."""


# Commands: the frame is whole, so the stream can go on after it.


class CommandError(ProtocolError):
    """A whole frame whose command cannot be carried out as it stands."""


class MalformedCommand(CommandError):
    """A command that is not what its type promises.

    `command` is the name of its type, or "unknown" when not even that could be read; `request_id`
    is present when the command carried one, so that an answer can be addressed.
    """

    def __init__(self, command: str, reason: str, request_id: int | None = None) -> None:
        super().__init__(f"malformed command {command}: {reason}")
        self.command = command
        self.reason = reason
        self.request_id = request_id  # None: the command has none, or it could not be read


class UnknownCommand(CommandError):
    """A command whose type this version does not know."""

    def __init__(self, number: int) -> None:
        super().__init__(f"unknown command of type {number}")
        self.number = number


# Entries


class EntryError(ProtocolError):
    """Bytes of an entry that cannot be read."""


class EntryTooLarge(EntryError):
    """An entry, or its payload, exceeds what may be published; nothing of it was kept."""

    def __init__(self, what: str, size: int, limit: int) -> None:
        super().__init__(f"the {what} of {size} bytes exceeds the limit of {limit} bytes")
        self.what = what
        self.size = size
        self.limit = limit


class MalformedEntry(EntryError):
    """An entry whose layout or metadata is broken."""


class ChecksumMismatch(EntryError):
    """The entry's CRC32C is not that of its bytes: it was damaged on the way."""

    def __init__(self, expected: int, actual: int) -> None:
        super().__init__(
            f"checksum mismatch: the entry says {expected:#010x}, its bytes give {actual:#010x}"
        )
        self.expected = expected
        self.actual = actual


class UncompressedSizeCorruption(EntryError):
    """The size that a payload is said to have uncompressed is too large or not the real one."""

    def __init__(self, stated: int, reason: str) -> None:
        super().__init__(f"a payload is said to have {stated} bytes uncompressed: {reason}")
        self.stated = stated


class DecompressionError(EntryError):
    """A compressed payload that its codec refuses."""

    def __init__(self, codec: str, reason: str) -> None:
        super().__init__(f"cannot decompress {codec}: {reason}")
        self.codec = codec


class BatchDeserializeError(EntryError):
    """A batch whose messages do not fill its payload exactly."""


class EntryEncrypted(EntryError):
    """The payload is encrypted, and there is no key to read it with."""

    def __init__(self) -> None:
        super().__init__("the payload is encrypted; reading encrypted messages is not supported")


def _shown(name: str) -> str:
    """A name for a message: a hostile one may be megabytes long."""
    return repr(name) if len(name) <= 200 else f"{name[:200]!r}... ({len(name)} characters)"
