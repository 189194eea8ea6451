"""A node of the tree, and the checks of every store before it sends a request. Pure."""

from dataclasses import dataclass
from typing import Final

from magnetar.metadata.errors import ValueTooLarge

ABSENT: Final = -1
"""A value of `expected`: the node must not exist."""

VALUE_BYTES_MAX: Final = 1_000 * 1024
"""ZooKeeper refuses packets over 0xfffff bytes; this leaves 24,575 for the path and the headers."""

PATH_BYTES_MAX: Final = 16 * 1024
"""The limit of a path in those 24,575 bytes. The rest is for headers and access lists."""


@dataclass(frozen=True, slots=True)
class Versioned:
    value: bytes
    version: int
    ephemeral_session: int = 0  # 0: the node is persistent


def check_change(path: str, value: bytes, expected: int) -> None:
    """The checks of every store before it creates or changes a node. Raises ValueTooLarge."""
    check_path(path)
    check_value(path, value)
    assert path != "/", "the root holds no value"
    assert expected >= ABSENT, expected


def check_delete(path: str, expected: int) -> None:
    check_path(path)
    assert path != "/", "the root cannot be deleted"
    assert expected >= 0, f"delete compares with a version that was read, not {expected}"


def check_prefix(path_prefix: str, value: bytes) -> None:
    check_path(path_prefix + "0" * 10)
    check_value(path_prefix, value)


def check_path(path: str) -> None:
    """Paths come from `paths.py`, which quotes users' names. So a malformed path is a bug."""
    assert path.startswith("/"), path
    assert path == "/" or not path.endswith("/"), path
    assert len(path.encode()) <= PATH_BYTES_MAX, f"path of {len(path)} characters"
    parts = path.split("/")[1:]
    assert path == "/" or all(part not in ("", ".", "..") for part in parts), path
    assert path.isprintable(), path


def check_value(path: str, value: bytes) -> None:
    """Raise ValueTooLarge if the value is too large. All stores have the same limit, so a value
    that works in `magnetar standalone` works in a cluster."""
    if len(value) > VALUE_BYTES_MAX:
        raise ValueTooLarge(path, len(value), VALUE_BYTES_MAX)


def parent_of(path: str) -> str:
    return path.rpartition("/")[0] or "/"


def parents_of(path: str) -> list[str]:
    """Every proper ancestor but the root, outermost first."""
    parts = path.split("/")[1:-1]
    return ["/" + "/".join(parts[: count + 1]) for count in range(len(parts))]
