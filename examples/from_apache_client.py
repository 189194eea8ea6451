"""A program written for Apache Pulsar's Python client. It uses Magnetar's client instead.

    python examples/from_apache_client.py

The original program used Apache's package pulsar-client. Only the two places with a comment
`# was: ...` differ from it.
"""

from __future__ import annotations

import os

import magnetar as pulsar  # was: import pulsar

URL = os.environ.get(
    "MAGNETAR_SERVICE_URL", "grpc://localhost:6660"
)  # was: pulsar://localhost:6650

client = pulsar.Client(URL)

consumer = client.subscribe(
    "persistent://public/default/moved",
    "my-subscription",
    consumer_type=pulsar.ConsumerType.Shared,
    initial_position=pulsar.InitialPosition.Earliest,
)
producer = client.create_producer(
    "persistent://public/default/moved",
    compression_type=pulsar.CompressionType.LZ4,
    block_if_queue_full=True,
)


def on_sent(result: pulsar.Result, message_id: pulsar.MessageId | None) -> None:
    if result != pulsar.Result.Ok:
        print("not sent:", result)


for number in range(10):
    producer.send_async(f"hello-{number}".encode(), on_sent, properties={"number": str(number)})
producer.flush()

for _ in range(10):
    message = consumer.receive(timeout_millis=10_000)
    print(message.data().decode(), message.properties())
    consumer.acknowledge(message)

try:
    consumer.receive(timeout_millis=100)
except pulsar.Timeout:
    print("no more messages")

client.close()
