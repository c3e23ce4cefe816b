"""Tensor-parallel nodes, their ranks as processes of their own: served end to end, and killed."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from baton.client import AsyncClient, GenerateOptions
from baton.llm import LLM
from baton.node.data_ranks import LOST_RANK
from baton.protocol.sampling import SamplingParams
from tests.cluster import Plan, cluster
from tests.engine.quantized_models import make_quantized
from tests.engine.test_latent_models import WIDE
from tests.golden.hybrid_models import RANKED, save_hybrid
from tests.golden.latent_models import as_published, save_latent
from tests.system.processes import Processes
from tests.system.references import one_engine_tokens, prompts, transformers_tokens
from tests.system.test_images import NEW_TOKENS as NUM_TOLD
from tests.system.test_images import told
from tests.tiny_models import make_tiny_model
from tests.tiny_vision import generated, make_vision_model, picture, prompt_of
from tests.waiting import eventually

GREEDY = SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True)
LONG = SamplingParams(temperature=0.0, max_tokens=400, ignore_eos=True)
PROMPTS = prompts((61, 40, 75, 5))
PATIENCE_S = 90.0
FEW = {"block_size": 4, "num_kv_blocks": 256, "max_num_seqs": 4, "max_num_batched_tokens": 40}
WHOLE = {"enable_expert_parallel": True}
FLAGS = ("--num-kv-blocks", "64", "--block-size", "8")

pytestmark = pytest.mark.long


def soak(*values: Any) -> Any:
    """A case whose ranks are threads in the tests of every run: test_tensor_parallel_matrix.py and
    test_state_ranks.py."""
    return pytest.param(*values, marks=pytest.mark.soak)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model("llama", tmp_path_factory.mktemp("model") / "m")


@pytest.mark.parametrize(("sizes", "lane"), [((2, 1), "grpc"), ((1, 2), "stream")])
async def test_any_two_sizes_serve_the_tokens_of_one_engine(
    model: Path, sizes: tuple[int, int], lane: str
) -> None:
    prefill, decode = (
        {"tensor_parallel_size": size, "block_size": block}
        for size, block in zip(sizes, (8, 16), strict=True)
    )
    async with cluster(Plan(model, [prefill], [decode], lanes=(lane,))) as c:
        done = await c.generate(PROMPTS, GREEDY)
        await c.settle()
        found = [generation.token_ids for generation in done]
        assert found == one_engine_tokens(model, PROMPTS, GREEDY)
        assert {generation.retries for generation in done} == {0}
        (d,) = c.decode
        assert d.stats.num_prompt_tokens == 0, "all KV came from the prefill node"
        assert d.transfers.bytes_received[lane] > 0
        for member, size in zip(c.members, sizes, strict=True):
            ranks = member.engine.ranks
            assert (0 if ranks is None else len(ranks.processes)) == size - 1


@pytest.mark.parametrize("sizes", [(2, 1), (1, 2)])
async def test_integer_weights_over_two_sizes_serve_the_tokens_of_one_engine(
    tmp_path: Path, sizes: tuple[int, int]
) -> None:
    """w8a8 as compressed-tensors stores it, and a head of 8 bits; KV goes from one size to the
    other, so both call the model by one digest."""
    path, _ = make_quantized("w8a8", tmp_path, "qwen3")
    options: dict[str, Any] = {"lm_head_quantization": "w8a8"}
    prefill, decode = ({"tensor_parallel_size": size, **options} for size in sizes)
    llm = LLM(str(path), num_kv_blocks=64, threads=1, **options)
    expected = llm.generate([list(prompt) for prompt in PROMPTS], GREEDY)
    async with cluster(Plan(path, [prefill], [decode], lanes=("grpc",))) as c:
        done = await c.generate(PROMPTS, GREEDY)
        await c.settle()
        found = [list(generation.token_ids) for generation in done]
        assert found == [list(each.outputs[0].token_ids) for each in expected]
        assert {generation.retries for generation in done} == {0}
        assert c.decode[0].stats.num_prompt_tokens == 0, "all KV came from the prefill node"
        assert c.decode[0].transfers.bytes_received["grpc"] > 0


@pytest.mark.parametrize(
    ("name", "prefill", "decode"),
    [
        soak("v3", {"tensor_parallel_size": 2}, {"tensor_parallel_size": 4, **WHOLE}),
        soak("v3", {"tensor_parallel_size": 4, **WHOLE}, {}),
        ("kimi k2", {}, {"tensor_parallel_size": 2, **WHOLE}),
    ],
)
async def test_latents_and_whole_experts_over_two_sizes(
    name: str, prefill: dict[str, Any], decode: dict[str, Any], tmp_path: Path
) -> None:
    """int8 weights. A latent travels once, and is written to every rank's pool."""
    path = as_published(save_latent(tmp_path, name, **WIDE), name)
    options: dict[str, Any] = {"quantization": "int8"}
    llm = LLM(str(path), "float32", num_kv_blocks=64, threads=1, **options)
    expected = llm.generate([list(prompt) for prompt in PROMPTS], GREEDY)
    nodes = [{"block_size": 8} | options | each for each in (prefill, decode)]
    async with cluster(Plan(path, nodes[:1], nodes[1:], lanes=("stream",))) as c:
        done = await c.generate(PROMPTS, GREEDY)
        await c.settle()
        found = [list(generation.token_ids) for generation in done]
        assert found == [list(each.outputs[0].token_ids) for each in expected]
        assert {generation.retries for generation in done} == {0}
        (d,), layers = c.decode, llm.engine.info.layers
        assert d.stats.num_prompt_tokens == 0, "all KV came from the prefill node"
        latents = sum(map(len, PROMPTS)) * sum(spec.token_bytes("float32") for spec in layers)
        assert 0.9 * latents < d.transfers.bytes_received["stream"] < 1.2 * latents
        for member, each in zip(c.members, (prefill, decode), strict=True):
            ranks = member.engine.ranks
            size = each.get("tensor_parallel_size", 1)
            assert (0 if ranks is None else len(ranks.processes)) == size - 1
            assert member.engine.info.digest == llm.engine.info.digest


