"""The page of the settings has every setting, with its default and its description."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING

from magnetar.bookie.config import BookieConfig
from magnetar.broker.config import BrokerConfig
from magnetar.standalone import StandaloneConfig

if TYPE_CHECKING:
    from collections.abc import Mapping

    from pydantic.fields import FieldInfo

PAGE = Path(__file__).resolve().parents[3] / "docs" / "settings.md"
ROW = re.compile(r"^\| `(\w+)` \| (.*?) \| (.+) \|$", re.MULTILINE)


def test_the_page_has_every_setting_of_a_broker() -> None:
    _compare("Settings of a broker", BrokerConfig.model_fields)


def test_the_page_has_every_setting_of_a_standalone_server() -> None:
    fields = StandaloneConfig.model_fields
    own = {name: fields[name] for name in fields.keys() - BrokerConfig.model_fields.keys()}
    _compare("Settings of a standalone server alone", own)


def test_the_page_has_every_setting_of_a_bookie() -> None:
    _compare("Settings of a bookie", BookieConfig.model_fields)


def _compare(title: str, fields: Mapping[str, FieldInfo]) -> None:
    section = re.split(r"^##? ", PAGE.read_text().partition(f"# {title}\n")[2], flags=re.MULTILINE)[
        0
    ]
    rows = {name: (default, text) for name, default, text in ROW.findall(section)}
    assert rows.keys() == fields.keys()
    for name, (shown, text) in rows.items():
        field = fields[name]
        assert shown == _default(field.is_required(), field.get_default()), name
        assert text.rpartition(" | ")[2] == field.description, name


def _default(required: bool, value: object) -> str:
    if required:
        return "required"
    if isinstance(value, frozenset):
        value = ",".join(sorted(map(str, value)))
    text = str(value).lower() if isinstance(value, bool) else str(value)
    return f"`{text}`" if text else "empty"
