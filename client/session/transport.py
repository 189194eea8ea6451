"""Selects the transport that a service URL names."""

from __future__ import annotations

from typing import TYPE_CHECKING

from magnetar.client.session.service_url import scheme_of
from magnetar.client.session.tls import Tls

if TYPE_CHECKING:
    from magnetar.client.options import ClientOptions
    from magnetar.client.session.pool import Dialer


def service_url_of(options: ClientOptions) -> str:
    """Return the service URL with the scheme that the client uses.

    `use_tls` selects the scheme with TLS.

    Raises InvalidUrl.
    """
    scheme = scheme_of(options.url)
    if options.use_tls and not scheme.is_tls:
        return options.url.replace(scheme, scheme.with_tls, 1)
    return options.url


def dialer_of(options: ClientOptions) -> Dialer:
    """Create the dialer of a client. Raises InvalidUrl. For TLS, raises
    InvalidConfiguration or NotAllowedError.

    A client imports only the transport that it uses: the import of grpc takes 0.1 s.
    """
    scheme = scheme_of(service_url_of(options))
    tls = Tls.of(options) if scheme.is_tls else None
    if scheme.is_grpc:
        from magnetar.client.session.dialer import GrpcDialer

        return GrpcDialer(None if tls is None else tls.grpc_credentials())
    from magnetar.client.session.pulsar_tcp import PulsarDialer

    return PulsarDialer(
        connect_timeout_s=options.connection_timeout_ms / 1000,
        tls=None if tls is None else tls.context(),
    )
