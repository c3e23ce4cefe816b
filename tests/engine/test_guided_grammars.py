"""Compiled grammars: each once, off the loop, within a budget; and the guides made of them."""

from __future__ import annotations

import asyncio
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import numpy as np
import pytest

from baton.engine.core.grammars import prepared
from baton.guided import cache
from baton.guided.cache import GrammarCache
from baton.guided.thought import ThoughtEnd
from baton.guided.vocabulary import Vocabulary
from baton.protocol.errors import (
    InternalError,
    InvalidRequest,
    Overloaded,
    Unavailable,
    UnsupportedFeature,
)
from baton.protocol.sampling import GuidedDecoding
from tests.engine.guided_vocabulary import EOS, MERGED, VOCAB_SIZE, encode, vocabulary
from tests.waiting import WAIT_S

DIGITS = GuidedDecoding("regex", "[0-9]{3}")
PROMPT = [1, 2, 3]


def masks(count: int) -> np.ndarray:
    return np.zeros((count, -(-VOCAB_SIZE // 32)), np.int32)


def bits(row: np.ndarray) -> set[int]:
    return set(np.flatnonzero(np.unpackbits(row.view(np.uint8), bitorder="little")).tolist())


class Gate:
    """A vocabulary that is there once it is opened; counts how often it was loaded."""

    def __init__(self) -> None:
        self.loads = 0
        self.open = threading.Event()
        self.asked = threading.Event()

    def load(self) -> Vocabulary:
        self.loads += 1
        self.asked.set()
        assert self.open.wait(WAIT_S)
        return vocabulary()


def test_a_grammar_is_compiled_once_however_many_ask() -> None:
    gate = Gate()
    grammars = GrammarCache(gate.load)
    with ThreadPoolExecutor(4) as threads:
        asked = [threads.submit(grammars.get, DIGITS) for _ in range(4)]
        assert gate.asked.wait(WAIT_S)
        gate.open.set()
        found = {id(future.result(WAIT_S)) for future in asked}
    assert len(found) == 1
    assert (grammars.num_compiled, gate.loads) == (1, 1)
    assert grammars.submit(replace(DIGITS, backend="auto")).done()
    grammars.get(GuidedDecoding("regex", "x"))
    assert (grammars.num_compiled, gate.loads) == (2, 1)


async def test_waiting_blocks_nobody_and_a_cancelled_one_harms_nobody() -> None:
    gate = Gate()
    grammars = GrammarCache(gate.load)
    first = asyncio.create_task(prepared(grammars, DIGITS))
    second = asyncio.create_task(prepared(grammars, DIGITS))
    await asyncio.to_thread(gate.asked.wait, WAIT_S)
    assert not first.done()
    first.cancel()
    await asyncio.gather(first, return_exceptions=True)
    gate.open.set()
    async with asyncio.timeout(WAIT_S):
        assert await second is grammars.get(DIGITS)
    assert await prepared(grammars, None) is None
    assert await prepared(None, DIGITS) is None


async def test_a_wait_for_our_own_slowness_is_no_fault_of_the_client(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(cache, "COMPILE_S", 0.01)
    gate = Gate()
    grammars = GrammarCache(gate.load)
    try:
        with pytest.raises(Unavailable) as waited:
            await prepared(grammars, DIGITS)
        with pytest.raises(Unavailable, match="too busy to compile") as caught:
            grammars.get(DIGITS)
        assert (caught.value.field, caught.value.http_status) == ("guided", 503)
        assert waited.value.retry_after_s
    finally:
        gate.open.set()


def test_the_line_is_bounded() -> None:
    gate = Gate()
    grammars = GrammarCache(gate.load)
    waiting = [
        grammars.submit(GuidedDecoding("regex", f"a{index}")) for index in range(cache.MAX_WAITING)
    ]
    with pytest.raises(Overloaded):
        grammars.submit(DIGITS)
    gate.open.set()
    for future in waiting:
        future.result(WAIT_S)
    grammars.get(DIGITS)


def test_few_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache, "MAX_KEPT", 2)
    grammars = GrammarCache(vocabulary)
    one, two, three = (GuidedDecoding("regex", text) for text in "abc")
    first = grammars.get(one)
    grammars.get(two)
    assert grammars.get(one) is first  # now the most recent
    grammars.get(three)
    assert grammars.get(one) is first
    assert grammars.num_compiled == 3
    grammars.get(two)
    assert grammars.num_compiled == 4


def test_failures_are_told_and_not_kept() -> None:
    grammars = GrammarCache(vocabulary)
    for _ in range(2):
        with pytest.raises(InvalidRequest, match="regex"):
            grammars.get(GuidedDecoding("regex", "("))

    def broken() -> Vocabulary:
        raise OSError("/some/path is gone")

    with pytest.raises(InternalError, match=r"^a grammar could not be compiled$"):
        GrammarCache(broken).get(DIGITS)


def test_a_model_without_an_end_is_refused() -> None:
    endless = Vocabulary(vocabulary().tokens, {}, (), encode)
    with pytest.raises(UnsupportedFeature, match="end-of-sequence"):
        GrammarCache(lambda: endless).get(DIGITS)


# ---- guides ----


def test_a_guide_follows_what_is_new_and_starts_again_for_a_shorter_text() -> None:
    guide = GrammarCache(vocabulary).get(DIGITS).guide()
    rows = masks(1)
    assert guide.fill(PROMPT, 3, (), rows) == 1
    assert bits(rows[0]) == {*b"0123456789", 256 + MERGED.index(b"12")}
    assert guide.fill([*PROMPT, *b"12"], 3, (), rows) == 1
    assert bits(rows[0]) == set(b"0123456789")
    assert guide.fill([*PROMPT, *b"123"], 3, (), rows) == 1
    assert EOS in bits(rows[0])
    assert guide.fill([*PROMPT, *b"4"], 3, (), rows) == 1  # other tokens: a replay
    assert guide.failure == ""


def test_drafts_are_masked_as_far_as_they_can_stand() -> None:
    guide = GrammarCache(vocabulary).get(DIGITS).guide()
    rows = masks(4)
    assert guide.fill(PROMPT, 3, b"1x2", rows) == 2
    assert guide.fill(PROMPT, 3, [*b"123"], rows) == 4
    assert EOS in bits(rows[3])
    assert guide.fill([*PROMPT, *b"123"], 3, [EOS, 9, 9], rows) == 1
    assert guide.cut(PROMPT, 3, [*b"12x"]) == [*b"12"]
    assert guide.cut([*PROMPT, *b"12"], 3, [*b"34"]) == [*b"3"]


def test_a_fork_goes_its_own_way() -> None:
    guide = GrammarCache(vocabulary).get(GuidedDecoding("regex", "(ab|cd){2}")).guide()
    assert guide.fork().cut(PROMPT, 3, [*b"ab"]) == [*b"ab"]
    guide.cut([*PROMPT, *b"a"], 3, [])
    other = guide.fork()
    assert other.cut([*PROMPT, *b"abc"], 3, [*b"d"]) == [*b"d"]
    assert guide.cut([*PROMPT, *b"aba"], 3, [*b"b"]) == [*b"b"]


def test_an_output_that_does_not_fit_fails_its_guide() -> None:
    guide = GrammarCache(vocabulary).get(DIGITS).guide()
    assert guide.fill([*PROMPT, *b"x"], 3, (), masks(1)) == 0
    assert "doesn't satisfy the grammar" in guide.failure or "fit" in guide.failure
    assert guide.cut([*PROMPT, *b"x"], 3, [*b"1"]) == []


def test_a_thought_is_free_until_it_ends() -> None:
    grammar = GrammarCache(vocabulary).get(replace(DIGITS, starts_after="</think>"))
    guide, rows = grammar.guide(), masks(3)
    whole, longer = 256 + MERGED.index(b"</think>"), 256 + MERGED.index(b"</think>\n")
    tail = 256 + MERGED.index(b"k>\n")
    assert guide.fill(PROMPT, 3, (), rows) == 1
    assert bits(rows[0]) >= set(range(VOCAB_SIZE)) - {longer}
    assert longer not in bits(rows[0])
    assert guide.fill([*PROMPT, *b"x</thin"], 3, (), rows) == 1
    assert tail not in bits(rows[0])
    for end in ([whole], [*b"</think>"]):
        guide = grammar.guide()
        assert guide.fill([*PROMPT, *b"hm", *end], 3, [*b"12"], rows) == 3
        assert bits(rows[0]) >= set(b"0123456789")
        assert EOS not in bits(rows[0])
    drafts = [*b"nk>", *b"12x"]
    assert grammar.guide().cut([*PROMPT, *b"</thi"], 3, drafts) == drafts[:-1]
    assert grammar.guide().cut([*PROMPT, *b"</th"], 3, [*b"x", 5]) == [*b"x", 5]


def test_the_end_of_a_thought_may_be_one_character_or_a_special_token() -> None:
    vocab = vocabulary()
    end = ThoughtEnd(">", vocab)
    assert end.follow(b"", ord("a")) == b""
    assert end.follow(b"", ord(">")) is None
    assert end.overshooting(b"") == [256 + MERGED.index(b"k>\n"), 256 + MERGED.index(b"</think>\n")]
    special = ThoughtEnd("[CALL]", vocab)
    assert special.follow(b"", vocab.specials["[CALL]"]) is None
