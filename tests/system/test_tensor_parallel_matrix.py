"""Every weight format from P to D over any sizes: formats x ranks {1, 2, 4} x {P = D, P != D}.

Nodes in one process, their ranks as threads, in float32. Each cell is proven by counters: all KV
was fetched once, by a decode node that computed no prompt; as many ranks ran as asked; the tokens
are those of one engine of one rank. Memory per rank, by the formats:
tests/engine/test_tensor_parallel_quantized.py and test_tensor_parallel_mixtures.py. Processes as
ranks: test_tensor_parallel.py.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from baton.engine.loading import leader
from baton.llm import LLM
from baton.protocol.sampling import SamplingParams
from tests.cluster import Plan, cluster
from tests.engine.quantized_models import RECIPES, SHAPE
from tests.engine.tensor_parallel_ranks import start_thread
from tests.engine.test_latent_models import WIDE
from tests.engine.test_tensor_parallel_mixtures import fp8, stored
from tests.engine.test_tensor_parallel_quantized import KINDS, ON_LOAD, make_case
from tests.engine.widened_models import make_widened
from tests.golden.latent_models import as_published, save_latent
from tests.system.references import Tokens, prompts
from tests.tiny_models import make_tiny_model

GREEDY = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
PROMPTS = prompts((37, 20, 45, 5))
LANE = "stream"
EQUAL = ((1, 1), (2, 2), (4, 4))
SIZES = (*EQUAL, (1, 2), (2, 4), (4, 1))  # of P and of D
PLAIN = "plain"
WIDENED = "fp8, widened"
FORMATS = (PLAIN, *ON_LOAD, *RECIPES, WIDENED)
LATENTS = ("v3", "kimi k2")
LATENT_FORMATS: dict[str, dict[str, Any]] = {
    PLAIN: {}, "int8": {"quantization": "int8"}, "int4": {"quantization": "int4"}, WIDENED: {},
    "w4a16": {}, "gptq-desc-act": {},
}  # fmt: skip

MIXTURE_FORMATS = ("loaded as int8", "loaded as int4", "w8a8", "w4a16", "awq")

pytestmark = pytest.mark.long


@dataclass(frozen=True, slots=True)
class Model:
    """A checkpoint, how engines load it, and what one of one rank writes."""

    path: Path
    options: dict[str, Any]
    tokens: list[Tokens]


def model_of(path: Path, options: dict[str, Any]) -> Model:
    llm = LLM(str(path), "float32", num_kv_blocks=64, threads=1, **options)
    done = llm.generate([list(prompt) for prompt in PROMPTS], GREEDY)
    return Model(path, options, [tuple(each.outputs[0].token_ids) for each in done])


Models = Callable[[str, str], Model]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Models:
    """By family and format, each made once."""
    known: dict[tuple[str, str], Model] = {}

    def make(family: str, name: str) -> Model:
        path = tmp_path_factory.mktemp("model")
        if family == "qwen3" and name in (PLAIN, WIDENED):
            plain = name == PLAIN
            given = (
                make_tiny_model(family, path, **SHAPE)
                if plain
                else make_widened("fp8-deepseek", path, family)[0]
            )
            return model_of(given, {})
        if family in KINDS:
            case = make_case(family, name, path)
            return model_of(case.path, case.options)
        options = LATENT_FORMATS[name]
        if name in RECIPES:
            return model_of(stored(name)(path, family), options)
        if name == WIDENED:
            return model_of(fp8(path, family), options)
        return model_of(as_published(save_latent(path, family, **WIDE), family), options)

    def of(family: str, name: str) -> Model:
        if (family, name) not in known:
            known[family, name] = make(family, name)
        return known[family, name]

    return of


@pytest.fixture(autouse=True)
def ranks_are_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(leader.load_leader, "__defaults__", (start_thread,))


async def assert_pair(model: Model, sizes: tuple[int, int], **options: Any) -> None:
    """A prefill and a decode node of these sizes write what one engine writes."""
    nodes = [
        {"tensor_parallel_size": size, "block_size": block, **model.options, **options}
        for size, block in zip(sizes, (8, 16), strict=True)
    ]
    async with cluster(Plan(model.path, nodes[:1], nodes[1:], lanes=(LANE,))) as c:
        done = await c.generate(PROMPTS, GREEDY)
        await c.settle()
        assert [each.token_ids for each in done] == model.tokens
        assert {each.retries for each in done} == {0}
        (prefill,), (decode,) = c.prefill, c.decode
        assert prefill.stats.num_prompt_tokens == sum(map(len, PROMPTS))
        assert decode.stats.num_prompt_tokens == 0
        assert decode.transfers.failures == {}
        assert decode.transfers.fetches == len(PROMPTS)
        token_bytes = prefill.node.shell.connector.bytes_of(1)
        assert decode.transfers.bytes_received == {LANE: sum(map(len, PROMPTS)) * token_bytes}
        for member, size in zip(c.members, sizes, strict=True):
            ranks = member.engine.ranks
            assert (0 if ranks is None else len(ranks.processes)) == size - 1


@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize("name", FORMATS)
async def test_every_format_over_any_sizes(
    name: str, sizes: tuple[int, int], models: Models
) -> None:
    await assert_pair(models("qwen3", name), sizes)


@pytest.mark.parametrize("sizes", SIZES[1:])
@pytest.mark.parametrize("name", LATENT_FORMATS)
@pytest.mark.parametrize("family", LATENTS)
async def test_latents_and_whole_experts_over_any_sizes(
    family: str, name: str, sizes: tuple[int, int], models: Models
) -> None:
    """A node of one rank takes the flag, too."""
    await assert_pair(models(family, name), sizes, enable_expert_parallel=True)


@pytest.mark.parametrize("sizes", SIZES[1:])
@pytest.mark.parametrize("name", MIXTURE_FORMATS)
async def test_whole_experts_over_any_sizes(
    name: str, sizes: tuple[int, int], models: Models
) -> None:
    await assert_pair(models("qwen3_moe", name), sizes, enable_expert_parallel=True)