@pytest.mark.parametrize("sizes", [(2, 1), soak((1, 4)), soak((4, 2))])
async def test_recurrent_states_over_two_sizes(sizes: tuple[int, int], tmp_path: Path) -> None:
    """A state travels whole; each process has its heads of it."""
    path = save_hybrid(tmp_path, "qwen3 next", **RANKED)
    nodes = [{"tensor_parallel_size": size, "dtype": "float32"} for size in sizes]
    async with cluster(Plan(path, nodes[:1], nodes[1:], lanes=("stream",))) as c:
        done = await c.generate(PROMPTS, GREEDY)
        await c.settle()
        found = [generation.token_ids for generation in done]
        assert found == transformers_tokens(path, PROMPTS, 20)
        assert {generation.retries for generation in done} == {0}
        (d,), layers = c.decode, c.decode[0].engine.info.layers
        assert d.stats.num_prompt_tokens == 0, "all KV and states came from the prefill node"
        states = len(PROMPTS) * sum(spec.state_bytes for spec in layers)
        assert d.transfers.lanes["stream"].state_bytes == states > 0
        for member, size in zip(c.members, sizes, strict=True):
            ranks = member.engine.ranks
            assert (0 if ranks is None else len(ranks.processes)) == size - 1


@pytest.mark.parametrize(
    ("kind", "step", "sizes"),
    [("qwen3_vl", 20, (2, 1)), soak("gemma3", 40, (1, 2)), soak("qwen3_5", 20, (2, 4))],
)
async def test_images_over_two_sizes(
    kind: str, step: int, sizes: tuple[int, int], tmp_path: Path
) -> None:
    """The first process has the vision tower, and sends the rows of images to the others.

    A step takes `step` tokens: an image, and less than a prompt.
    """
    path = make_vision_model(kind, tmp_path)
    cat, dog = picture(1), picture(2, 16, 40)
    asked = [prompt_of(kind, [[5 + n], cat, [9, 10, 11], dog, [20, 21]]) for n in range(2)]
    expected = [generated(path, kind, *prompt, NUM_TOLD) for prompt in asked]
    few = {**FEW, "max_num_batched_tokens": step, "dtype": "float32"}
    nodes = [{**few, "tensor_parallel_size": size} for size in sizes]
    async with cluster(Plan(path, nodes[:1], nodes[1:], lanes=("stream",))) as c:
        done = [told(c, str(number), *prompt) for number, prompt in enumerate(asked)]
        assert await asyncio.gather(*done) == expected
        assert c.prefill[0].stats.num_encoded_images == 2
        assert c.prefill[0].stats.num_chunked_prompts == len(asked)
        assert c.decode[0].stats.num_prompt_tokens == 0, "all KV came from the prefill node"
        for member, size in zip(c.members, sizes, strict=True):
            ranks = member.engine.ranks
            assert (0 if ranks is None else len(ranks.processes)) == size - 1
        await c.settle()


