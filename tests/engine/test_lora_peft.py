"""LoRA against PEFT's own forward: adapters that PEFT made, saved and runs.

test_models_lora.py proves our reading of the format against merged weights; here the format, the
scales and the order of the products are PEFT's. PEFT adds each delta beside the base layer as we
do, so in float32 logits agree to rounding at every position, and greedy tokens exactly.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from torch import Tensor
from transformers import AutoModelForCausalLM

from baton.engine.attention.torch_cpu import TorchAttention
from baton.engine.config import EngineConfig
from baton.engine.loading.loading import LoadedModel, load_model
from baton.engine.memory.kv_cache import KVArena
from baton.engine.memory.layer_groups import one_group
from baton.engine.state.batch import flatten
from baton.engine.state.interface import SequenceChunk
from baton.protocol.adapters import adapter_name
from baton.protocol.errors import ModelRefused
from tests.adapters import ids_of
from tests.block_lists import held
from tests.golden.greedy import our_tokens, random_prompts, transformers_tokens
from tests.tiny_models import VOCAB_SIZE, make_tiny_model

# PEFT 0.21 asks transformers for a property that transformers 5.23 has renamed.
pytestmark = pytest.mark.filterwarnings(
    "ignore:`is_gradient_checkpointing` is deprecated:FutureWarning"
)

NEW_TOKENS = 12
BASE = "__base__"  # PEFT's name, in a mixed batch, for rows without an adapter
# Greedy tokens are of mixed lengths; one PEFT batch of logits is not padded, so of one length.
PROMPTS = random_prompts(VOCAB_SIZE)
EQUAL_PROMPTS = random_prompts(VOCAB_SIZE, lengths=(23,) * 5)
BLOCK_SIZE = 4


@dataclass(frozen=True)
class Family:
    """One base model, the adapters PEFT puts on it, and the route that serves it."""

    kind: str
    impl: str
    attention: tuple[str, ...] = ("q_proj", "v_proj", "o_proj")
    patterns: dict[str, Any] = field(
        default_factory=lambda: {
            "rank_pattern": {"v_proj": 2, r"^model\.layers\.1\.mlp\.down_proj": 7},
            "alpha_pattern": {r"layers\.[02]\.self_attn\.q_proj": 24, "gate_proj": 3},
        }
    )

    def adapters(self) -> dict[str, LoraConfig]:
        """Every linear layer; some under rsLoRA; ranks and alphas of their own; some layers."""
        common: dict[str, Any] = {
            "task_type": "CAUSAL_LM",
            "fan_in_fan_out": self.kind == "gpt2",
            "lora_dropout": 0.1,  # in training only
        }
        everything: dict[str, Any] = {"target_modules": "all-linear", **common}
        some: dict[str, Any] = {"target_modules": list(self.attention), **common}
        return {
            "plain": LoraConfig(r=4, lora_alpha=16, **everything),
            "stable": LoraConfig(r=8, lora_alpha=8, use_rslora=True, **some),
            "patterns": LoraConfig(r=4, lora_alpha=8, **self.patterns, **everything),
            "upper": LoraConfig(r=3, lora_alpha=12, layers_to_transform=[1, 2], **some),
        }


GPT2_PATTERNS = {
    "rank_pattern": {r"h\.\d+\.mlp\.c_proj": 2, "c_fc": 7},
    "alpha_pattern": {r"^transformer\.h\.1\.attn\.c_attn": 24},
}
FAMILIES = (
    Family("llama", "lean"),
    Family("llama", "transformers"),
    Family("qwen2", "lean"),
    Family("gpt2", "transformers", ("c_attn", "c_proj"), GPT2_PATTERNS),
)


@dataclass(frozen=True)
class Served:
    """The same base and adapters, in PEFT's hands and in ours."""

    peft: PeftModel
    ours: LoadedModel
    names: tuple[str, ...]


