"""n, best_of and beams through router, prefill and decode nodes, in fp32, with one transfer each.

Samples must be those of one engine, beams those of transformers; counters of P and D prove that a
prompt was computed once and moved once, and that nothing stays behind.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from transformers import AutoModelForCausalLM

from baton.client import Generation
from baton.llm import LLM
from baton.protocol.errors import InvalidRequest
from baton.protocol.sampling import SamplingParams
from router.server.app import create_app
from tests.cluster import Cluster, Member, Plan, cluster
from tests.system.references import Tokens, prompts
from tests.system.samples import Samples
from tests.tiny_models import make_tiny_model
from tests.waiting import WAIT_S, eventually

SAMPLED = SamplingParams(n=8, temperature=0.9, seed=11, max_tokens=20, ignore_eos=True)
LONG = replace(SAMPLED, n=4, max_tokens=200)
BEAMS = SamplingParams(n=4, beam_width=4, temperature=0.0, seed=0, max_tokens=12, ignore_eos=True)
PROMPTS = prompts((3, 17, 40, 65, 1, 33), seed=6)
ROOMY: dict[str, Any] = {"num_kv_blocks": 400, "max_num_seqs": 64}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    make_tiny_model("llama", path, max_position_embeddings=512, seed=3)
    return path


def one_engine(model: Path, asked: Sequence[Tokens], params: SamplingParams) -> list[list[Tokens]]:
    """All answers of `LLM`, by prompt; computed once for each question."""
    return _one_engine(model, tuple(asked), params)


@cache
def _one_engine(
    model: Path, asked: tuple[Tokens, ...], params: SamplingParams
) -> list[list[Tokens]]:
    llm = LLM(model=str(model), threads=1, **ROOMY)
    outputs = llm.generate([list(prompt) for prompt in asked], params)
    return [[tuple(sample.token_ids) for sample in output.outputs] for output in outputs]


def answers(done: Generation) -> list[Tokens]:
    return [done.token_ids, *(other.token_ids for other in done.others)]


def plan(model: Path, **changes: Any) -> Plan:
    options: dict[str, Any] = {"decode": [ROOMY], **changes}
    return Plan(model, **options)


def assert_one_transfer_each(c: Cluster, count: int, prompt_tokens: int) -> None:
    """`count` prompts were computed once, on P, and fetched once, by D."""
    assert sum(member.transfers.exports for member in c.prefill) == count
    assert sum(member.transfers.fetches for member in c.decode) == count
    assert sum(member.stats.num_prompt_tokens for member in c.prefill) == prompt_tokens
    assert sum(member.stats.num_prompt_tokens for member in c.decode) == 0
    sent = sum(member.transfers.total_sent for member in c.prefill)
    received = sum(member.transfers.total_received for member in c.decode)
    token_bytes = c.decode[0].node.shell.load().kv_token_bytes
    assert sent == received == prompt_tokens * token_bytes, "the KV of the prompts, once"


@pytest.mark.parametrize(
    "sizes", [pytest.param((32, 32), marks=pytest.mark.long), (8, 32), (32, 8)]
)
async def test_eight_samples_with_one_prefill_and_one_transfer(
    model: Path, sizes: tuple[int, int]
) -> None:
    expected = one_engine(model, PROMPTS, SAMPLED)
    assert len({tokens for samples in expected for tokens in samples}) == 8 * len(PROMPTS)
    p, d = sizes
    prefill = {"block_size": p, "max_num_seqs": 2, "enable_prefix_caching": False}
    decode = {**ROOMY, "block_size": d, "enable_prefix_caching": False}
    async with cluster(plan(model, prefill=[prefill], decode=[decode])) as c:
        done = await c.generate(PROMPTS, SAMPLED)
        assert [answers(one) for one in done] == expected
        for prompt, one in zip(PROMPTS, done, strict=True):
            assert one.usage.prompt_tokens == len(prompt), "counted once"
            assert one.usage.completion_tokens == 8 * 20
        await c.settle()
        assert_one_transfer_each(c, len(PROMPTS), sum(map(len, PROMPTS)))
        assert c.decode[0].stats.num_forks == 7 * len(PROMPTS)


async def test_more_samples_than_a_node_runs_are_refused_before_any_work(model: Path) -> None:
    """Nodes tell how many they run at once, and the wider one gets the wide request."""
    decode = [{**ROOMY, "max_num_seqs": 4}, {**ROOMY, "max_num_seqs": 8}]
    async with cluster(plan(model, decode=decode)) as c:
        with pytest.raises(InvalidRequest, match="9 sequences") as caught:
            await c.client.generate(tuple(PROMPTS[0]), replace(SAMPLED, n=9))
        assert caught.value.field == "n"
        assert sum(member.stats.num_prompt_tokens for member in c.members) == 0
        for _ in range(3):
            done = await c.client.generate(tuple(PROMPTS[0]), SAMPLED)
            assert len(answers(done)) == 8
        await c.settle()
        narrow, wide = sorted(c.decode, key=lambda member: member.engine.config.max_num_seqs)
        assert narrow.stats.num_generated_tokens == 0
        assert wide.stats.num_generated_tokens > 0


async def test_prefix_hits_chunks_and_preemption_change_no_sample(model: Path) -> None:
    params = replace(SAMPLED, n=4)
    expected = one_engine(model, PROMPTS, params)
    chunked = {"max_num_batched_tokens": 16, "max_num_seqs": 8, "block_size": 8}
    small = {"block_size": 8, "num_kv_blocks": 56}
    async with cluster(plan(model, prefill=[chunked], decode=[small])) as c:
        for _ in range(3):
            done = await c.generate(PROMPTS, params)
            assert [answers(one) for one in done] == expected
            await c.settle()
        assert c.prefill[0].stats.num_chunked_prompts > 0
        assert c.prefill[0].stats.num_prefix_hit_tokens > 0
        assert c.decode[0].stats.num_prefix_hit_tokens > 0
        assert c.decode[0].stats.num_preemptions > 0


async def test_a_local_prefill_forks_as_well(model: Path) -> None:
    async with cluster(
        plan(model, router={"local_prefill_tokens": 4096, "prefill_placement": "threshold"})
    ) as c:
        done = await c.generate(PROMPTS, SAMPLED)
        assert [answers(one) for one in done] == one_engine(model, PROMPTS, SAMPLED)
        assert c.decode[0].transfers.fetches == 0
        await c.settle()


async def test_best_of_chooses_what_one_engine_chooses(model: Path) -> None:
    params = replace(SAMPLED, n=2, best_of=6)
    async with cluster(plan(model)) as c:
        done = await c.generate(PROMPTS, params)
        assert [answers(one) for one in done] == one_engine(model, PROMPTS, params)
        assert done[0].usage.completion_tokens == 6 * 20, "all were computed"
        assert c.decode[0].transfers.fetches == len(PROMPTS)
        await c.settle()


async def test_pages_on_the_same_host(model: Path, tmp_path: Path) -> None:
    """Forks share own blocks only: a page of another pool is copied first, once."""
    own = {**ROOMY, "enable_prefix_caching": False}
    async with cluster(plan(model, shared=tmp_path, prefill=[own], decode=[own])) as c:
        for params in (SAMPLED, replace(SAMPLED, n=1)):
            done = await c.generate(PROMPTS, params)
            assert [answers(one) for one in done] == one_engine(model, PROMPTS, params)
            assert (c.decode[0].stats.num_adopted_blocks > 0) == (params.n == 1)
        await c.settle()


# ---- beams ----


def transformers_beams(model: Path, asked: Sequence[Tokens]) -> list[list[Tokens]]:
    loaded: Any = AutoModelForCausalLM.from_pretrained(
        model, dtype=torch.float32, attn_implementation="eager"
    ).eval()
    found: list[list[Tokens]] = []
    for prompt in asked:
        ids = torch.tensor([prompt])
        out = loaded.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            num_beams=4,
            num_return_sequences=4,
            max_new_tokens=BEAMS.max_tokens,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
        )
        found.append([tuple(row[len(prompt) :].tolist()) for row in out])
    return found


async def test_beams_equal_transformers_on_20_prompts(model: Path) -> None:
    asked = prompts([(7 * index) % 47 + 1 for index in range(20)], seed=20)
    expected = transformers_beams(model, asked)
    no_hits = {"enable_prefix_caching": False}
    decode = [{**ROOMY, **no_hits}]
    async with cluster(plan(model, prefill=[no_hits], decode=decode)) as c:
        done = await c.generate(asked, BEAMS)
        assert [answers(one) for one in done] == expected
        assert {one.retries for one in done} == {0}
        await c.settle()
        assert_one_transfer_each(c, 20, sum(map(len, asked)))
        assert c.decode[0].stats.num_prefill_chunks == 0, "the first candidates came with the KV"


async def test_beams_over_http(model: Path) -> None:
    (expected,) = transformers_beams(model, PROMPTS[2:3])
    async with cluster(plan(model)) as c, http(c) as client:
        body = {"prompt": list(PROMPTS[2]), "n": 4, "use_beam_search": True, "max_tokens": 12}
        reply = await client.post(
            "/v1/completions", json={**body, "ignore_eos": True, "logprobs": 0}
        )
        assert reply.status_code == 200, reply.text
        choices = reply.json()["choices"]
        [served] = c.router.services.models.all
        texts = [served.tokenizer.decode(ids, skip_special_tokens=True) for ids in expected]
        assert [choice["text"] for choice in choices] == texts
        assert [len(choice["logprobs"]["tokens"]) for choice in choices] == [12] * 4
        await c.settle()


def http(c: Cluster) -> httpx.AsyncClient:
    """The real router's HTTP routes, in process."""
    transport = httpx.ASGITransport(create_app(c.router.services))
    return httpx.AsyncClient(transport=transport, base_url="http://baton", timeout=WAIT_S)


