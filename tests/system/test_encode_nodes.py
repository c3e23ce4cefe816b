"""Encode nodes: E + P + D give the tokens of transformers' generate, one file once."""

from __future__ import annotations

import asyncio
import logging
from contextlib import aclosing
from pathlib import Path
from typing import Any

import pytest

from baton.node.main import USAGE_ERROR, main
from baton.protocol.errors import InvalidRequest
from baton.protocol.images import ImageInput, digest_of
from baton.protocol.request import Request
from baton.protocol.sampling import SamplingParams
from decode_node.__main__ import PROGRAM as DECODE
from tests.cluster import Cluster, Plan, cluster
from tests.system.test_endpoints import served
from tests.tiny_vision import KINDS, generated, make_vision_model, picture, prompt_of

NEW_TOKENS = 24
GREEDY = SamplingParams(temperature=0.0, seed=1, max_tokens=NEW_TOKENS, ignore_eos=True)
ROOM: dict[str, Any] = {
    "num_kv_blocks": 256, "max_num_seqs": 8, "block_size": 4, "max_num_batched_tokens": 48,
}  # fmt: skip
LONG = ("qwen3_vl_moe", "qwen3_5")  # other language models behind much the same towers
CAT, DOG = picture(1), picture(2, 16, 40)
Prompt = tuple[tuple[int, ...], tuple[ImageInput, ...]]


@pytest.fixture(
    scope="module",
    params=[pytest.param(k, marks=[pytest.mark.long] * k.startswith(LONG)) for k in KINDS],
)
def kind(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(scope="module")
def path(kind: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    logging.getLogger("transformers").setLevel(logging.ERROR)
    return make_vision_model(kind, tmp_path_factory.mktemp(kind))


async def told(c: Cluster, name: str, prompt: Prompt) -> list[int]:
    found: list[int] = []
    ids, images = prompt
    request = Request(name, ids, GREEDY, images=images)
    async with aclosing(c.router.services.dispatcher.run(request)) as events:
        async for event in events:
            found += event.token_ids
    return found


def encoded(members: list[Any]) -> int:
    return sum(member.stats.num_encoded_images for member in members)


async def test_tokens_are_those_of_generate(path: Path, kind: str) -> None:
    prompts = [prompt_of(kind, [[5 + n], CAT, [9, 10, 11], DOG, [20, 21]]) for n in range(8)]
    expected = [generated(path, kind, *prompt, NEW_TOKENS) for prompt in prompts]
    plan = Plan(path, ({**ROOM, "vision_tower": False},), (ROOM,), encode=({}, {}))
    async with cluster(plan) as c:
        asked = [told(c, str(number), prompt) for number, prompt in enumerate(prompts)]
        assert await asyncio.gather(*asked) == expected
        # Two files in eight requests: each was encoded once, by one of two nodes, and the prefill
        # node, which has no tower, got it once.
        assert encoded(c.encode) == 2
        assert sum(member.stats.num_reused_images for member in c.encode) == 14
        assert encoded(c.prefill + c.decode) == 0
        assert c.prefill[0].stats.num_fetched_images == 2
        assert sum(member.stats.num_prompt_tokens for member in c.decode) == 0
        assert c.prefill[0].engine.model is not None
        assert c.decode[0].engine.model is not None
        assert c.prefill[0].engine.model.weight_bytes < c.decode[0].engine.model.weight_bytes
        # A broken file is refused by the node that would have encoded it.
        ids, (image, *_) = prompts[0]
        broken = ImageInput(digest_of(b"broken"), image.start, image.num_tokens, b"broken")
        with pytest.raises(InvalidRequest, match="cannot be read"):
            await told(c, "broken", (ids, (broken,)))
        await c.settle()


@pytest.fixture(scope="module")
def deep(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose rows have further rows for its first layers."""
    logging.getLogger("transformers").setLevel(logging.ERROR)
    return make_vision_model("qwen3_vl", tmp_path_factory.mktemp("deep"))


async def test_the_router_counts_them(deep: Path) -> None:
    async with served(Plan(deep, (), (ROOM,), encode=({}, {}))) as (_, client):
        lines = (await client.get("/metrics")).text.splitlines()
    assert 'baton_router_nodes{role="encode",state="ready"} 2.0' in lines
    assert 'baton_router_nodes{role="decode",state="ready"} 1.0' in lines


async def test_a_node_with_a_tower_computes_what_nobody_encodes(deep: Path) -> None:
    prompt = prompt_of("qwen3_vl", [[5], CAT, [9, 10, 11]])
    expected = generated(deep, "qwen3_vl", *prompt, NEW_TOKENS)
    blind = {**ROOM, "vision_tower": False}
    async with cluster(Plan(deep, (blind,), (ROOM,))) as c:  # no encode node
        assert await told(c, "one", prompt) == expected
        assert (encoded(c.prefill), encoded(c.decode)) == (0, 1)
        await c.settle()
    small = {"image_cache_memory": "1", "block_size": 4}  # no image fits into its pool
    async with cluster(Plan(deep, (blind,), (ROOM,), encode=(small,))) as c:
        assert await told(c, "one", prompt) == expected
        assert (encoded(c.encode), encoded(c.prefill), encoded(c.decode)) == (0, 0, 1)
        await c.settle()


async def test_a_decode_node_takes_rows_too(deep: Path) -> None:
    prompt = prompt_of("qwen3_vl", [[5], CAT, [9, 10, 11]])
    expected = generated(deep, "qwen3_vl", *prompt, NEW_TOKENS)
    async with cluster(Plan(deep, (), (ROOM,), encode=({},))) as c:
        assert await told(c, "one", prompt) == expected
        assert (encoded(c.encode), encoded(c.decode)) == (1, 0)
        assert c.decode[0].stats.num_fetched_images == 1
        # Behind a prefix hit nothing is asked for.
        longer = prompt_of("qwen3_vl", [[5], CAT, [9, 10, 11, 12]])
        assert await told(c, "two", longer) == generated(deep, "qwen3_vl", *longer, NEW_TOKENS)
        assert (encoded(c.encode), c.encode[0].stats.num_reused_images) == (1, 0)
        await c.settle()


def test_only_a_prefill_node_goes_without_a_tower(
    deep: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(DECODE, ["--model", str(deep), "--no-vision-tower"], {}) == USAGE_ERROR
    assert "--no-vision-tower is for prefill nodes" in capsys.readouterr().err
