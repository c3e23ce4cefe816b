"""Integer weights over ranks: each rank's part of a product, and whole models of every format.

Ranks are threads over gloo. Models in float32: sums over ranks differ from those of one rank by
their order alone.
"""

from __future__ import annotations

import itertools
import threading
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from baton.engine.loading.loading import LoadedModel, load_model
from baton.engine.parallel.group import RankGroup
from baton.engine.performance.estimate import sized
from baton.engine.performance.ideal import EstimateOptions
from baton.engine.quantization.int8_rows import W4A8Linear, W8A8Linear
from baton.engine.quantization.int_weight import IntWeight
from baton.engine.quantization.integer import (
    NibbleLinear,
    QuantizedFormat,
    Scheme,
    WidenedLinear,
    quantize,
)
from baton.engine.quantization.linear import Int8Share, Linear
from baton.engine.quantization.parts import of_inputs, of_outputs
from baton.engine.state.place import RankPlace
from baton.llm import LLM
from baton.protocol.errors import ModelRefused
from baton.protocol.request import Request
from tests.adapters import id_of
from tests.engine import quantized_models
from tests.engine.driving import assert_all_free
from tests.engine.quantized_models import MIXTURE, RECIPES, SHAPE, make_quantized
from tests.engine.running import relative_error
from tests.engine.tensor_parallel_ranks import by_threads, config_of, engine_of_ranks, logits_of
from tests.engine.test_models_lora import make_adapter
from tests.engine.test_tensor_parallel_engine import GREEDY, PROMPTS, answers
from tests.golden.gpt_oss_models import WIDE as WIDE_OSS
from tests.golden.gpt_oss_models import save_gpt_oss
from tests.golden.random_models import save_random
from tests.tiny_models import make_tiny_model

CPU = torch.device("cpu")
# Of integers, in float32 on a CPU: a layer, and what every product of it calls.
KERNELS = {
    NibbleLinear: "__call__", W8A8Linear: "wide", W4A8Linear: "wide", WidenedLinear: "__call__",
}  # fmt: skip
ON_LOAD: dict[str, dict[str, Any]] = {
    "loaded as int8": {"quantization": "int8"},
    "loaded as w8a8": {"quantization": "w8a8"},
    "loaded as int4": {"quantization": "int4"},
    "loaded as w4a8": {"quantization": "w4a8"},
    "loaded as int4, head too": {"quantization": "int4", "lm_head_quantization": "int4"},
    "head alone as w8a8": {"lm_head_quantization": "w8a8"},
}
KINDS = ("qwen3", "qwen3_moe")  # heads share KV heads; a mixture of experts
# What the default run tries of them; the others are `long`.
QUICK = {
    ("qwen3", "w8a8", 2), ("qwen3", "gptq-desc-act", 4), ("qwen3", "awq", 2),
    ("qwen3", "loaded as int4, head too", 4), ("qwen3_moe", "w8a8", 2),
    ("qwen3_moe", "loaded as int4", 4),
    ("qwen3", "loaded as w4a8", 2), ("qwen3_moe", "w4a8", 2),
}  # fmt: skip
MATRIX = [
    pytest.param(*case, marks=() if case in QUICK else pytest.mark.long)
    for case in itertools.product(KINDS, (*ON_LOAD, *RECIPES), (2, 4))
]


def random_rows(count: int, inputs: int) -> torch.Tensor:
    return torch.randn(count, inputs, generator=torch.Generator().manual_seed(2))


def random_weight(outputs: int, inputs: int) -> torch.Tensor:
    return torch.randn(outputs, inputs, generator=torch.Generator().manual_seed(1)) / 16


# ---- parts of a product ----


def parts_of(weight: IntWeight, size: int) -> list[IntWeight]:
    """By inputs."""
    share = weight.shape[1] // size
    return [of_inputs(weight, slice(rank * share, (rank + 1) * share)) for rank in range(size)]


def ordered(weight: IntWeight) -> IntWeight:
    """With the columns of another order of the inputs, as act-order leaves them."""
    order = torch.randperm(weight.shape[1], generator=torch.Generator().manual_seed(3))
    return replace(weight, order=order)


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("act_order", [False, True])
def test_the_parts_of_inputs_are_the_columns_of_the_whole(size: int, act_order: bool) -> None:
    """192 inputs in groups of 64: of four ranks, two share a group."""
    for scheme in ("int8", "int4"):
        whole = quantize(random_weight(24, 192), scheme)
        if act_order and scheme == "int4":
            whole = ordered(whole)
        found = torch.cat([part.dequantized(torch.float32) for part in parts_of(whole, size)], 1)
        assert torch.equal(found, whole.dequantized(torch.float32))