def children(pid: int) -> Iterator[int]:
    """Of a process, by the kernel's account."""
    for task in Path(f"/proc/{pid}/task").iterdir():
        yield from map(int, (task / "children").read_text().split())


async def gone(descriptor: int) -> None:
    """Until the process behind a pidfd has ended: nobody here is its parent."""
    loop, ended = asyncio.get_running_loop(), asyncio.Event()
    loop.add_reader(descriptor, ended.set)
    try:
        async with asyncio.timeout(PATIENCE_S):
            await ended.wait()
    finally:
        loop.remove_reader(descriptor)
        os.close(descriptor)


@pytest.mark.parametrize("ends", ["leader killed", "SIGTERM"])
async def test_no_rank_outlives_its_leader(model: Path, tmp_path: Path, ends: str) -> None:
    async with Processes(model, tmp_path, forked=True) as run:
        node = await run.start("prefill_node", "p", (*FLAGS, "--tensor-parallel-size", "2"))
        (rank,) = children(node.process.pid)
        descriptor = os.pidfd_open(rank)
        if ends == "SIGTERM":
            assert await node.stop() == 0
            assert "group lost" not in node.log.read_text()
        else:
            await node.kill()
        await gone(descriptor)


async def test_a_rank_killed_in_mid_answer_ends_its_node(model: Path, tmp_path: Path) -> None:
    """The leader is about to meet the dead rank in a collective, or does: either way it ends, and
    says why; what the client has seen is the beginning of the answer."""
    [prompt] = PROMPTS[:1]
    [expected] = one_engine_tokens(model, [prompt], LONG)
    async with Processes(model, tmp_path) as run:
        prefill, decode = await asyncio.gather(
            run.start("prefill_node", "p", FLAGS),
            run.start("decode_node", "d", (*FLAGS, "--tensor-parallel-size", "2")),
        )
        router = await run.router([prefill], [decode])
        (rank,) = children(decode.process.pid)
        async with AsyncClient(str(router.ready["grpc_address"])) as client:

            async def serves() -> bool:
                return len((await client.server_info()).nodes) == 2

            await eventually(serves)
            stream = client.stream(prompt, LONG, GenerateOptions(timeout_s=PATIENCE_S))
            seen: list[int] = []
            while len(seen) < 5:
                seen += (await anext(stream)).token_ids
            os.kill(rank, signal.SIGKILL)
            assert await asyncio.wait_for(decode.process.wait(), PATIENCE_S) == LOST_RANK
            await stream.aclose()
        assert tuple(seen) == expected[: len(seen)]
        assert "tensor-parallel group lost, all ranks end: rank 1 has ended" in (
            decode.log.read_text()
        )
