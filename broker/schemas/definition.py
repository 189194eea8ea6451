"""The JSON in which clients define schemas, read within bounds. Pure."""

from __future__ import annotations

import json
from typing import Any, Final

DEPTH_MAX: Final = 256
"""The maximum depth of nested objects and arrays. Avro types nested as deep as avro.py allows take
180. Python's own recursion limit is not enough: it includes the calls that are active already. So
one call could store a definition that is too deep for another call."""


def json_tree(text: bytes) -> Any:
    """Parse a JSON text in UTF-8. Raises ValueError, also for values nested too deep."""
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
