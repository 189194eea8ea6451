"""Serializers of functions: from an object to the bytes of a message and back."""

import pickle
from abc import abstractmethod
from typing import Any

_KINDS = (int, float, complex, str)


class SerDe:
    """Converts between objects and the bytes of messages."""

    @abstractmethod
    def serialize(self, input: Any) -> bytes:  # noqa: A002 - Apache's name
        """Return the object as bytes."""

    @abstractmethod
    def deserialize(self, input_bytes: bytes) -> Any:
        """Return the object that the bytes hold."""


class PickleSerDe(SerDe):
    """Converts with `pickle`. Use it for trusted topics only: loading a pickle can run any code."""

    def serialize(self, input: Any) -> bytes:  # noqa: A002 - Apache's name
        return pickle.dumps(input)

    def deserialize(self, input_bytes: bytes) -> Any:
        return pickle.loads(input_bytes)


class IdentitySerDe(SerDe):
    """Serializes numbers and text as UTF-8 text, and bytes as they are. The type is not stored:
    `deserialize` returns the bytes b"12" as the int 12."""

    def serialize(self, input: Any) -> bytes:  # noqa: A002 - Apache's name
        """Serialize an int, float, complex, str or bytes. Raises TypeError for another type."""
        if type(input) in _KINDS:
            return str(input).encode()
        if type(input) is bytes:
            return input
        raise TypeError(f"IdentitySerDe cannot serialize {type(input).__name__}")

    def deserialize(self, input_bytes: bytes) -> Any:
        """Parse the bytes as int, float, complex or str, in this order; else return the bytes."""
        for kind in _KINDS:
            try:
                return kind(input_bytes.decode())
            except ValueError:
                continue
        return input_bytes
