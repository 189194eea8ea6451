"""The address of a client's cluster: one service URL, or several clusters to choose from."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from magnetar.client.authentication import Authentication
from magnetar.client.errors import InvalidConfiguration, WrongType

if TYPE_CHECKING:
    from collections.abc import Callable


class ServiceInfo:
    """The address of one cluster, with its credentials and certificates.

    - `service_url`: the URL of the cluster's brokers.
    - `authentication`: the credentials for this cluster.
    - `tls_trust_certs_file_path`: the trusted certificates for this cluster.
    """

    def __init__(
        self,
        service_url: str,
        authentication: Authentication | None = None,
        tls_trust_certs_file_path: str | None = None,
    ) -> None:
        _expect("service_url", service_url, str)
        _expect("authentication", authentication, Authentication, type(None))
        _expect("tls_trust_certs_file_path", tls_trust_certs_file_path, str, type(None))
        self._service_url = service_url
        self._authentication = authentication
        self._tls_trust_certs_file_path = tls_trust_certs_file_path

    @property
    def service_url(self) -> str:
        """The URL of the cluster's brokers."""
        return self._service_url

    @property
    def authentication(self) -> Authentication | None:
        """The credentials. None: the client sends none. In Apache's class they are private."""
        return self._authentication

    @property
    def use_tls(self) -> bool:
        """True when the URL asks for TLS."""
        return self._service_url.partition("://")[0].endswith(("+ssl", "+tls", "s"))

    @property
    def tls_trust_certs_file_path(self) -> str | None:
        """The trusted certificates. None: those of the system."""
        return self._tls_trust_certs_file_path

    @classmethod
    def wrap(cls, service_info: ServiceInfo) -> ServiceInfo:
        """Return `service_info`. In Apache's client, this method wraps an object of another class;
        here there is only this class."""
        return service_info

    def __repr__(self) -> str:
        return (
            f"ServiceInfo(service_url={self.service_url!r}, use_tls={self.use_tls!r}, "
            f"tls_trust_certs_file_path={self.tls_trust_certs_file_path!r})"
        )


class ServiceInfoProvider:
    """Tells a client which cluster to use, and when to move to another cluster.

    A program derives a class and overrides the methods. The client calls them as Apache's client
    does.
    """

    def initial_service_info(self) -> ServiceInfo:
        """Return the cluster to begin with."""
        raise NotImplementedError

    def initialize(self, on_service_info_update: Callable[[ServiceInfo], None]) -> None:
        """Begin to watch for changes. The client calls this method in a thread of its own.

        To move the client to a cluster, the provider calls `on_service_info_update(service_info)`,
        from any thread.
        """
        raise NotImplementedError

    def close(self) -> None:
        """End background work. The client calls this method when the client is closed."""


@dataclass(frozen=True)
class AutoClusterFailover:
    """Moves a client to another cluster while its primary cluster is not reachable.

    - `primary`: the cluster that the client prefers.
    - `secondary`: the other clusters, in the order in which the client tries them.
    - `check_interval_ms`: the time in milliseconds between two checks. A check connects to a broker
      of the current cluster and of the primary cluster.
    - `failover_threshold`: after this many failed checks in a row, the client moves to the first
      other cluster that accepts connections.
    - `switch_back_threshold`: after this many successful checks of the primary cluster in a row,
      the client moves back to it.

    Raises InvalidConfiguration for an empty `secondary`, and for a number below 1.

    Each cluster has its own message ids. If a consumer received a message before a move, an
    acknowledgement after the move has no effect: the former cluster redelivers the message.
    Acknowledge messages, not their ids: an id does not tell the client which cluster it belongs to.
    A reader or table view begins at the earliest message of the cluster that it moves to.
    """

    primary: ServiceInfo
    secondary: list[ServiceInfo]
    check_interval_ms: int = 5000
    failover_threshold: int = 1
    switch_back_threshold: int = 1

    def __post_init__(self) -> None:
        _expect("primary", self.primary, ServiceInfo)
        _expect("secondary", self.secondary, list)
        if not self.secondary:
            raise InvalidConfiguration("secondary needs at least one ServiceInfo")
        for index, info in enumerate(self.secondary):
            _expect(f"secondary[{index}]", info, ServiceInfo)
        for name in ("check_interval_ms", "failover_threshold", "switch_back_threshold"):
            value = getattr(self, name)
            _expect(name, value, int)
            if value <= 0:
                raise InvalidConfiguration(f"{name} must be above 0, not {value}")
        object.__setattr__(self, "secondary", list(self.secondary))


ServiceUrl = str | AutoClusterFailover | ServiceInfoProvider
"""The types that a client accepts as its service URL."""


def _expect(name: str, value: object, *kinds: type) -> None:
    if not isinstance(value, kinds) or (type(value) is bool and bool not in kinds):
        wanted = " or ".join(kind.__name__ for kind in kinds)
        raise WrongType(f"{name} must be {wanted}, not {type(value).__name__}")
