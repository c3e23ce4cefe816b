"""Which of our classes stand for a request on its way: sorted out of all that were made for it.

Made while the request was served, an object is

    a carrier     one of its fields holds the request itself (its id, its prompt as text or as
                  tokens) or a piece of its answer, or is a carrier
    a row         a carrier that is made anew for each step or for each frame: one function made as
                  many objects of its class as the answer has tokens, or more (an engine's step
                  yields one token); or its class is one of kv_transfer.protocol, whose values are
                  the frames of a transfer's session and what the session does about each
    a side-car    a carrier's field or collection holds it, or a side-car's
    a batch       holds carriers, but only in collections
    another       none of these: what nodes report of themselves, what a step is made of

Enums, exceptions and protobuf's messages are not looked at. A type is what at least one object of
it is, the first of these that fits; carriers are sorted into carriers and rows by class.
"""

from __future__ import annotations

import array
from collections import Counter, deque
from collections.abc import Iterable, Sequence
from collections.abc import Set as AnySet
from dataclasses import dataclass, field
from enum import Enum
from functools import partial
from types import MethodType
from typing import Any

FRAMES = "kv_transfer.protocol."  # the package whose carriers are rows
DEPTH = 4  # of plain collections within a field
MOST = 512  # elements of a collection that are looked at


class Kind(Enum):
    CARRIER = "carrier"
    ROW = "row"
    SIDE_CAR = "side-car"
    BATCH = "batch"
    OTHER = "other"


@dataclass(frozen=True, slots=True)
class Marks:
    """What only this request holds."""

    texts: Sequence[str]  # its id, a phrase of its prompt
    prompt_ids: tuple[int, ...]
    pieces: tuple[str, ...] = ()  # of the answer's text: a field that is one of them, exactly

    def on(self, value: object, depth: int = DEPTH) -> bool:
        """Whether a plain value, or a collection of them, bears one."""
        if isinstance(value, str):
            return value in self.pieces or any(text in value for text in self.texts)
        if isinstance(value, (bytes, bytearray)):
            return any(text.encode() in value for text in self.texts)
        if isinstance(value, (list, tuple, array.array)):
            begins = tuple(value[: len(self.prompt_ids)])
            if begins and begins == self.prompt_ids:
                return True
        return depth > 0 and any(self.on(each, depth - 1) for each in elements(value))


@dataclass(slots=True)
class Made:
    """One object: where it was made, and what has been seen in its fields."""

    object: object
    file: str
    function: str
    marked: set[str] = field(default_factory=set[str])  # fields
    holds: dict[str, set[int]] = field(default_factory=dict[str, set[int]])  # field: ids
    collects: dict[str, set[int]] = field(default_factory=dict[str, set[int]])

    @property
    def name(self) -> str:
        return type_name(type(self.object))

    def look(self, marks: Marks, own: AnySet[str]) -> None:
        """Note what its fields hold now; `own`: first folders of modules whose classes count."""
        for name, value in fields(self.object):
            if marks.on(value):
                self.marked.add(name)
            for each in held(value, own):
                self.holds.setdefault(name, set()).add(id(each))
            for each in elements(value):
                for one in held(each, own):
                    self.collects.setdefault(name, set()).add(id(one))


@dataclass(frozen=True, slots=True)
class TypeReport:
    """One class of ours that was made for the request."""

    name: str
    kind: Kind
    num_made: int
    made_in: tuple[str, ...]  # file:function
    marked: tuple[str, ...]  # fields that hold the request itself
    wraps: tuple[str, ...]  # field: class, of carriers and side-cars


def type_name(kind: type) -> str:
    return f"{kind.__module__}.{kind.__qualname__}"


