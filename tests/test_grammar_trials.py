"""Grammars tried out in a child: what is refused, what is given up; others never notice."""

from __future__ import annotations

import gc
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from baton.guided.trials import TRIAL, GrammarTrials
from baton.protocol.errors import InternalError, InvalidRequest, Unavailable, UnsupportedFeature
from baton.protocol.sampling import GuidedDecoding
from baton.runtime.children import ChildBudget
from tests.guided_cases import CHOICES, GBNF, SCHEMAS
from tests.waiting import WAIT_S

EASY = GuidedDecoding("regex", "[0-9]{3}")
# 100 s and more in one call of the library; in it, no thread can be stopped.
ENDLESS = GuidedDecoding("json_schema", json.dumps({"type": "integer", "multipleOf": 9999991}))
QUICK = ChildBudget(cpu_s=0.3)


@pytest.fixture(scope="module")
def trials() -> Iterator[GrammarTrials]:
    made = GrammarTrials(budget=QUICK)
    yield made
    made.close()
    made.close()


GOOD = [
    EASY,
    GuidedDecoding("json_object", ""),
    GuidedDecoding("choice", json.dumps(CHOICES)),
    GuidedDecoding("ebnf", GBNF),
    GuidedDecoding("regex", r"\n+"),  # white space alone
    GuidedDecoding("regex", "é+"),
    GuidedDecoding("json_schema", "{}", starts_after="</think>"),
    *(GuidedDecoding("json_schema", json.dumps(schema)) for schema in SCHEMAS.values()),
]


@pytest.mark.parametrize("guided", GOOD, ids=lambda guided: guided.grammar[:40])
def test_what_can_be_followed(trials: GrammarTrials, guided: GuidedDecoding) -> None:
    trials.run(guided)
    assert trials.children.num_started == 1


BAD: list[tuple[GuidedDecoding, str]] = [
    (GuidedDecoding("regex", "("), "regex"),
    (GuidedDecoding("regex", "(a{1000}){1000}"), "too many expressions"),
    (GuidedDecoding("regex", "^$"), "nothing but an empty answer"),
    (GuidedDecoding("ebnf", "root ::= "), "nothing but an empty answer"),
    (GuidedDecoding("ebnf", 'root ::= ""'), "nothing but an empty answer"),
    (GuidedDecoding("ebnf", "   \n"), "Empty grammar"),
    (GuidedDecoding("ebnf", ""), "the grammar is empty"),
    (GuidedDecoding("json_schema", '{"$ref": "#"}'), "no text matches the grammar"),
    (GuidedDecoding("json_schema", "[]"), "object or a boolean"),
    # Built without a word; the limit is met within the text.
    (GuidedDecoding("json_schema", json.dumps(
        {"type": "object", "properties": {f"p{i}": {"type": "string"} for i in range(1500)}}
    )), "items"),
    (ENDLESS, "too long to build"),
]  # fmt: skip


@pytest.mark.parametrize(("guided", "why"), BAD, ids=lambda value: str(value)[:40])
def test_what_is_refused_is_refused_alone(guided: GuidedDecoding, why: str) -> None:
    trials = GrammarTrials(budget=ChildBudget(cpu_s=0.8 if guided is ENDLESS else 30.0))
    try:
        with pytest.raises(InvalidRequest, match=why) as caught:
            trials.run(guided)
        assert caught.value.field == "guided"
        assert "verbose" not in caught.value.message
        trials.run(EASY)  # the next one is none the worse
    finally:
        trials.close()
    assert (trials.children.num_given_up, trials.children.num_started) == (
        (1, 2) if guided is ENDLESS else (0, 1)
    )


def test_what_is_not_supported_is_said_so(trials: GrammarTrials) -> None:
    with pytest.raises(UnsupportedFeature):
        trials.run(GuidedDecoding("structural_tag", '{"format": {"type": "exclude_token"}}'))


def test_too_much_memory_ends_one_child() -> None:
    trials = GrammarTrials(budget=ChildBudget(cpu_s=20.0, memory_bytes=150 << 20))
    with pytest.raises(InvalidRequest, match="too much memory"):
        trials.run(ENDLESS)
    trials.run(EASY)
    trials.close()
    assert (trials.children.num_given_up, trials.children.num_started) == (1, 2)


def test_a_child_that_does_not_answer_is_given_up() -> None:
    """Its CPU is not used, so only the wall clock can tell; nor is the grammar to blame."""
    mute = "import sys; print(end='\\0' * 8, flush=True); sys.stdin.read()"
    trials = GrammarTrials([sys.executable, "-c", mute], ChildBudget(wall_s=0.2))
    with pytest.raises(Unavailable, match="too busy") as caught:
        trials.run(EASY)
    assert (caught.value.field, caught.value.retry_after_s) == ("guided", 5)
    assert trials.children.num_given_up == 1
    trials.close()


def test_without_a_child_nobody_is_blamed() -> None:
    with pytest.raises(InternalError, match="could start"):
        GrammarTrials([sys.executable, "-c", "pass"]).run(EASY)


def test_a_child_that_somebody_killed_costs_no_grammar() -> None:
    before = _children()
    trials = GrammarTrials(budget=QUICK)
    trials.run(EASY)
    (child,) = _children() - before
    os.kill(child, signal.SIGKILL)
    os.waitid(os.P_PID, child, os.WEXITED | os.WNOWAIT)
    trials.run(EASY)
    assert (trials.children.num_started, trials.children.num_given_up) == (2, 0)
    trials.close()
    assert _children() == before


def test_an_endless_one_holds_up_no_other_thread() -> None:
    raised: list[BaseException] = []
    asked = threading.Event()

    def endless() -> None:
        asked.set()
        try:
            slow.run(ENDLESS)
        except InvalidRequest as error:
            raised.append(error)

    slow = GrammarTrials(budget=ChildBudget(cpu_s=2.0))
    thread = threading.Thread(target=endless)
    thread.start()
    assert asked.wait(WAIT_S)
    for _ in range(20):
        slow.run(EASY)
        assert not raised
    thread.join(WAIT_S)
    assert len(raised) == 1
    slow.close()


def test_children_end_with_whoever_wanted_them() -> None:
    before = _children()
    trials = GrammarTrials()
    trials.run(EASY)
    assert len(_children() - before) == 1
    del trials
    gc.collect()
    assert _children() == before


def test_a_child_ends_with_its_input() -> None:
    process = subprocess.Popen([*TRIAL, "1", str(1 << 30)], stdin=-1, stdout=-1)
    out, _ = process.communicate(b"", timeout=WAIT_S)
    assert (process.returncode, out) == (0, b"\0" * 8)


def _children() -> set[int]:
    """Processes of baton.guided.trials that this one started, from any thread, and still
    has."""
    found: set[int] = set()
    for listed in Path("/proc/self/task").glob("*/children"):
        for pid in map(int, listed.read_text().split()):
            if b"baton.guided.trials" in Path(f"/proc/{pid}/cmdline").read_bytes():
                found.add(pid)
    return found
