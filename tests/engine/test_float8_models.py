"""Models of 8-bit floats on a device that multiplies them, beside the widened ones: mixtures,
latents, adapters, ranks, sizes. The device is a CPU, see float8_device.py."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from torch.nn import functional

from baton.engine.loading.loading import load_model
from baton.engine.parallel.group import RankGroup
from baton.engine.performance.estimate import sized
from baton.engine.performance.ideal import EstimateOptions
from baton.engine.quantization import float8
from baton.engine.quantization.float8 import (
    Float8Linear,
)
from baton.engine.state.place import RankPlace
from baton.llm import LLM
from baton.protocol.errors import ModelRefused
from baton.protocol.request import Request
from baton.text.tokenizer import Tokenizer
from bench.quantization import all_logits, glossary
from bench.quantization import load as load_measured
from tests.adapters import id_of
from tests.engine.float8_device import multiplying
from tests.engine.format_losses import packed_copy
from tests.engine.quantized_models import MIXTURE
from tests.engine.running import load, logits_of, relative_error
from tests.engine.tensor_parallel_ranks import by_threads, config_of
from tests.engine.tensor_parallel_ranks import logits_of as logits_of_rank
from tests.engine.test_float8 import DOWN, KEPT
from tests.engine.test_latent_models import WIDE, save_latent
from tests.engine.test_models_lora import make_adapter
from tests.engine.test_tensor_parallel_engine import GREEDY, PROMPTS, answers
from tests.engine.widened_models import (
    edit_tensors,
    make_widened,
    widened_pair,
)
from tests.golden.random_models import save_random
from tests.tiny_models import VOCAB_SIZE

DEMO = Path(__file__).parents[2] / "demo_model"
PROMPT = torch.randint(5, VOCAB_SIZE, (40,), generator=torch.Generator().manual_seed(3)).tolist()
# Of the logits of random models, whose weights are sharpened, against the widened ones.
MOST_ERROR = 0.12


# ---- models ----


@pytest.mark.parametrize("name", KEPT)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_model_is_near_the_widened_one(name: str, dtype: str, tmp_path: Path) -> None:
    path, _ = make_widened(name, tmp_path, kind="qwen3")
    wide = load(path, dtype=dtype)
    with multiplying():
        kept = load(path, dtype=dtype)
        asked = load(path, dtype=dtype, quantization="widened")
        universal = load(path, dtype=dtype, model_impl="transformers")
    assert 0.01 < relative_error(logits_of(kept, PROMPT), logits_of(wide, PROMPT)) < MOST_ERROR
    assert torch.equal(logits_of(asked, PROMPT), logits_of(wide, PROMPT))
    assert kept.weight_bytes < (0.5 if dtype == "float32" else 0.75) * wide.weight_bytes
    assert kept.info.digest != wide.info.digest
    assert asked.info.digest == wide.info.digest
    assert universal.weight_bytes >= wide.weight_bytes


def test_the_loss_of_the_demo_model(tmp_path: Path) -> None:
    """docs/quantization.md states it: 0.030 against the widened model, no other greedy token."""
    answers = list(glossary(Tokenizer.load(DEMO), 40))
    for name in ("fp8-channel", "fp8-block"):
        path = tmp_path / name
        packed_copy(name, DEMO, path)
        wide = torch.cat(all_logits(load_measured(path, dtype="float32"), answers))
        with multiplying():
            model = load_measured(path, dtype="float32")
        found = torch.cat(all_logits(model, answers))
        assert 0.02 < relative_error(found, wide) < 0.04
        assert torch.equal(found.argmax(-1), wide.argmax(-1))


def test_modules_that_stay_plain_stand_beside_8_bit_floats(tmp_path: Path) -> None:
    path, twin = make_widened("fp8-deepseek", tmp_path)
    plain = load_file(twin / "model.safetensors")
    names = ("model.layers.0.self_attn.k_proj", DOWN)

    def back(tensors: dict[str, Tensor]) -> None:
        for name in names:
            tensors[f"{name}.weight"] = plain[f"{name}.weight"]
            del tensors[f"{name}.weight_scale_inv"]

    edit_tensors(path, back)
    wide = load(path)
    with multiplying():
        kept = load(path)
    assert relative_error(logits_of(kept, PROMPT), logits_of(wide, PROMPT)) < MOST_ERROR


MOE: dict[str, Any] = {
    "hidden_size": 128, "intermediate_size": 192, "head_dim": 32, "num_hidden_layers": 2,
    **MIXTURE, "moe_intermediate_size": 192,
}  # fmt: skip


@pytest.mark.parametrize("name", ["fp8-channel", "fp8-deepseek", "fp8-static"])
def test_experts_keep_8_bits(name: str, tmp_path: Path) -> None:
    path = save_mixture(name, tmp_path)
    wide = load(path)
    with multiplying():
        kept = load(path)
    found, expected = logits_of(kept, PROMPT), logits_of(wide, PROMPT)
    # A token whose two experts are nearly equal may get another one, so single rows differ more.
    rows = (found - expected).norm(dim=1) / expected.norm(dim=1)
    assert 0.005 < rows.median() < MOST_ERROR
    assert kept.weight_bytes < 0.5 * wide.weight_bytes


def save_mixture(name: str, path: Path) -> Path:
    packed, twin = (save_random(path / each, "qwen3_moe", **MOE) for each in ("a", "b"))
    return widened_pair(name, packed, twin)[0]


def save_latents(name: str, path: Path) -> Path:
    """`kv_b_proj` is packed, too: it is absorbed, and therefore widened."""
    packed, twin = (save_latent(path / each, "v3", **WIDE) for each in ("a", "b"))
    return widened_pair(name, packed, twin, ("_proj.weight", "_mqa.weight"))[0]


def save_dense(name: str, path: Path) -> Path:
    return make_widened(name, path, kind="qwen3")[0]


SAVE = {"dense": save_dense, "mixture": save_mixture, "latents": save_latents}


@pytest.fixture
def unrounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Products multiply inputs as they are: then they compute what widened weights compute."""

    def product(layer: Float8Linear, x: Tensor) -> Tensor:
        return functional.linear(x, layer.weight.dequantized(x.dtype), layer.bias)

    monkeypatch.setattr(Float8Linear, "__call__", product)
    monkeypatch.setattr(float8, "try_scaled", lambda *_: False)


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("kind", SAVE)
@pytest.mark.parametrize("name", ["fp8-tensor", "fp8-channel", "fp8-deepseek", "fp8-static"])
@pytest.mark.usefixtures("unrounded")
@torch.inference_mode()
def test_but_for_the_rounding_of_inputs_nothing_differs(
    name: str, kind: str, size: int, tmp_path: Path
) -> None:
    """Of one rank and of two, whose products of o and down share blocks."""
    path = SAVE[kind](name, tmp_path)
    wide = load_model(config_of(path))
    expected = logits_of_rank(wide, 1)
    with multiplying():
        found, num_bytes = logits_of_ranks(path, size)
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)
    assert num_bytes < (0.7 if size == 1 else 0.45) * wide.weight_bytes


