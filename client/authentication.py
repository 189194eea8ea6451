"""The authentication of a client at the brokers: Apache's classes, and their credentials.

A client sends its credentials in CONNECT and again whenever a broker asks for them. An application
that needs new tokens passes a function, which the client calls each time. Magnetar's brokers do not
check credentials yet: they accept every client. Apache Pulsar's brokers check them.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final, Protocol
from urllib.parse import unquote

from magnetar.client.blocking import Repeated
from magnetar.client.errors import (
    ErrorGettingAuthenticationData,
    InvalidConfiguration,
    NotAllowedError,
    WrongType,
)
from magnetar.client.oauth2 import TOKEN_BYTES_MAX, Oauth2Tokens

TokenSupplier = Callable[[], str]


class Credentials(Protocol):
    """The credentials that a client presents to a broker."""

    method: str  # the name of the broker's provider, such as "token"
    certificate: tuple[str, str] | None  # paths of certificate and private key for TLS; None: none

    async def data(self) -> bytes | None:
        """Return the credentials for CONNECT or AUTH_RESPONSE. None: the method's name suffices.

        Raises ErrorGettingAuthenticationData.
        """

    def on_refused(self) -> None:
        """Drop cached data that may be outdated: a broker refused it or asks for new data."""


class NoCredentials:
    """The client presents no credentials."""

    method = "none"
    certificate: tuple[str, str] | None = None

    async def data(self) -> bytes | None:
        return None

    def on_refused(self) -> None:
        """The client has no other credentials."""


class Authentication:
    """Credentials whose kind and parameters are texts, as in Apache's client.

    - `dynamicLibPath`: the kind, which is "tls", "token", "basic" or "oauth2", or the class name of
      Apache's Java client for it.
    - `authParamsString`: the parameters of this kind. "tls" expects
      `tlsCertFile:PATH,tlsKeyFile:PATH`. "token" expects `token:TEXT`, `file:PATH`, `env:NAME` or
      the token itself. "basic" and "oauth2" expect the JSON object that is the
      `auth_params_string` of AuthenticationBasic or AuthenticationOauth2.

    Raises NotAllowedError for any other kind, such as the path of a shared library. Raises
    InvalidConfiguration for wrong parameters.
    """

    auth: Credentials

    def __init__(self, dynamicLibPath: str, authParamsString: str) -> None:
        _expect_text("dynamicLibPath", dynamicLibPath)
        _expect_text("authParamsString", authParamsString)
        kind = _KINDS.get(dynamicLibPath.lower())
        if kind is None:
            raise NotAllowedError(
                f"dynamicLibPath: {dynamicLibPath!r} is not supported: expected"
                " basic, oauth2, tls or token"
            )
        self.auth = kind(authParamsString)

    def __repr__(self) -> str:
        return f"{type(self).__name__}(method={self.auth.method!r})"  # never the secret


class AuthenticationTLS(Authentication):
    """The client's certificate and its private key, as paths of PEM files. Needs a URL with TLS."""

    def __init__(self, certificate_path: str, private_key_path: str) -> None:
        _expect_text("certificate_path", certificate_path)
        _expect_text("private_key_path", private_key_path)
        self.auth = _Tls(certificate_path, private_key_path)


class AuthenticationToken(Authentication):
    """A token, usually a JSON Web Token: as text, or as a function that returns the text.

    The client calls the function for each connection. It calls the function again when a broker
    asks for new credentials because the token has expired. Each call runs in a thread.
    """

    def __init__(self, token: str | TokenSupplier) -> None:
        if isinstance(token, str):
            self.auth = _Token(lambda: token, blocks=False)
        elif callable(token):
            self.auth = _Token(token)
        else:
            raise WrongType(f"token must be str or a function, not {type(token).__name__}")


class AuthenticationBasic(Authentication):
    """A user name and a password.

    `auth_params_string` replaces the other parameters: it is a JSON object with `username`,
    `password` and optionally `method`.
    """

    def __init__(
        self,
        username: str | None = None,
        password: str | None = None,
        method: str = "basic",
        auth_params_string: str | None = None,
    ) -> None:
        if auth_params_string is not None:
            _expect_text("auth_params_string", auth_params_string)
            self.auth = _basic(auth_params_string)
            return
        for name, value in (("username", username), ("password", password), ("method", method)):
            _expect_text(name, value)
        assert username is not None
        assert password is not None
        self.auth = _Basic(username, password, method)


class AuthenticationOauth2(Authentication):
    """A token that the client gets from an OAuth 2.0 server (client credentials grant).

    `auth_params_string` is a JSON object. It must have `issuer_url` and `private_key`, and can have
    `audience` and `scope`. `private_key` is the path, or a `file:` or `data:` URL, of another JSON
    object with `client_id` and `client_secret`.
    """

    def __init__(self, auth_params_string: str) -> None:
        _expect_text("auth_params_string", auth_params_string)
        self.auth = _oauth2(auth_params_string)


class AuthenticationAthenz(Authentication):
    """Not supported: raises NotAllowedError."""

    def __init__(self, auth_params_string: str) -> None:
        _expect_text("auth_params_string", auth_params_string)
        raise NotAllowedError(
            "AuthenticationAthenz is not supported: use a token, TLS or OAuth 2.0"
        )


def credentials_of(authentication: Authentication | None) -> Credentials:
    return NoCredentials() if authentication is None else authentication.auth


# Kinds of credentials


