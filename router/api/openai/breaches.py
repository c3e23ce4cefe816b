"""Error messages for refused bodies: they name the client's field, and its bounds in words.

The bounds come from the types by which msgspec refused the body (router/api/openai/fields.py). If
orjson refused it, the body is parsed again to find the field. Pure.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Mapping
from typing import Any, Final, Literal, cast, get_args, get_origin

import msgspec

from baton.protocol.errors import InvalidRequest

_PLACE: Final = re.compile(r"^(`key` in )?`\$\.?([^`]*)`$")
_MISSING: Final = re.compile(r"missing required field `([^`]+)`")
_BREACH: Final = re.compile(r"Expected `(\w+)` (of length )?(?:[<>]=?) (\S+)")
_UNITS: Final = {"array": "items", "object": "pairs", "str": "characters"}

LARGEST: Final = 2**64 - 1
SMALLEST: Final = -(2**63)


def refusal(
    error: msgspec.ValidationError, kind: type[msgspec.Struct], content: Mapping[str, Any]
) -> InvalidRequest:
    """Return the error for `content`, which msgspec could not convert to `kind`."""
    said, _, place = str(error).rpartition(" - at ")
    found = _PLACE.match(place)
    text, path = (str(error), "") if found is None else (said, found[2])
    breach, value = _BREACH.fullmatch(text), _value_at(content, path)
    if breach is not None:
        where = path if found is None or not found[1] else f"a key of {path}"
        # For a bad item of a list, `field` is the list; the message names the item.
        message = _breach(breach, where, _hints(kind, path), value) or f"{where}: {text}"
        return InvalidRequest(message, field=re.sub(r"\[[^\]]*\]$", "", path))
    if text.startswith("Invalid enum value"):
        known = [name for hint in _hints(kind, path) for name in _choices(hint)]
        return InvalidRequest(f"{path} must be one of {', '.join(known)}", field=path)
    if isinstance(value, float) and abs(value) >= 2**63:  # orjson reads no integer so large
        text = "a number of more than 64 bits"
    missing = _MISSING.search(text)
    parts = [path, "" if missing is None else missing[1]]
    field = ".".join(part for part in parts if part) or None
    return InvalidRequest(f"{field}: {text}" if field else text, field=field)


def _breach(breach: re.Match[str], where: str, hints: list[Any], value: object) -> str | None:
    """Return a bound in words, or None if no type in `hints` has that bound."""
    kind, of_length, limit = breach[1], breach[2], float(breach[3])
    for meta in (hint for hint in hints if isinstance(hint, msgspec.Meta)):
        if of_length and limit in (meta.min_length, meta.max_length):
            return f"{where}{_length(meta, _UNITS[kind])}"
        if not of_length and limit in (meta.ge, meta.gt, meta.le):
            got = f", got {value}" if isinstance(value, int | float) else ""
            return f"{where} must be {_range(meta)}{got}"
    return None


def _length(meta: msgspec.Meta, unit: str) -> str:
    if meta.max_length is None:
        return " must not be empty" if meta.min_length == 1 else f": at least {meta.min_length}"
    most = f"{meta.max_length} {unit}"
    return f": at most {most}" if meta.min_length is None else f": {meta.min_length} to {most}"


def _range(meta: msgspec.Meta) -> str:
    if meta.gt is not None:
        return f"above {meta.gt} and at most {meta.le}"
    return f"at least {meta.ge}" if meta.le is None else f"between {meta.ge} and {meta.le}"


def _hints(kind: type[msgspec.Struct], path: str) -> list[Any]:
    """Return the type of the field at `path`, with all types that it consists of. The fields of a
    struct in it are left out."""
    parts: list[Any] = [kind]
    for name in re.findall(r"(?:^|\.)(\w+)", path):
        structs = (part for part in parts if isinstance(part, type))
        fields = {
            field.encode_name: field.type
            for struct in structs
            if issubclass(struct, msgspec.Struct)
            for field in msgspec.structs.fields(struct)
        }
        parts = list(_parts(fields.get(name)))
    return parts


def _parts(hint: Any) -> Iterator[Any]:
    yield hint
    for each in () if get_origin(hint) is Literal else get_args(hint):
        yield from _parts(each)


def _choices(hint: Any) -> Iterator[str]:
    if get_origin(hint) is Literal:
        yield from (str(name) for name in get_args(hint))


def _value_at(content: object, path: str) -> object:
    """Return the value at a path, or None if there is no such value."""
    for name in re.findall(r"[^.\[\]]+", path):
        if isinstance(content, list) and name.isdigit():
            content = cast("list[object]", content)[int(name)]
        else:
            mapping = cast("dict[str, object]", content) if isinstance(content, dict) else {}
            content = mapping.get(name)
    return content


def fault_of(raw: bytes) -> tuple[str, str] | None:
    """Find the field for which orjson refused a body (NaN, a lone surrogate, a huge number).

    Return its path, like `messages[0].content`, and what is wrong there; None if the body is no
    JSON at all. The values that are parsed here are not used for anything else."""
    try:
        content: object = json.loads(raw)
    except (ValueError, RecursionError):
        return None
    waiting: list[tuple[str, object]] = [("", content)]
    while waiting:
        path, value = waiting.pop()
        what = _json_fault(value)
        if what is not None:
            return path, what
        if isinstance(value, dict):
            fields = cast("dict[str, object]", value)
            if any(_json_fault(name) for name in fields):
                return path, "has a name that is not valid Unicode"
            waiting += [(f"{path}.{name}" if path else name, each) for name, each in fields.items()]
        elif isinstance(value, list):
            items = cast("list[object]", value)
            waiting += [(f"{path}[{index}]", each) for index, each in enumerate(items)]
    return None


def _json_fault(value: object) -> str | None:
    if isinstance(value, float) and not math.isfinite(value):
        return "must be a finite number"
    if isinstance(value, int) and not SMALLEST <= value <= LARGEST:
        return "is a number of more than 64 bits"
    if isinstance(value, str) and not value.isascii():
        try:
            value.encode()
        except UnicodeEncodeError:
            return "is not valid Unicode (a lone surrogate)"
    return None
