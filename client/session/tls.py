"""TLS of a client: the trusted certificates, and the client's own certificate."""

from __future__ import annotations

import ssl
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

from magnetar.client.authentication import credentials_of
from magnetar.client.errors import InvalidConfiguration, NotAllowedError

if TYPE_CHECKING:
    import grpc

    from magnetar.client.options import ClientOptions

PEM_BYTES_MAX: Final = 10 << 20


@dataclass(frozen=True, slots=True)
class Tls:
    """The options of TLS. All paths are paths of PEM files."""

    trust_certs: str | None  # None: the authorities that the system trusts
    allows_insecure: bool  # any certificate is accepted
    validates_hostname: bool
    certificate: tuple[str, str] | None  # the client's certificate and its private key

    @classmethod
    def of(cls, options: ClientOptions) -> Tls:
        """Create a Tls from the options of a client.

        Raises InvalidConfiguration for a certificate without a private key, or the reverse.
        """
        own = options.tls_certificate_file_path, options.tls_private_key_file_path
        if (own[0] is None) != (own[1] is None):
            raise InvalidConfiguration(
                "tls_certificate_file_path and tls_private_key_file_path must be given together"
            )
        given = (own[0], own[1]) if own[0] is not None and own[1] is not None else None
        return cls(
            options.tls_trust_certs_file_path,
            options.tls_allow_insecure_connection,
            options.tls_validate_hostname,
            given or credentials_of(options.authentication).certificate,
        )

    def context(self) -> ssl.SSLContext:
        """Return a context for connections over TCP. Raises InvalidConfiguration."""
        try:
            context = ssl.create_default_context(cafile=self.trust_certs)
        except OSError as error:  # also ssl.SSLError
            raise _unusable("tls_trust_certs_file_path", self.trust_certs, error) from None
        context.check_hostname = self.validates_hostname and not self.allows_insecure
        if self.allows_insecure:
            context.verify_mode = ssl.CERT_NONE
        if self.certificate is not None:
            _refuse_encrypted_key(self.certificate[1])
            try:
                context.load_cert_chain(*self.certificate)
            except OSError as error:
                paths = " and ".join(self.certificate)
                raise _unusable("tls_certificate_file_path", paths, error) from None
        return context

    def grpc_credentials(self) -> grpc.ChannelCredentials:
        """Return the credentials of a gRPC channel, which always validates the host's name.

        Raises InvalidConfiguration, and NotAllowedError for `allows_insecure`.
        """
        import grpc

        if self.allows_insecure:
            raise NotAllowedError(
                "tls_allow_insecure_connection: gRPC always checks certificates; use pulsar+ssl://"
            )
        certificate, key = self.certificate or (None, None)
        if key is not None:
            _refuse_encrypted_key(key)
        return grpc.ssl_channel_credentials(
            root_certificates=self._authorities(),
            private_key=_read("tls_private_key_file_path", key),
            certificate_chain=_read("tls_certificate_file_path", certificate),
        )

    def _authorities(self) -> bytes | None:
        """Return the trusted certificates as PEM. None: gRPC trusts those of its own package.

        gRPC does not read the system's certificates, among which a company may have its own
        authority. So this method reads OpenSSL's file of them. A system without this file is rare.
        """
        if self.trust_certs:
            return _read("tls_trust_certs_file_path", self.trust_certs)
        return _read("SSL_CERT_FILE", ssl.get_default_verify_paths().cafile)


def _refuse_encrypted_key(path: str) -> None:
    """Raise InvalidConfiguration for a private key with a password.

    OpenSSL would ask for the password on the terminal, and the program would hang.
    """
    key = _read("tls_private_key_file_path", path) or b""
    if b"ENCRYPTED" in key:  # PKCS 8 has the word in the first line, the older form in the header
        raise InvalidConfiguration(
            f"tls_private_key_file_path: the key {path} is encrypted; give one without a password"
        )


def _read(option: str, path: str | None) -> bytes | None:
    if path is None:
        return None
    try:
        with Path(path).open("rb") as file:
            return file.read(PEM_BYTES_MAX)
    except OSError as error:
        raise _unusable(option, path, error) from None


def _unusable(option: str, path: str | None, error: OSError) -> InvalidConfiguration:
    return InvalidConfiguration(f"{option}: {path} cannot be used: {error}")
