"""Big mixtures over ranks: latent attention, whole experts on each rank; against one rank.

Ranks are threads over gloo, models in float32. Sums over ranks differ from those of one rank by
their order alone, but w8a8's experts also round what lies between two integers.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from baton.engine.config import EngineConfig
from baton.engine.loading.loading import LoadedModel, load_model
from baton.engine.models.experts import Expert, Experts
from baton.engine.parallel.group import RankGroup
from baton.engine.parallel.pool import GroupArena
from baton.engine.parallel.rank import RankModel
from baton.engine.performance.estimate import sized
from baton.engine.performance.ideal import EstimateOptions
from baton.engine.state.place import RankPlace
from baton.llm import LLM
from baton.protocol.errors import ModelRefused
from baton.protocol.request import Request
from tests.adapters import id_of
from tests.engine.driving import assert_all_free
from tests.engine.quantized_models import MIXTURE, RECIPES, SHAPE, make_quantized, quantized_pair
from tests.engine.running import relative_error
from tests.engine.tensor_parallel_ranks import by_threads, config_of, engine_of_ranks, logits_of
from tests.engine.test_latent_models import WIDE
from tests.engine.test_models_lora import linear_layers, make_adapter
from tests.engine.test_tensor_parallel_engine import GREEDY, PROMPTS, answers
from tests.engine.widened_models import widened_pair
from tests.golden.latent_models import LATENT_MODELS, as_published, save_latent
from tests.golden.random_models import save_random
from tests.system.references import transformers_tokens
from tests.tiny_models import make_tiny_model

SCHEMES = ("int8", "w8a8", "int4")
INT8_ROWS = ("w8a8", "w4a8")
ADAPTED = (
    "q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "o_proj", "gate_proj", "up_proj", "down_proj",
)  # fmt: skip
PRODUCTS = ("_proj.weight", "_mqa.weight")


def fp8(path: Path, name: str) -> Path:
    """As DeepSeek publishes: 8-bit floats in blocks, all products of the layers."""
    packed, twin = (save_latent(path / each, name, **WIDE) for each in ("packed", "twin"))
    return widened_pair("fp8-deepseek", packed, twin, PRODUCTS)[0]


def stored(recipe: str) -> Callable[[Path, str], Path]:
    """Integers, kv_b_proj's too."""

    def make(path: Path, name: str) -> Path:
        packed, twin = (save_latent(path / each, name, **WIDE) for each in ("packed", "twin"))
        return quantized_pair(recipe, packed, twin, products=("_proj", "_mqa"))[0]

    return make


MIXTURES: dict[str, Callable[[Path], Path]] = {
    "mixtral": lambda path: save_random(
        path, "mixtral", num_experts_per_tok=2, num_local_experts=4
    ),
    "qwen2_moe": lambda path: save_random(
        path, "qwen2_moe", **SHAPE, **MIXTURE, shared_expert_intermediate_size=64
    ),
    "qwen3_moe": lambda path: save_random(path, "qwen3_moe", **SHAPE, **MIXTURE),
}


def share_of(
    config: EngineConfig, size: int
) -> Callable[[RankGroup], tuple[LoadedModel, torch.Tensor]]:
    def share(group: RankGroup) -> tuple[LoadedModel, torch.Tensor]:
        loaded = load_model(config, group)
        return loaded, logits_of(loaded, size)

    return share


def of_ranks(path: Path, size: int, **options: Any) -> list[tuple[LoadedModel, torch.Tensor]]:
    """Of each rank its share and its logits; `options`: the engine's."""
    return by_threads(size, share_of(config_of(path, tensor_parallel_size=size, **options), size))


def assert_as_one_rank(path: Path, size: int, whole_experts: bool, **options: Any) -> None:
    whole = load_model(config_of(path, **options))
    expected = logits_of(whole, 1)
    ranks = of_ranks(path, size, enable_expert_parallel=whole_experts, **options)
    leader, found = ranks[0]
    if options.get("quantization") in INT8_ROWS or any(each in str(path) for each in INT8_ROWS):
        # A number between two integers may be rounded to the other one: few rows differ.
        assert relative_error(found, expected) < 0.2
        assert (found - expected).abs().amax(1).quantile(0.25) < 2e-3
    else:
        torch.testing.assert_close(found, expected, atol=2e-4, rtol=2e-4)
        assert found.argmax(-1).equal(expected.argmax(-1))
    assert {loaded.info.digest for loaded, _ in ranks} == {whole.info.digest}
    assert leader.info.layers == whole.info.layers, "the model's, whoever computes them"
    for loaded, _ in ranks:
        assert loaded.attention_layers[0].query_heads == 4 // size
        assert loaded.weight_bytes < (0.75 if size == 2 else 0.55) * whole.weight_bytes


