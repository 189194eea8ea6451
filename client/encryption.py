"""The public values of end-to-end encryption: the reader of keys, and what a message tells."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Final

from magnetar.client.errors import CryptoError, WrongType

if TYPE_CHECKING:
    from collections.abc import Mapping

    from magnetar.client.enums import CompressionType

ENCRYPTION_KEYS_MAX: Final = 16
"""Wrapped keys of one entry that a producer writes and a consumer tries: each costs a millisecond.
"""

KEY_FILE_BYTES_MAX: Final = 64 * 1024
"""A PEM file of an RSA key has at most some 4 KB."""


class CryptoKeyReader:
    """Reads the keys that wrap the data key of encrypted messages. This one reads two PEM files.

    A producer needs the public key, a consumer or reader the private key; the file of the other key
    may be missing. Both are RSA keys. A subclass can override the two methods to choose a key by
    its name, for example in a key store. The client calls them on its loop, for each key name and
    each new data key: they must not wait long, and raise CryptoError for a key that is missing.

    - `public_key_path`: the file with the public key.
    - `private_key_path`: the file with the private key.
    """

    def __init__(self, public_key_path: str, private_key_path: str) -> None:
        for name, path in (
            ("public_key_path", public_key_path),
            ("private_key_path", private_key_path),
        ):
            if not isinstance(path, str):
                raise WrongType(f"{name} must be str, not {type(path).__name__}")
        self._public_key_path = public_key_path
        self._private_key_path = private_key_path
        self._read: dict[str, bytes] = {}

    def get_public_key(self, key_name: str, metadata: Mapping[str, str]) -> bytes:
        """Return the public key in PEM. Raises CryptoError if it cannot be read.

        The name and the metadata of the key do not matter to this reader.
        """
        return self._file(self._public_key_path, key_name)

    def get_private_key(self, key_name: str, metadata: Mapping[str, str]) -> bytes:
        """Return the private key in PEM. Raises CryptoError if it cannot be read."""
        return self._file(self._private_key_path, key_name)

    def prefetch(self) -> None:
        """Read the files now. The client calls it in a thread, so that its loop does not wait for
        the disk. A file that cannot be read is reported when its key is needed."""
        for path in (self._public_key_path, self._private_key_path):
            try:
                self._file(path, "")
            except CryptoError:
                continue

    def _file(self, path: str, key_name: str) -> bytes:
        if path not in self._read:
            try:
                with Path(path).open("rb") as file:
                    text = file.read(KEY_FILE_BYTES_MAX + 1)
            except OSError as error:
                raise CryptoError(f"key {key_name!r} cannot be read: {error}") from None
            if len(text) > KEY_FILE_BYTES_MAX:
                raise CryptoError(f"{path} is larger than a key: {KEY_FILE_BYTES_MAX} bytes")
            self._read[path] = text
        return self._read[path]


@dataclass(frozen=True, slots=True)
class EncryptionKey:
    """A data key of a message, wrapped with one public key."""

    key: str
    """The name of the public key, as the producer named it."""
    value: bytes = field(repr=False)
    """The wrapped data key."""
    metadata: Mapping[str, str]
    """The metadata of the public key, from the producer's key reader."""


class EncryptionContext:
    """How a message was encrypted. A program that gets encrypted payloads decrypts with it."""

    def __init__(
        self,
        keys: list[EncryptionKey],
        param: bytes,
        algorithm: str,
        compression_type: CompressionType,
        uncompressed_message_size: int,
        batch_size: int,
        *,
        is_decryption_failed: bool,
    ) -> None:
        self._keys = keys
        self._param = param
        self._algorithm = algorithm
        self._compression_type = compression_type
        self._uncompressed_message_size = uncompressed_message_size
        self._batch_size = batch_size
        self._is_decryption_failed = is_decryption_failed

    def keys(self) -> list[EncryptionKey]:
        """Return the wrapped data keys, one for each public key."""
        return list(self._keys)

    def param(self) -> bytes:
        """Return the parameter of the algorithm: the initialization vector of AES-GCM."""
        return self._param

    def algorithm(self) -> str:
        """Return the name of the algorithm; "" if the producer named none, as Apache's clients."""
        return self._algorithm

    def compression_type(self) -> CompressionType:
        """Return how the payload was compressed before its encryption."""
        return self._compression_type

    def uncompressed_message_size(self) -> int:
        """Return the size of the payload before its compression; 0 if it was not compressed."""
        return self._uncompressed_message_size

    def batch_size(self) -> int:
        """Return the number of messages in the batch, or -1 for a message in no batch."""
        return self._batch_size

    def is_decryption_failed(self) -> bool:
        """Return whether the payload is still encrypted (ConsumerCryptoFailureAction.CONSUME)."""
        return self._is_decryption_failed

    def __repr__(self) -> str:
        names = ", ".join(key.key for key in self._keys)
        return (
            f"EncryptionContext(algorithm={self._algorithm}, keys=[{names}], "
            f"compression_type={self._compression_type.name}, "
            f"is_decryption_failed={self._is_decryption_failed})"
        )