def fields(instance: object) -> list[tuple[str, object]]:
    """Names and values: slots, dictionary, msgspec's and named tuples' fields."""
    kind = type(instance)
    names: list[str] = [*getattr(kind, "__struct_fields__", ()), *getattr(kind, "_fields", ())]
    for base in kind.__mro__:
        slots = base.__dict__.get("__slots__", ())
        names += [slots] if isinstance(slots, str) else slots
    found: dict[str, object] = {}
    for name in names:
        if name not in ("__dict__", "__weakref__") and hasattr(instance, name):
            found[name] = getattr(instance, name)
    found |= getattr(instance, "__dict__", {})
    return list(found.items())


def elements(value: object) -> list[Any]:
    """Of a plain collection; keys of a dictionary count."""
    if isinstance(value, dict):
        return [*list(value.keys())[:MOST], *list(value.values())[:MOST]]
    if type(value) in (list, tuple, set, frozenset, deque):
        return list(value)[:MOST]  # pyright: ignore[reportArgumentType]
    return []


def held(value: object, own: AnySet[str]) -> list[object]:
    """The object of ours that a value is, or calls back."""
    if isinstance(value, MethodType):
        return held(value.__self__, own)
    if isinstance(value, partial):
        return [one for each in (value.func, *value.args) for one in held(each, own)]
    return [value] if is_own(type(value), own) else []


def is_own(kind: type, own: AnySet[str]) -> bool:
    if issubclass(kind, (type, Enum, BaseException)):
        return False
    return kind.__module__.split(".")[0] in own


def kinds(made: Sequence[Made]) -> list[Kind]:
    """What each object is."""
    index = {id(each.object): number for number, each in enumerate(made)}

    def known(ids: Iterable[set[int]]) -> set[int]:
        return {index[one] for each in ids for one in each if one in index}

    holds = [known(each.holds.values()) for each in made]
    collects = [known(each.collects.values()) for each in made]
    carriers = {number for number, each in enumerate(made) if each.marked}
    while more := {n for n, held in enumerate(holds) if held & carriers} - carriers:
        carriers |= more
    batches = {n for n, within in enumerate(collects) if within & carriers} - carriers
    aside: set[int] = set()
    found = carriers
    while found := set().union(*(holds[n] | collects[n] for n in found)) - carriers - aside:
        aside |= found

    def kind(number: int) -> Kind:
        if number in carriers:
            return Kind.CARRIER
        if number in batches:
            return Kind.BATCH
        return Kind.SIDE_CAR if number in aside else Kind.OTHER

    return [kind(number) for number in range(len(made))]


def is_row(made: Sequence[Made], num_tokens: int) -> bool:
    """Whether a class of carriers, of which these are all objects, is one of rows."""
    makers = Counter((each.file, each.function) for each in made)
    return made[0].name.startswith(FRAMES) or max(makers.values()) >= num_tokens


def report(made: Sequence[Made], num_tokens: int) -> list[TypeReport]:
    """Every class, in the order in which its first object was made. `num_tokens`: of the answer."""
    sorted_out = kinds(made)
    names = {id(each.object): each.name.rpartition(".")[2] for each in made}
    first = list(Kind)
    reports: list[TypeReport] = []
    for name in dict.fromkeys(each.name for each in made):
        ours = [
            (each, kind) for each, kind in zip(made, sorted_out, strict=True) if each.name == name
        ]
        wraps = {
            f"{field_name}: {names[one]}"
            for each, _ in ours
            for field_name, ids in [*each.holds.items(), *each.collects.items()]
            for one in ids
            if one in names and one != id(each.object)
        }
        kind = min((kind for _, kind in ours), key=first.index)
        if kind is Kind.CARRIER and is_row([each for each, _ in ours], num_tokens):
            kind = Kind.ROW
        reports.append(
            TypeReport(
                name,
                kind,
                len(ours),
                tuple(dict.fromkeys(f"{each.file}:{each.function}" for each, _ in ours)),
                tuple(sorted({one for each, _ in ours for one in each.marked})),
                tuple(sorted(wraps)),
            )
        )
    return reports