def cases(names: tuple[str, ...], quick: set[tuple[str, int, bool]]) -> list[Any]:
    """All of `names` over 2 and 4 ranks with experts cut and whole; the `quick` ones by default."""
    return [
        pytest.param(*case, marks=() if case in quick else pytest.mark.long)
        for case in itertools.product(names, (2, 4), (False, True))
    ]


@pytest.mark.parametrize(
    ("name", "size", "whole_experts"),
    cases(
        tuple(LATENT_MODELS),
        {("v3", 2, False), ("v3", 4, True), ("v2, groups", 4, False), ("v3, biases", 2, True),
         ("v3, plain queries", 4, True), ("glm4 lite", 2, True), ("kimi k2", 4, False)},
    ),
)  # fmt: skip
@torch.inference_mode()
def test_latent_attention_gives_the_logits_of_one_rank(
    name: str, size: int, whole_experts: bool, tmp_path: Path
) -> None:
    path = as_published(save_latent(tmp_path, name), name)
    assert_as_one_rank(path, size, whole_experts)


@pytest.mark.parametrize(
    ("name", "size", "whole_experts"),
    cases(tuple(MIXTURES), {("mixtral", 4, True), ("qwen2_moe", 2, True), ("qwen3_moe", 4, True)}),
)
@torch.inference_mode()
def test_mixtures_give_the_logits_of_one_rank(
    name: str, size: int, whole_experts: bool, tmp_path: Path
) -> None:
    assert_as_one_rank(MIXTURES[name](tmp_path), size, whole_experts)


ROUNDED = tuple(f"{kind}, {scheme}" for kind in ("v3", "v2, groups") for scheme in SCHEMES)


@pytest.mark.parametrize(
    ("case", "size", "whole_experts"),
    cases(ROUNDED, {("v3, int8", 4, True), ("v3, w8a8", 2, False), ("v3, w8a8", 4, True),
                    ("v2, groups, int4", 2, True)}),
)  # fmt: skip
@torch.inference_mode()
def test_weights_rounded_on_load(case: str, size: int, whole_experts: bool, tmp_path: Path) -> None:
    name, _, scheme = case.rpartition(", ")
    path = save_latent(tmp_path / "m", name, **WIDE)
    assert_as_one_rank(path, size, whole_experts, quantization=scheme)


@pytest.mark.parametrize(
    ("name", "size", "whole_experts"),
    cases(
        ("fp8", *RECIPES),
        {("fp8", 4, True), ("w8a8", 2, True), ("gptq-desc-act", 2, False), ("awq", 4, False)},
    ),
)
@torch.inference_mode()
def test_stored_formats(name: str, size: int, whole_experts: bool, tmp_path: Path) -> None:
    """kv_b_proj is widened whole, and then cut by heads."""
    make = fp8 if name == "fp8" else stored(name)
    assert_as_one_rank(make(tmp_path / name, "v3"), size, whole_experts)


@pytest.mark.parametrize(
    "name",
    [pytest.param(n, marks=() if n == "w8a8" else pytest.mark.long) for n in RECIPES],
)
@torch.inference_mode()
def test_whole_experts_of_integers(name: str, tmp_path: Path) -> None:
    path, _ = make_quantized(name, tmp_path / name, "qwen3_moe")
    assert_as_one_rank(path, 4, True)


@pytest.mark.parametrize("scheme", SCHEMES)
@torch.inference_mode()
def test_a_gated_shared_expert_beside_whole_ones(scheme: str, tmp_path: Path) -> None:
    """Its part is summed with theirs."""
    assert_as_one_rank(MIXTURES["qwen2_moe"](tmp_path / scheme), 2, True, quantization=scheme)


@torch.inference_mode()
def test_each_rank_has_its_own_experts(tmp_path: Path) -> None:
    """And computes for each row those that the row has chosen, once over all ranks."""
    path = save_latent(tmp_path, "v3")
    for rank, (loaded, _) in enumerate(of_ranks(path, 4, enable_expert_parallel=True)):
        assert isinstance(loaded.model, RankModel)
        mixtures = [layer.mlp for layer in loaded.model.decoder._layers[1:]]
        for layer in mixtures:
            assert isinstance(layer, Experts)
            assert (layer.first, len(layer.experts)) == (2 * rank, 2)