def test_groups_that_ranks_share_are_cut_as_little_as_can_be() -> None:
    whole = quantize(random_weight(8, 192), "int4")
    assert [part.group_size for part in parts_of(whole, 3)] == [64, 64, 64]
    assert [part.group_size for part in parts_of(whole, 2)] == [32, 32]
    assert [part.group_size for part in parts_of(whole, 4)] == [16, 16, 16, 16]
    with pytest.raises(ValueError, match="its groups of 64 inputs would be cut into 4"):
        parts_of(whole, 16)


def test_parts_own_their_memory() -> None:
    """A view would keep the whole weight."""
    whole = quantize(random_weight(64, 256), "int4")
    for part in (of_outputs(whole, slice(0, 8)), of_inputs(whole, slice(0, 64))):
        for tensor in (part.values, part.scales, part.zeros):
            assert tensor is not None
            assert tensor.untyped_storage().nbytes() == tensor.nbytes


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("scheme", "act_order"), [("int8", False), ("int4", False), ("int4", True)]
)
def test_the_sum_of_the_parts_is_the_product(
    scheme: Scheme, act_order: bool, dtype: torch.dtype
) -> None:
    """Also by the compiled kernels."""
    whole = quantize(random_weight(64, 256), scheme)
    whole = ordered(whole) if act_order else whole
    x = random_rows(7, 256).to(dtype)
    make, total = QuantizedFormat(dtype, CPU), torch.zeros(7, 64)
    for part, rows in zip(parts_of(whole, 4), x.chunk(4, 1), strict=True):
        total += make(part, None)(rows.contiguous()).float()
    bound = 1e-6 if dtype == torch.float32 else 0.006
    assert relative_error(total, make(whole, None)(x).float()) < bound


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize(
    ("scheme", "act_order"), [("w8a8", False), ("w4a8", False), ("w4a8", True)]
)
def test_ranks_round_rows_as_the_whole_product_does(
    scheme: Scheme, act_order: bool, size: int, dtype: torch.dtype
) -> None:
    """Each of them, bias included; also by the compiled kernels. The greatest numbers of rows lie
    on the first rank. An expert's partial sums are rounded alike. w8a8 adds integers, so its sums
    are equal bit for bit."""
    whole = quantize(random_weight(64, 256), scheme)
    whole = ordered(whole) if act_order else whole
    x = random_rows(7, 256).to(dtype)
    x[:, 3] *= 9
    x[6] = 0
    bias = random_rows(1, 64)[0].to(dtype)
    make = QuantizedFormat(dtype, CPU)

    def share(group: RankGroup) -> tuple[torch.Tensor, torch.Tensor]:
        rank = group.place.rank
        part = replace(parts_of(whole, size)[rank], exchange=group)
        layer, rows = make(part, bias), x.chunk(size, 1)[rank]
        assert isinstance(layer, Int8Share)
        unbiased = replace(layer, bias=None)
        return layer(rows), unbiased.partial(*unbiased.rounded(rows))

    ranks = by_threads(size, share)
    expected = make(whole, bias)(x)
    for summed, _ in ranks:
        assert torch.equal(summed, ranks[0][0])
        if scheme == "w8a8":
            assert torch.equal(summed, expected)
    bound = 1e-6 if dtype == torch.float32 else 0.006
    assert relative_error(ranks[0][0].float(), expected.float()) < bound
    total = torch.stack([partial.float() for _, partial in ranks]).sum(0)
    assert relative_error(total, make(whole, None)(x).float()) < bound


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("scheme", ["w8a8", "w4a8"])
@pytest.mark.parametrize("odd", [torch.nan, torch.inf])
def test_a_number_that_is_none_on_one_rank_is_seen_on_all(
    scheme: Scheme, odd: float, dtype: torch.dtype
) -> None:
    """Integers have no NaN: without the scale, such a row would be wrong and look right."""
    whole = quantize(random_weight(64, 256), scheme)
    x = random_rows(3, 256).to(dtype)
    x[1, 200] = odd
    make = QuantizedFormat(dtype, CPU)

    def share(group: RankGroup) -> torch.Tensor:
        rank = group.place.rank
        layer = make(replace(parts_of(whole, 2)[rank], exchange=group), None)
        return layer(x.chunk(2, 1)[rank])

    for summed in by_threads(2, share):
        assert torch.equal(summed.isfinite().any(1), torch.tensor([True, False, True]))


# ---- models ----


@dataclass(frozen=True, slots=True)
class Case:
    """A checkpoint and the options that it is loaded with."""

    path: Path
    options: dict[str, Any]


