"""The option `service.url` of the source, the sink and the pipelines."""

from __future__ import annotations

from magnetar.client.errors import InvalidUrl
from magnetar.client.session.service_url import Scheme, parse_service_url, scheme_of
from magnetar.spark.errors import InvalidOption


def brokers_of(text: str) -> tuple[str, ...]:
    """The addresses of the brokers, which the connector calls over gRPC. Raises InvalidOption."""
    try:
        brokers, scheme = parse_service_url(text), scheme_of(text)
    except InvalidUrl as error:
        raise InvalidOption("service.url", str(error)) from None
    if scheme is not Scheme.GRPC:
        raise InvalidOption("service.url", f"expected grpc://host:port: {text!r}")
    return brokers
