"""`magnetar bookies` without a cluster: parsing, and what goes wrong."""

from __future__ import annotations

import pytest
from support import free_port
from typer.testing import CliRunner

from magnetar.cli.main import make_app


def invoke(*arguments: str) -> tuple[int, str]:
    result = CliRunner(env={"MAGNETAR_METADATA_URL": None}).invoke(
        make_app(arguments), list(arguments)
    )
    return result.exit_code, result.output


@pytest.mark.parametrize(
    "words",
    [
        ("list",),
        ("drain", "b1"),
        ("undrain", "b1"),
        ("decommission", "b1"),
        ("under-replicated",),
        ("ledger", "5"),
        ("repair", "pause"),
        ("repair", "resume"),
        ("repair", "status"),
    ],
)
def test_a_missing_or_malformed_metadata_url_is_refused(words: tuple[str, ...]) -> None:
    code, said = invoke("bookies", *words)
    assert code == 2
    assert "MAGNETAR_METADATA_URL" in said
    code, said = invoke("bookies", *words, "--metadata-url", "localhost:2181")
    assert code == 2
    assert "does not begin with zk://" in said


def test_an_unreachable_metadata_store_is_reported_in_one_line() -> None:
    code, said = invoke("bookies", "list", "--metadata-url", f"zk://127.0.0.1:{free_port()}")
    assert code == 1
    [line] = said.strip().splitlines()
    assert "no session within" in line


@pytest.mark.parametrize("wrong", ["-1", "x", str(1 << 63)])
def test_an_invalid_ledger_id_is_refused(wrong: str) -> None:
    code, _ = invoke("bookies", "ledger", "--metadata-url", "zk://127.0.0.1:1", "--", wrong)
    assert code == 2
