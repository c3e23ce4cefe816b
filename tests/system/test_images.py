"""Images through prefill and decode nodes: the tokens of transformers' generate."""

from __future__ import annotations

import asyncio
import logging
from contextlib import aclosing
from pathlib import Path

import pytest

from baton.protocol.errors import InvalidRequest
from baton.protocol.images import ImageInput, digest_of
from baton.protocol.request import Request
from baton.protocol.sampling import SamplingParams
from tests.cluster import Cluster, Plan, cluster
from tests.tiny_vision import KINDS, generated, make_vision_model, picture, prompt_of

NEW_TOKENS = 40
GREEDY = SamplingParams(temperature=0.0, seed=1, max_tokens=NEW_TOKENS, ignore_eos=True)


async def told(
    c: Cluster, name: str, ids: tuple[int, ...], images: tuple[ImageInput, ...]
) -> list[int]:
    found: list[int] = []
    request = Request(name, ids, GREEDY, images=images)
    async with aclosing(c.router.services.dispatcher.run(request)) as events:
        async for event in events:
            found += event.token_ids
    return found


@pytest.mark.parametrize("kind", KINDS)
async def test_tokens_are_those_of_generate(kind: str, tmp_path: Path) -> None:
    logging.getLogger("transformers").setLevel(logging.ERROR)
    path = make_vision_model(kind, tmp_path)
    cat, dog = picture(1), picture(2, 16, 40)
    prompts = [
        prompt_of(kind, [[5 + number], cat, [9, 10, 11], dog, [20, 21]]) for number in range(3)
    ]
    expected = [generated(path, kind, *prompt, NEW_TOKENS) for prompt in prompts]
    room = {"num_kv_blocks": 256, "max_num_seqs": 4}
    small = {**room, "block_size": 4, "max_num_batched_tokens": 40}
    async with cluster(Plan(path, (small,), ({**room, "block_size": 16}, small))) as c:
        asked = [told(c, str(number), *prompt) for number, prompt in enumerate(prompts)]
        assert await asyncio.gather(*asked) == expected
        # The prompts were computed, and the images encoded, by the prefill node alone.
        assert c.prefill[0].stats.num_encoded_images == 2
        assert sum(member.stats.num_encoded_images for member in c.decode) == 0
        assert sum(member.stats.num_prompt_tokens for member in c.decode) == 0
        # The node's own refusal comes back.
        ids, (image, *_) = prompts[0]
        broken = ImageInput(digest_of(b"broken"), image.start, image.num_tokens, b"broken")
        with pytest.raises(InvalidRequest, match="cannot be read"):
            await told(c, "broken", ids, (broken,))
        await c.settle()


async def test_a_decode_node_computes_prompts_itself(tmp_path: Path) -> None:
    logging.getLogger("transformers").setLevel(logging.ERROR)
    path = make_vision_model("qwen3_5", tmp_path)
    ids, images = prompt_of("qwen3_5", [[5, 6], picture(1), [9, 10, 11], picture(2, 16, 40), [20]])
    expected = generated(path, "qwen3_5", ids, images, NEW_TOKENS)
    options = {"num_kv_blocks": 64, "max_num_batched_tokens": 16, "max_num_seqs": 4}
    async with cluster(Plan(path, (), (options,))) as c:
        assert await told(c, "one", ids, images) == expected
        assert c.decode[0].stats.num_encoded_images == 2
        await c.settle()
