"""Encrypts and decrypts payloads end to end, in the format of Apache's clients.

The producer compresses a payload, then encrypts it with AES-GCM under a random data key. It
encrypts a batch as a whole, and a large message chunk by chunk. The entry's metadata holds the
initialization vector and the data key, which is wrapped with each public key by RSA-OAEP (SHA-1).
The encrypted payload ends with the tag of AES-GCM.
"""

from __future__ import annotations

import os
from collections import OrderedDict
from functools import lru_cache
from typing import TYPE_CHECKING, Final

from magnetar.client.encryption import (
    ENCRYPTION_KEYS_MAX,
    CryptoKeyReader,
    EncryptionContext,
    EncryptionKey,
)
from magnetar.client.enums import CompressionType
from magnetar.client.errors import CryptoError
from magnetar.protos.entry import checked_text
from magnetar.protos.message import Sealed, SealedKey

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from cryptography.hazmat.primitives.asymmetric.padding import OAEP
    from cryptography.hazmat.primitives.asymmetric.rsa import RSAPrivateKey, RSAPublicKey
    from cryptography.hazmat.primitives.ciphers.aead import AESGCM

    from magnetar.client.options import ProducerOptions
    from magnetar.protos import pulsar_pb2 as pb
    from magnetar.protos.message import ReceivedEntry

TAG_BYTES: Final = 16
"""The bytes that encryption adds to a payload: the tag of AES-GCM."""

DATA_KEY_S: Final = 4 * 3600.0
"""The time in seconds for which a producer uses a data key, as in Apache's client. A producer
encrypts far fewer payloads in this time than AES-GCM permits for one key."""

DATA_KEYS_MAX: Final = 1000
"""The maximum number of data keys that a consumer remembers. Beyond it, the consumer forgets the
least recently used key, and unwraps that key again when a message needs it."""

_EXPECTED: Final = "expected an RSA key, the only kind that Apache's Python and C++ clients read"
_DATA_KEY_BYTES = 32
_IV_BYTES = 12


class PayloadSealer:
    """Encrypts the payloads of one producer with a data key, which `begin` makes and renews."""

    def __init__(
        self,
        names: Sequence[str],
        reader: CryptoKeyReader,
        random_bytes: Callable[[int], bytes] = os.urandom,
    ) -> None:
        self._names = names
        self._reader = reader
        self._random_bytes = random_bytes
        self._cipher: AESGCM | None = None  # None: no data key yet
        self._keys: list[SealedKey] = []
        self._renew_at = 0.0

    def begin(self, now: float) -> None:
        """Make a data key if there is none, or if the present one is older than DATA_KEY_S.

        `now`: the time in seconds. Raises CryptoError if a public key is missing or unusable.
        """
        if self._cipher is not None and now < self._renew_at:
            return
        from cryptography.hazmat.primitives.ciphers.aead import AESGCM

        data_key = self._random_bytes(_DATA_KEY_BYTES)
        self._keys = [
            SealedKey(name, _wrapped(data_key, name, _public_key(self._reader, name)))
            for name in self._names
        ]
        self._cipher = AESGCM(data_key)
        self._renew_at = now + DATA_KEY_S

    def seal(self, payload: bytes) -> Sealed:
        """Encrypt a payload with a fresh initialization vector. Call `begin` before."""
        assert self._cipher is not None
        param = self._random_bytes(_IV_BYTES)
        return Sealed(self._keys, param, self._cipher.encrypt(param, payload, None))


class PayloadOpener:
    """Decrypts the payloads that one consumer receives."""

    def __init__(self, reader: CryptoKeyReader | None) -> None:
        """`reader` None: every decryption fails."""
        self._reader = reader
        self._ciphers: OrderedDict[bytes, AESGCM] = OrderedDict()  # keyed by wrapped data key

    def open(self, entry: ReceivedEntry) -> bytes:
        """Decrypt the payload of an entry. Raises CryptoError if no key of the entry decrypts it,
        and MalformedEntry if the metadata is malformed."""
        if self._reader is None:
            raise CryptoError("the message is encrypted, and there is no crypto_key_reader")
        from cryptography.exceptions import InvalidTag

        metadata = entry.metadata
        param = metadata.encryption_param
        if len(param) != _IV_BYTES:
            raise CryptoError(
                f"the initialization vector has {len(param)} bytes instead of {_IV_BYTES}"
            )
        reasons: list[str] = []
        for key in metadata.encryption_keys[:ENCRYPTION_KEYS_MAX]:
            try:
                cipher = self._cipher(checked_text(key.key), key.value, _texts(key.metadata))
                return cipher.decrypt(param, entry.payload, None)
            except CryptoError as error:
                reasons.append(str(error))
            except InvalidTag:
                reasons.append(f"the data key of {key.key!r} does not fit the payload")
        raise CryptoError("; ".join(reasons))

    def _cipher(self, name: str, wrapped: bytes, metadata: dict[str, str]) -> AESGCM:
        assert self._reader is not None
        cipher = self._ciphers.get(wrapped)
        if cipher is None:
            from cryptography.hazmat.primitives.ciphers.aead import AESGCM

            private_key = _private_key(self._reader, name, metadata)
            try:
                cipher = AESGCM(private_key.decrypt(wrapped, _oaep()))
            except ValueError:  # also for a data key of a wrong size
                raise CryptoError(f"the private key does not fit the key {name!r}") from None
            self._ciphers[wrapped] = cipher
            if len(self._ciphers) > DATA_KEYS_MAX:
                self._ciphers.popitem(last=False)
        else:
            self._ciphers.move_to_end(wrapped)
        return cipher


