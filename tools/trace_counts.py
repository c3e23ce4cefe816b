"""Files, functions and calls of one traced request, by stage: arithmetic over a list of entries.

A stage is found by a file's path alone: its first folder, and within `baton/` its second one if
that is `engine` or `node`. So modules may move into sub-packages, and the stages stay.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum


class Stage(Enum):
    """Where a file belongs; in the order in which a request comes by."""

    ROUTER = "router"
    NODE = "both nodes (baton/node)"
    PREFILL = "prefill node"
    ENGINE = "engine"
    KV_TRANSFER = "kv_transfer"
    DECODE = "decode node"
    SHARED = "baton, shared"


FOLDERS: dict[tuple[str, ...], Stage] = {
    ("router",): Stage.ROUTER,
    ("prefill_node",): Stage.PREFILL,
    ("decode_node",): Stage.DECODE,
    ("kv_transfer",): Stage.KV_TRANSFER,
    ("baton", "engine"): Stage.ENGINE,
    ("baton", "node"): Stage.NODE,
    ("baton",): Stage.SHARED,
}
# The node hears of a request in the first file of one of these.
OF_NODES = frozenset({Stage.NODE, Stage.PREFILL})


@dataclass(frozen=True, slots=True)
class Entry:
    """A function that was entered; a coroutine or generator that goes on is not entered again."""

    file: str  # relative to the repository, with slashes
    function: str  # its qualified name

    def __str__(self) -> str:
        return f"{self.file}:{self.function}"


@dataclass(frozen=True, slots=True)
class Count:
    """How much of our code was entered. Functions are told apart by file and qualified name."""

    files: int
    functions: int
    calls: int


@dataclass(frozen=True, slots=True)
class Counts:
    """Of one request. The router's files may be on both sides of `heard`."""

    stages: dict[Stage, Count]
    router_before: Count  # until a node hears of the request
    router_after: Count
    whole: Count


def stage_of(file: str) -> Stage:
    """Raises KeyError for a file that belongs to none."""
    folders = tuple(file.split("/")[:-1])
    return FOLDERS.get(folders[:2]) or FOLDERS[folders[:1]]


def count(entries: Sequence[Entry]) -> Count:
    functions = set(entries)
    return Count(len({each.file for each in functions}), len(functions), len(entries))


def heard(entries: Sequence[Entry]) -> int:
    """Index of the first entry in which a node hears of the request; their number if none does."""
    at_nodes = (index for index, each in enumerate(entries) if stage_of(each.file) in OF_NODES)
    return next(at_nodes, len(entries))


def counts(entries: Sequence[Entry]) -> Counts:
    """By stage, of the entries of one request in their order."""

    def of(stage: Stage, part: Sequence[Entry]) -> Count:
        return count([each for each in part if stage_of(each.file) is stage])

    border = heard(entries)
    return Counts(
        {stage: of(stage, entries) for stage in Stage},
        of(Stage.ROUTER, entries[:border]),
        of(Stage.ROUTER, entries[border:]),
        count(entries),
    )


def first_entries(entries: Sequence[Entry]) -> dict[Stage, list[Entry]]:
    """Every function entered, by stage, in the order of its first entry."""
    found: dict[Stage, list[Entry]] = {stage: [] for stage in Stage}
    for each in dict.fromkeys(entries):
        found[stage_of(each.file)].append(each)
    return found
