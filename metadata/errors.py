"""The operating errors of metadata. Each says whether the outcome of the call is known.

`definite` is True when the call that raised changed nothing, or when the stored data is damaged. It
is False when the change may have happened, or may still happen: read again and compare.
"""

from collections.abc import Sequence


class MetadataError(Exception):
    """Base of every operating error of the metadata package."""

    definite = True


class BadVersion(MetadataError):
    """The node does not have the expected version (it may be gone): another process changed it."""

    def __init__(self, path: str, expected: int) -> None:
        super().__init__(f"{path} is not at version {expected}")
        self.path = path
        self.expected = expected


class NodeExists(BadVersion):
    """The node to be created exists already."""

    def __init__(self, path: str) -> None:
        super().__init__(path, -1)
        self.args = (f"{path} exists already",)


class NoNode(MetadataError):
    """The node to be deleted does not exist."""

    def __init__(self, path: str) -> None:
        super().__init__(f"{path} does not exist")
        self.path = path


class NotEmpty(MetadataError):
    """The node to be deleted has children."""

    def __init__(self, path: str) -> None:
        super().__init__(f"{path} has children")
        self.path = path


class ParentIsEphemeral(MetadataError):
    """The node cannot be created, because its parent is ephemeral and cannot have children."""

    def __init__(self, path: str) -> None:
        super().__init__(f"{path} cannot be created under an ephemeral node")
        self.path = path


class ValueTooLarge(MetadataError):
    """The value exceeds the limit of all stores. It was not sent."""

    def __init__(self, path: str, size: int, limit: int) -> None:
        super().__init__(f"value of {path} has {size} bytes, at most {limit} are allowed")
        self.path = path
        self.size = size
        self.limit = limit


class Contended(MetadataError):
    """`update` lost the race against other writers too often, and changed nothing."""

    def __init__(self, path: str, attempts: int) -> None:
        super().__init__(f"{path} was changed by others {attempts} times in a row")
        self.path = path
        self.attempts = attempts


class Unavailable(MetadataError):
    """The call had no effect: a request was not sent or was refused, or a deadline passed."""

    def __init__(self, reason: str, *, hosts: Sequence[str] = ()) -> None:
        where = f" ({', '.join(hosts)})" if hosts else ""
        super().__init__(f"metadata store unavailable{where}: {reason}")
        self.reason = reason
        self.hosts = tuple(hosts)


class StoreClosed(Unavailable):
    """`close()` was called on this store."""

    def __init__(self) -> None:
        super().__init__("the store was closed")


class OutcomeUnknown(MetadataError):
    """The request was sent and its reply was lost: it may have been applied."""

    definite = False

    def __init__(self, path: str, reason: str = "the reply was lost") -> None:
        super().__init__(f"outcome of the request on {path} is unknown: {reason}")
        self.path = path
        self.reason = reason


class SessionLost(OutcomeUnknown):
    """The session ended while the request was in flight; its ephemeral nodes are gone."""

    def __init__(self, path: str, session_id: int) -> None:
        super().__init__(path, f"session {session_id:#x} was lost")
        self.session_id = session_id


class StoreBusy(MetadataError):
    """Another process holds the directory of an embedded store."""

    def __init__(self, path: str) -> None:
        super().__init__(f"metadata directory {path} is in use by another process")
        self.path = path


class StoreDamaged(MetadataError):
    """The directory of an embedded store cannot be read back as it was written."""

    def __init__(self, path: str, reason: str) -> None:
        super().__init__(f"metadata directory {path} is damaged: {reason}")
        self.path = path
        self.reason = reason


class StoreForeign(MetadataError):
    """The directory holds something that is not an embedded metadata store of this version."""

    def __init__(self, path: str, reason: str) -> None:
        super().__init__(f"{path} is not a metadata directory: {reason}")
        self.path = path
        self.reason = reason


class StoreFailed(MetadataError):
    """The disk failed at a read, a write or a sync. The content of the disk is unknown, and the
    store takes no more calls."""

    definite = False

    def __init__(self, path: str, reason: str) -> None:
        super().__init__(f"metadata directory {path} failed: {reason}")
        self.path = path
        self.reason = reason


class InvalidRecord(MetadataError):
    """A record breaks an invariant of its kind."""

    def __init__(self, kind: str, reason: str) -> None:
        super().__init__(f"invalid {kind}: {reason}")
        self.kind = kind
        self.reason = reason


class InvalidLedgerMetadata(InvalidRecord):
    """Metadata of a ledger that no correct writer can have produced."""

    def __init__(self, reason: str) -> None:
        super().__init__("ledger metadata", reason)


class CorruptRecord(InvalidRecord):
    """Stored bytes that cannot be parsed as the expected kind of record."""


class UnsupportedFormat(InvalidRecord):
    """A record written in a format that this version does not know; it must not be rewritten."""

    def __init__(self, kind: str, version: int) -> None:
        super().__init__(kind, f"format version {version} is not supported")
        self.version = version


class LeaseTaken(MetadataError):
    """Another process has replaced this process's node. If the node registers a process, two
    processes use one name."""

    def __init__(self, path: str, holder: bytes) -> None:
        super().__init__(f"{path} was taken over by another process")
        self.path = path
        self.holder = holder
