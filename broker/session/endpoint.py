"""The objects that all connections of one broker share."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from magnetar.broker.session.access import AllowAll
from magnetar.broker.session.answers import Answers
from magnetar.broker.session.limits import ConnectionLimits, Handshakes

if TYPE_CHECKING:
    from collections.abc import Callable

    from magnetar.broker.broker import Broker
    from magnetar.broker.session.access import Authenticator


@dataclass(slots=True)
class Endpoint:
    """The broker, the authentication of clients, the limits of connections, and a counter of
    failures."""

    broker: Broker
    make_authenticator: Callable[[], Authenticator] = AllowAll  # called per connection or call
    answers: Answers = field(default_factory=Answers)
    limits: ConnectionLimits = field(default_factory=ConnectionLimits)
    handshakes: Handshakes = field(default_factory=Handshakes)
    failures: int = 0  # connections that the broker closed after an unexpected exception