# ---- what may happen on the way ----


def busy(c: Cluster) -> Member:
    return max(c.decode, key=lambda member: len(member.node.shell.requests))


async def test_a_lost_decode_node_loses_no_sample(model: Path) -> None:
    """One sample has ended before: it is not run again."""
    prompt = PROMPTS[2]
    (plain,) = one_engine(model, [prompt], LONG)
    early = next(t for t in plain[1][3:30] if all(t not in plain[s][:120] for s in (0, 2, 3)))
    params = replace(LONG, stop_token_ids=(early,))
    (expected,) = one_engine(model, [prompt], params)
    assert len(expected[1]) <= 31
    async with cluster(plan(model, decode=[ROOMY, ROOMY])) as c:
        go_on = c.hold_after(60)
        samples = Samples(c.client, prompt, params)
        await eventually(lambda: _true(samples.ended[1] and len(samples.tokens[0]) > 40))
        victim = busy(c)
        survivor = next(member for member in c.decode if member is not victim)
        go_on.set()
        await victim.node.stop()
        assert await samples.whole() == expected
        assert samples.retries == 1
        assert survivor.stats.num_forks == 2, "of the three samples that lived"
        c.decode.remove(victim)
        await c.settle()


async def _true(value: bool) -> bool:
    return value


async def test_a_lost_decode_node_begins_a_search_again(model: Path) -> None:
    long = replace(BEAMS, max_tokens=120)
    expected = one_engine(model, PROMPTS[2:3], long)
    async with cluster(plan(model, decode=[ROOMY, ROOMY])) as c:
        go_on = c.hold_after(60)
        task = asyncio.create_task(c.client.generate(PROMPTS[2], long))

        async def searching() -> bool:
            return busy(c).stats.num_forks > 30

        await eventually(searching)
        victim = busy(c)
        go_on.set()
        await victim.node.stop()
        async with asyncio.timeout(WAIT_S):
            done = await task
        assert [answers(done)] == expected
        assert done.retries == 1
        c.decode.remove(victim)
        await c.settle()