def make_case(kind: str, name: str, path: Path) -> Case:
    """`name`: of ON_LOAD or RECIPES."""
    if name in RECIPES:
        return Case(make_quantized(name, path, kind)[0], {})
    return Case(quantized_models.make_plain(kind, path), ON_LOAD[name])


@pytest.fixture
def integer_products(monkeypatch: pytest.MonkeyPatch) -> Counter[tuple[int, str]]:
    """How often each thread multiplied by integers, by the name of the layer's class."""
    calls: Counter[tuple[int, str]] = Counter()

    def counted(plain: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        def call(self: Linear, x: torch.Tensor) -> torch.Tensor:
            calls[threading.get_ident(), type(self).__name__] += 1
            return plain(self, x)

        return call

    for each, method in KERNELS.items():
        monkeypatch.setattr(each, method, counted(getattr(each, method)))
    return calls


def of_ranks(
    case: Case, size: int, dtype: str = "float32"
) -> list[tuple[LoadedModel, torch.Tensor, int]]:
    """Of each rank its share, its logits and its thread."""
    config = config_of(case.path, tensor_parallel_size=size, **case.options)
    config = replace(config, dtype=dtype)

    def share(group: RankGroup) -> tuple[LoadedModel, torch.Tensor, int]:
        loaded = load_model(config, group)
        return loaded, logits_of(loaded, size), threading.get_ident()

    return by_threads(size, share)


@pytest.mark.parametrize(("kind", "name", "size"), MATRIX)
@torch.inference_mode()
def test_every_format_gives_the_logits_of_one_rank(
    kind: str, name: str, size: int, tmp_path: Path, integer_products: Counter[tuple[int, str]]
) -> None:
    case = make_case(kind, name, tmp_path / "m")
    whole = load_model(config_of(case.path, **case.options))
    expected = logits_of(whole, 1)
    made = {kernel: count for (_, kernel), count in integer_products.items()}
    assert made
    integer_products.clear()
    ranks = of_ranks(case, size)
    leader, found, _ = ranks[0]
    assert found.argmax(-1).equal(expected.argmax(-1))
    if "w4a8" in name or ("w8a8" in name and kind == "qwen3_moe"):
        # Sums are rounded in another order. A number that lies between two integers may then be
        # rounded to the other one: few rows differ.
        assert relative_error(found, expected) < 0.03
        assert (found - expected).abs().amax(1).quantile(0.25) < 1e-4
    else:
        torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)
    assert {loaded.info.digest for loaded, _, _ in ranks} == {whole.info.digest}
    assert bool(leader.rounded_head_bytes) == bool(whole.rounded_head_bytes)
    threads = {thread for _, _, thread in ranks}
    for thread in threads:
        assert {k: n for (t, k), n in integer_products.items() if t == thread} == made


