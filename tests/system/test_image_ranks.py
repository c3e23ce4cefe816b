"""Images through prefill and decode nodes of unequal tensor parallel sizes: the tokens of
transformers' generate, by counters computed and handed over once. Ranks are threads."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.cluster import Plan, cluster
from tests.engine.tensor_parallel_ranks import ranks_as_threads
from tests.system.test_images import NEW_TOKENS, told
from tests.system.test_state_ranks import assert_ranks, of_ranks
from tests.tiny_vision import KINDS, generated, make_vision_model, picture, prompt_of

CAT, DOG = picture(1), picture(2, 16, 40)
ROOM: dict[str, Any] = {"num_kv_blocks": 256, "max_num_seqs": 4, "max_num_batched_tokens": 40}
P, D = {**ROOM, "block_size": 4}, {**ROOM, "block_size": 16}
# What the default run tries: sizes that only one side's ranks cut, of two ways to place images.
QUICK = {("qwen3_vl", 2, 1), ("gemma3", 1, 2)}
PAIRS = [
    pytest.param(kind, *sizes, marks=() if (kind, *sizes) in QUICK else pytest.mark.soak)
    for kind in KINDS
    for sizes in ((2, 1), (1, 2), (2, 4))
]


@pytest.fixture(autouse=True)
def _threads() -> Iterator[None]:
    logging.getLogger("transformers").setLevel(logging.ERROR)
    with ranks_as_threads():
        yield
    logging.getLogger("transformers").setLevel(logging.WARNING)


@pytest.mark.parametrize(("kind", "p_size", "d_size"), PAIRS)
async def test_any_two_sizes(kind: str, p_size: int, d_size: int, tmp_path: Path) -> None:
    path = make_vision_model(kind, tmp_path)
    prompts = [prompt_of(kind, [[5 + n], CAT, [9, 10, 11], DOG, [20, 21]]) for n in range(3)]
    expected = [generated(path, kind, *prompt, NEW_TOKENS) for prompt in prompts]
    plan = Plan(path, (of_ranks(p_size, P),), (of_ranks(d_size, D),), lanes=("stream",))
    async with cluster(plan) as c:
        asked = [told(c, str(number), *prompt) for number, prompt in enumerate(prompts)]
        assert await asyncio.gather(*asked) == expected
        (p,), (d,) = c.prefill, c.decode
        assert p.stats.num_encoded_images == 2
        assert p.stats.num_chunked_prompts > 0
        assert (d.stats.num_encoded_images, d.stats.num_prompt_tokens) == (0, 0)
        assert (d.transfers.fetches, d.transfers.failures) == (len(prompts), {})
        assert_ranks(c, p_size, d_size)
        await c.settle()


@pytest.mark.parametrize(
    "kind",
    [pytest.param(k, marks=() if k == "qwen3_vl" else pytest.mark.soak) for k in KINDS],
)
async def test_rows_of_an_encode_node(kind: str, tmp_path: Path) -> None:
    """The prefill node has no tower: its first rank fetches rows, and sends them to the others. The
    decode node computes the next prompt itself, with the same rows."""
    path = make_vision_model(kind, tmp_path)
    prompt = prompt_of(kind, [[5], CAT, [9, 10, 11], DOG, [20, 21]])
    expected = generated(path, kind, *prompt, NEW_TOKENS)
    blind = of_ranks(2, P, vision_tower=False)
    plan = Plan(path, (blind,), (of_ranks(2, D),), lanes=("stream",), encode=({},))
    async with cluster(plan) as c:
        assert await told(c, "one", *prompt) == expected
        assert c.encode[0].stats.num_encoded_images == 2
        assert c.prefill[0].stats.num_fetched_images == 2
        assert sum(member.stats.num_encoded_images for member in c.prefill + c.decode) == 0
        assert c.decode[0].stats.num_prompt_tokens == 0
        assert_ranks(c, 2, 2, 1)
        await c.settle()
    async with cluster(Plan(path, (), (of_ranks(2, D),), encode=({},))) as c:
        assert await told(c, "two", *prompt) == expected
        assert c.encode[0].stats.num_encoded_images == 2
        assert c.decode[0].stats.num_fetched_images == 2
        await c.settle()
