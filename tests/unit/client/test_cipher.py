"""Encrypted payloads: data keys that are renewed, and entries that a hostile producer made."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
from cryptography.hazmat.primitives.asymmetric import rsa
from cryptography.hazmat.primitives.serialization import (
    BestAvailableEncryption,
    Encoding,
    NoEncryption,
    PrivateFormat,
    PublicFormat,
)

from magnetar.client import cipher
from magnetar.client.cipher import (
    DATA_KEY_S,
    TAG_BYTES,
    PayloadOpener,
    PayloadSealer,
    context_of,
)
from magnetar.client.encryption import ENCRYPTION_KEYS_MAX, CryptoKeyReader
from magnetar.client.errors import CryptoError
from magnetar.protos.errors import EntryEncrypted, MalformedEntry
from magnetar.protos.message import EntryHeader, OutgoingMessage, encode_message, read_entry

if TYPE_CHECKING:
    from collections.abc import Mapping

    from magnetar.protos.message import ReceivedEntry

KEY = rsa.generate_private_key(65537, 1024)
PUBLIC = KEY.public_key().public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)
PRIVATE = KEY.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())


class Reader(CryptoKeyReader):
    def __init__(self) -> None:
        super().__init__("", "")
        self.asked = 0

    def get_public_key(self, key_name: str, metadata: Mapping[str, str]) -> bytes:
        return PUBLIC

    def get_private_key(self, key_name: str, metadata: Mapping[str, str]) -> bytes:
        self.asked += 1
        return PRIVATE


def entry(sealer: PayloadSealer, payload: bytes = b"secret") -> ReceivedEntry:
    header = EntryHeader("p", 1, seal=sealer.seal)
    data = b"".join(encode_message(OutgoingMessage(payload, 1), header))
    with pytest.raises(EntryEncrypted):
        read_entry(data)
    return read_entry(data, encrypted_too=True)


def sealer() -> PayloadSealer:
    made = PayloadSealer(["k"], Reader())
    made.begin(0.0)
    return made


def test_a_payload_is_read_back_and_its_data_key_unwrapped_once() -> None:
    reader = Reader()
    opener, one = PayloadOpener(reader), sealer()
    for payload in (b"", b"secret", bytes(1000)):
        sealed = entry(one, payload)
        assert len(sealed.payload) == len(payload) + TAG_BYTES
        assert opener.open(sealed) == payload
    assert reader.asked == 1


def test_vectors_differ_and_the_data_key_is_renewed_in_time() -> None:
    one = sealer()
    first, second = entry(one), entry(one)
    assert first.metadata.encryption_param != second.metadata.encryption_param
    one.begin(DATA_KEY_S - 1)
    assert context_of(entry(one), failed=False).keys() == context_of(first, failed=False).keys()
    one.begin(DATA_KEY_S)
    assert context_of(entry(one), failed=False).keys() != context_of(first, failed=False).keys()


def test_a_changed_payload_is_not_opened() -> None:
    sealed = entry(sealer())
    opener = PayloadOpener(Reader())
    for payload in (b"", sealed.payload[:-1], b"x" + sealed.payload[1:]):
        with pytest.raises(CryptoError, match="does not fit the payload"):
            opener.open(replace(sealed, body=payload, payload_at=0))


def test_false_metadata_of_an_entry_is_refused() -> None:
    opener = PayloadOpener(Reader())
    sealed = entry(sealer())
    sealed.metadata.encryption_param = b"short"
    with pytest.raises(CryptoError, match="initialization vector"):
        opener.open(sealed)
    sealed = entry(sealer())
    for value in (b"", b"x" * 128, KEY.public_key().encrypt(b"5 bytes", cipher._oaep())):
        sealed.metadata.encryption_keys[0].value = value
        with pytest.raises(CryptoError, match="private key does not fit"):
            opener.open(sealed)


def test_the_number_of_tried_keys_of_an_entry_is_bounded() -> None:
    reader = Reader()
    sealed = entry(sealer())
    right = sealed.metadata.encryption_keys.pop()
    for number in range(ENCRYPTION_KEYS_MAX):
        sealed.metadata.encryption_keys.add(key=str(number), value=b"x")
    sealed.metadata.encryption_keys.append(right)
    with pytest.raises(CryptoError):
        PayloadOpener(reader).open(sealed)
    assert reader.asked == ENCRYPTION_KEYS_MAX


def test_a_key_reader_that_fails_is_reported() -> None:
    class Broken(Reader):
        def get_private_key(self, key_name: str, metadata: Mapping[str, str]) -> bytes:
            raise RuntimeError("the key store is down")

    with pytest.raises(CryptoError, match="the key store is down"):
        PayloadOpener(Broken()).open(entry(sealer()))
    with pytest.raises(CryptoError, match="no crypto_key_reader"):
        PayloadOpener(None).open(entry(sealer()))


@pytest.mark.parametrize(
    ("returned", "said"),
    [
        (PRIVATE.decode(), "returned str instead of bytes for key 'k'"),
        (
            KEY.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, BestAvailableEncryption(b"x")),
            "the private key has a password",
        ),
        (b"text", "is not a PEM of a private key"),
    ],
)
def test_a_private_key_that_cannot_be_used_is_described(returned: Any, said: str) -> None:
    class Returning(Reader):
        def get_private_key(self, key_name: str, metadata: Mapping[str, str]) -> bytes:
            return returned  # type: ignore[no-any-return]

    with pytest.raises(CryptoError, match=said):
        PayloadOpener(Returning()).open(entry(sealer()))


def test_a_key_that_cannot_wrap_a_data_key_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    class Small:
        key_size = 512

        def encrypt(self, *_: object) -> bytes:
            raise ValueError("Encryption failed")

    monkeypatch.setattr(cipher, "_loaded_public", lambda _: Small())
    with pytest.raises(CryptoError, match="512 bits"):
        cipher.check_public_keys(["k"], Reader())
    with pytest.raises(CryptoError, match="512 bits"):
        PayloadSealer(["k"], Reader()).begin(0.0)


def test_the_name_of_a_key_that_is_no_text_is_refused() -> None:
    sealer = PayloadSealer(["name!"], Reader())
    sealer.begin(0.0)
    good = entry(sealer)
    data = good.metadata.SerializeToString().replace(b"name!", b"\xff\xfe\xfd\xfc\xfb")
    bad = replace(good, metadata=type(good.metadata).FromString(data))
    with pytest.raises(MalformedEntry, match="UTF-8"):
        PayloadOpener(Reader()).open(bad)
    with pytest.raises(MalformedEntry, match="UTF-8"):
        context_of(bad, failed=True)