@pytest.mark.usefixtures("unrounded")
def test_adapters_stand_beside_8_bit_floats(tmp_path: Path) -> None:
    path, _ = make_widened("fp8-deepseek", tmp_path, kind="qwen3")
    layers = {DOWN: (192, 128), "model.layers.0.self_attn.q_proj": (128, 128)}
    modules = (f"a={make_adapter(tmp_path / 'a', layers, seed=1)}",)
    options: dict[str, Any] = {"num_kv_blocks": 96, "block_size": 8, "lora_modules": modules}
    told, digests = list[Any](), set[str]()
    for where in (multiplying, nullcontext):
        with where():
            engine = LLM(str(path), "float32", threads=1, **options).engine
        adapter = id_of(engine.info, "a")
        asked = [
            Request(f"r{i}", prompt, GREEDY, adapter=adapter * (i % 2))
            for i, prompt in enumerate(PROMPTS)
        ]
        told.append(answers(engine, asked))
        digests.add(engine.info.digest)
    assert told[0] == told[1]
    assert len(digests) == 2


# ---- ranks ----


@pytest.mark.parametrize("name", ["fp8-channel", "fp8-deepseek", "fp8-static"])
@torch.inference_mode()
def test_ranks_give_nearly_the_logits_of_one(name: str, tmp_path: Path) -> None:
    """Each rounds its own inputs of o and down."""
    path = save_dense(name, tmp_path)
    with multiplying():
        (expected, _), (found, _) = (logits_of_ranks(path, size) for size in (1, 2))
    assert relative_error(found, expected) < MOST_ERROR


def logits_of_ranks(path: Path, size: int) -> tuple[Tensor, int]:
    """Logits of the leader, and the greatest number of bytes that a rank holds. All ranks have the
    digest of one that is alone."""
    alone = load_model(config_of(path))
    if size == 1:
        return logits_of_rank(alone, 1), alone.weight_bytes
    config = config_of(path, tensor_parallel_size=size)

    def share(group: RankGroup) -> tuple[str, int, Tensor]:
        loaded = load_model(config, group)
        return loaded.info.digest, loaded.weight_bytes, logits_of_rank(loaded, size)

    ranks = by_threads(size, share)
    assert {digest for digest, _, _ in ranks} == {alone.info.digest}
    return ranks[0][2], max(num_bytes for _, num_bytes, _ in ranks)


def test_blocks_that_ranks_would_cut_too_small_are_refused_by_name(tmp_path: Path) -> None:
    path, _ = make_widened("fp8-deepseek", tmp_path, kind="qwen3")
    reason = "down_proj cannot be split over 4 ranks: its groups of 128 inputs would be cut into 16"
    with multiplying(), pytest.raises(ModelRefused, match=reason) as refused:
        load_model(config_of(path, tensor_parallel_size=4), RankGroup(RankPlace(0, 4), "gloo"))
    assert refused.value.field == "tensor_parallel_size"


# ---- sizes ----


@pytest.mark.parametrize("name", ["fp8-channel", "fp8-deepseek", "fp8-group"])
@pytest.mark.parametrize("size", [1, 2])
def test_the_estimate_is_what_a_rank_holds(name: str, size: int, tmp_path: Path) -> None:
    path, _ = make_widened(name, tmp_path, hidden_size=256, intermediate_size=512)
    told = sized(
        EstimateOptions(model=path, dtype="float32", quantization="fp8", tensor_parallel_size=size)
    )
    assert told.refused is None
    assert ("kept as fp8" in told.note) is (name != "fp8-group")
    group = None if size == 1 else RankGroup(RankPlace(0, size), "gloo")
    with multiplying():
        loaded = load_model(config_of(path, tensor_parallel_size=size), group)
    assert 0.9 < loaded.weight_bytes / told.weight_bytes < 1.1
    plain = sized(EstimateOptions(model=path, dtype="float32", tensor_parallel_size=size))
    assert "kept as float32" in plain.note
