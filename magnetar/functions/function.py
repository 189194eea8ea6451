"""The interface of a function."""

from abc import abstractmethod
from typing import Any

from magnetar.functions.context import Context


class Function:
    """A function of Pulsar Functions. Magnetar does not run functions."""

    @abstractmethod
    def process(self, input: Any, context: Context) -> Any:  # noqa: A002 - Apache's name
        """Process one message of an input topic. The returned value goes to the output topic."""