def context_of(entry: ReceivedEntry, *, failed: bool) -> EncryptionContext:
    """Return the program's view of an entry's encryption.

    Raises MalformedEntry if the metadata is malformed.
    """
    metadata = entry.metadata
    keys = [
        EncryptionKey(checked_text(one.key), one.value, _texts(one.metadata))
        for one in metadata.encryption_keys
    ]
    return EncryptionContext(
        keys,
        metadata.encryption_param,
        checked_text(metadata.encryption_algo),
        CompressionType(entry.compression),
        entry.uncompressed_size if entry.compression else 0,
        entry.num_messages if entry.is_batch else -1,
        is_decryption_failed=failed,
    )


def _texts(pairs: Iterable[pb.KeyValue]) -> dict[str, str]:
    return {checked_text(pair.key): checked_text(pair.value) for pair in pairs}


def sealer_of(options: ProducerOptions) -> PayloadSealer | None:
    """Return the sealer of a producer's payloads. None: the producer does not encrypt."""
    if options.crypto_key_reader is None:
        return None
    return PayloadSealer(options.key_names, options.crypto_key_reader)


def check_public_keys(names: Sequence[str], reader: CryptoKeyReader) -> None:
    """Raise CryptoError if a public key is missing or unusable."""
    reader.prefetch()
    for name in names:
        _wrapped(bytes(_DATA_KEY_BYTES), name, _public_key(reader, name))


def _wrapped(data_key: bytes, name: str, public_key: RSAPublicKey) -> bytes:
    try:
        return public_key.encrypt(data_key, _oaep())
    except ValueError:
        reason = f"the public key {name!r} of {public_key.key_size} bits cannot wrap a data key"
        raise CryptoError(reason) from None


def _public_key(reader: CryptoKeyReader, name: str) -> RSAPublicKey:
    return _loaded_public(_pem(reader.get_public_key, name, {}))


def _private_key(reader: CryptoKeyReader, name: str, metadata: dict[str, str]) -> RSAPrivateKey:
    return _loaded_private(_pem(reader.get_private_key, name, metadata))


def _pem(get: Callable[[str, dict[str, str]], bytes], name: str, metadata: dict[str, str]) -> bytes:
    """Return the PEM text from a method of a key reader, which may be the program's own class.

    Raises CryptoError if the method fails or does not return bytes.
    """
    try:
        text = get(name, metadata)
    except CryptoError:
        raise
    except Exception as error:
        raise CryptoError(f"the crypto_key_reader failed for key {name!r}: {error!r}") from error
    if not isinstance(text, bytes):
        raise CryptoError(
            f"the crypto_key_reader returned {type(text).__name__} instead of bytes for key"
            f" {name!r}"
        )
    return text


@lru_cache(maxsize=64)  # parsing a key takes a millisecond
def _loaded_public(pem: bytes) -> RSAPublicKey:
    from cryptography.exceptions import UnsupportedAlgorithm
    from cryptography.hazmat.primitives.asymmetric.rsa import RSAPublicKey
    from cryptography.hazmat.primitives.serialization import load_pem_public_key

    try:
        key = load_pem_public_key(pem)
    except (ValueError, UnsupportedAlgorithm):
        raise CryptoError("the public key is not a PEM of a public key") from None
    if not isinstance(key, RSAPublicKey):
        raise CryptoError(f"the public key is {_kind(key)}; {_EXPECTED}")
    return key


@lru_cache(maxsize=64)
def _loaded_private(pem: bytes) -> RSAPrivateKey:
    from cryptography.exceptions import UnsupportedAlgorithm
    from cryptography.hazmat.primitives.asymmetric.rsa import RSAPrivateKey
    from cryptography.hazmat.primitives.serialization import load_pem_private_key

    try:
        key = load_pem_private_key(pem, password=None)
    except TypeError:
        raise CryptoError(
            "the private key has a password; give a PEM of a private key without a password"
        ) from None
    except (ValueError, UnsupportedAlgorithm):
        raise CryptoError("the private key is not a PEM of a private key") from None
    if not isinstance(key, RSAPrivateKey):
        raise CryptoError(f"the private key is {_kind(key)}; {_EXPECTED}")
    return key


def _kind(key: object) -> str:
    """Return the kind of an unusable key for an error message."""
    from cryptography.hazmat.primitives.asymmetric import ec

    curve = isinstance(key, (ec.EllipticCurvePublicKey, ec.EllipticCurvePrivateKey))
    return "an EC key" if curve else "of another kind"


def _oaep() -> OAEP:
    from cryptography.hazmat.primitives.asymmetric.padding import MGF1, OAEP
    from cryptography.hazmat.primitives.hashes import SHA1

    return OAEP(MGF1(SHA1()), SHA1(), None)  # Apache's format