@torch.inference_mode()
def test_whole_experts_exchange_nothing_and_sum_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of w8a8: a sum for the embedding, and two of a layer (o, and its mixture's or its MLP's).
    Rows are rounded together before o, and before down of the MLP and of the shared expert."""
    path = save_latent(tmp_path, "v3", **WIDE)
    calls: Counter[str] = Counter()

    def counted(name: str) -> Callable[[RankGroup, torch.Tensor], torch.Tensor]:
        plain = getattr(RankGroup, name)

        def call(group: RankGroup, tensor: torch.Tensor) -> torch.Tensor:
            calls[name] += group.place.leads
            return plain(group, tensor)

        return call

    for name in ("all_reduce", "all_reduce_max"):
        monkeypatch.setattr(RankGroup, name, counted(name))
    computed = Counter[int]()
    inner = Expert.inner

    def counted_inner(expert: Expert, x: torch.Tensor) -> torch.Tensor:
        computed[len(x)] += 1
        return inner(expert, x)

    monkeypatch.setattr(Expert, "inner", counted_inner)
    of_ranks(path, 2, enable_expert_parallel=True, quantization="w8a8")
    steps, layers = 2, 3
    assert calls == {"all_reduce": steps * (1 + 2 * layers), "all_reduce_max": steps * 2 * layers}
    rows, chosen, sparse = 30 + 4, 3, 2
    assert sum(count * number for count, number in computed.items()) == rows * chosen * sparse


@torch.inference_mode()
def test_bfloat16_by_the_compiled_kernels(tmp_path: Path) -> None:
    """Whole experts in one compiled call; sums are rounded once more."""
    from baton.engine.models.elementwise import CompiledElementwise

    path = save_random(tmp_path, "qwen3_moe", **SHAPE, **MIXTURE)
    for scheme in ("none", "w8a8"):
        options: dict[str, Any] = {"device": "cpu", "dtype": "bfloat16", "quantization": scheme}
        expected = logits_of(load_model(EngineConfig(str(path), **options)), 1)
        config = EngineConfig(
            str(path), tensor_parallel_size=2, enable_expert_parallel=True, **options
        )
        ranks: list[tuple[LoadedModel, torch.Tensor]] = by_threads(2, share_of(config, 2))
        assert relative_error(ranks[0][1], expected) < 0.06
        for loaded, _ in ranks:
            assert isinstance(loaded.model, RankModel)
            decoder = loaded.model.decoder
            if isinstance(decoder._between, CompiledElementwise):
                mixtures = [layer.mlp for layer in decoder._layers]
                assert all(isinstance(m, Experts) and m.together is not None for m in mixtures)


# ---- engines ----

OPTIONS: dict[str, Any] = {
    "num_kv_blocks": 96, "block_size": 8, "max_num_batched_tokens": 24, "max_num_seqs": 8,
}  # fmt: skip
ENGINES = cases(
    ("v3", "v2, groups", "glm4 lite", "kimi k2"), {("v3", 4, True), ("v2, groups", 2, False)}
)


@pytest.mark.parametrize(("name", "size", "whole_experts"), ENGINES)
def test_an_engine_of_ranks_writes_transformers_tokens(
    name: str, size: int, whole_experts: bool, tmp_path: Path
) -> None:
    """Prompts in chunks. Every rank's pool holds the same latents, bit for bit."""
    path = save_latent(tmp_path, name)
    expected = transformers_tokens(path, PROMPTS, GREEDY.max_tokens)
    model = str(as_published(path, name))
    options: dict[str, Any] = OPTIONS | {"enable_expert_parallel": whole_experts}
    with engine_of_ranks(model, size, **options) as engine:
        asked = [Request(f"r{i}", prompt, GREEDY) for i, prompt in enumerate(PROMPTS)]
        found = answers(engine, asked)
        assert [tuple(found[f"r{i}"]) for i in range(len(PROMPTS))] == expected
        assert engine.stats.num_chunked_prompts > 0
        assert isinstance(engine.arena, GroupArena)
        first, *others = (
            torch.frombuffer(arena.buffer(), dtype=torch.uint8) for arena in engine.arena.ranks
        )
        assert first.any()
        assert len(others) == size - 1
        assert all(torch.equal(first, other) for other in others)
        assert_all_free(engine)


