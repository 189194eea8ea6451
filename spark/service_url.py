"""The option `service.url` of the source, the sink and the pipelines."""

from __future__ import annotations

from magnetar.client.errors import InvalidUrl
from magnetar.client.session.service_url import parse_service_url, scheme_of
from magnetar.spark.errors import InvalidOption


def brokers_of(text: str) -> tuple[str, ...]:
    """The addresses of the brokers, which the connector calls over gRPC. Raises InvalidOption."""
    try:
        brokers, scheme = parse_service_url(text), scheme_of(text)
    except InvalidUrl as error:
        raise InvalidOption("service.url", str(error)) from None
    if not scheme.is_grpc:
        reason = f"expected grpc://host:port, or grpcs:// with TLS: {text!r}"
        raise InvalidOption("service.url", reason)
    return brokers