@pytest.fixture(scope="module", params=FAMILIES, ids=lambda family: f"{family.kind}-{family.impl}")
def served(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Served:
    """Adapters made and saved by PEFT, loaded through lora_modules."""
    family: Family = request.param
    base = make_tiny_model(family.kind, tmp_path_factory.mktemp("base"))
    configs = family.adapters()
    peft = peft_model(base, configs)
    saved = tmp_path_factory.mktemp("adapters")
    peft.save_pretrained(str(saved))
    modules = [f"{name}={saved / name}" for name in configs]
    ours = load(base, family.impl, *modules)
    assert ours.info.model_impl == family.impl
    assert list(map(adapter_name, ours.info.adapters)) == list(configs)
    return Served(peft, ours, tuple(configs))


def load(base: Path, impl: Any, *modules: str) -> LoadedModel:
    """The base with adapters given as NAME=DIR, on the CPU in float32."""
    return load_model(
        EngineConfig(
            str(base), dtype="float32", device="cpu", model_impl=impl, lora_modules=modules
        )
    )


def peft_model(base: Path, configs: dict[str, LoraConfig]) -> PeftModel:
    """The base under PEFT with all adapters, their A and B random (PEFT starts with B zero)."""
    model: Any = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    names = list(configs)
    peft: Any = get_peft_model(model, configs[names[0]], adapter_name=names[0])
    for name in names[1:]:
        peft.add_adapter(name, configs[name])
    randomize(peft)
    return peft.eval()


def randomize(peft: PeftModel) -> None:
    """Weights as after training, strong enough to change tokens."""
    generator = torch.Generator().manual_seed(11)
    for name, weight in peft.named_parameters():
        if "lora_" in name:
            noise = torch.randn(weight.shape, generator=generator)
            weight.data.copy_(noise * 0.3 / weight.shape[1] ** 0.5)


@torch.inference_mode()
def peft_logits(peft: PeftModel, prompts: Sequence[Sequence[int]], names: Sequence[str]) -> Tensor:
    """[N, T, vocab] of one batch whose rows name their adapters ("" for none): PEFT's forward."""
    rows = [name or BASE for name in names]
    return peft(input_ids=torch.tensor(prompts), adapter_names=rows).logits


def peft_tokens(peft: PeftModel, prompts: Sequence[Sequence[int]], name: str) -> list[list[int]]:
    """PEFT's greedy generate under one adapter, or with its adapters switched off."""
    if not name:
        with peft.disable_adapter():
            return transformers_tokens(peft, prompts, NEW_TOKENS)
    peft.set_adapter(name)
    return transformers_tokens(peft, prompts, NEW_TOKENS)


@torch.inference_mode()
def our_logits(
    loaded: LoadedModel, prompts: Sequence[Sequence[int]], names: Sequence[str]
) -> Tensor:
    """[N, T, vocab] of all prompts in one flattened step."""
    length = len(prompts[0])
    each = -(-length // BLOCK_SIZE)
    wanted = ids_of(loaded.info, names)
    arena = KVArena(
        one_group(loaded.info.layers),
        each * len(prompts),
        BLOCK_SIZE,
        loaded.info.kv_dtype,
        loaded.device,
    )
    chunks = [
        SequenceChunk(str(i), list(ids), 0, held(range(i * each, (i + 1) * each)), adapter=id_)
        for i, (ids, id_) in enumerate(zip(prompts, wanted, strict=True))
    ]
    attention = TorchAttention(arena, loaded.attention_layers)
    step = flatten(chunks, attention, BLOCK_SIZE, loaded.device)
    hidden = loaded.forward(step.token_ids, step.positions, step.batch)
    return loaded.logits(hidden).view(len(prompts), length, -1)


@pytest.mark.parametrize(
    "names",
    [
        ("plain", "", "stable", "patterns", "upper"),
        ("", "patterns", "plain", "", "patterns"),
        ("",) * 5,
    ],
)
def test_logits_of_a_mixed_batch_are_pefts(served: Served, names: tuple[str, ...]) -> None:
    expected = peft_logits(served.peft, EQUAL_PROMPTS, names)
    torch.testing.assert_close(
        our_logits(served.ours, EQUAL_PROMPTS, names), expected, rtol=1e-4, atol=1e-4
    )


def test_each_adapter_changes_the_logits(served: Served) -> None:
    """Else the comparison above would hold for adapters that are never applied."""
    prompts = EQUAL_PROMPTS[:1]
    logits = [peft_logits(served.peft, prompts, [name]) for name in ("", *served.names)]
    for i, one in enumerate(logits):
        for other in logits[:i]:
            assert (one - other).abs().mean() > 0.1


def test_greedy_tokens_of_a_mixed_batch_are_pefts(served: Served) -> None:
    """Chunked prefill and decode of several adapters, and of the base, in the same steps."""
    expected = {name: peft_tokens(served.peft, PROMPTS, name) for name in ("", *served.names)}
    for names in (
        ("plain", "", "stable", "patterns", "upper"),
        ("patterns", "stable", "", "plain", "plain"),
    ):
        found = our_tokens(served.ours, PROMPTS, NEW_TOKENS, adapters=names)
        assert found == [expected[name][i] for i, name in enumerate(names)]


# PEFT says why such an adapter has to be converted: what this test does.
@pytest.mark.filterwarnings("ignore:(PiSSA|OLoRA) changes the base weights:UserWarning")
@pytest.mark.parametrize("init", ["pissa", "olora"])
def test_an_adapter_that_changed_its_base_is_served_once_converted(
    init: Any, tmp_path: Path
) -> None:
    """These start from parts of the base weights, taken out of the base: beside the whole base such
    an adapter counts them twice. PEFT can convert it to a plain one."""
    base = make_tiny_model("llama", tmp_path / "base")
    model: Any = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    config = LoraConfig(
        r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=init, task_type="CAUSAL_LM"
    )
    peft: Any = get_peft_model(model, config).eval()
    start, raw, converted = (tmp_path / name for name in ("start", "raw", "converted"))
    config.init_lora_weights = True  # PEFT's recipe: the start is saved as if it were plain
    peft.save_pretrained(str(start))
    config.init_lora_weights = init
    randomize(peft)
    with torch.inference_mode():
        expected = peft(input_ids=torch.tensor(EQUAL_PROMPTS)).logits
    peft.save_pretrained(str(raw))
    peft.save_pretrained(str(converted), path_initial_model_for_weight_conversion=str(start))
    with pytest.raises(ModelRefused, match=f"init_lora_weights = '{init}'"):
        load(base, "lean", f"a={raw}")
    ours = load(base, "lean", f"a={converted}")
    found = our_logits(ours, EQUAL_PROMPTS, ["a"] * len(EQUAL_PROMPTS))
    torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-3)
