"""Publish to some topics until SIGTERM, then read all of it back; run in a container of the image.

    python load.py SERVICE_URL TOPICS MESSAGES_PER_SECOND

Prints one JSON line a second with the messages acknowledged so far, of all topics and of the topic
that has the fewest. At the end it prints the verdict: how many messages were acknowledged, lost,
duplicated or out of order.
"""

from __future__ import annotations

import json
import signal
import sys
import threading
import time
from collections import Counter
from itertools import pairwise
from typing import TYPE_CHECKING

import magnetar

if TYPE_CHECKING:
    from collections.abc import Callable

    Done = Callable[[magnetar.Result, magnetar.MessageId], None]

PENDING_MAX = 10_000  # messages of one topic without an acknowledgement
SEND_TIMEOUT_MS = 120_000
READ_TIMEOUT_MS = 30_000


class Load:
    def __init__(self, client: magnetar.Client, topics: int, per_second: float) -> None:
        self._client = client
        self._interval_s = topics / per_second  # the time between two messages of one topic
        self._topics = [f"load-{number}" for number in range(topics)]
        self._lock = threading.Lock()
        self._acknowledged: dict[str, set[int]] = {topic: set() for topic in self._topics}
        self._failed: Counter[str] = Counter()  # keyed by result
        self._stop = threading.Event()

    def run(self) -> None:
        signal.signal(signal.SIGTERM, lambda *_: self._stop.set())
        threads = [threading.Thread(target=self._publish, args=(topic,)) for topic in self._topics]
        for thread in threads:
            thread.start()
        while any(thread.is_alive() for thread in threads):
            counts = self._counts()
            self._say(acknowledged=sum(counts), fewest=min(counts))
            self._stop.wait(1)
            for thread in threads:
                thread.join(1 if self._stop.is_set() else 0)
        self._say(verdict=self._verdict())

    def _publish(self, topic: str) -> None:
        producer = self._client.create_producer(
            topic,
            send_timeout_millis=SEND_TIMEOUT_MS,
            max_pending_messages=PENDING_MAX,
            block_if_queue_full=True,
            batching_enabled=False,
        )
        number = 0
        while not self._stop.wait(self._interval_s):
            producer.send_async(b"%d" % number, self._note(topic, number))
            number += 1
        producer.flush()
        producer.close()

    def _note(self, topic: str, number: int) -> Done:
        def done(result: magnetar.Result, _: magnetar.MessageId) -> None:
            with self._lock:
                if result is magnetar.Result.Ok:
                    self._acknowledged[topic].add(number)
                else:
                    self._failed[str(result)] += 1

        return done

    def _counts(self) -> list[int]:
        """By topic."""
        with self._lock:
            return [len(numbers) for numbers in self._acknowledged.values()]

    def _verdict(self) -> dict[str, object]:
        lost = duplicates = disorder = 0
        for topic in self._topics:
            found = self._read(topic)
            counts = Counter(found)
            lost += len(self._acknowledged[topic] - counts.keys())
            duplicates += sum(counts.values()) - len(counts)
            firsts = list(dict.fromkeys(found))
            disorder += sum(later < earlier for earlier, later in pairwise(firsts))
        return {
            "acknowledged": sum(self._counts()),
            "failed": dict(self._failed),
            "lost": lost,
            "duplicates": duplicates,
            "out_of_order": disorder,
        }

    def _read(self, topic: str) -> list[int]:
        reader = self._client.create_reader(topic, magnetar.MessageId.earliest)
        found = []
        while reader.has_message_available():
            found.append(int(reader.read_next(READ_TIMEOUT_MS).data()))
        reader.close()
        return found

    def _say(self, **facts: object) -> None:
        print(json.dumps(facts | {"at_s": round(time.monotonic(), 1)}), flush=True)


if __name__ == "__main__":
    url, topics, per_second = sys.argv[1:]
    with magnetar.Client(url) as client:
        Load(client, int(topics), float(per_second)).run()
