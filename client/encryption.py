"""The public classes of end-to-end encryption: key readers and encryption contexts."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Final

from magnetar.client.errors import CryptoError, WrongType

if TYPE_CHECKING:
    from collections.abc import Mapping

    from magnetar.client.enums import CompressionType

ENCRYPTION_KEYS_MAX: Final = 16
"""The maximum number of wrapped keys that a producer writes into an entry, and that a consumer
tries. Each key costs a millisecond."""

KEY_FILE_BYTES_MAX: Final = 64 * 1024
"""The maximum size of a key file. A PEM file of an RSA key has at most some 4 KB."""


class CryptoKeyReader:
    """Reads two PEM files with the RSA keys that wrap the data keys of encrypted messages.

    A producer needs the public key. A consumer or reader needs the private key. The file of the
    other key may be missing.

    A subclass can override `get_public_key` and `get_private_key` to choose a key by its name, for
    example from a key store. The client calls these methods on its event loop, for each key name
    and each new data key, so they must return quickly. Before it opens a producer, the client also
    calls `get_public_key` for each key name in a thread. The methods must raise CryptoError if the
    key is missing.

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
        """Return the public key in PEM. Raises CryptoError if the file cannot be read.

        CryptoKeyReader returns the same key for all values of `key_name` and `metadata`.
        """
        return self._file(self._public_key_path, key_name)

    def get_private_key(self, key_name: str, metadata: Mapping[str, str]) -> bytes:
        """Return the private key in PEM. Raises CryptoError if the file cannot be read.

        CryptoKeyReader returns the same key for all values of `key_name` and `metadata`.
        """
        return self._file(self._private_key_path, key_name)

    def prefetch(self) -> None:
        """Read the files now. The client calls this method in a thread, so that its event loop does
        not wait for the disk. If a file cannot be read, the error comes when its key is needed."""
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
                raise CryptoError(f"{path} is larger than the limit of {KEY_FILE_BYTES_MAX} bytes")
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
    """The parameters of a message's encryption.

    A program that receives an encrypted payload needs these parameters for the decryption.
    """

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
        """Return the algorithm's name. "": the producer gave none. Apache's clients give none."""
        return self._algorithm

    def compression_type(self) -> CompressionType:
        """Return the compression that the producer applied before the encryption."""
        return self._compression_type

    def uncompressed_message_size(self) -> int:
        """Return the size of the payload before its compression; 0 if it was not compressed."""
        return self._uncompressed_message_size

    def batch_size(self) -> int:
        """Return the number of messages in the batch, or -1 for a message in no batch."""
        return self._batch_size

    def is_decryption_failed(self) -> bool:
        """Return whether the client could not decrypt the payload, which is still encrypted.

        A consumer receives such messages only with ConsumerCryptoFailureAction.CONSUME.
        """
        return self._is_decryption_failed

    def __repr__(self) -> str:
        names = ", ".join(key.key for key in self._keys)
        return (
            f"EncryptionContext(algorithm={self._algorithm}, keys=[{names}], "
            f"compression_type={self._compression_type.name}, "
            f"is_decryption_failed={self._is_decryption_failed})"
        )
