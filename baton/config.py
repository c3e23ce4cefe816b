"""Configuration: one frozen dataclass per component, filled from layers, each above the one before:
defaults < file < environment (`BATON_` + NAME) < flags.

Flags are generated from the dataclass: every field is declared with `option(default, help)`. Read
once in a `__main__`; nothing else reads os.environ. Unknown keys and bad values raise ConfigError.
"""

from __future__ import annotations

import argparse
import tomllib
import types
import typing
from collections.abc import Collection, Mapping, Sequence
from dataclasses import MISSING, Field, field, fields
from pathlib import Path
from typing import Any, TypeVar

from baton.errors import ConfigError

T = TypeVar("T")


def option(
    default: Any = MISSING,
    help: str = "",
    *,
    choices: Sequence[str] = (),
    short: str = "",
    secret: bool = False,
    several: bool = False,
) -> Any:
    """A dataclass field that becomes the flag `--field-name`.

    `secret`: environment or file only, never a flag. `several`: of a tuple, that the flag takes
    values one behind the other, too.
    """
    metadata = {"help": help, "choices": tuple(choices), "short": short}
    metadata |= {"secret": secret, "several": several}
    if default is MISSING:
        return field(metadata=metadata)
    return field(default=default, metadata=metadata)


def add_options(
    parser: argparse.ArgumentParser, cls: type, only: Collection[str] | None = None
) -> None:
    """Add a flag per option of `cls` (`only` those); an absent flag leaves no attribute: lower
    layers show."""
    types_of = typing.get_type_hints(cls)
    for spec in fields(cls):
        meta = spec.metadata
        if "help" not in meta or meta["secret"] or (only is not None and spec.name not in only):
            continue
        flag = "--" + spec.name.replace("_", "-")
        names = [meta["short"], flag] if meta["short"] else [flag]
        keywords: dict[str, Any] = {
            "help": _help_text(spec), "default": argparse.SUPPRESS, "dest": spec.name
        }  # fmt: skip
        if types_of[spec.name] is bool:
            parser.add_argument(*names, action=argparse.BooleanOptionalAction, **keywords)
        elif _is_sequence(types_of[spec.name]):
            one = {"action": "extend", "nargs": "+"} if meta["several"] else {"action": "append"}
            parser.add_argument(*names, **one, **keywords)
        else:
            if meta["choices"]:
                keywords["choices"] = meta["choices"]
            else:
                keywords["metavar"] = spec.name.upper()
            parser.add_argument(*names, **keywords)


def load(
    cls: type[T],
    arguments: argparse.Namespace | Mapping[str, Any] | None = None,
    environ: Mapping[str, str] | None = None,
    file: Path | None = None,
) -> T:
    """Build `cls` from its layers.

    Raises ConfigError naming the option, its source and the bad value.
    """
    types_of = typing.get_type_hints(cls)
    names = {spec.name for spec in fields(cls) if "help" in spec.metadata}  # type: ignore[arg-type]
    values: dict[str, Any] = {}
    if file is not None:
        for key, value in _read_file(file).items():
            name = key.replace("-", "_")
            if name not in names:
                raise ConfigError(f"{file}: unknown option {key!r}", field=key)
            values[name] = _convert(name, types_of[name], value, str(file))
    for name in names:
        variable = "BATON_" + name.upper()
        if environ is not None and variable in environ:
            values[name] = _convert(name, types_of[name], environ[variable], variable)
    given = arguments if isinstance(arguments, Mapping) else vars(arguments or argparse.Namespace())
    for name, value in given.items():
        if name in names:
            values[name] = _convert(name, types_of[name], value, "--" + name.replace("_", "-"))
    _check_choices(cls, values)
    _check_required(cls, values)
    return cls(**values)


def _check_required(cls: type, values: Mapping[str, Any]) -> None:
    missing = [
        spec.name
        for spec in fields(cls)
        if spec.default is MISSING and spec.default_factory is MISSING and spec.name not in values
    ]
    if missing:
        flags = ", ".join("--" + name.replace("_", "-") for name in missing)
        variables = ", ".join("BATON_" + name.upper() for name in missing)
        text = f"missing: {flags} (or in the environment: {variables})"
        raise ConfigError(text, field=missing[0])


def _check_choices(cls: type, values: Mapping[str, Any]) -> None:
    """argparse checks flags; a file and the environment come through here."""
    for spec in fields(cls):
        choices = spec.metadata.get("choices")
        value = values.get(spec.name)
        if choices and value is not None and value not in choices:
            text = f"{spec.name}: {value!r} is none of {', '.join(choices)}"
            raise ConfigError(text, field=spec.name)


def _help_text(spec: Field[Any]) -> str:
    text = spec.metadata["help"]
    if spec.default not in (MISSING, None, "", ()):
        text = f"{text} (default: {spec.default})"
    return text.replace("%", "%%")


def _is_sequence(kind: Any) -> bool:
    return typing.get_origin(kind) is tuple


def _read_file(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text())
    except (OSError, tomllib.TOMLDecodeError) as error:
        raise ConfigError(f"cannot read {path}: {error}") from error


def _convert(name: str, kind: Any, value: Any, source: str) -> Any:
    """Turn text (or a TOML value) into `kind`; None is allowed where the type says so."""
    origin = typing.get_origin(kind)
    if origin in (typing.Union, types.UnionType):
        inner = [k for k in typing.get_args(kind) if k is not types.NoneType]
        return None if value is None or value == "" else _convert(name, inner[0], value, source)
    try:
        if origin is tuple:
            parts = value.split(",") if isinstance(value, str) else value
            item = typing.get_args(kind)[0]
            return tuple(_convert(name, item, part, source) for part in parts)
        if kind is bool:
            return _boolean(value)
        if kind in (int, float, str, Path):
            return kind(value)
    except (TypeError, ValueError) as error:
        raise ConfigError(
            f"{source}: {value!r} is not a valid {kind.__name__}", field=name
        ) from error
    return value


def _boolean(value: Any) -> bool:
    if isinstance(value, bool):
        return value
    text = str(value).lower()
    if text in ("1", "true", "yes", "on"):
        return True
    if text in ("0", "false", "no", "off"):
        return False
    raise ValueError(value)
