"""The page of the settings tells what the code does."""

from __future__ import annotations

import re
from pathlib import Path

from magnetar.broker.config import BrokerConfig
from magnetar.broker.policy_settings import PolicySettings

PAGE = Path(__file__).resolve().parents[3] / "docs" / "settings.md"
ROW = re.compile(r"^\| `(\w+)` \| (.*?) \| (.*?) \| (.+) \|$", re.MULTILINE)


def test_the_page_has_every_default_of_a_policy_and_no_wrong_default() -> None:
    table = PAGE.read_text().partition("## Where")[0]
    rows = {name: default for name, default, _, _ in ROW.findall(table)}
    assert rows.keys() >= PolicySettings.model_fields.keys()
    for name, shown in rows.items():
        field = BrokerConfig.model_fields[name]
        assert shown == _default(field.is_required(), field.get_default()), name


def _default(required: bool, value: object) -> str:
    if required:
        return "required"
    if isinstance(value, frozenset):
        value = ",".join(sorted(map(str, value)))
    text = str(value).lower() if isinstance(value, bool) else str(value)
    return f"`{text}`" if text else "empty"
