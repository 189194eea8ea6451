"""Lets tests import `support` from any depth: with importlib import mode pytest adds no paths."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
