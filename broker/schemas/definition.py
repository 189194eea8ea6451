"""The JSON in which clients define schemas, read within bounds. Pure."""

from __future__ import annotations

import json
from typing import Any, Final

DEPTH_MAX: Final = 256
"""Objects and arrays within each other; Avro types that are nested as deep as avro.py allows take
180. Python's own limit counts the calls that the thread is already in: with it alone, a definition
could be stored by one call and be too deep for another."""


def json_tree(text: bytes) -> Any:
    """The values of a JSON text in UTF-8. Raises ValueError."""
    try:
        tree = json.loads(text.decode())
    except RecursionError:
        raise _too_deep() from None
    level = [tree]
    for _ in range(DEPTH_MAX + 1):
        inner = [part for it in level if isinstance(it, dict) for part in it.values()]
        inner += [part for it in level if isinstance(it, list) for part in it]
        if not inner:
            return tree
        level = inner
    raise _too_deep()


def _too_deep() -> ValueError:
    return ValueError(f"its values are nested deeper than {DEPTH_MAX}")
