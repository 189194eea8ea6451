"""The settings of a role: one frozen class, filled from flags, environment, file and defaults.

An unknown key, or keys that contradict each other, prevent the start: a setting that is silently
ignored would do more harm.
"""

from __future__ import annotations

import difflib
import os
import re
import tomllib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError

from magnetar.runtime.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping
    from pathlib import Path

__all__ = ["RoleConfig", "load_config", "ConfigError"]

Config = TypeVar("Config", bound="RoleConfig")


class RoleConfig(BaseModel):
    """Base of every role's settings.

        class BookieConfig(RoleConfig):
            role = "bookie"
            data_dir: Path
            grpc_port: int = Field(3182, ge=0, le=65535, description="...")

            @model_validator(mode="after")
            def quorums(self) -> Self:
                if ...: raise ValueError("ack_quorum 3 exceeds write_quorum 2")   # names both keys
                return self

    Keys are snake_case, and the key of a quantity ends in its unit. The file and the environment
    may write keys in camelCase, as Pulsar does. A value from the environment is text, and a value
    from a flag may be text. A type that Pydantic cannot parse from text needs a validator that
    parses it (`mode="before"`). `load_config` reads the file and the environment; the constructor
    does not.
    """

    model_config = ConfigDict(
        frozen=True, extra="forbid", validate_default=True, allow_inf_nan=False
    )

    role: ClassVar[str]
    """The <ROLE> in MAGNETAR_<ROLE>_<KEY>, in lower case."""

    def survives(self, error: BaseException) -> bool:
        """Return whether the process continues after this bug in a callback or a handler. The
        default is False."""
        del error
        return False


def load_config(
    config_class: type[Config], *, file: Path | None, flags: Mapping[str, Any]
) -> Config:
    """Return the settings of a role. A flag overrides MAGNETAR_<ROLE>_<KEY>, which overrides the
    TOML `file`, which overrides the default. A flag that is None was not given.

    Raises ConfigError. If one of the three places has unknown keys, the error names those keys and
    the most similar known keys. If all keys are known, it names the invalid values and the place of
    each. An error names a setting as the user wrote it: as a flag, as a variable, or as a key.
    """
    from_file = _read_file(config_class, file) if file is not None else {}
    from_environment = _read_environment(config_class)
    _refuse_unknown(config_class, flags, "the command line")
    from_flags = {
        key: _Given(value, f"--{key.replace('_', '-')}")
        for key, value in flags.items()
        if value is not None
    }
    given = {**from_file, **from_environment, **from_flags}
    try:
        return config_class(**{key: found.value for key, found in given.items()})
    except ValidationError as error:
        raise ConfigError(_problems(error, config_class, given)) from None


@dataclass(frozen=True, slots=True)
class _Given:
    """A setting that the user gave."""

    value: Any
    written: str  # its name, as the user wrote it
    file: Path | None = None  # None: a flag or a variable


def _read_file(config_class: type[RoleConfig], file: Path) -> dict[str, _Given]:
    values = _read_toml(file)
    found = {key: _Given(value, key, file) for key, value in values.items()}
    renamed = _renamed(config_class, found, str(file))
    _refuse_unknown(config_class, renamed, str(file))
    return renamed


def _read_toml(file: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError([f"cannot read config file {file}: {error.strerror}"]) from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError([f"config file {file} is not valid TOML: {error}"]) from error


def _read_environment(config_class: type[RoleConfig]) -> dict[str, _Given]:
    prefix = _prefix(config_class)
    present = {name[len(prefix) :]: name for name in os.environ if name.upper().startswith(prefix)}
    unknown = [
        f"unknown environment variable {name}{_hint(key, config_class, prefix)}"
        for key, name in sorted(present.items())
        if _field_of(key, config_class) is None
    ]
    if unknown:
        raise ConfigError(unknown)
    found = {key: _Given(os.environ[name], name) for key, name in present.items()}
    return _renamed(config_class, found, "the environment")


def _refuse_unknown(config_class: type[RoleConfig], given: Iterable[str], place: str) -> None:
    unknown = [
        f"unknown key {key!r} in {place}{_hint(key, config_class)}"
        for key in given
        if key not in config_class.model_fields
    ]
    if unknown:
        raise ConfigError(unknown)


def _field_of(key: str, config_class: type[RoleConfig]) -> str | None:
    """Return the name of the setting for a key. The key is in snake_case, in upper case (in the
    environment) or in camelCase. None: there is no such setting."""
    if key.lower() in config_class.model_fields:
        return key.lower()
    if "_" in key or key.isupper():
        return None
    joined = {name.replace("_", ""): name for name in config_class.model_fields}
    return joined.get(key.lower())


def _renamed(
    config_class: type[RoleConfig], given: Mapping[str, _Given], place: str
) -> dict[str, _Given]:
    """Replace keys in camelCase by the names of settings. Raises ConfigError for a setting that is
    given under two names."""
    found: dict[str, _Given] = {}
    for key, value in given.items():
        name = _field_of(key, config_class) or key
        if name in found:
            both = f"{found[name].written} and {value.written}"
            raise ConfigError([f"{place} has {both}, which are the same setting: give one of them"])
        found[name] = value
    return found


def _prefix(config_class: type[RoleConfig]) -> str:
    return f"MAGNETAR_{config_class.role.upper()}_"


def _hint(key: str, config_class: type[RoleConfig], prefix: str = "") -> str:
    near = difflib.get_close_matches(key.lower(), config_class.model_fields, n=1, cutoff=0.5)
    if not near:
        return ""
    name = prefix + near[0].upper() if prefix else near[0]
    return f": did you mean {name}?"


def _problems(
    error: ValidationError, config_class: type[RoleConfig], given: Mapping[str, _Given]
) -> list[str]:
    problems = []
    for detail in error.errors():
        reason = detail["msg"].removeprefix("Value error, ")
        if not detail["loc"]:  # a validator over several keys; its reason names them
            problems.append(_as_written(reason, given))
            continue
        key = str(detail["loc"][0])
        if detail["type"] == "missing":
            problems.append(
                f"{key} is required: give --{key.replace('_', '-')}, "
                f"{_prefix(config_class)}{key.upper()} or {key} in a config file"
            )
            continue
        found = given.get(key)  # None: the default is invalid
        place = key if found is None else found.written
        if found is not None and found.file is not None:
            place = f"{place} in {found.file}"
        problems.append(f"{place}: {reason}, not {detail['input']!r}")
    return problems


def _as_written(reason: str, given: Mapping[str, _Given]) -> str:
    """Replace the names of settings by the names that the user wrote."""
    if not given:
        return reason
    names = re.compile(rf"\b({'|'.join(given)})\b")
    return names.sub(lambda found: given[found[1]].written, reason)
