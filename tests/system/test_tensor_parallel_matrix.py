"""Every weight format from P to D over any sizes: formats x ranks {1, 2, 4} x {P = D, P != D}.
Every run takes each format and each pair of sizes; every format over every pair is `soak`.

Nodes in one process, their ranks as threads, in float32. Each cell is proven by counters: all KV
was fetched once, by a decode node that computed no prompt; as many ranks ran as asked; the tokens
are those of one engine of one rank. Memory per rank: at the end, and by other formats in
tests/engine/test_tensor_parallel_quantized.py and test_tensor_parallel_mixtures.py. Processes as
ranks: test_tensor_parallel.py.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from baton.engine.checkpoint.convert import convert
from baton.engine.loading import leader
from baton.engine.loading.loading import load_model
from baton.engine.parallel.group import RankGroup
from baton.engine.performance.estimate import sized
from baton.engine.performance.ideal import EstimateOptions
from baton.engine.state.place import RankPlace
from baton.llm import LLM
from baton.protocol.kv_spec import LayerSpec
from baton.protocol.sampling import SamplingParams
from tests.cluster import Plan, cluster
from tests.combinations import combined
from tests.engine.quantized_models import RECIPES, SHAPE
from tests.engine.tensor_parallel_ranks import config_of, start_thread
from tests.engine.test_latent_models import WIDE
from tests.engine.test_tensor_parallel_mixtures import fp8, stored
from tests.engine.test_tensor_parallel_quantized import KINDS, ON_LOAD, make_case
from tests.engine.widened_models import make_widened, packed_experts
from tests.golden.dense_families import save_dense
from tests.golden.gpt_oss_models import WIDE as WIDE_OSS
from tests.golden.gpt_oss_models import save_gpt_oss
from tests.golden.latent_models import as_published, save_latent
from tests.system.references import Tokens, prompts
from tests.tiny_models import make_tiny_model

pytest.importorskip("gguf")
from tests.engine.gguf_models import write_gguf

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

# Formats whose packing is not of RECIPES; further families, plain.
FURTHER: dict[str, Callable[[Path], Path]] = {
    "MXFP4": lambda path: make_widened("mxfp4", path, "qwen3")[0],
    "NVFP4": lambda path: make_widened("nvfp4", path, "qwen3")[0],
    "NVFP4, modelopt's": lambda path: make_widened("nvfp4-modelopt", path, "qwen3")[0],
    "bitsandbytes nf4": lambda path: make_widened("nf4-nested", path, "qwen3")[0],
    "bitsandbytes int8": lambda path: make_widened("llm-int8", path, "qwen3")[0],
    "GGUF Q4_K_M": lambda path: gguf_file(path, "Q4_K_M"),
    "GGUF Q8_0": lambda path: gguf_file(path, "Q8_0"),
    "GPT-OSS": lambda path: save_gpt_oss(path, **WIDE_OSS),
    "GPT-OSS, MXFP4": lambda path: packed_experts(path, save_gpt_oss(path / "m", **WIDE_OSS))[0],
    "Gemma 3": lambda path: save_dense(path, "gemma 3"),
    "Phi 3": lambda path: save_dense(path, "phi 3"),
    "Phi 4 mini": lambda path: save_dense(path, "phi 4 mini"),
    "GLM 4": lambda path: save_dense(path, "glm 4"),
}
# What the default run tries, too.
QUICK = {
    (PLAIN, (1, 1)), ("w8a8", (1, 2)), ("gptq-desc-act", (2, 1)), ("MXFP4", (2, 1)),
    ("NVFP4", (1, 2)), ("bitsandbytes nf4", (2, 2)), ("GGUF Q4_K_M", (1, 2)),
    ("GPT-OSS, MXFP4", (2, 1)), ("Gemma 3", (1, 2)), ("Phi 4 mini", (2, 1)), ("GLM 4", (1, 2)),
}  # fmt: skip

MIXTURE_FORMATS = ("loaded as int8", "loaded as int4", "w8a8", "w4a16", "awq")


def gguf_file(path: Path, mix: str) -> Path:
    """The folder of a file, of a Qwen3 whose rows make blocks of 256."""
    sizes = {"hidden_size": 256, "intermediate_size": 512, "head_dim": 64, "num_hidden_layers": 2}
    file = path / "tiny.gguf"
    write_gguf(make_tiny_model("qwen3", path / "m", **sizes), file, mix)
    convert(file)
    return file.with_suffix("")


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
        if name in FURTHER:
            return model_of(FURTHER[name](path), {})
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


def kv_bytes(layers: Sequence[LayerSpec]) -> tuple[int, int]:
    """Of all prompts: what their next tokens attend to, and all. The same without windows."""
    least = most = 0
    for spec in layers:
        read = sum(min(len(p), spec.window - 1 if spec.window else len(p)) for p in PROMPTS)
        least += read * spec.token_bytes("float32")
        most += sum(map(len, PROMPTS)) * spec.token_bytes("float32")
    return least, most


async def assert_pair(model: Model, sizes: tuple[int, int], **options: Any) -> None:
    """A prefill and a decode node of these sizes write what one engine writes."""
    nodes = [
        {"tensor_parallel_size": size, "block_size": block, "dtype": "float32"}
        | model.options
        | options
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
        least, most = kv_bytes(prefill.engine.info.layers)
        assert decode.transfers.bytes_received.keys() == {LANE}
        assert least <= decode.transfers.bytes_received[LANE] <= most
        for member, size in zip(c.members, sizes, strict=True):
            ranks = member.engine.ranks
            assert (0 if ranks is None else len(ranks.processes)) == size - 1


@pytest.mark.parametrize(
    ("name", "sizes"),
    combined((*FORMATS, *FURTHER), SIZES, always=QUICK, marks=[pytest.mark.long]),
)
async def test_every_format_over_any_sizes(
    name: str, sizes: tuple[int, int], models: Models
) -> None:
    await assert_pair(models("qwen3", name), sizes)


@pytest.mark.parametrize(
    ("latents", "sizes"),
    combined([*itertools.product(LATENTS, LATENT_FORMATS)], SIZES[1:], marks=[pytest.mark.long]),
)
async def test_latents_and_whole_experts_over_any_sizes(
    latents: tuple[str, str], sizes: tuple[int, int], models: Models
) -> None:
    """A node of one rank takes the flag, too."""
    family, name = latents
    await assert_pair(models(family, name), sizes, enable_expert_parallel=True)


@pytest.mark.parametrize(
    ("name", "sizes"), combined(MIXTURE_FORMATS, SIZES[1:], marks=[pytest.mark.long])
)
async def test_whole_experts_over_any_sizes(
    name: str, sizes: tuple[int, int], models: Models
) -> None:
    await assert_pair(models("qwen3_moe", name), sizes, enable_expert_parallel=True)


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=() if name.startswith("G") else pytest.mark.long)
        for name in FURTHER
    ],
)
def test_a_rank_takes_the_memory_that_is_estimated(name: str, tmp_path: Path) -> None:
    """Four ranks share two KV heads. RECIPES: tests/engine/test_tensor_parallel_quantized.py."""
    path = FURTHER[name](tmp_path)
    for size in (1, 2, 4):
        asked = EstimateOptions(model=path, dtype="float32", tensor_parallel_size=size)
        estimate = sized(asked)
        assert estimate.refused is None
        for rank in range(size):
            group = None if size == 1 else RankGroup(RankPlace(rank, size), "gloo")
            loaded = load_model(config_of(path, tensor_parallel_size=size), group)
            assert 0.9 < loaded.weight_bytes / estimate.weight_bytes < 1.1, (size, rank)
