"""Models with recurrent state on prefill and decode nodes, in one process: transformers' tokens,
with counters that prove that the states moved and that nothing was computed twice."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from dataclasses import replace
from pathlib import Path

import pytest

from baton.client import AsyncClient, GenerateEvent
from baton.engine.memory.state_sizes import slot_bytes
from baton.llm import LLM
from baton.protocol.sampling import SamplingParams
from tests.cluster import Cluster, Plan, cluster
from tests.golden.random_models import save_random
from tests.golden.stateful_models import STATEFUL
from tests.system.references import Tokens, prompts, transformers_tokens
from tests.waiting import WAIT_S

# KV and states in layers of their own; a mixer behind its layer's attention; no KV at all.
KINDS = ("qwen3_next", "zamba2", "mamba2")
MOVED = ("kimi_linear", "lfm2")  # in every run, beside KINDS: latents, and convolutions alone
TYPES = [pytest.param(n, marks=[] if n in KINDS else [pytest.mark.long]) for n in STATEFUL]
PROMPTS = prompts((3, 17, 40, 65, 1, 90), seed=2)
NUM_TOKENS = 24
GREEDY = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True)
CHUNK = 32  # tokens of a step: longer prompts are computed in chunks
OPTIONS = {"dtype": "float32", "max_num_batched_tokens": CHUNK, "max_num_seqs": 8}
P, D = {**OPTIONS, "block_size": 16}, {**OPTIONS, "block_size": 8, "num_kv_blocks": 128}
LANES = ("shm", "stream", "grpc", "dist")


def saved(model_type: str, directory: Path) -> Path:
    return save_random(directory / "m", model_type, **STATEFUL[model_type])


def alone(model: Path, params: SamplingParams) -> list[list[Tokens]]:
    """Each prompt's samples from one engine."""
    llm = LLM(model=str(model), num_kv_blocks=128, threads=1, **OPTIONS)
    return [
        [tuple(sample.token_ids) for sample in done.outputs]
        for done in llm.generate([list(prompt) for prompt in PROMPTS], params)
    ]


def state_bytes(c: Cluster) -> int:
    """Bytes of recurrent state that decode nodes have received."""
    lanes = [lane for member in c.decode for lane in member.transfers.lanes.values()]
    return sum(lane.state_bytes for lane in lanes)


def assert_handed_over(c: Cluster, count: int) -> None:
    """Each of `count` requests was prefilled once, and its state moved once."""
    layers = c.decode[0].engine.info.layers
    assert slot_bytes(layers) > 0
    assert state_bytes(c) == count * sum(spec.state_bytes for spec in layers)
    assert sum(member.transfers.fetches for member in c.decode) == count
    assert sum(member.stats.num_prompt_tokens for member in c.decode) == 0
    assert [member.transfers.failures for member in c.decode] == [{}] * len(c.decode)


async def settled(c: Cluster) -> None:
    await c.settle()
    for member in c.members:
        states = member.engine.tables.states
        assert (states.num_free, states.num_pinned) == (states.num_slots, 0)


@pytest.mark.parametrize("model_type", TYPES)
async def test_two_prefill_and_two_decode_nodes(model_type: str, tmp_path: Path) -> None:
    model = saved(model_type, tmp_path)
    expected = transformers_tokens(model, PROMPTS, NUM_TOKENS)
    async with cluster(Plan(model, (P, P), (D, D), lanes=("stream",))) as c:
        done = await c.generate(PROMPTS, GREEDY)
        assert [each.token_ids for each in done] == expected
        await settled(c)
        assert_handed_over(c, len(PROMPTS))
        assert sum(member.stats.num_prompt_tokens for member in c.prefill) == sum(map(len, PROMPTS))


@pytest.mark.parametrize("lane", LANES)
async def test_each_lane(lane: str, tmp_path: Path) -> None:
    model = saved("qwen3_next", tmp_path)
    expected = transformers_tokens(model, PROMPTS, NUM_TOKENS)
    plan = Plan(model, (P,), (D,), lanes=(lane,), shared=tmp_path if lane == "shm" else None)
    async with cluster(plan) as c:
        done = await c.generate(PROMPTS, GREEDY)
        assert [each.token_ids for each in done] == expected
        await settled(c)
        assert_handed_over(c, len(PROMPTS))
        assert list(c.decode[0].transfers.bytes_received) == [lane]


