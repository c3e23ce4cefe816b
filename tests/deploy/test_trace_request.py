"""tools.trace_request: how much code one streamed chat goes through, and in how many classes."""

from __future__ import annotations

import json
import subprocess
import sys
from collections import deque
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from kv_transfer.protocol.messages import Fetch
from tools.trace_counts import Count, Entry, Stage, counts, first_entries, stage_of
from tools.trace_types import Kind, Made, Marks, report

ROOT = Path(__file__).resolve().parents[2]
TRACE_S = 240.0
# Ceilings: they only go down. Behind each: what was measured when it was set -> where the design
# wants it. What is measured does not depend on how busy the machine is; the room is for fixes.
FILES = {
    "router_before": 48,  # 46
    "router": 50,  # 48 -> 30 (docs/adr/0009)
    "whole": 147,  # 146: 4 for images, checkpoints and reservations -> 90
}
FUNCTIONS = {
    # 259: 5 for what nodes tell of their times, 1 for images, 8 for tokens shown without a task;
    # they are asked in place of 8 generators of each token -> 250
    "router": 260,
    "whole": 921,  # 921: 19 for the times of nodes, 25 for recurrent states and draft heads, 2 for
    # logits that the compiled step makes, 1 for tokens that are looked up in a head's panels, 8 for
    # tokens shown without a task, 6 for rows that the last layer does not compute
}
CALLS = {
    # 541: 17 for the times of nodes, 8 for the first and the last byte, 7 for tokens shown without
    # a task: the traced chat is so short that it pays for the way and hardly takes it
    "router": 541,
}
# Of all stages together: carriers and side-cars are what stands for the request, rows are what each
# step and each frame makes of it (tools/trace_types.py). -> 12 without the rows (docs/adr/0009)
# Carriers and rows together: two steps that come at once are one object, and then its class is a
# carrier and no row.
TYPES = {
    # 47 with the times of nodes, prompts that may hold images, and a trace that leads to its reader
    # (tokens shown without a task): it and the output stream then count, though no class is new
    "carrier or row": 47,
    "side-car": 16,  # 16
}
ROUTER_TYPES = {
    # 17 with the entry of its timeline, the prompt with its images, the trace's way to its reader
    "carrier or row": 17,
    "side-car": 6,  # 6
}


@pytest.fixture(scope="module")
def traced() -> dict[str, Any]:
    """In a process of its own: nobody else's threads, imports or caches."""
    command = [sys.executable, "-m", "tools.trace_request", "--json"]
    run = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, timeout=TRACE_S, check=False
    )
    assert run.returncode == 0, run.stderr
    return json.loads(run.stdout)


def counted(traced: dict[str, Any], part: str) -> dict[str, int]:
    return traced[part] if part in traced else traced["stages"][part]


def on_the_way(num_types: dict[str, int]) -> dict[str, int]:
    """How many classes of one stage stand for the request, by the names of TYPES."""
    return {
        "carrier or row": num_types["carrier"] + num_types["row"],
        "side-car": num_types["side-car"],
    }


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.parametrize(
    ("what", "ceilings"), [("files", FILES), ("functions", FUNCTIONS), ("calls", CALLS)]
)
def test_code_on_the_way(traced: dict[str, Any], what: str, ceilings: dict[str, int]) -> None:
    found = {part: counted(traced, part)[what] for part in ceilings}
    above = {part: number for part, number in found.items() if number > ceilings[part]}
    assert not above, f"{what} above {ceilings}: `python -m tools.trace_request --list` names them"


@pytest.mark.slow
@pytest.mark.long
def test_types_on_the_way(traced: dict[str, Any]) -> None:
    of_stages = {stage: on_the_way(each) for stage, each in traced["num_types"].items()}
    router = of_stages["router"]
    assert all(router[kind] <= most for kind, most in ROUTER_TYPES.items()), router
    whole = {kind: sum(each[kind] for each in of_stages.values()) for kind in TYPES}
    assert all(whole[kind] <= most for kind, most in TYPES.items()), whole


@pytest.mark.slow
@pytest.mark.long
def test_it_is_one_whole_chat_and_nothing_else(traced: dict[str, Any]) -> None:
    assert len(traced["answer"]) == 4
    assert traced["idle"] == []
    assert all(each["files"] > 0 for each in traced["stages"].values()), "every stage was there"
    assert counted(traced, "router_before")["files"] <= counted(traced, "router")["files"]


def test_stages_are_found_by_folders() -> None:
    assert stage_of("router/request/dispatch.py") is Stage.ROUTER
    assert stage_of("baton/engine/core/engine.py") is Stage.ENGINE
    assert stage_of("baton/node/shell.py") is Stage.NODE
    assert stage_of("baton/protocol/wire.py") is Stage.SHARED
    assert stage_of("baton/protocol/wire.py") is Stage.SHARED
    with pytest.raises(KeyError):
        stage_of("tests/cluster.py")