@torch.inference_mode()
def test_modules_that_stay_plain_stand_beside_integers(tmp_path: Path) -> None:
    """Of one product, and of one layer's sum."""
    ignored = ("0.self_attn.k_proj", "1.mlp.down_proj", "0.self_attn.o_proj")
    path, _ = make_quantized("w4a16", tmp_path, "qwen3", ignored)
    expected = logits_of(load_model(config_of(path)), 1)
    (_, found, _), *_ = of_ranks(Case(path, {}), 2)
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("scheme", ["w8a8", "int4", "w4a8"])
@torch.inference_mode()
def test_biases_and_shared_experts(scheme: str, tmp_path: Path) -> None:
    """A bias is added once, whoever has the sum, also that of an expert; a shared expert's part is
    summed with the others'.
    (A mixture's w8a8 is not exact, see above.)"""
    biased = make_tiny_model(
        "llama", tmp_path / "llama", **SHAPE, attention_bias=True, mlp_bias=True
    )
    shared = save_random(
        tmp_path / "moe", "qwen2_moe", **SHAPE, **MIXTURE, shared_expert_intermediate_size=64
    )
    mixed = 1e-5 if scheme == "int4" else 0.03
    experts = save_gpt_oss(tmp_path / "gpt-oss", **WIDE_OSS)
    for path, bound in (
        (biased, mixed if scheme == "w4a8" else 1e-5),
        (shared, mixed),
        (experts, mixed),
    ):
        case = Case(path, {"quantization": scheme})
        expected = logits_of(load_model(config_of(path, **case.options)), 1)
        (_, found, _), *_ = of_ranks(case, 4)
        assert relative_error(found, expected) < bound


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("scheme", ["w8a8", "w4a8"])
@torch.inference_mode()
def test_rows_are_rounded_once_per_sum(
    scheme: str, kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The ranks exchange peaks not for each expert: two layers, two sums each, two steps."""
    peaks = list[tuple[int, ...]]()
    plain = RankGroup.all_reduce_max

    def counted(group: RankGroup, tensor: torch.Tensor) -> torch.Tensor:
        if group.place.leads:
            peaks.append(tuple(tensor.shape))
        return plain(group, tensor)

    monkeypatch.setattr(RankGroup, "all_reduce_max", counted)
    of_ranks(make_case(kind, f"loaded as {scheme}", tmp_path / "m"), 2)
    chosen = 2 if kind == "qwen3_moe" else 1
    assert peaks == [(30, 1), (30 * chosen, 1)] * 2 + [(4, 1), (4 * chosen, 1)] * 2


@torch.inference_mode()
def test_bfloat16_over_two_ranks(tmp_path: Path) -> None:
    """By the compiled kernels, where there are any; sums are rounded once more."""
    for kind in KINDS:
        for scheme, bound in (("int8", 0.04), ("w8a8", 0.06), ("int4", 0.06), ("w4a8", 0.06)):
            case = make_case(kind, f"loaded as {scheme}", tmp_path / kind / scheme)
            config = replace(config_of(case.path, **case.options), dtype="bfloat16")
            expected = logits_of(load_model(config), 1)
            (_, found, _), _ = of_ranks(case, 2, dtype="bfloat16")
            assert relative_error(found, expected) < bound, (kind, scheme)


def test_groups_that_would_become_too_small_are_refused_by_name(tmp_path: Path) -> None:
    """96 inputs of down over 8 ranks, which are 12 for each."""
    sizes = SHAPE | {"intermediate_size": 96, "num_attention_heads": 8}
    path = make_tiny_model("qwen3", tmp_path, **sizes)
    config = config_of(path, tensor_parallel_size=8, quantization="int4")
    reason = "down_proj cannot be split over 8 ranks: its groups of 32 inputs would be cut into 4"
    with pytest.raises(ModelRefused, match=reason) as refused:
        load_model(config, RankGroup(RankPlace(0, 8), "gloo"))
    assert refused.value.field == "tensor_parallel_size"


WIDE = SHAPE | {
    "hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 8,
    "num_key_value_heads": 2,
}  # fmt: skip


@pytest.mark.long
@pytest.mark.parametrize("name", [*ON_LOAD, *RECIPES])
@pytest.mark.parametrize("kind", KINDS)
def test_a_rank_takes_the_memory_that_is_estimated(
    kind: str, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Four ranks share two KV heads; act-order's columns of zeros count."""
    monkeypatch.setattr(quantized_models, "SHAPE", WIDE)
    monkeypatch.setattr(quantized_models, "MIXTURE", MIXTURE | {"moe_intermediate_size": 256})
    case = make_case(kind, name, tmp_path / "m")
    for size in (1, 2, 4):
        options = EstimateOptions(
            model=case.path, dtype="float32", tensor_parallel_size=size, **case.options
        )
        estimate = sized(options)
        assert estimate.refused is None
        config = config_of(case.path, tensor_parallel_size=size, **case.options)
        for rank in range(size):
            group = RankGroup(RankPlace(rank, size), "gloo")
            loaded = load_model(config, None if size == 1 else group)
            assert 0.9 < loaded.weight_bytes / estimate.weight_bytes < 1.1


# ---- engines ----

OPTIONS: dict[str, Any] = {"num_kv_blocks": 96, "block_size": 8}


@pytest.mark.parametrize("scheme", ["w8a8", pytest.param("int4", marks=pytest.mark.long)])
def test_an_engine_of_ranks_gives_the_tokens_of_one(scheme: str, tmp_path: Path) -> None:
    """Adapters too: rows of one and of none share steps."""
    model = str(make_tiny_model("qwen3", tmp_path / "m", **SHAPE))
    layers = {
        f"model.layers.{layer}.{part}": sizes
        for layer in range(2)
        for part, sizes in {"self_attn.o_proj": (128, 128), "mlp.down_proj": (192, 128)}.items()
    }
    modules = (f"a={make_adapter(tmp_path / 'a', layers, seed=1)}",)
    options: dict[str, Any] = OPTIONS | {"quantization": scheme, "lora_modules": modules}
    engine = LLM(model, "float32", threads=1, **options).engine
    adapter = id_of(engine.info, "a")
    asked = [Request(f"r{i}", p, GREEDY, adapter=adapter * (i % 2)) for i, p in enumerate(PROMPTS)]
    expected = answers(engine, asked)
    for size in (2, 4):
        with engine_of_ranks(model, size, **options) as engine:
            assert answers(engine, asked) == expected
            assert_all_free(engine)
