"""Configuration: one frozen dataclass per component, filled from layers, each above the one before:
defaults < file < environment (`BATON_` + NAME) < flags.

Flags are generated from the dataclass: every field is declared with `option(default, help)`. Read
once in a `__main__`; nothing else reads os.environ. Unknown keys and bad values raise ConfigError.
The file is what `--config FILE` names, in YAML or TOML; `parse` reads it for options that no
dataclass declares, too.
"""

from __future__ import annotations

import argparse
import tomllib
import types
import typing
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import MISSING, Field, field, fields
from pathlib import Path
from typing import Any, Final, Protocol, TypeVar, cast

import yaml

from baton.protocol.errors import ConfigError

T = TypeVar("T")
_LAYERED: Final = "options_of_dataclasses"  # a parser's, which `load` reads; in its namespaces, too
MOST_SHOWN: Final = 12  # choices that a help text lists


def option(
    default: Any = MISSING,
    help: str = "",
    *,
    choices: Sequence[str] | Mapping[str, str] = (),
    also: Sequence[str] = (),
    secret: bool = False,
    several: bool = False,
) -> Any:
    """A dataclass field that becomes the flag `--field-name`.

    `choices`: a mapping also says what else a choice may be called (`spelled`). `also`: further
    names of the flag. `secret`: environment or file only, never a flag. `several`: of a tuple, that
    the flag takes values one behind the other, too.
    """
    meant = choices if isinstance(choices, Mapping) else {each: each for each in choices}
    metadata = {
        "help": help,
        "choices": tuple(dict.fromkeys(meant.values())),
        "meant": meant,
        "also": tuple(also),
        "secret": secret,
        "several": several,
    }
    if default is MISSING:
        return field(metadata=metadata)
    return field(default=default, metadata=metadata)


def spelled(choices: Sequence[str], **others: str) -> dict[str, str]:
    """The choices of an option; `others`: what else one of them may be called."""
    return {each: each for each in choices} | others


class Flags(Protocol):
    """A parser, or a group of one."""

    @property
    def add_argument(self) -> Callable[..., object]: ...
    @property
    def set_defaults(self) -> Callable[..., object]: ...
    @property
    def get_default(self) -> Callable[[str], Any]: ...


def add_options(parser: Flags, cls: type, only: Collection[str] | None = None) -> None:
    """Add a flag per option of `cls` (`only` those); an absent flag leaves no attribute: lower
    layers show."""
    types_of = typing.get_type_hints(cls)
    mine = {spec.name for spec in fields(cls) if "help" in spec.metadata}
    if only is not None:
        mine &= set(only)
    add_config(parser)
    parser.set_defaults(**{_LAYERED: mine | parser.get_default(_LAYERED)})
    for spec in fields(cls):
        meta = spec.metadata
        if spec.name not in mine or meta["secret"]:
            continue
        flag = "--" + spec.name.replace("_", "-")
        names = [*meta["also"], flag]
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
                # The own ones are shown; others are taken.
                keywords["choices"] = tuple(meta["meant"])
            if 0 < len(meta["choices"]) <= MOST_SHOWN:
                keywords["metavar"] = "{" + ",".join(meta["choices"]) + "}"
            else:
                keywords["metavar"] = spec.name.upper()
            parser.add_argument(*names, **keywords)


def add_config(parser: Flags) -> None:
    """Add the flag `--config FILE`. Twice is safe."""
    if parser.get_default(_LAYERED) is None:
        text = "YAML or TOML file of options, by their flags' names; flags and environment go first"
        parser.add_argument("--config", type=Path, metavar="FILE", help=text)
        parser.set_defaults(**{_LAYERED: set[str]()})


def parse(parser: argparse.ArgumentParser, argv: Sequence[str]) -> argparse.Namespace:
    """`parser.parse_args`; what a --config file says of options that no dataclass declares holds
    where no flag is given. `load` reads the others.

    Raises ConfigError for a file that cannot be read, names an option that there is none of, or a
    bad value of one.
    """
    first = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    first.add_argument("--config", type=Path)
    file: Path | None = first.parse_known_args(argv)[0].config
    if file is not None:
        _set_defaults(_chosen(parser, argv), file)
    return parser.parse_args(argv)