class _Token:
    method = "token"
    certificate: tuple[str, str] | None = None

    def __init__(self, supply: TokenSupplier, *, blocks: bool = True) -> None:
        self._supply = supply
        self._blocking = Repeated(supply) if blocks else None  # None: `supply` does not block

    async def data(self) -> bytes:
        try:
            token = self._supply() if self._blocking is None else await self._blocking.call()
        except Exception as error:  # the repr of a UnicodeDecodeError would show the token
            reason = f"the client could not get the token: {type(error).__name__}: {error}"
            raise ErrorGettingAuthenticationData(reason) from error
        if type(token) is not str:
            reason = f"the function returned {type(token).__name__} instead of str"
            raise ErrorGettingAuthenticationData(reason)
        try:
            encoded = token.strip().encode()
        except UnicodeEncodeError:
            raise ErrorGettingAuthenticationData("the token is not a text in UTF-8") from None
        if not 0 < len(encoded) <= TOKEN_BYTES_MAX:
            reason = f"the token has {len(encoded)} bytes, expected 1 to {TOKEN_BYTES_MAX}"
            raise ErrorGettingAuthenticationData(reason)
        return encoded

    def on_refused(self) -> None:
        """The client caches nothing: it calls the function each time."""


class _Basic:
    certificate: tuple[str, str] | None = None

    def __init__(self, username: str, password: str, method: str) -> None:
        self.method = method
        self._data = f"{username}:{password}".encode()

    async def data(self) -> bytes:
        return self._data

    def on_refused(self) -> None:
        """The client has no other credentials."""


class _Tls:
    method = "tls"

    def __init__(self, certificate_path: str, private_key_path: str) -> None:
        self.certificate: tuple[str, str] | None = certificate_path, private_key_path

    async def data(self) -> None:
        return None  # the broker reads the name of the client in the certificate

    def on_refused(self) -> None:
        """The client has no other credentials."""


class _Oauth2:
    method = "token"
    certificate: tuple[str, str] | None = None

    def __init__(self, tokens: Oauth2Tokens) -> None:
        self._tokens = tokens

    async def data(self) -> bytes:
        return (await self._tokens.token()).encode()

    def on_refused(self) -> None:
        self._tokens.on_refused()


def _token(params: str) -> Credentials:
    """Parse `token:TEXT`, `file:PATH`, `env:NAME` or the token alone, as Apache's clients do."""
    kind, _, rest = params.partition(":")
    if kind == "token":
        return _Token(lambda: rest, blocks=False)
    if kind == "file":
        path = Path(unquote(rest.removeprefix("//")))
        return _Token(lambda: _read_token(path))
    if kind == "env":
        return _Token(lambda: _token_of_variable(rest))
    return _Token(lambda: params, blocks=False)


def _token_of_variable(name: str) -> str:
    token = os.environ.get(name)
    if token is None:
        raise LookupError(f"the environment variable {name} is not set")
    return token


def _read_token(path: Path) -> str:
    with path.open() as file:
        return file.read(TOKEN_BYTES_MAX + 1)


def _basic(params: str) -> Credentials:
    values = _json_object("basic", params, ("username", "password"))
    return _Basic(values["username"], values["password"], values.get("method", "basic"))


def _tls(params: str) -> Credentials:
    """Parse `tlsCertFile:PATH,tlsKeyFile:PATH`."""
    pairs = dict(part.strip().partition(":")[::2] for part in params.split(","))
    if not (pairs.get("tlsCertFile") and pairs.get("tlsKeyFile")):
        raise InvalidConfiguration(
            f"tls: expected tlsCertFile:PATH,tlsKeyFile:PATH, not {params!r}"
        )
    return _Tls(pairs["tlsCertFile"], pairs["tlsKeyFile"])


def _oauth2(params: str) -> Credentials:
    return _Oauth2(
        Oauth2Tokens.parse(_json_object("oauth2", params, ("issuer_url", "private_key")))
    )


def _athenz(params: str) -> Credentials:
    return AuthenticationAthenz(params).auth


_KINDS: Final[dict[str, Callable[[str], Credentials]]] = {
    "token": _token,
    "basic": _basic,
    "tls": _tls,
    "oauth2": _oauth2,
    "athenz": _athenz,
    "org.apache.pulsar.client.impl.auth.authenticationtoken": _token,
    "org.apache.pulsar.client.impl.auth.authenticationbasic": _basic,
    "org.apache.pulsar.client.impl.auth.authenticationtls": _tls,
    "org.apache.pulsar.client.impl.auth.oauth2.authenticationoauth2": _oauth2,
    "org.apache.pulsar.client.impl.auth.authenticationathenz": _athenz,
}


def _json_object(kind: str, text: str, required: tuple[str, ...]) -> dict[str, str]:
    """Parse a JSON object whose values are strings. The error does not show `text`, which holds
    secrets."""
    try:
        values: Any = json.loads(text)
    except ValueError:
        raise InvalidConfiguration(f"{kind}: the parameters are not a JSON object") from None
    if not isinstance(values, dict) or not all(isinstance(it, str) for it in values.values()):
        raise InvalidConfiguration(f"{kind}: the parameters are not a JSON object of strings")
    for name in required:
        if not values.get(name):
            raise InvalidConfiguration(f"{kind}: the parameter {name} is missing")
    return values


def _expect_text(name: str, value: object) -> None:
    if not isinstance(value, str):
        raise WrongType(f"{name} must be str, not {type(value).__name__}")
