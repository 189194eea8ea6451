"""Payloads encrypted end to end: Apache's client and ours read each other's messages, and handle
messages that they cannot decrypt in the same way."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import pulsar
import pytest
from cryptography.hazmat.primitives.asymmetric import ec, rsa
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    NoEncryption,
    PrivateFormat,
    PublicFormat,
)
from fakes.services import Service, brokers_in_thread

import magnetar

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from cryptography.hazmat.primitives.asymmetric.types import PrivateKeyTypes

TIMEOUT_MS = 30_000
QUIET_MS = 300
MODULES: list[Any] = [pulsar, magnetar]
PAIRS = [(pulsar, magnetar), (magnetar, pulsar), (magnetar, magnetar)]
NAMES = ["apache to ours", "ours to apache", "ours to ours"]


@dataclass
class Keys:
    public: str
    private: str

    def reader(self, module: Any) -> Any:
        return module.CryptoKeyReader(self.public, self.private)


def written(directory: Path, name: str, key: PrivateKeyTypes) -> Keys:
    public, private = directory / f"{name}.public", directory / f"{name}.private"
    public.write_bytes(
        key.public_key().public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)
    )
    private.write_bytes(key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()))
    return Keys(str(public), str(private))


@pytest.fixture(scope="module")
def keys(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Keys]:
    directory = tmp_path_factory.mktemp("keys")
    return {
        name: written(directory, name, rsa.generate_private_key(65537, 2048))
        for name in ("ours", "other")
    }


@pytest.fixture(scope="module")
def service() -> Iterator[Service]:
    with brokers_in_thread(1) as service:
        yield service


@pytest.fixture(scope="module")
def clients(service: Service) -> Iterator[dict[Any, Any]]:
    logger = pulsar.ConsoleLogger(pulsar.LoggerLevel.Error)
    theirs = pulsar.Client(service.pulsar_url, logger=logger)
    with magnetar.Client(service.grpc_url) as ours:
        yield {pulsar: theirs, magnetar: ours}
    theirs.close()


_numbers = itertools.count()


@pytest.fixture
def topic() -> str:
    return f"persistent://public/default/encrypted-{next(_numbers)}"


def publish(producer: Any, messages: list[tuple[bytes, dict[str, Any]]], ok: object) -> None:
    told: list[Any] = []
    for content, options in messages:
        producer.send_async(content, lambda result, _: told.append(result), **options)
    producer.flush()
    assert told == [ok] * len(messages)


def is_quiet(module: Any, consumer: Any) -> bool:
    with pytest.raises(module.Timeout):
        consumer.receive(QUIET_MS)
    return True


MESSAGES: list[tuple[bytes, dict[str, Any]]] = [
    (b"first" * 100, {"properties": {"a": "b"}}),
    (b"", {"partition_key": "k"}),
    (b"third", {"partition_key": "k", "ordering_key": "o", "event_timestamp": 5}),
]


@pytest.mark.parametrize(("sends", "receives"), PAIRS, ids=NAMES)
@pytest.mark.parametrize("batching", [False, True], ids=["alone", "batched"])
@pytest.mark.parametrize("codec", ["NONE", "ZSTD"])
def test_messages_arrive_decrypted(
    clients: dict[Any, Any],
    keys: dict[str, Keys],
    topic: str,
    sends: Any,
    receives: Any,
    batching: bool,
    codec: str,
) -> None:
    consumer = clients[receives].subscribe(
        topic, "s", crypto_key_reader=keys["ours"].reader(receives)
    )
    plain = clients[magnetar].subscribe(
        topic, "raw", crypto_failure_action=magnetar.ConsumerCryptoFailureAction.CONSUME
    )
    producer = clients[sends].create_producer(
        topic,
        encryption_key="my-key",
        crypto_key_reader=keys["ours"].reader(sends),
        batching_enabled=batching,
        batching_max_publish_delay_ms=1000,
        compression_type=getattr(sends.CompressionType, codec),
    )
    publish(producer, MESSAGES, sends.Result.Ok)
    for content, options in MESSAGES:
        message = consumer.receive(TIMEOUT_MS)
        assert message.data() == content
        assert message.properties() == options.get("properties", {})
        assert message.partition_key() == options.get("partition_key", "")
        context = message.encryption_context()
        (key,) = context.keys()
        assert (key.key, len(key.value)) == ("my-key", 256)
        assert len(context.param()) == 12
        assert context.algorithm() == ""
        assert context.compression_type().name == (codec if batching or content else "NONE") or (
            sends is pulsar
        )
        assert context.batch_size() == (len(MESSAGES) if batching else -1)
        assert not context.is_decryption_failed()
        consumer.acknowledge(message)
    stored = plain.receive(TIMEOUT_MS).data()
    assert b"first" not in stored


@pytest.mark.parametrize(("sends", "receives"), PAIRS, ids=NAMES)
def test_a_message_in_chunks_arrives_decrypted(
    clients: dict[Any, Any], keys: dict[str, Keys], topic: str, sends: Any, receives: Any
) -> None:
    content = bytes(range(256)) * (45 * 1024)  # 11.25 MiB: three chunks
    consumer = clients[receives].subscribe(
        topic, "s", crypto_key_reader=keys["ours"].reader(receives)
    )
    producer = clients[sends].create_producer(
        topic,
        chunking_enabled=True,
        encryption_key="my-key",
        crypto_key_reader=keys["ours"].reader(sends),
    )
    producer.send(content)
    message = consumer.receive(TIMEOUT_MS)
    assert message.data() == content
    consumer.acknowledge(message)


@pytest.mark.parametrize("receives", MODULES, ids=["apache", "ours"])
@pytest.mark.parametrize("reader", [None, "other"], ids=["without a key", "with another key"])
@pytest.mark.parametrize("batching", [False, True], ids=["alone", "batched"])
def test_an_undecryptable_message_is_discarded_or_delivered_encrypted(
    clients: dict[Any, Any],
    keys: dict[str, Keys],
    topic: str,
    receives: Any,
    reader: str | None,
    batching: bool,
) -> None:
    actions = receives.ConsumerCryptoFailureAction
    given = {"crypto_key_reader": keys[reader].reader(receives)} if reader else {}
    discards = clients[receives].subscribe(
        topic, "discards", crypto_failure_action=actions.DISCARD, **given
    )
    consumes = clients[receives].subscribe(
        topic, "consumes", crypto_failure_action=actions.CONSUME, **given
    )
    producer = clients[magnetar].create_producer(
        topic,
        encryption_key="my-key",
        crypto_key_reader=keys["ours"].reader(magnetar),
        batching_enabled=batching,
        batching_max_publish_delay_ms=1000,
    )
    publish(producer, [(b"secret", {}), (b"more", {})], magnetar.Result.Ok)
    clients[magnetar].create_producer(topic).send(b"plain")
    assert discards.receive(TIMEOUT_MS).data() == b"plain"
    entries = 1 if batching else 2
    for _ in range(entries):
        message = consumes.receive(TIMEOUT_MS)
        assert b"secret" not in message.data()
        context = message.encryption_context()
        assert context.is_decryption_failed()
        assert context.batch_size() == (2 if batching else -1)
        consumes.acknowledge(message)
    assert consumes.receive(TIMEOUT_MS).data() == b"plain"


def test_a_failed_decryption_is_raised_and_stays_unacknowledged(
    clients: dict[Any, Any], keys: dict[str, Keys], topic: str
) -> None:
    client = clients[magnetar]
    consumer = client.subscribe(topic, "s")
    producer = client.create_producer(
        topic, encryption_key="k", crypto_key_reader=keys["ours"].reader(magnetar)
    )
    producer.send(b"secret")
    with pytest.raises(magnetar.CryptoError, match="there is no crypto_key_reader"):
        consumer.receive(TIMEOUT_MS)
    assert consumer.get_stats().undecryptable == 1
    consumer.close()
    able = client.subscribe(topic, "s", crypto_key_reader=keys["ours"].reader(magnetar))
    assert able.receive(TIMEOUT_MS).data() == b"secret"


def test_each_of_several_keys_decrypts(
    clients: dict[Any, Any], keys: dict[str, Keys], topic: str
) -> None:
    class Store(magnetar.CryptoKeyReader):
        """A key reader that finds each key by its name."""

        def __init__(self) -> None:
            super().__init__("", "")

        def get_public_key(self, key_name: str, metadata: Any) -> bytes:
            return keys[key_name].reader(magnetar).get_public_key(key_name, metadata)  # type: ignore[no-any-return]

    client = clients[magnetar]
    consumers = [
        client.subscribe(topic, name, crypto_key_reader=keys[name].reader(magnetar))
        for name in keys
    ]
    theirs = clients[pulsar].subscribe(
        topic, "theirs", crypto_key_reader=keys["other"].reader(pulsar)
    )
    producer = client.create_producer(topic, encryption_keys=list(keys), crypto_key_reader=Store())
    producer.send(b"for both")
    for consumer in (*consumers, theirs):
        assert consumer.receive(TIMEOUT_MS).data() == b"for both"


@pytest.mark.parametrize(("sends", "receives"), PAIRS, ids=NAMES)
def test_a_reader_decrypts(
    clients: dict[Any, Any], keys: dict[str, Keys], topic: str, sends: Any, receives: Any
) -> None:
    clients[magnetar].subscribe(topic, "keeps")
    producer = clients[sends].create_producer(
        topic, encryption_key="k", crypto_key_reader=keys["ours"].reader(sends)
    )
    producer.send(b"secret")
    reader = clients[receives].create_reader(
        topic, receives.MessageId.earliest, crypto_key_reader=keys["ours"].reader(receives)
    )
    assert reader.read_next(TIMEOUT_MS).data() == b"secret"


def test_a_batch_decrypted_by_the_program_is_read_by_message_batch(
    clients: dict[Any, Any], keys: dict[str, Keys], topic: str
) -> None:
    from cryptography.hazmat.primitives.ciphers.aead import AESGCM

    from magnetar.client.cipher import _loaded_private, _oaep

    consumer = clients[magnetar].subscribe(
        topic, "s", crypto_failure_action=magnetar.ConsumerCryptoFailureAction.CONSUME
    )
    producer = clients[magnetar].create_producer(
        topic,
        encryption_key="k",
        crypto_key_reader=keys["ours"].reader(magnetar),
        batching_max_publish_delay_ms=1000,
    )
    publish(producer, [(b"a", {}), (b"b", {})], magnetar.Result.Ok)
    message = consumer.receive(TIMEOUT_MS)
    context = message.encryption_context()
    pem = keys["ours"].reader(magnetar).get_private_key("k", {})
    data_key = _loaded_private(pem).decrypt(context.keys()[0].value, _oaep())
    batch = AESGCM(data_key).decrypt(context.param(), message.data(), None)
    read = magnetar.MessageBatch().with_message_id(message.message_id())
    assert [one.data() for one in read.parse_from(batch, context.batch_size())] == [b"a", b"b"]


@pytest.mark.parametrize("encryption_keys", [["k"], None], ids=["encrypted", "in the clear"])
def test_copies_on_letter_topics_are_encrypted_if_asked_for(
    clients: dict[Any, Any], keys: dict[str, Keys], topic: str, encryption_keys: list[str] | None
) -> None:
    client = clients[magnetar]
    reader = keys["ours"].reader(magnetar)
    consumer = client.subscribe(
        topic,
        "s",
        magnetar.ConsumerType.Shared,
        crypto_key_reader=reader,
        enable_retry=True,
        dead_letter_policy=magnetar.ConsumerDeadLetterPolicy(
            1, initial_subscription_name="keep", encryption_keys=encryption_keys
        ),
    )
    producer = client.create_producer(topic, encryption_key="k", crypto_key_reader=reader)
    producer.send(b"secret")
    for _ in range(2):  # the original and the copy on the retry topic
        message = consumer.receive(TIMEOUT_MS)
        assert message.data() == b"secret"
        consumer.reconsume_later(message, timedelta(0))
    assert (message.encryption_context() is not None) is (encryption_keys is not None)
    consumer.close()
    stored = client.subscribe(
        f"{topic}-s-DLQ",
        "keep",
        crypto_failure_action=magnetar.ConsumerCryptoFailureAction.CONSUME,
    ).receive(TIMEOUT_MS)
    assert (b"secret" in stored.data()) is (encryption_keys is None)
    if encryption_keys is not None:
        read = clients[pulsar].create_reader(
            f"{topic}-s-DLQ",
            pulsar.MessageId.earliest,
            crypto_key_reader=keys["ours"].reader(pulsar),
        )
        assert read.read_next(TIMEOUT_MS).data() == b"secret"


def test_a_message_that_is_still_encrypted_is_not_copied(
    clients: dict[Any, Any], keys: dict[str, Keys], topic: str
) -> None:
    client = clients[magnetar]
    consumer = client.subscribe(
        topic,
        "s",
        magnetar.ConsumerType.Shared,
        enable_retry=True,
        crypto_failure_action=magnetar.ConsumerCryptoFailureAction.CONSUME,
    )
    client.create_producer(
        topic, encryption_key="k", crypto_key_reader=keys["ours"].reader(magnetar)
    ).send(b"secret")
    message = consumer.receive(TIMEOUT_MS)
    with pytest.raises(magnetar.CryptoError, match="would lose its data key"):
        consumer.reconsume_later(message, timedelta(0))
    consumer.close()
    again = client.subscribe(
        topic,
        "s",
        magnetar.ConsumerType.Shared,
        crypto_key_reader=keys["ours"].reader(magnetar),
    )
    assert again.receive(TIMEOUT_MS).data() == b"secret"


def test_keys_that_cannot_be_used_are_refused(
    clients: dict[Any, Any], keys: dict[str, Keys], topic: str, tmp_path: Path
) -> None:
    client = clients[magnetar]
    (tmp_path / "text").write_text("no key")
    for public in (str(tmp_path / "text"), str(tmp_path / "missing")):
        with pytest.raises(magnetar.CryptoError):
            client.create_producer(
                topic, encryption_key="k", crypto_key_reader=magnetar.CryptoKeyReader(public, "")
            )
    with pytest.raises(magnetar.InvalidConfiguration, match="encryption_key"):
        client.create_producer(topic, encryption_key="k")
    with pytest.raises(magnetar.InvalidConfiguration, match="crypto_key_reader"):
        client.create_producer(topic, crypto_key_reader=keys["ours"].reader(magnetar))
    with pytest.raises(ValueError, match="public_key_path"):
        magnetar.CryptoKeyReader(5, "")  # type: ignore[arg-type]


def test_apaches_client_and_ours_refuse_keys_of_elliptic_curves(
    clients: dict[Any, Any], keys: dict[str, Keys], topic: str, tmp_path: Path
) -> None:
    curve = written(tmp_path, "curve", ec.generate_private_key(ec.SECP256R1()))
    with pytest.raises(magnetar.CryptoError, match="public key is an EC key; expected an RSA key"):
        clients[magnetar].create_producer(
            topic, encryption_key="k", crypto_key_reader=curve.reader(magnetar)
        )
    theirs = clients[pulsar].create_producer(
        topic, encryption_key="k", crypto_key_reader=curve.reader(pulsar)
    )
    with pytest.raises(pulsar.CryptoError):
        theirs.send(b"x")
    consumer = clients[magnetar].subscribe(topic, "s", crypto_key_reader=curve.reader(magnetar))
    with clients[magnetar].create_producer(
        topic, encryption_key="k", crypto_key_reader=keys["ours"].reader(magnetar)
    ) as producer:
        producer.send(b"x")
    with pytest.raises(magnetar.CryptoError, match="private key is an EC key"):
        consumer.receive(TIMEOUT_MS)
    consumer.close()
