"""The credentials of source and sink: the options `pulsar.client.*`.

The names are the same as in StreamNative's connector. The values travel to the executors with the
tasks. Spark hides an option in plans if its name or its value matches REDACTED_BY_SPARK. The
connector refuses a secret that Spark would show.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, field
from functools import lru_cache
from typing import TYPE_CHECKING, Final

from magnetar.client.errors import InvalidConfiguration, NotAllowedError
from magnetar.client.session.service_url import scheme_of
from magnetar.spark.errors import InvalidOption

if TYPE_CHECKING:
    from collections.abc import Mapping

    from magnetar.client.authentication import Authentication
    from magnetar.client.options import ClientOptions

PLUGIN: Final = "pulsar.client.authPluginClassName"
PARAMS: Final = "pulsar.client.authParams"
TRUST: Final = "pulsar.client.tlsTrustCertsFilePath"
CERTIFICATE: Final = "pulsar.client.tlsCertificateFilePath"
KEY: Final = "pulsar.client.tlsKeyFilePath"
OPTIONS: Final = (PLUGIN, PARAMS, TRUST, CERTIFICATE, KEY)

REDACTED_BY_SPARK: Final = re.compile(r"(?i)secret|password|token|access[.]?key")
"""The default of Spark's setting `spark.redaction.regex`."""

CHARACTERS_MAX: Final = 60_000
"""The limit of authParams: credentials travel in the metadata of a call, which has at most 64
KiB."""

_WITHOUT_SECRET: Final = ("file:", "env:", "tlsCertFile:", "tlsKeyFile:")

_PUBLIC_PARAMETERS: Final = frozenset(
    {"type", "issuer_url", "private_key", "client_id", "audience", "scope"}
)
"""The parameters of "oauth2". `private_key` usually is a path."""

_KEY_ITSELF: Final = ("data:", "{", "-----BEGIN")
"""The beginnings of a `private_key` that is no path."""


@dataclass(frozen=True, slots=True)
class Access:
    """The credentials of one read or write. The paths name PEM files on each machine."""

    plugin: str = ""  # empty: no credentials
    params: str = field(default="", repr=False)
    trust_certs: str | None = None  # None: the authorities that the system trusts
    certificate: str | None = None
    key: str | None = None
    encrypts: bool = False  # the service URL has TLS: the connector calls no broker without TLS

    def authentication(self) -> Authentication | None:
        """Return the same object for equal values, because the object may keep a token. Raises
        InvalidConfiguration, NotAllowedError."""
        return _authentication(self.plugin, self.params) if self.plugin else None

    def client_options(self, service_url: str, *, operation_timeout_s: int = 30) -> ClientOptions:
        """The options of a client with this access.

        Raises InvalidConfiguration, NotAllowedError.
        """
        from magnetar.client.options import ClientOptions  # takes 0.1 s

        return ClientOptions(
            service_url,
            authentication=self.authentication(),
            operation_timeout_seconds=operation_timeout_s,
            tls_trust_certs_file_path=self.trust_certs,
            tls_certificate_file_path=self.certificate,
            tls_private_key_file_path=self.key,
        )


ANONYMOUS: Final = Access()


def parse_access(values: Mapping[str, str]) -> Access:
    """Parse the options, whose names are in lower case. Raises InvalidOption. The text of the error
    does not show authParams."""
    plugin, params = (values.get(name.lower(), "") for name in (PLUGIN, PARAMS))
    trust, certificate, key = (
        values.get(name.lower()) or None for name in (TRUST, CERTIFICATE, KEY)
    )
    if params and not plugin:
        raise InvalidOption(PARAMS, f"needs {PLUGIN}")
    if len(params) > CHARACTERS_MAX:
        raise InvalidOption(PARAMS, f"has more than {CHARACTERS_MAX} characters")
    if (certificate is None) != (key is None):
        raise InvalidOption(CERTIFICATE, f"must be given together with {KEY}")
    url = values.get("service.url", "")
    encrypts = scheme_of(url).is_tls
    access = Access(plugin, params, trust, certificate, key, encrypts)
    try:
        access.authentication()
    except NotAllowedError as error:
        raise InvalidOption(PLUGIN, str(error)) from None
    except InvalidConfiguration:  # the text of the error may show the parameters
        raise InvalidOption(PARAMS, f"is not what {plugin} expects") from None
    if may_hold_secret(params) and not REDACTED_BY_SPARK.search(params):
        raise InvalidOption(PARAMS, "would be shown in Spark's plans: write it as token:...")
    if any((trust, certificate, key)) and not encrypts:
        raise InvalidOption(TRUST if trust else CERTIFICATE, "needs a service.url with grpcs://")
    if encrypts:
        from magnetar.client.session.tls import Tls

        try:
            Tls.of(access.client_options(url)).grpc_credentials()
        except InvalidConfiguration as error:
            raise InvalidOption(TRUST if trust else CERTIFICATE, str(error)) from None
    return access


def may_hold_secret(params: str) -> bool:
    """Return whether authParams may hold the secret itself. A path to a file with the secret, or
    the name of a variable with the secret, is no secret."""
    if not params or params.startswith(_WITHOUT_SECRET):
        return False
    try:
        values = json.loads(params)
    except ValueError:
        return True
    if not isinstance(values, dict) or not values.keys() <= _PUBLIC_PARAMETERS:
        return True
    return str(values.get("private_key", "")).lstrip().startswith(_KEY_ITSELF)


@lru_cache(maxsize=16)
def _authentication(plugin: str, params: str) -> Authentication:
    from magnetar.client.authentication import Authentication

    return Authentication(plugin, params)
