"""Configuration: one frozen dataclass per component, filled from layers.

Each layer overrides the one before: defaults < file < environment (`BATON_` + NAME) < flags.

Flags are generated from the dataclass, whose fields are declared with `option(default, help)`. Each
`__main__` reads its configuration once; no other code reads os.environ. Unknown keys and bad values
raise ConfigError. The file is the one that `--config FILE` names, in YAML or TOML. `load` reads the
options that dataclasses declare from it, `parse` all others.
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

from baton.protocol.errors import ConfigError

T = TypeVar("T")
AUTO: Final = "auto"  # of an option: it is chosen by what is found, as the option's help says
# A parser's default that holds the names which `load` reads; parsed namespaces have it, too.
_LAYERED: Final = "options_of_dataclasses"
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
    """Return a dataclass field that becomes the flag `--field-name`.

    `choices`: the values that are allowed; a mapping also has other spellings of them (see
    `spelled`). `also`: further names of the flag. `secret`: the value comes from environment or
    file only, never from a flag. `several`: the flag of a tuple takes several values in a row.
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
    """Return the choices of an option. `others` maps another spelling to its choice."""
    return {each: each for each in choices} | others


class Flags(Protocol):
    """A parser, or an argument group of one."""

    @property
    def add_argument(self) -> Callable[..., object]: ...
    @property
    def set_defaults(self) -> Callable[..., object]: ...
    @property
    def get_default(self) -> Callable[[str], Any]: ...


def add_options(parser: Flags, cls: type, only: Collection[str] | None = None) -> None:
    """Add a flag per option of `cls`, or only for those in `only`.

    A flag that is not given leaves no attribute, so that the lower layers apply.
    """
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
                # The help shows the choices; other spellings are accepted.
                keywords["choices"] = tuple(meta["meant"])
            if 0 < len(meta["choices"]) <= MOST_SHOWN:
                keywords["metavar"] = "{" + ",".join(meta["choices"]) + "}"
            else:
                keywords["metavar"] = spec.name.upper()
            parser.add_argument(*names, **keywords)


def add_config(parser: Flags) -> None:
    """Add the flag `--config FILE`. May be called twice."""
    if parser.get_default(_LAYERED) is None:
        text = "YAML or TOML file of options, by their flags' names; flags and environment go first"
        parser.add_argument("--config", type=Path, metavar="FILE", help=text)
        parser.set_defaults(**{_LAYERED: set[str]()})


def parse(parser: argparse.ArgumentParser, argv: Sequence[str]) -> argparse.Namespace:
    """Parse `argv`; options that no dataclass declares get defaults from the --config file.

    `load` reads the file's other options. Raises ConfigError for a file that cannot be read, has an
    unknown option, or has a bad value.
    """
    first = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    first.add_argument("--config", type=Path)
    file: Path | None = first.parse_known_args(argv)[0].config
    if file is not None:
        _set_defaults(_chosen(parser, argv), file)
    return parser.parse_args(argv)


def _chosen(parser: argparse.ArgumentParser, argv: Sequence[str]) -> argparse.ArgumentParser:
    """Return the parser of the command in `argv`, or `parser` itself if it has no commands."""
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
    """Return what flags and file set for `cls`, to pass it on to another process.

    Values of the file that the environment overrides are left out.
    """
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
    """Raise ConfigError for a value outside an option's choices.

    argparse checks flags; this checks values of a file and of the environment.
    """
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
    """Return the file's values for options that dataclasses declare."""
    file: Path | None = getattr(arguments, "config", None)
    known: set[str] = getattr(arguments, _LAYERED, set())
    told = {} if file is None else read_file(file)
    return {name: value for name, value in told.items() if name in known}


def _set_defaults(parser: argparse.ArgumentParser, file: Path) -> None:
    """Make the file's values the parser's defaults for the options that `load` does not read."""
    layered: set[str] = parser.get_default(_LAYERED) or set()
    actions = {each.dest: each for each in _actions(parser)}
    for name, value in read_file(file).items():
        if name in layered:
            continue
        action = actions.get(name)
        if action is None or name in ("help", "config"):
            raise ConfigError(f"{file}: unknown option {name!r}", field=name)
        if action.choices is not None and value not in action.choices:
            allowed = ", ".join(map(str, action.choices))
            raise ConfigError(f"{file}: {name}: {value!r} is none of {allowed}", field=name)
        action.required = False
        # argparse parses a default that is a string like a flag's value.
        plain = isinstance(value, bool | list) or value is None
        parser.set_defaults(**{name: value if plain else str(value)})


def read_file(path: Path, field: str = "config") -> dict[str, Any]:
    """Return the values of a YAML or TOML file by name; its keys may have dashes, like flags.

    Raises ConfigError, about the option `field`, for a file that cannot be read.
    """
    import yaml  # for a file only: it would take time of every start

    try:
        text = path.read_text()
        told: object = tomllib.loads(text) if path.suffix == ".toml" else yaml.safe_load(text)
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError, yaml.YAMLError) as error:
        raise ConfigError(f"cannot read {path}: {error}", field=field) from error
    if told is None:  # only comments
        return {}
    if not isinstance(told, dict):
        raise ConfigError(f"{path} must hold options and their values", field=field)
    values = cast("dict[object, Any]", told)
    return {str(key).replace("-", "_"): value for key, value in values.items()}


def _convert(name: str, kind: Any, value: Any, source: str) -> Any:
    """Convert text (or a file's value) to `kind`. None stays None if the type allows it."""
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
            raise TypeError(value)  # a file's value that Python would convert silently
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
