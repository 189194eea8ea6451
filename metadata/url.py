"""The address of the metadata store: `zk://host:port[,host:port…][/chroot]`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Self

from magnetar.metadata.errors import MetadataError

SCHEME: Final = "zk://"
CHROOT: Final = "/magnetar"


class InvalidMetadataUrl(MetadataError):
    """A metadata URL that cannot be parsed; the message names the expected form."""

    def __init__(self, url: str, reason: str) -> None:
        super().__init__(
            f"metadata URL {url!r}: {reason}; expected zk://host:port[,host:port...][/chroot]"
        )
        self.url = url
        self.reason = reason


@dataclass(frozen=True, slots=True)
class MetadataUrl:
    """A ZooKeeper ensemble and the folder in it that holds the cluster's metadata."""

    hosts: str  # "host:port,host:port"
    chroot: str = CHROOT

    @classmethod
    def parse(cls, url: str) -> Self:
        """Parse a metadata URL. Raises InvalidMetadataUrl."""
        if not url.startswith(SCHEME):
            raise InvalidMetadataUrl(url, f"it does not begin with {SCHEME}")
        hosts, slash, chroot = url.removeprefix(SCHEME).partition("/")
        for host in hosts.split(","):
            name, colon, port = host.rpartition(":")
            if not (name and colon and port.isdecimal() and 0 < int(port) <= 65535):
                raise InvalidMetadataUrl(url, f"{host!r} is not host:port")
        parts = chroot.split("/") if slash and chroot else []
        if any(part in ("", ".", "..") for part in parts):
            raise InvalidMetadataUrl(url, f"/{chroot} is not a path")
        return cls(hosts, f"/{chroot}" if parts else CHROOT)
