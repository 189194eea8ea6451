"""For all tests: `support` can be imported from any depth (with importlib import mode pytest adds
no paths), and logging is afterwards what it was before, whatever a command made of it."""

from __future__ import annotations

import logging
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from collections.abc import Iterator

sys.path.insert(0, str(Path(__file__).parent))


@pytest.fixture(autouse=True)
def _logging() -> Iterator[None]:
    root, kazoo = logging.getLogger(), logging.getLogger("kazoo")
    handlers, levels = root.handlers[:], (root.level, kazoo.level)
    yield
    root.handlers[:] = handlers
    root.setLevel(levels[0])
    kazoo.setLevel(levels[1])
