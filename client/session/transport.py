"""Selects the transport that a service URL names."""

from __future__ import annotations

from typing import TYPE_CHECKING

from magnetar.client.session.service_url import scheme_of

if TYPE_CHECKING:
    from magnetar.client.options import ClientOptions
    from magnetar.client.session.pool import Dialer


def dialer_of(options: ClientOptions) -> Dialer:
    """Create the dialer of a client. Raises InvalidUrl.

    A client imports only the transport that it uses: the import of grpc takes 0.1 s.
    """
    scheme = scheme_of(options.service_url)
    if scheme.is_grpc:
        from magnetar.client.session.dialer import GrpcDialer

        return GrpcDialer()
    from magnetar.client.session.pulsar_tcp import PulsarDialer

    return PulsarDialer(connect_timeout_s=options.connection_timeout_ms / 1000)