def _chosen(parser: argparse.ArgumentParser, argv: Sequence[str]) -> argparse.ArgumentParser:
    """Of a parser with commands, that of the one which is given."""
    for action in _actions(parser):
        if isinstance(action.choices, dict):
            commands = cast("dict[str, argparse.ArgumentParser]", action.choices)
            return commands.get(argv[0], parser)
    return parser


def _actions(parser: argparse.ArgumentParser) -> list[argparse.Action]:
    return parser._actions  # pyright: ignore[reportPrivateUsage] - argparse tells it nowhere else


def given(
    cls: type, arguments: argparse.Namespace, environ: Mapping[str, str] | None = None
) -> dict[str, Any]:
    """What flags and file say of `cls`, without what the environment says instead of the file: to
    be passed on to another process."""
    names = {spec.name for spec in fields(cls) if "help" in spec.metadata}
    told = {
        name: value
        for name, value in _of_file(arguments).items()
        if name in names and _variable(name) not in (environ or {})
    }
    return told | {name: value for name, value in vars(arguments).items() if name in names}


def load(
    cls: type[T],
    arguments: argparse.Namespace | Mapping[str, Any] | None = None,
    environ: Mapping[str, str] | None = None,
) -> T:
    """Build `cls` from its layers.

    Raises ConfigError naming the option, its source and the bad value.
    """
    types_of = typing.get_type_hints(cls)
    names = {spec.name for spec in fields(cls) if "help" in spec.metadata}  # type: ignore[arg-type]
    values: dict[str, Any] = {}
    if isinstance(arguments, argparse.Namespace):
        for name, value in _of_file(arguments).items():
            if name in names:
                values[name] = _convert(name, types_of[name], value, str(arguments.config))
    for name in names:
        variable = _variable(name)
        if environ is not None and variable in environ:
            values[name] = _convert(name, types_of[name], environ[variable], variable)
    flags = arguments if isinstance(arguments, Mapping) else vars(arguments or argparse.Namespace())
    for name, value in flags.items():
        if name in names:
            values[name] = _convert(name, types_of[name], value, "--" + name.replace("_", "-"))
    for spec in fields(cls):  # type: ignore[arg-type]
        if spec.name in values and isinstance(values[spec.name], str):
            meant = spec.metadata.get("meant", {})
            values[spec.name] = meant.get(values[spec.name], values[spec.name])
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


def _variable(name: str) -> str:
    return "BATON_" + name.upper()


def _of_file(arguments: argparse.Namespace) -> dict[str, Any]:
    """What the file says of options that dataclasses declare."""
    file: Path | None = getattr(arguments, "config", None)
    known: set[str] = getattr(arguments, _LAYERED, set())
    told = {} if file is None else _read_file(file)
    return {name: value for name, value in told.items() if name in known}


def _set_defaults(parser: argparse.ArgumentParser, file: Path) -> None:
    """Let the file's values be the defaults of what `load` does not read."""
    layered: set[str] = parser.get_default(_LAYERED) or set()
    actions = {each.dest: each for each in _actions(parser)}
    for name, value in _read_file(file).items():
        if name in layered:
            continue
        action = actions.get(name)
        if action is None or name in ("help", "config"):
            raise ConfigError(f"{file}: unknown option {name!r}", field=name)
        if action.choices is not None and value not in action.choices:
            allowed = ", ".join(map(str, action.choices))
            raise ConfigError(f"{file}: {name}: {value!r} is none of {allowed}", field=name)
        action.required = False
        # argparse reads a default that is text as it reads what follows a flag.
        plain = isinstance(value, bool | list) or value is None
        parser.set_defaults(**{name: value if plain else str(value)})


def _read_file(path: Path) -> dict[str, Any]:
    """The file's values by option; its keys may be flags' names, with dashes."""
    try:
        text = path.read_text()
        told: object = tomllib.loads(text) if path.suffix == ".toml" else yaml.safe_load(text)
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError, yaml.YAMLError) as error:
        raise ConfigError(f"cannot read {path}: {error}", field="config") from error
    if told is None:  # nothing but comments
        return {}
    if not isinstance(told, dict):
        raise ConfigError(f"{path} must hold options and their values", field="config")
    values = cast("dict[object, Any]", told)
    return {str(key).replace("-", "_"): value for key, value in values.items()}


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
        if kind in (int, float, str, Path) and isinstance(value, bool | list | dict):
            raise TypeError(value)  # a file's: Python would make something of it
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