@pytest.mark.parametrize("params", [LONG, replace(BEAMS, max_tokens=120)], ids=["n", "beams"])
async def test_a_draining_node_hands_on_the_kv_that_all_share(
    model: Path, params: SamplingParams
) -> None:
    expected = one_engine(model, PROMPTS[2:3], params)
    async with cluster(plan(model, decode=[ROOMY, ROOMY])) as c:
        go_on = c.hold_after(60)
        samples = Samples(c.client, PROMPTS[2], params)

        async def under_way() -> bool:
            return busy(c).stats.num_generated_tokens > 60 or busy(c).stats.num_forks > 30

        await eventually(under_way)
        leaving = busy(c)
        leaving.node.shell.begin_drain()
        go_on.set()
        assert [await samples.whole()] == expected
        assert samples.retries == 0, "as asked: nobody failed"
        assert leaving.stats.num_handed_on == 1
        # What is each sample's own is computed again there, and that is counted.
        kind = "shared" if params is LONG else "prompt"
        assert leaving.stats.departures == {kind: 1}
        assert leaving.stats.num_left_behind_tokens > 0

        async def told() -> bool:
            """With the next heartbeat, if no step comes first."""
            lines = leaving.node.shell.metrics.render().decode().splitlines()
            found = [line for line in lines if line.startswith("baton_departures_total{")]
            return [f'kv="{kind}"' in line and line.endswith(" 1.0") for line in found] == [True]

        await eventually(told)
        assert sum(member.stats.num_prompt_tokens for member in c.prefill) == len(PROMPTS[2])
        assert c.router.services.dispatcher.migrations.done == 1
        await c.settle()