def test_the_router_is_counted_before_and_after_a_node_hears() -> None:
    body, send, show = (Entry("router/a.py", name) for name in ("body", "send", "show"))
    node, wire = Entry("baton/node/b.py", "serve"), Entry("baton/c.py", "read")
    entries = [body, send, wire, send, node, send, show, show]
    found = counts(entries)
    assert found.router_before == Count(files=1, functions=2, calls=3)
    assert found.router_after == Count(files=1, functions=2, calls=3)
    assert found.stages[Stage.ROUTER] == Count(files=1, functions=3, calls=6)
    assert found.whole == Count(files=3, functions=5, calls=8)
    assert first_entries(entries)[Stage.ROUTER] == [body, send, show]
    assert counts(entries[:4]).router_after == Count(0, 0, 0), "no node has heard of it"


@dataclass
class Asked:
    id: str
    limits: Limits | None = None


@dataclass(frozen=True, slots=True)
class Limits:
    num_tokens: int = 4
    words: list[Words] = field(default_factory=list["Words"])


@dataclass(frozen=True, slots=True)
class Words:
    texts: tuple[str, ...] = ()
    ids: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Wrapper:
    asked: object


def kinds_of(*objects: object, num_tokens: int = 4) -> list[Kind]:
    made = [Made(each, "a.py", "f") for each in objects]
    for each in made:
        each.look(Marks(("request-7",), (1, 2, 3), (" an",)), {"tests", "kv_transfer"})
    return [each.kind for each in report(made, num_tokens)]


def test_what_holds_the_request_carries_it() -> None:
    asked = Asked("chat-request-7")
    assert kinds_of(asked, Wrapper(asked)) == [Kind.CARRIER, Kind.CARRIER]
    assert kinds_of(asked, Wrapper(partial(print, asked))) == [Kind.CARRIER, Kind.CARRIER]
    assert kinds_of(Words(ids=(1, 2, 3, 4))) == [Kind.CARRIER]
    assert kinds_of(Words(texts=(" an",))) == [Kind.CARRIER]
    assert kinds_of(Words((" and",), (1, 2))) == [Kind.OTHER]


def test_a_carrier_for_each_token_is_a_row() -> None:
    asked = [Asked("request-7", Limits()) for _ in range(4)]
    assert kinds_of(*asked) == [Kind.ROW]
    assert kinds_of(*asked, asked[0].limits) == [Kind.ROW, Kind.SIDE_CAR]
    assert kinds_of(*asked, num_tokens=5) == [Kind.CARRIER]
    assert kinds_of(*(Words() for _ in range(4))) == [Kind.OTHER], "no carrier"


def test_two_makers_of_a_class_make_no_row() -> None:
    made = [Made(Asked("request-7"), "a.py", name) for name in ("f", "g") for _ in range(3)]
    for each in made:
        each.look(Marks(("request-7",), ()), {"tests"})
    assert [each.kind for each in report(made, num_tokens=4)] == [Kind.CARRIER]
    assert [each.kind for each in report(made, num_tokens=3)] == [Kind.ROW]


def test_what_a_transfers_session_sends_is_a_row() -> None:
    assert kinds_of(Fetch(1, b"secret", "request-7", 1)) == [Kind.ROW]


def test_what_a_carrier_holds_is_a_side_car() -> None:
    words = Words()
    limits = Limits(words=[words])
    assert kinds_of(Asked("request-7", limits), limits, words) == [
        Kind.CARRIER,
        Kind.SIDE_CAR,
        Kind.SIDE_CAR,
    ]
    assert kinds_of(Asked("request-8", limits), limits, words) == [Kind.OTHER] * 3


def test_what_collects_carriers_is_a_batch() -> None:
    asked = Asked("request-7")
    assert kinds_of(asked, Wrapper(deque([asked]))) == [Kind.CARRIER, Kind.BATCH]


def test_a_type_is_reported_once_with_what_it_wraps() -> None:
    first, second = Asked("request-7"), Asked("request-7", Limits())
    made = [Made(first, "a.py", "f"), Made(second, "a.py", "g"), Made(second.limits, "a.py", "f")]
    for each in made:
        each.look(Marks(("request-7",), ()), {"tests"})
    asked, limits = report(made, num_tokens=4)
    assert asked.name == f"{__name__}.Asked"
    assert (asked.num_made, asked.made_in) == (2, ("a.py:f", "a.py:g"))
    assert (asked.marked, asked.wraps) == (("id",), ("limits: Limits",))
    assert limits.kind is Kind.SIDE_CAR