@pytest.mark.parametrize(
    ("scheme", "whole_experts"),
    [("none", True), ("w8a8", True), pytest.param("int4", False, marks=pytest.mark.long)],
)
def test_adapters_of_latent_attention_and_shared_experts(
    scheme: str, whole_experts: bool, tmp_path: Path
) -> None:
    """What every rank holds whole, what is cut, and a part of a mixture's sum."""
    path = save_latent(tmp_path / "m", "v3", **WIDE)
    layers = linear_layers(path, ADAPTED)
    assert {name.rpartition(".")[2] for name in layers} == {*ADAPTED}
    assert any("shared_experts" in name for name in layers)
    modules = (f"a={make_adapter(tmp_path / 'a', layers, seed=1)}",)
    options = OPTIONS | {"quantization": scheme, "lora_modules": modules}
    engine = LLM(str(path), "float32", threads=1, **options).engine
    adapter = id_of(engine.info, "a")
    asked = [Request(f"r{i}", p, GREEDY, adapter=adapter * (i % 2)) for i, p in enumerate(PROMPTS)]
    expected = answers(engine, asked)
    plain = answers(engine, [replace(request, adapter="") for request in asked])
    assert [name for name in expected if plain[name] != expected[name]] == ["r1", "r3"]
    with engine_of_ranks(str(path), 2, enable_expert_parallel=whole_experts, **options) as engine:
        assert answers(engine, asked) == expected
        assert_all_free(engine)


def test_an_adapter_of_what_is_absorbed_is_refused_over_ranks_too(tmp_path: Path) -> None:
    path = save_latent(tmp_path / "m", "v3")
    adapter = make_adapter(tmp_path / "a", linear_layers(path, ("kv_b_proj",)), 1)
    config = config_of(path, tensor_parallel_size=2, lora_modules=(f"a={adapter}",))
    with pytest.raises(ModelRefused, match="kv_b_proj is absorbed"):
        load_model(config, RankGroup(RankPlace(0, 2), "gloo"))


# ---- memory ----

BIG = WIDE | {
    "hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 8, "v_head_dim": 64,
    "num_key_value_heads": 8, "moe_intermediate_size": 256, "q_lora_rank": 96,
}  # fmt: skip


RANKS: tuple[tuple[int, bool], ...] = (
    (1, False), (2, False), (2, True), (4, False), (4, True),
)  # fmt: skip


def assert_as_estimated(path: Path, **given: Any) -> None:
    """Memory of every rank, at 1, 2 and 4 ranks, experts cut and whole."""
    for size, whole_experts in RANKS:
        options: dict[str, Any] = {
            "tensor_parallel_size": size, "enable_expert_parallel": whole_experts, **given,
        }  # fmt: skip
        estimate = sized(EstimateOptions(model=path, dtype="float32", **options))
        assert estimate.refused is None
        for rank in range(size):
            group = None if size == 1 else RankGroup(RankPlace(rank, size), "gloo")
            loaded = load_model(config_of(path, **options), group)
            held = loaded.weight_bytes / estimate.weight_bytes
            assert 0.9 < held < 1.1, (size, whole_experts, rank)


@pytest.mark.parametrize("scheme", ["none", "int8", "w8a8", "int4"])
@pytest.mark.parametrize("name", ["v3", "v2, groups"])
def test_a_rank_takes_the_memory_that_is_estimated(name: str, scheme: str, tmp_path: Path) -> None:
    assert_as_estimated(save_latent(tmp_path, name, **BIG), quantization=scheme)


@pytest.mark.parametrize("name", ["fp8", *RECIPES])
def test_so_it_does_in_stored_formats(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Act-order's columns of zeros count."""
    monkeypatch.setattr(f"{__name__}.WIDE", BIG)
    make = fp8 if name == "fp8" else stored(name)
    assert_as_estimated(make(tmp_path / name, "v3"))


# ---- refusals ----


def test_experts_that_cannot_be_dealt_out_are_refused_by_name(tmp_path: Path) -> None:
    uneven = save_latent(
        tmp_path / "uneven", "v3", n_routed_experts=6, n_group=3, moe_intermediate_size=48
    )
    config = config_of(uneven, enable_expert_parallel=True, tensor_parallel_size=4)
    with pytest.raises(ModelRefused, match="6 experts cannot be split over 4 ranks") as refused:
        load_model(config, RankGroup(RankPlace(0, 4), "gloo"))
    assert refused.value.field == "tensor_parallel_size"
    dense = make_tiny_model("llama", tmp_path / "dense")
    for size in (1, 2):
        with pytest.raises(ModelRefused, match="llama has no experts") as refused:
            load_model(config_of(dense, tensor_parallel_size=size, enable_expert_parallel=True))
        assert refused.value.field == "enable_expert_parallel"
    other = save_random(tmp_path / "other", "mixtral")
    with pytest.raises(ModelRefused, match="only the lean route has experts over ranks"):
        load_model(config_of(other, model_impl="transformers", enable_expert_parallel=True))


def test_one_rank_holds_all_experts(tmp_path: Path) -> None:
    """The flag changes nothing there."""
    path = MIXTURES["mixtral"](tmp_path)
    expected = logits_of(load_model(config_of(path)), 1)
    found = logits_of(load_model(config_of(path, enable_expert_parallel=True)), 1)
    assert torch.equal(found, expected)
