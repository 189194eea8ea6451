"""The role and the permissions of a client: the seam between sessions and authentication.

The session machine passes the credentials of CONNECT to an `Authenticator`. The authenticator
accepts the client with its grants, challenges it (AUTH_CHALLENGE), or refuses it. The broker checks
the grants before each command that names a topic or namespace. Commands of an open producer or
consumer need no further check, because PRODUCER and SUBSCRIBE were granted.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Protocol

from magnetar.protos.names import NamespaceName, TopicName

Resource = TopicName | NamespaceName


class Permission(Enum):
    """A permission of a client on a topic or a namespace."""

    PRODUCE = "produce"
    CONSUME = "consume"
    # Look up the partitions and the owner of a topic, or the topics of a namespace.
    LOOKUP = "lookup"


class Grants(Protocol):
    """The permissions of one client."""

    def allow(self, permission: Permission, resource: Resource) -> bool:
        """Return True if the client has this permission now. Does no I/O."""


@dataclass(frozen=True, slots=True)
class Credentials:
    """The authentication data in a CONNECT, AUTH_CHALLENGE or AUTH_RESPONSE."""

    method: str  # auth_method_name; "" if the client names none
    data: bytes


@dataclass(frozen=True, slots=True)
class Accepted:
    """The client is authenticated."""

    role: str
    grants: Grants


@dataclass(frozen=True, slots=True)
class Challenged:
    """The client must answer this challenge."""

    challenge: Credentials


@dataclass(frozen=True, slots=True)
class Refused:
    """The client is not authenticated. The reason goes to the client and into the log."""

    reason: str


Outcome = Accepted | Challenged | Refused


class Authenticator(Protocol):
    """Authenticates the client of one connection or gRPC call; each of these has its own."""

    def authenticate(self, credentials: Credentials) -> Outcome:
        """Judge the credentials of CONNECT, then the answer to each challenge. Does no I/O: other
        code keeps keys and roles up to date. An exception fails the connection."""


class AllowAll:
    """Accepts every client and grants it everything."""

    def authenticate(self, credentials: Credentials) -> Outcome:
        return Accepted("", self)

    def allow(self, permission: Permission, resource: Resource) -> bool:
        return True
