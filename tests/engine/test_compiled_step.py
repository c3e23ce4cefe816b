"""A whole decode step in one compiled call: bit for bit the layers taken one by one."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from baton.engine.attention.compiled import CompiledAttention
from baton.engine.kernels import rope
from baton.engine.kernels.cpu.library import CpuKernels, kernels
from baton.engine.kernels.cpu.quantized import integer_kernels_for
from baton.engine.kernels.delta_rule import DeltaSizes
from baton.engine.kernels.rope import PairRotation, RopeRule
from baton.engine.memory.kv_cache import KVArena
from baton.engine.memory.layer_groups import one_group
from baton.engine.memory.state_arena import StateArena
from baton.engine.models.config import (
    DecoderConfig,
    DeltaConfig,
    ExpertsConfig,
    GateConfig,
    LatentConfig,
    LayerNames,
)
from baton.engine.models.decoder import Decoder
from baton.engine.models.lora import Adapter, LowRank
from baton.engine.quantization.integer import SCHEMES, QuantizedFormat, Scheme, quantize
from baton.engine.quantization.linear import Linear, PanelLinear, PlainLinear
from baton.engine.state.batch import Step, StepLogits, flatten
from baton.engine.state.interface import SequenceChunk
from baton.protocol.kv_spec import HeldBlocks
from tests.engine.quantized_models import make_quantized
from tests.engine.running import Driver, load, relative_error
from tests.engine.test_latent_models import WIDE
from tests.golden.latent_models import save_latent

pytestmark = pytest.mark.usefixtures("cpu_kernels")  # each instruction set's in turn
CPU = torch.device("cpu")
RULE = DeltaSizes(key_heads=2, value_heads=4, key_dim=48, value_dim=32, taps=4)
BLOCK = 16
MIXTURES = [
    "mixtures", "mixtures, shared", "mixtures, shared, sigmoid", "mixtures, gated",
    "mixtures, gated, hybrids",
]  # fmt: skip
LATENTS = ["latents of a low rank, regrouped", "latents, halves", "latents, neighbours"]


def serving() -> CpuKernels:
    found = kernels()
    assert found is not None
    return found


def needs_kernels_of(scheme: Scheme | None) -> None:
    if scheme is not None and integer_kernels_for(torch.bfloat16, CPU) is None:
        pytest.skip("no integer kernels here")


@dataclass(frozen=True)
class RandomWeights:
    """A checkpoint that answers every name with noise of its own; weights.Linears too."""

    shapes: dict[str, tuple[int, ...]]
    plain_outputs: bool = False  # products whose format the compiled step does not know
    plain_head: bool = False  # the same of the product over the vocabulary
    scheme: Scheme | None = None  # of rounded products
    shared_size: int = 0  # of the expert that all rows share
    generator: torch.Generator = field(default_factory=lambda: torch.Generator().manual_seed(3))

    def __call__(self, name: str) -> Tensor:
        shape = self.shapes[name.split(".")[-2]]
        if ".experts." in name:
            shape = (64, shape[1]) if shape[0] > shape[1] else (shape[0], 64)
        if ".shared_expert." in name:
            size = self.shared_size
            shape = (size, shape[1]) if shape[0] > shape[1] else (shape[0], size)
        if name.endswith("correction_bias"):
            return torch.randn(shape[0], generator=self.generator) / 9
        if name.endswith("attn.norm.weight"):
            shape = (RULE.value_dim,)
        noise = torch.randn(*shape, generator=self.generator)
        return (noise / math.sqrt(shape[-1]) if len(shape) > 1 else 1 + noise / 8).bfloat16()

    def read(self, modules: Sequence[str], has_bias: bool) -> Linear:
        weight = torch.cat([self(f"{module}.weight") for module in modules])
        bias = torch.randn(len(weight), generator=self.generator).bfloat16() if has_bias else None
        if self.plain_outputs and modules[0].endswith("o_proj"):
            return PlainLinear(weight, bias)
        if self.scheme is not None:
            return QuantizedFormat(torch.bfloat16, CPU)(quantize(weight, self.scheme), bias)
        return PanelLinear(serving(), weight, bias)

    def derived(self, name: str, make: Callable[[Tensor], Tensor]) -> Tensor:
        return make(self(name))

    def head(self, tied: bool) -> Linear:
        assert tied
        table = self("model.embed_tokens.weight")
        if self.plain_head:
            return PlainLinear(table, None)
        if self.scheme is not None:
            return QuantizedFormat(torch.bfloat16, CPU)(quantize(table, self.scheme), None)
        return PanelLinear(serving(), table, None)


def config_of(*, normed: bool = True, biased: bool = False, window: int = 0) -> DecoderConfig:
    return DecoderConfig(
        vocab_size=50, max_positions=512, hidden_size=96, intermediate_size=160, num_layers=3,
        num_heads=6, num_kv_heads=2, head_dim=32, rms_norm_eps=1e-6, tied_embeddings=True,
        qkv_bias=biased, output_bias=biased, mlp_bias=biased, qk_norm=normed,
        windows=(0, window, 0), rope=RopeRule("default", 10000.0),
    )  # fmt: skip


def like(kind: str, config: DecoderConfig) -> DecoderConfig:
    """`config` with what a family adds."""
    if kind == "gemma 3":
        names = LayerNames("pre_norm", "attention_norm", "mlp_output_norm")
        return replace(
            config, names=names, norm_offset=1.0, activation="gelu_tanh", embedding_scale=9.8,
            scale=0.2, softcap=4.0, logit_softcap=2.0, local_rope=RopeRule("default", 500.0),
        )  # fmt: skip
    if kind == "phi 3":
        names = LayerNames(fused_qkv=True, fused_gate_up=True)
        return replace(config, names=names, rotated_dim=32)
    if kind == "glm 4":
        names = LayerNames("mlp_norm", "attention_norm", "mlp_output_norm", fused_gate_up=True)
        return replace(config, names=names, rotated_dim=32, pairs=PairRotation.NEIGHBOURS)
    if kind == "qwen 3.5":
        delta = DeltaConfig(RULE, frozenset((0, 2)), by_head=False)
        return replace(config, delta=delta, gated=True, norm_offset=1.0, rotated_dim=32)
    if kind.startswith("latents"):
        low = 64 if "low rank" in kind else 0
        latent = LatentConfig(low, 96, 48, 64, 80, PairRotation(kind.split()[-1]))
        config = replace(config, latent=latent, qk_norm=False, head_dim=64)
        return like("mixtures, shared, sigmoid", config) if low else config
    if "mixtures" in kind:
        parts = ("gate_proj", "up_proj", "down_proj")
        experts = ExpertsConfig(5, 2, 64, True, "mlp.", parts, frozenset((0, 2)))
        if "gated" in kind:
            experts = replace(experts, normalized=False, shared_size=192)
        elif "shared" in kind:
            groups = GateConfig("sigmoid" in kind, True, 4, 2, 2.5)
            experts = replace(
                experts, count=16, per_token=3, shared_size=128, shared_gated=False, gate=groups
            )
        if "hybrids" in kind:
            config = like("qwen 3.5", config)
        return replace(config, experts=experts)
    return config


def decoder_of(
    config: DecoderConfig,
    *,
    plain_outputs: bool = False,
    plain_head: bool = False,
    scheme: Scheme | None = None,
) -> Decoder:
    hidden, inner, dim = config.hidden_size, config.intermediate_size, config.head_dim
    queries, kv = config.num_heads * dim, config.num_kv_heads * dim
    gates = 2 if config.gated else 1
    experts = 0 if config.experts is None else config.experts.count
    weights = RandomWeights(
        {
            "embed_tokens": (config.vocab_size, hidden), "norm": (hidden,),
            "input_layernorm": (hidden,), "post_attention_layernorm": (hidden,),
            "q_norm": (dim,), "k_norm": (dim,), "q_proj": (gates * queries, hidden),
            "k_proj": (kv, hidden), "v_proj": (kv, hidden), "o_proj": (hidden, queries),
            "gate_proj": (inner, hidden),
            "up_proj": (inner, hidden), "down_proj": (hidden, inner),
            "qkv_proj": (queries + 2 * kv, hidden), "gate_up_proj": (2 * inner, hidden),
            **dict.fromkeys(("pre_norm", "mlp_norm", "attention_norm"), (hidden,)),
            "mlp_output_norm": (hidden,),
            "linear_attn": (RULE.value_heads,), "conv1d": (RULE.channels, 1, RULE.taps),
            "in_proj_qkv": (RULE.channels, hidden), "in_proj_z": (RULE.values, hidden),
            **dict.fromkeys(("in_proj_a", "in_proj_b"), (RULE.value_heads, hidden)),
            "out_proj": (hidden, RULE.values),
            "gate": (experts, hidden), "shared_expert_gate": (1, hidden),
            **({} if config.latent is None else latent_shapes(config, config.latent)),
        },
        plain_outputs,
        plain_head,
        scheme,
        0 if config.experts is None else config.experts.shared_size,
    )  # fmt: skip
    return Decoder(config, weights, weights)


def latent_shapes(config: DecoderConfig, latent: LatentConfig) -> dict[str, tuple[int, ...]]:
    hidden, heads, rank = config.hidden_size, config.num_heads, latent.rank
    queries, low = heads * latent.query_dim, latent.query_rank
    absorbed = heads * (latent.nope_dim + latent.value_dim)
    return {
        "q_proj": (queries, hidden), "q_a_proj": (low, hidden), "q_b_proj": (queries, low),
        "q_a_layernorm": (low,), "kv_a_proj_with_mqa": (rank + latent.rope_dim, hidden),
        "kv_a_layernorm": (rank,), "kv_b_proj": (absorbed, rank),
        "o_proj": (hidden, heads * latent.value_dim),
    }  # fmt: skip


class Pool:
    """A pool whose sequences have histories of noise, and steps over it."""

    def __init__(
        self,
        config: DecoderConfig,
        starts: Sequence[int],
        kv_dtype: str = "bfloat16",
        rows: int = 1,
    ) -> None:
        """`rows`: the most that a step computes of the last sequence."""
        self.starts = starts
        self.layers, self.slots = range(config.num_layers), range(len(starts) + 1)
        layers = config.layers_in(torch.bfloat16)
        self.groups = one_group(layers)
        blocks = sum((start + rows - 1) // BLOCK + 1 for start in starts)
        self.arena = KVArena(self.groups, blocks, BLOCK, kv_dtype, CPU)
        generator = torch.Generator().manual_seed(5)
        for layer in range(config.num_layers):
            for pool in self.arena.layer(layer):
                noise = torch.randn(pool.shape, generator=generator)
                pool.copy_((30 * noise).clamp(-127, 127) if kv_dtype == "int8" else noise)
            for scales in self.arena.scales(layer) if kv_dtype == "int8" else ():
                scales.copy_(torch.rand(scales.shape, generator=generator) / 50)
        self.states: StateArena | None = None
        if config.delta is not None:
            self.states = StateArena(layers, len(starts) + 1)
            for layer in config.delta.layers:
                for state in self.states.views(layer):
                    assert state is not None
                    state.copy_(torch.randn(state.shape, generator=generator))
        self.attention = CompiledAttention(self.arena, config.attention_layers, serving())

    def step(self, rows: int = 1, adapter: str = "") -> Step:
        """One more token of each sequence; `rows` of the last one."""
        chunks: list[SequenceChunk] = []
        block = 0
        for index, start in enumerate(self.starts):
            count = rows if index == len(self.starts) - 1 else 1
            ids = tuple(range(block, block + (start + count - 1) // BLOCK + 1))
            block += len(ids)
            named = adapter if index == 0 else ""
            chunk = SequenceChunk(
                str(index), [index + 7] * count, start, (HeldBlocks(ids),), adapter=named,
                state_slot=len(self.starts) - index,
            )  # fmt: skip
            chunks.append(chunk)
        return flatten(chunks, self.attention, BLOCK, CPU, states=self.states)

    def kept(self) -> list[Tensor]:
        """All keys, values, their scales and states."""
        found = [torch.cat([x.flatten() for x in self.arena.layer(i)]) for i in self.layers]
        if self.arena.dtype == "int8":
            found += [x for i in self.layers for x in self.arena.scales(i)]
        return found if self.states is None else [*found, self.states.read_slots(self.slots)]


def hidden_of(decoder: Decoder, step: Step, by_layer: bool = False) -> Tensor:
    """`by_layer`: operation by operation."""
    compiled = decoder.step
    decoder.step = None if by_layer else compiled
    with torch.inference_mode():
        hidden = decoder.forward(step.token_ids, step.positions, step.batch)
    decoder.step = compiled
    return hidden


def answers_of(decoder: Decoder, step: Step, by_layer: bool = False) -> tuple[Tensor, Tensor]:
    """Hidden states and logits, of one call or of two."""
    wanted = StepLogits()
    hidden = hidden_of(decoder, replace(step, batch=replace(step.batch, logits=wanted)), by_layer)
    assert (wanted.made is None) == by_layer
    if wanted.made is not None:
        return hidden, wanted.made.clone()  # the next step overwrites them
    with torch.inference_mode():
        return hidden, decoder.logits(hidden)


def same_answers(got: tuple[Tensor, Tensor], want: tuple[Tensor, Tensor]) -> bool:
    assert not any(each.isnan().any() for each in want)
    return all(map(torch.equal, got, want))


@settings(max_examples=15)
@given(
    starts=st.lists(st.one_of(st.integers(0, 70), st.integers(120, 500)), min_size=1, max_size=9),
    normed=st.booleans(),
    biased=st.booleans(),
    window=st.sampled_from([0, 20]),
    scheme=st.sampled_from([None, *SCHEMES]),
)
def test_a_whole_step_is_its_layers_one_by_one(
    starts: list[int], normed: bool, biased: bool, window: int, scheme: Scheme | None
) -> None:
    if scheme is not None and integer_kernels_for(torch.bfloat16, CPU) is None:
        return
    config = config_of(normed=normed, biased=biased, window=window)
    decoder = decoder_of(config, scheme=scheme)
    assert decoder.step is not None
    assert decoder.step.embeds == (scheme is not None), "rounded heads have no rows to look up"
    ours, plain = Pool(config, starts), Pool(config, starts)
    got = answers_of(decoder, ours.step())
    assert decoder.step.num_steps == 1
    want = answers_of(decoder, plain.step(), by_layer=True)
    assert decoder.step.num_steps == 1
    assert same_answers(got, want)
    assert all(map(torch.equal, ours.kept(), plain.kept()))


@pytest.mark.parametrize("kind", ["", "gemma 3", "glm 4", *LATENTS])
def test_rotations_are_picked_by_the_row_where_positions_are_too_many(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    config, starts = like(kind, config_of()) if kind else config_of(), [3, 130, 0]
    decoder = decoder_of(config)
    want = answers_of(decoder, Pool(config, starts).step())
    monkeypatch.setattr(rope, "MOST_BYTES", 0)
    decoder = decoder_of(config)
    assert same_answers(answers_of(decoder, Pool(config, starts).step()), want)


@pytest.mark.parametrize("token", [-1, 50])
def test_a_token_outside_the_embedding_is_refused(token: int) -> None:
    config = config_of()
    decoder, step = decoder_of(config, plain_head=True), Pool(config, [5, 9]).step()
    assert decoder.step is not None
    assert decoder.step.embeds
    wrong = replace(step, token_ids=torch.tensor([7, token]))
    with pytest.raises(IndexError, match="outside the embedding"):
        hidden_of(decoder, wrong)


@settings(max_examples=10)
@given(
    starts=st.lists(st.one_of(st.integers(0, 70), st.integers(120, 500)), min_size=1, max_size=9),
    kind=st.sampled_from(["", "gemma 3", "glm 4", "qwen 3.5", "mixtures, shared"]),
)
def test_a_step_over_int8_kv_is_its_layers_one_by_one(starts: list[int], kind: str) -> None:
    config = config_of(window=20)
    if kind:
        config = like(kind, replace(config, head_dim=64))
    decoder = decoder_of(config)
    assert decoder.step is not None
    ours, plain = Pool(config, starts, "int8"), Pool(config, starts, "int8")
    got = answers_of(decoder, ours.step())
    assert decoder.step.num_steps == 1
    assert same_answers(got, answers_of(decoder, plain.step(), by_layer=True))
    assert all(map(torch.equal, ours.kept(), plain.kept()))


@settings(max_examples=5)
@given(
    starts=st.lists(st.one_of(st.integers(0, 70), st.integers(120, 500)), min_size=1, max_size=17),
    normed=st.booleans(),
    scheme=st.sampled_from([None, *SCHEMES]),
)
@pytest.mark.parametrize("kind", ["gemma 3", "phi 3", "glm 4", "qwen 3.5", *MIXTURES, *LATENTS])
def test_families_take_whole_steps(
    kind: str, starts: list[int], normed: bool, scheme: Scheme | None
) -> None:
    """Norms behind products, other gates, two RoPE rules, partial and neighbours' rotation, gated
    heads and linear attention, mixtures of experts beside a dense layer: with every gate, and with
    an expert that all rows share; latent attention."""
    if scheme is not None and integer_kernels_for(torch.bfloat16, CPU) is None:
        return
    config = like(kind, replace(config_of(normed=normed, window=20), head_dim=64))
    decoder = decoder_of(config, scheme=scheme)
    assert decoder.step is not None
    ours, plain = Pool(config, starts), Pool(config, starts)
    got = answers_of(decoder, ours.step())
    assert decoder.step.num_steps == 1
    want = answers_of(decoder, plain.step(), by_layer=True)
    assert same_answers(got, want)
    assert all(map(torch.equal, ours.kept(), plain.kept()))


@pytest.mark.parametrize("kind", ["qwen 3.5", *MIXTURES, LATENTS[0]])
def test_late_threads_change_nothing(kind: str) -> None:
    """More threads than cores: some are still layers behind the others."""
    config = replace(like(kind, config_of()), num_layers=12, windows=(0,) * 12)
    if config.experts is not None:
        everywhere = replace(config.experts, count=64, per_token=4, layers=frozenset(range(12)))
        config = replace(config, experts=everywhere)
    decoder = decoder_of(config)
    assert decoder.step is not None
    threads, starts = torch.get_num_threads(), [3, 48, 17, 0, 90, 33, 20]
    want = answers_of(decoder, Pool(config, starts).step(), by_layer=True)
    try:
        for count in (2, 3, 8) * 60:
            torch.set_num_threads(count)
            assert same_answers(answers_of(decoder, Pool(config, starts).step()), want)
    finally:
        torch.set_num_threads(threads)


@pytest.mark.parametrize("scheme", [None, *SCHEMES])
def test_threads_do_not_change_a_step(scheme: Scheme | None) -> None:
    needs_kernels_of(scheme)
    config = config_of(window=20)
    decoder = decoder_of(config, scheme=scheme)
    threads = torch.get_num_threads()
    found: list[tuple[Tensor, Tensor]] = []
    try:
        for count in (1, 2, 3, 5):  # more than there are cores: barriers sleep, too
            torch.set_num_threads(count)
            found += [answers_of(decoder, Pool(config, [3, 480, 17]).step()) for _ in range(3)]
    finally:
        torch.set_num_threads(threads)
    assert all(same_answers(one, found[0]) for one in found)


@pytest.mark.parametrize("name", ["w8a8", "w4a8", "w8a16", "w4a16", "gptq-asymmetric", "awq"])
def test_checkpoints_of_integers_take_whole_steps(name: str, tmp_path: Path) -> None:
    needs_kernels_of("int8")
    loaded = load(make_quantized(name, tmp_path)[0], dtype="bfloat16")
    decoder = loaded.model
    assert isinstance(decoder, Decoder)
    assert decoder.step is not None
    prompt = list(range(5, 17))
    by_row = Driver(loaded).logits(prompt, range(2), [1] * len(prompt))
    assert decoder.step.num_steps == len(prompt)
    whole = Driver(loaded).logits(prompt, range(2), [len(prompt)])
    assert relative_error(by_row, whole) < 0.05, "prefill attention rounds elsewhere"


@pytest.mark.parametrize("name", ["v3", "v3, biases", "v2, groups", "glm4 lite", "kimi k2"])
def test_checkpoints_with_latents_take_whole_steps(name: str, tmp_path: Path) -> None:
    """Every gate, YaRN, biases, dense layers anywhere."""
    loaded = load(save_latent(tmp_path, name, **WIDE), dtype="bfloat16")
    decoder = loaded.model
    assert isinstance(decoder, Decoder)
    step = decoder.step
    assert step is not None
    prompt = list(range(5, 17))
    whole = Driver(loaded).logits(prompt, range(2), [1] * len(prompt))
    assert step.num_steps == len(prompt)
    decoder.step = None
    assert torch.equal(Driver(loaded).logits(prompt, range(2), [1] * len(prompt)), whole)


def test_rows_that_want_an_adapter_go_layer_by_layer() -> None:
    config = config_of()
    decoder = decoder_of(config)
    assert decoder.step is not None
    delta = LowRank(torch.ones(2, 96).bfloat16(), torch.ones(96, 2).bfloat16())
    tuning = Adapter("tuned", "00", {"model.layers.1.self_attn.q_proj": LowRank(
        delta.down, torch.ones(192, 2).bfloat16())})  # fmt: skip
    decoder.add_adapter(tuning)
    plain = hidden_of(decoder, Pool(config, [3, 40]).step())
    assert decoder.step.num_steps == 1
    tuned = hidden_of(decoder, Pool(config, [3, 40]).step(adapter=tuning.id))
    assert decoder.step.num_steps == 1
    assert not torch.equal(tuned[0], plain[0])
    assert torch.equal(tuned[1], plain[1])


def test_other_formats_go_layer_by_layer() -> None:
    config = config_of()
    decoder = decoder_of(config, plain_outputs=True)
    assert decoder.step is None
    assert hidden_of(decoder, Pool(config, [3, 40]).step()).shape == (2, config.hidden_size)


def test_a_head_of_another_format_is_multiplied_behind_the_step() -> None:
    config = config_of()
    decoder = decoder_of(config, plain_head=True)
    assert decoder.step is not None
    wanted, step = StepLogits(), Pool(config, [3, 40]).step()
    hidden = hidden_of(decoder, replace(step, batch=replace(step.batch, logits=wanted)))
    assert decoder.step.num_steps == 1
    assert wanted.made is None
    assert decoder.logits(hidden).shape == (2, config.vocab_size)


def test_a_step_makes_no_logits_that_nobody_wants() -> None:
    """Of hidden states alone: the same as those beside logits."""
    config = config_of()
    decoder = decoder_of(config)
    hidden = hidden_of(decoder, Pool(config, [3, 40]).step())
    assert torch.equal(hidden, answers_of(decoder, Pool(config, [3, 40]).step())[0])
