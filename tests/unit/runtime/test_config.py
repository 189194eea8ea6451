"""Settings: their precedence, and the errors for unknown keys and bad values."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Self

import pytest
from pydantic import Field, ValidationError, model_validator

from magnetar.runtime.config import ConfigError, RoleConfig, load_config


class OvenConfig(RoleConfig):
    role = "oven"

    data_dir: Path
    grpc_port: int = Field(3181, ge=0, le=65535)
    write_quorum: int = 3
    ack_quorum: int = 2
    sync: bool = True
    bake_s: float = 60.0

    @model_validator(mode="after")
    def quorums(self) -> Self:
        if self.ack_quorum > self.write_quorum:
            raise ValueError(
                f"ack_quorum {self.ack_quorum} exceeds write_quorum {self.write_quorum}"
            )
        return self


@pytest.fixture(autouse=True)
def no_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    import os

    for name in list(os.environ):
        if name.startswith("MAGNETAR_"):
            monkeypatch.delenv(name)


def load(file: Path | None = None, **flags: Any) -> OvenConfig:
    return load_config(OvenConfig, file=file, flags={"data_dir": "/data", **flags})


def toml(folder: Path, text: str) -> Path:
    file = folder / "oven.toml"
    file.write_text(text)
    return file


def test_flags_go_before_environment_before_file_before_defaults(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert load().grpc_port == 3181
    file = toml(tmp_path, "grpc_port = 1")
    assert load(file).grpc_port == 1
    monkeypatch.setenv("MAGNETAR_OVEN_GRPC_PORT", "2")
    assert load(file).grpc_port == 2
    assert load(file, grpc_port=3).grpc_port == 3
    assert load(file, grpc_port=None).grpc_port == 2


def test_values_from_text_have_the_keys_type(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MAGNETAR_OVEN_SYNC", "false")
    monkeypatch.setenv("MAGNETAR_OVEN_DATA_DIR", "/elsewhere")
    config = load_config(OvenConfig, file=None, flags={"grpc_port": "7"})
    assert config == OvenConfig(data_dir=Path("/elsewhere"), grpc_port=7, sync=False)


def test_an_unknown_key_is_refused_wherever_it_stands(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = toml(tmp_path, "grpc_prot = 1")
    with pytest.raises(ConfigError) as caught:
        load(file)
    assert str(caught.value) == f"unknown key 'grpc_prot' in {file}: did you mean grpc_port?"
    with pytest.raises(ConfigError, match=r"unknown key 'synch' in the command line.*mean sync"):
        load(synch=True)
    monkeypatch.setenv("MAGNETAR_OVEN_ACKQUORUM", "2")
    with pytest.raises(
        ConfigError,
        match=r"variable MAGNETAR_OVEN_ACKQUORUM: did you mean MAGNETAR_OVEN_ACK_QUORUM\?",
    ):
        load()


def test_a_table_in_the_file_is_an_unknown_key_too(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="'oven'"):
        load(toml(tmp_path, "[oven]\ngrpc_port = 1"))


def test_other_roles_and_other_programs_keep_their_variables(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("MAGNETAR_KETTLE_GRPC_PROT", "1")
    monkeypatch.setenv("OVEN_GRPC_PORT", "1")
    monkeypatch.setenv("GRPC_PORT", "1")
    assert load().grpc_port == 3181


@pytest.mark.parametrize("place", ["file", "environment", "flag"])
def test_a_bad_value_is_named_with_its_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    file, flags = None, {}
    if place == "file":
        file, name = toml(tmp_path, "grpc_port = 70000"), r"grpc_port in .*oven\.toml"
    elif place == "environment":
        monkeypatch.setenv("MAGNETAR_OVEN_GRPC_PORT", "70000")
        name = "MAGNETAR_OVEN_GRPC_PORT"
    else:
        flags, name = {"grpc_port": 70000}, "--grpc-port"
    with pytest.raises(ConfigError, match=f"{name}: .*65535, not '?70000"):
        load(file, **flags)


@pytest.mark.parametrize("value", ["inf", "nan", "1e999", float("inf")])
def test_a_number_that_is_not_finite_is_refused(value: str | float) -> None:
    with pytest.raises(ConfigError, match="--bake-s: Input should be a finite number, not"):
        load(bake_s=value)


def test_a_missing_key_says_how_to_give_it() -> None:
    with pytest.raises(ConfigError, match="--data-dir, MAGNETAR_OVEN_DATA_DIR or data_dir in"):
        load_config(OvenConfig, file=None, flags={})


def test_keys_that_contradict_each_other_are_both_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        load(toml(tmp_path, "ack_quorum = 5"))
    assert caught.value.problems == ("ack_quorum 5 exceeds write_quorum 3",)


def test_an_error_names_a_setting_as_the_user_wrote_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = toml(tmp_path, "ackQuorum = 5\ngrpcPort = 70000")
    with pytest.raises(ConfigError, match=r"^grpcPort in .*oven\.toml: .*65535, not 70000$"):
        load(file)
    monkeypatch.setenv("MAGNETAR_OVEN_grpcPort", "70001")
    with pytest.raises(ConfigError, match=r"^MAGNETAR_OVEN_grpcPort: .*, not '70001'$"):
        load(file)
    with pytest.raises(ConfigError, match=r"^ackQuorum 5 exceeds --write-quorum 4$"):
        load(file, grpc_port=1, write_quorum=4)
    monkeypatch.setenv("MAGNETAR_OVEN_ACK_QUORUM", "6")
    with pytest.raises(ConfigError, match=r"^MAGNETAR_OVEN_ACK_QUORUM 6 exceeds write_quorum 3$"):
        load(file, grpc_port=1)


def test_all_problems_are_reported_at_once(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        load(toml(tmp_path, 'grpc_port = -1\nsync = "perhaps"'))
    assert len(caught.value.problems) == 2


def test_a_file_that_cannot_be_used_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"cannot read config file .*none\.toml"):
        load(tmp_path / "none.toml")
    with pytest.raises(ConfigError, match=r"oven\.toml is not valid TOML.*line 2"):
        load(toml(tmp_path, "grpc_port = 1\nsync = \n"))


def test_a_config_is_frozen_and_reads_nothing_by_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MAGNETAR_OVEN_GRPC_PORT", "1")
    monkeypatch.setenv("grpc_port", "1")
    config = OvenConfig(data_dir=Path("/data"))
    assert config.grpc_port == 3181
    with pytest.raises(ValidationError):
        config.grpc_port = 5


def test_a_key_may_be_in_camel_case(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = toml(tmp_path, "grpcPort = 1\nwriteQuorum = 5")
    assert load(file).grpc_port == 1
    monkeypatch.setenv("MAGNETAR_OVEN_grpcPort", "2")
    assert load(file).grpc_port == 2
    assert load(file).write_quorum == 5
    monkeypatch.setenv("MAGNETAR_OVEN_GRPC_PORT", "3")
    both = "MAGNETAR_OVEN_.* and MAGNETAR_OVEN_.*, which are the same setting: give one of them"
    with pytest.raises(ConfigError, match=f"the environment has {both}"):
        load(file)


def test_a_key_under_both_names_is_refused(tmp_path: Path) -> None:
    both = "grpcPort and grpc_port, which are the same setting"
    with pytest.raises(ConfigError, match=rf"oven\.toml has {both}"):
        load(toml(tmp_path, "grpcPort = 1\ngrpc_port = 2"))