async def test_a_stop_string_ends_its_sample_and_frees_its_steps(model: Path) -> None:
    (plain,) = one_engine(model, PROMPTS[2:3], LONG)
    async with cluster(plan(model)) as c, http(c) as client:
        [served] = c.router.services.models.all
        texts = [served.tokenizer.decode(ids, skip_special_tokens=True) for ids in plain]
        stop = next(
            piece
            for start in range(20, 60)
            if all((piece := texts[1][start : start + 6]) not in texts[s] for s in (0, 2, 3))
        )
        body = {"prompt": list(PROMPTS[2]), "n": 4, "seed": 11, "temperature": 0.9}
        body |= {"max_tokens": 200, "ignore_eos": True, "stop": stop}
        reply = await client.post("/v1/completions", json=body)
        assert reply.status_code == 200, reply.text
        choices = reply.json()["choices"]
        cut = texts[1][: texts[1].index(stop)]
        assert [choice["text"] for choice in choices] == [texts[0], cut, *texts[2:]]
        assert [choice["finish_reason"] for choice in choices] == ["length", "stop"] + [
            "length"
        ] * 2
        await c.settle()
        generated = c.decode[0].stats.num_generated_tokens
        assert generated < 3 * 199 + 150, "the stopped sample took no further steps"


async def test_clients_that_leave_free_everything(model: Path) -> None:
    async with cluster(plan(model)) as c:
        readers: list[Samples] = []
        for index, prompt in enumerate(PROMPTS):
            readers.append(Samples(c.client, prompt, LONG))
            if index % 2:
                await readers[-1].at_least(1 + index)
        for reader in readers:
            reader.task.cancel()
        await asyncio.gather(*(reader.task for reader in readers), return_exceptions=True)
        await c.settle()
        assert c.router.services.dispatcher.num_live == 0
