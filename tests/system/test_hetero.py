"""Pairs that store KV differently, end to end: greedy tokens are those of one engine alone.

Block sizes in both directions x dtype x lane; for tensor-parallel sizes see tests/transfer/
test_ranks_tokens.py. Exact where nothing is rounded. Where one side stores int8, its bound per
number is that of tests/transfer/test_contract_hetero.py; here, what it does to the text.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from baton.llm import LLM
from baton.protocol.sampling import SamplingParams
from tests.cluster import Cluster, Plan, cluster
from tests.system.references import Tokens, prompts
from tests.tiny_models import make_tiny_model

PROMPTS = prompts((3, 17, 40, 65, 1, 130), seed=2)
PARAMS = SamplingParams(temperature=0.0, max_tokens=16, ignore_eos=True)
LANES = ("shm", "stream", "grpc")
BLOCKS = ((8, 32), (32, 8), (16, 128), (128, 16), (64, 64))
NEARLY = 0.1  # nats: 0.075 is the most that int8 has cost (docs/kv_wire_format.md)
NO_HITS = {"enable_prefix_caching": False}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model("llama", tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def alone(model: Path) -> Callable[..., list[Tokens]]:
    """Tokens of one engine with these options."""
    known: dict[tuple[tuple[str, Any], ...], list[Tokens]] = {}

    def of(**options: Any) -> list[Tokens]:
        key = tuple(sorted(options.items()))
        if key not in known:
            llm = LLM(model=str(model), num_kv_blocks=64, threads=1, **options)
            done = llm.generate([list(prompt) for prompt in PROMPTS], PARAMS)
            known[key] = [tuple(each.token_ids) for each in done]
        return known[key]

    return of


async def tokens_of(c: Cluster, lane: str, token_bytes: float) -> list[Tokens]:
    """PROMPTS, all at once; proves that their KV moved by `lane`, at so many bytes a token."""
    done = await c.generate(PROMPTS, PARAMS)
    assert {each.retries for each in done} == {0}
    await c.settle()
    (decode,) = c.decode
    assert decode.transfers.failures == {}
    assert decode.transfers.fetches == len(PROMPTS)
    assert decode.transfers.bytes_received == {lane: sum(map(len, PROMPTS)) * token_bytes}
    assert decode.stats.num_prompt_tokens == 0
    return [each.token_ids for each in done]


def plan(model: Path, shared: Path, lane: str, p: dict[str, Any], d: dict[str, Any]) -> Plan:
    """Pages are copied: of pools that differ none could be adopted (test_adoption.py)."""
    shared.mkdir()
    return Plan(model, (NO_HITS | p,), (NO_HITS | d,), shared=shared, lanes=(lane,), adopt=False)


def bytes_per_token(c: Cluster) -> int:
    """As the exporter stores them."""
    return c.prefill[0].node.shell.connector.bytes_of(1)


# Each pair of sizes in each dtype, and each lane with every size; what is between comes with the
# long tests.
ANY_TWO = [
    pytest.param(blocks, dtype, lane, marks=[pytest.mark.long] * ((i + j + k) % len(LANES) > 0))
    for i, blocks in enumerate(BLOCKS)
    for j, dtype in enumerate(("float32", "bfloat16"))
    for k, lane in enumerate(LANES)
]


@pytest.mark.parametrize(("blocks", "dtype", "lane"), ANY_TWO)
async def test_any_two_block_sizes(
    model: Path,
    alone: Callable[..., list[Tokens]],
    tmp_path: Path,
    blocks: tuple[int, int],
    dtype: str,
    lane: str,
) -> None:
    # bfloat16 sums depend on their order, and that on the block size: in this mode on neither.
    how = {"dtype": dtype, "deterministic": dtype == "bfloat16"}
    p, d = (how | {"block_size": size} for size in blocks)
    async with cluster(plan(model, tmp_path / "shm", lane, p, d)) as c:
        sizes = tuple(member.engine.pool.block_size for member in c.members)
        assert sizes == blocks
        assert await tokens_of(c, lane, bytes_per_token(c)) == alone(**how)


@pytest.mark.parametrize(
    ("blocks", "lane"),
    [
        pytest.param(blocks, lane, marks=[pytest.mark.long] * (i != k))
        for i, blocks in enumerate([(8, 32), (32, 8), (16, 16)])
        for k, lane in enumerate(LANES)
    ],
)
async def test_int8_on_both_sides_is_one_int8_engine(
    model: Path,
    alone: Callable[..., list[Tokens]],
    tmp_path: Path,
    blocks: tuple[int, int],
    lane: str,
) -> None:
    """Nothing is rounded twice."""
    p, d = ({"block_size": size, "kv_cache_dtype": "int8"} for size in blocks)
    async with cluster(plan(model, tmp_path / "shm", lane, p, d)) as c:
        assert await tokens_of(c, lane, bytes_per_token(c)) == alone(kv_cache_dtype="int8")


@pytest.mark.parametrize(("lane", "dtype"), [("dist", "float32"), ("stream", "float16")])
async def test_another_lane_and_another_dtype(
    model: Path, alone: Callable[..., list[Tokens]], tmp_path: Path, lane: str, dtype: str
) -> None:
    how = {"dtype": dtype, "deterministic": dtype != "float32"}
    p, d = (how | {"block_size": size} for size in (8, 32))
    async with cluster(plan(model, tmp_path / "shm", lane, p, d)) as c:
        assert await tokens_of(c, lane, bytes_per_token(c)) == alone(**how)


def regret(model: Path, prompt: Tokens, wanted: Tokens, found: Tokens) -> float:
    """By how many nats the exact engine prefers its own token where `found` first differs from
    `wanted`; 0 if it does nowhere."""
    pairs = zip(wanted, found, strict=True)
    at = next((index for index, (ours, theirs) in enumerate(pairs) if ours != theirs), None)
    if at is None:
        return 0.0
    llm = LLM(model=str(model), num_kv_blocks=64, threads=1)
    params = SamplingParams(temperature=0.0, max_tokens=1, logprobs=20)
    [output] = llm.generate([[*prompt, *found[:at]]], params)
    likely = {each.token_id: each.logprob for each in output.outputs[0].logprobs[0]}
    return likely[wanted[at]] - likely[found[at]]


@pytest.mark.parametrize("sides", [("int8", "auto"), ("auto", "int8")])
async def test_int8_on_one_side(
    model: Path, alone: Callable[..., list[Tokens]], tmp_path: Path, sides: tuple[str, str]
) -> None:
    """The same on every lane; another token than the exact one only where it is nearly as good."""
    p, d = (
        {"block_size": size, "kv_cache_dtype": side}
        for size, side in zip((8, 32), sides, strict=True)
    )
    found: list[list[Tokens]] = []
    for lane in LANES:
        async with cluster(plan(model, tmp_path / lane, lane, p, d)) as c:
            found.append(await tokens_of(c, lane, bytes_per_token(c)))
    assert found[0] == found[1] == found[2]
    for prompt, wanted, tokens in zip(PROMPTS, alone(), found[0], strict=True):
        assert regret(model, prompt, wanted, tokens) < NEARLY


@pytest.mark.parametrize("sides", [("float32", "bfloat16"), ("bfloat16", "float32")])
async def test_float32_and_bfloat16(
    model: Path, alone: Callable[..., list[Tokens]], tmp_path: Path, sides: tuple[str, str]
) -> None:
    """Each computes in its own precision, from rounded KV or after it."""
    p, d = ({"dtype": side} for side in sides)
    async with cluster(plan(model, tmp_path / "shm", "stream", p, d)) as c:
        found = await tokens_of(c, "stream", bytes_per_token(c))
    for prompt, wanted, tokens in zip(PROMPTS, alone(), found, strict=True):
        assert regret(model, prompt, wanted, tokens) < NEARLY


@pytest.mark.parametrize(("codec", "lane"), [("int8", "stream"), ("auto", "grpc")])
async def test_int8_on_the_wire_alone(
    model: Path, alone: Callable[..., list[Tokens]], tmp_path: Path, codec: str, lane: str
) -> None:
    """Both pools are exact, what travels is not; `auto` has seen a slow link."""
    setup = replace(plan(model, tmp_path / "shm", lane, {}, {}), wire_codec=codec)
    async with cluster(setup) as c:
        p, d = (member.node.shell.connector for member in (c.prefill[0], c.decode[0]))
        d.links.observe(p.endpoint().boot_id, 100 << 20, 1.0)
        layers = c.prefill[0].engine.info.layers
        packed = sum(each.token_bytes("int8") + each.scale_bytes("int8") for each in layers)
        found = await tokens_of(c, lane, packed)
    assert packed < p.bytes_of(1) / 2
    for prompt, wanted, tokens in zip(PROMPTS, alone(), found, strict=True):
        assert regret(model, prompt, wanted, tokens) < NEARLY
