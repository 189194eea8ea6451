"""Flags of `magnetar local-cluster`; tests/integration/test_local_cluster.py starts clusters."""

from pathlib import Path

import pytest
from typer.testing import CliRunner

from magnetar.cli.main import make_app


@pytest.mark.parametrize("setting", ["zone", "=b"])
def test_a_setting_of_brokers_without_name_or_value_is_refused(
    tmp_path: Path, setting: str
) -> None:
    arguments = ["local-cluster", "--dir", str(tmp_path / "c"), "--broker-setting", setting]
    result = CliRunner().invoke(make_app(arguments), arguments)
    assert result.exit_code == 2
    assert "is not NAME=VALUE" in result.output
    assert not (tmp_path / "c").exists()