@pytest.mark.parametrize("model_type", KINDS)
async def test_adopted_pages_and_a_copied_state(model_type: str, tmp_path: Path) -> None:
    """KV is read where it lies. Few slots: exports hold them until their pages are wanted back."""
    model = saved(model_type, tmp_path)
    expected = transformers_tokens(model, PROMPTS, NUM_TOKENS)
    options = {**P, "max_num_seqs": 3}
    async with cluster(Plan(model, (options,), (P,), shared=tmp_path)) as c:
        done = await c.generate(PROMPTS, GREEDY)
        assert [each.token_ids for each in done] == expected
        await settled(c)
        assert_handed_over(c, len(PROMPTS))
        assert c.prefill[0].engine.tables.states.num_slots == 3
        whole = sum(len(prompt) // 16 for prompt in PROMPTS)
        assert c.decode[0].stats.num_adopted_blocks == whole
        assert c.decode[0].transfers.total_received == state_bytes(c)


async def test_a_prompt_from_a_checkpoint_is_handed_over_whole(tmp_path: Path) -> None:
    """The prefill node goes on from the state of an earlier prompt; the decode node fetches the KV
    that it lacks, and always the state."""
    model = saved("qwen3_next", tmp_path)
    longer = [(*prompt, *PROMPTS[0]) for prompt in PROMPTS[3:]]
    expected = transformers_tokens(model, longer, NUM_TOKENS)
    options = {"state_checkpoint_spacing": 1, "num_state_checkpoints": 8}
    async with cluster(Plan(model, ({**P, **options},), ({**D, **options},), lanes=("grpc",))) as c:
        (prefill,), (decode,) = c.prefill, c.decode
        await c.generate(PROMPTS[3:], GREEDY)
        before = decode.transfers.total_received - state_bytes(c)
        done = await c.generate(longer, GREEDY)
        assert [each.token_ids for each in done] == expected
        await settled(c)
        assert_handed_over(c, 2 * len(longer))
        assert prefill.stats.num_checkpoint_hits > 0
        assert decode.transfers.total_received - state_bytes(c) - before < before


@pytest.mark.parametrize("sampling", ["n", "beams"])
@pytest.mark.parametrize("model_type", ["qwen3_next", "falcon_h1", "zamba2", "mamba2"])
async def test_forks_of_a_state_that_has_moved(
    model_type: str, sampling: str, tmp_path: Path
) -> None:
    model = saved(model_type, tmp_path)
    params = (
        replace(GREEDY, temperature=0.8, n=4, seed=5)
        if sampling == "n"
        else replace(GREEDY, beam_width=3, n=3)
    )
    expected = alone(model, params)
    async with cluster(Plan(model, (P,), (D,), lanes=("stream",))) as c:
        done = await c.generate(PROMPTS, params)
        found = [[each.token_ids, *(other.token_ids for other in each.others)] for each in done]
        assert found == expected
        await settled(c)
        assert_handed_over(c, len(PROMPTS))
        assert sum(member.stats.num_forks for member in c.decode) > 0


@pytest.mark.parametrize("mode", ["swap", "recompute"])
async def test_preempted_after_the_hand_over(mode: str, tmp_path: Path) -> None:
    model = saved("qwen3_next", tmp_path)
    expected = transformers_tokens(model, PROMPTS, 60)
    decode = {**D, "num_kv_blocks": 24, "preemption_mode": mode}
    async with cluster(Plan(model, (P,), (decode,), lanes=("stream",))) as c:
        done = await c.generate(PROMPTS, replace(GREEDY, max_tokens=60))
        assert [each.token_ids for each in done] == expected
        await settled(c)
        assert c.decode[0].stats.num_preemptions > 0
        assert (c.decode[0].stats.num_swap_ins > 0) == (mode == "swap")
        assert state_bytes(c) == len(PROMPTS) * sum(
            spec.state_bytes for spec in c.decode[0].engine.info.layers
        )


class Stream:
    """One request, read in the background."""

    def __init__(self, client: AsyncClient, prompt: Tokens, params: SamplingParams) -> None:
        self.tokens: list[int] = []
        self._news = asyncio.Condition()
        self.task = asyncio.create_task(self._read(client.stream(prompt, params)))

    async def _read(self, events: AsyncGenerator[GenerateEvent, None]) -> None:
        async for event in events:
            async with self._news:
                self.tokens.extend(event.token_ids)
                self._news.notify_all()

    async def at_least(self, count: int) -> None:
        async with asyncio.timeout(WAIT_S), self._news:
            await self._news.wait_for(lambda: len(self.tokens) >= count)


@pytest.mark.parametrize(
    "model_type",
    [
        *KINDS,
        *(pytest.param(name, marks=pytest.mark.long) for name in MOVED),
        *(
            pytest.param(name, marks=pytest.mark.soak)
            for name in STATEFUL
            if name not in (*KINDS, *MOVED)
        ),
    ],
)
async def test_running_requests_move_with_their_states(model_type: str, tmp_path: Path) -> None:
    """To the other decode node and back again, in the middle of their streams."""
    model = saved(model_type, tmp_path)
    count = 60
    expected = transformers_tokens(model, PROMPTS, count)
    decode = tuple({**D, "block_size": size} for size in (16, 8))
    async with cluster(Plan(model, (P,), decode, lanes=("stream",))) as c:
        params = replace(GREEDY, max_tokens=count)
        streams = [Stream(c.client, prompt, params) for prompt in PROMPTS]
        c.pace(streams, lambda: [len(s.tokens) for s in streams if not s.task.done()])
        dispatcher = c.router.services.dispatcher
        for position in (5, 30):
            for stream in streams:
                await stream.at_least(position)
            found = [candidate.request_id for candidate in dispatcher.candidates()]
            moved = await asyncio.gather(*(dispatcher.migrate(each) for each in found))
            assert moved == [True] * len(PROMPTS)
        async with asyncio.timeout(WAIT_S):
            await asyncio.gather(*(stream.task for stream in streams))
        assert [tuple(stream.tokens) for stream in streams] == expected
        await settled(c)
        assert_handed_over(c, 3 * len(PROMPTS))
        assert sum(member.stats.num_handed_on for member in c.decode) == 2 * len(PROMPTS)
