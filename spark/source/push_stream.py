"""One stream of a broker's pushes, and the thread that receives it."""

from __future__ import annotations

import logging
import threading
import time
from typing import TYPE_CHECKING, Final, Generic, TypeVar

from magnetar.spark.range_client import BrokerLost, BrokerRefused

if TYPE_CHECKING:
    from collections.abc import Callable

    from google.protobuf.message import Message

    from magnetar.spark.range_client import Pushes

SILENCE_S_MAX: Final = 6.0
"""The time in seconds after which a stream without messages is silent. A broker sends a message on
each stream at least every 2 s."""

RETRY_S: Final = 1.0
"""The time in seconds between the attempts to open a stream to a broker. Another broker replaces a
dead broker in 3 s."""

REFUSED_S: Final = 30.0
"""The time in seconds before the next attempt after a refusal. The broker has too many watches, or
has an older version."""

Update = TypeVar("Update", bound="Message")

log = logging.getLogger(__name__)


class PushStream(Generic[Update]):
    """One stream and its thread. The thread calls `note` with each message, under `lock`."""

    def __init__(
        self,
        broker: str,
        pushes: Pushes[Update],
        note: Callable[[Update], None],
        *,
        silence_s_max: float = SILENCE_S_MAX,
    ) -> None:
        self.lock = threading.Lock()
        self.refused = False
        self._broker = broker
        self._updates, self.close = pushes
        self._note = note
        self._silence_s_max = silence_s_max
        self._heard_s = time.monotonic()
        self._ended = False
        threading.Thread(target=self._receive, name="magnetar-pushes", daemon=True).start()

    @property
    def is_live(self) -> bool:
        """True while the broker sends messages. After that, its last messages may be outdated."""
        return not self._ended and time.monotonic() - self._heard_s < self._silence_s_max

    def _receive(self) -> None:
        try:
            for update in self._updates:
                with self.lock:
                    self._note(update)
                    self._heard_s = time.monotonic()
        except BrokerRefused as error:
            self.refused = True
            log.warning("%s pushes no changes, the query polls instead: %s", self._broker, error)
        except BrokerLost as error:
            self.refused = error.name == "RequestRefused"
            log.debug("a stream of changes has ended: %s", error)
        self._ended = True
