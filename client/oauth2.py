"""Gets access tokens from an OAuth 2.0 server with the client credentials grant (RFC 6749, section
4.4). The server's metadata (OpenID Connect Discovery) names the token endpoint."""

from __future__ import annotations

import base64
import json
import time
import urllib.error
import urllib.request
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, Final
from urllib.parse import unquote, urlencode

from magnetar.client.blocking import in_thread
from magnetar.client.errors import ErrorGettingAuthenticationData, InvalidConfiguration

if TYPE_CHECKING:
    from collections.abc import Mapping
    from http.client import HTTPMessage

ANSWER_BYTES_MAX: Final = 1 << 20
REQUEST_S: Final = 10.0
"""The time limit in seconds of one request to the server."""

EARLY_S: Final = 10.0
"""The last seconds of a token's lifetime, in which the client does not use it. The token must still
be valid when the broker reads it."""

LIFETIME_S_MAX: Final = 24 * 3600.0
"""The maximum time in seconds for which the client keeps a token, even if the server permits more.
"""

FRESH_S: Final = 60.0
"""An age in seconds. If a broker refuses a younger token, the client does not request another one:
the broker would refuse the new token, too, and each reconnection would cause a request."""

TOKEN_BYTES_MAX: Final = 64 << 10
"""The maximum size of a token, or of a file with a token. CONNECT with the token must fit into the
bytes that a broker reads before it knows the client. Usual tokens have some hundred bytes."""


@dataclass
class Oauth2Tokens:
    """The access tokens of one client. The client uses a token until EARLY_S before it expires."""

    issuer_url: str
    private_key: str = field(repr=False)  # a data: URL contains the secret
    audience: str = ""
    scope: str = ""
    _token: str = field(default="", repr=False)
    _valid_until: float = 0.0  # time.monotonic()
    _fetched_at: float = 0.0

    @classmethod
    def parse(cls, params: Mapping[str, str]) -> Oauth2Tokens:
        """Create an Oauth2Tokens from the parameters of Apache's client.

        Raises InvalidConfiguration if `issuer_url` is not an HTTP URL.
        """
        issuer_url = params["issuer_url"].rstrip("/")
        if not issuer_url.startswith(("https://", "http://")):
            raise InvalidConfiguration(f"oauth2: issuer_url {issuer_url!r} is not an HTTP URL")
        return cls(
            issuer_url, params["private_key"], params.get("audience", ""), params.get("scope", "")
        )

    async def token(self) -> str:
        """Return a valid token. Raises ErrorGettingAuthenticationData."""
        if time.monotonic() >= self._valid_until:
            self._token, self._valid_until = await in_thread(self._fetch)
            self._fetched_at = time.monotonic()
        return self._token

    def on_refused(self) -> None:
        """Drop the token, which a broker refused, unless it is younger than FRESH_S."""
        if time.monotonic() >= self._fetched_at + FRESH_S:
            self._valid_until = 0.0

    def _fetch(self) -> tuple[str, float]:
        """Request a token. Returns it and the monotonic time until which the client uses it.

        Blocks. Raises ErrorGettingAuthenticationData.
        """
        began = time.monotonic()
        try:
            key = json.loads(_content(self.private_key))
            form = {
                "grant_type": "client_credentials",
                "client_id": key["client_id"],
                "client_secret": key["client_secret"],
            }
            form |= {"audience": self.audience} if self.audience else {}
            form |= {"scope": self.scope} if self.scope else {}
            metadata = _ask(f"{self.issuer_url}/.well-known/openid-configuration")
            endpoint = metadata["token_endpoint"]
            if self.issuer_url.startswith("https:") and not endpoint.startswith("https:"):
                raise ValueError(f"the token_endpoint {endpoint!r} is not encrypted")
            answer = _ask(endpoint, urlencode(form).encode())
            token, lifetime_s = answer["access_token"], float(answer.get("expires_in", 0))
            token.encode()
        except Exception as error:  # an error of the file, the network or the server's answer
            reason = f"no token from {self.issuer_url}: {type(error).__name__}: {error}"
            raise ErrorGettingAuthenticationData(reason) from None
        if not isinstance(token, str) or not 0 < len(token) <= TOKEN_BYTES_MAX:
            reason = f"no token from {self.issuer_url}: expected 1 to {TOKEN_BYTES_MAX} characters"
            raise ErrorGettingAuthenticationData(reason)
        return token, began + max(0.0, min(lifetime_s, LIFETIME_S_MAX) - EARLY_S)


class EncryptedRedirects(urllib.request.HTTPRedirectHandler):
    """Refuses redirects from HTTPS to HTTP: an unencrypted answer could name an endpoint of an
    attacker, which would get the client's secret. Raises ValueError."""

    def redirect_request(
        self,
        req: urllib.request.Request,
        fp: IO[bytes],
        code: int,
        msg: str,
        headers: HTTPMessage,
        newurl: str,
    ) -> urllib.request.Request | None:
        if req.full_url.startswith("https:") and not newurl.startswith("https:"):
            raise ValueError(f"{req.full_url} redirects to {newurl!r}, which is not encrypted")
        return super().redirect_request(req, fp, code, msg, headers, newurl)


_opener = urllib.request.build_opener(EncryptedRedirects)


def _ask(url: str, form: bytes | None = None) -> dict[str, Any]:
    """Send a GET, or a POST of `form`. Return the JSON object that the server answers.

    Raises OSError and ValueError.
    """
    if not url.startswith(("https://", "http://")):
        raise ValueError(f"{url!r} is not an HTTP URL")
    request = urllib.request.Request(url, data=form, headers={"Accept": "application/json"})
    with _opener.open(request, timeout=REQUEST_S) as response:
        values: Any = json.loads(response.read(ANSWER_BYTES_MAX))
    if not isinstance(values, dict):
        raise ValueError(f"{url} did not answer with a JSON object")
    return values


def _content(private_key: str) -> bytes:
    """Read the key: a path, or a URL `file:…` or `data:application/json;base64,…`."""
    if private_key.startswith("data:"):
        head, _, content = private_key.partition(",")
        if not head.endswith(";base64"):
            raise ValueError("private_key: expected data:application/json;base64,…")
        return base64.b64decode(content, validate=True)
    if private_key.lstrip().startswith("{"):  # an error must not show the key as a path
        raise ValueError("private_key: expected a path or a URL, not the JSON object itself")
    path = private_key.removeprefix("file:")
    path = unquote(path.removeprefix("//")) if path != private_key else path
    with Path(path).open("rb") as file:
        return file.read(ANSWER_BYTES_MAX)
