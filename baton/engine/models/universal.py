"""The universal route: transformers' own modelling code over our paged attention.

Baton's attention function is registered in transformers' AttentionInterface under its own name. It
gets the step's batch as a keyword of the forward call, so there is no global. At load:

    causal_once (refuses by config) -> native logits of a few tokens -> latents absorbed (MLA)
    -> probe forward (discovers layers, heads, windows, scaling, softcap, sinks)
    -> the same tokens through the paged path, in chunks -> the model is refused unless these
    logits equal the native ones

Layers that keep a recurrent state beside KV, or instead of it: recurrent.py.

A model that cannot be served this way (cross attention, own masks, chunked attention, ...) is
refused with the reason: no model is ever served approximately.
"""

from __future__ import annotations

import copy
import dataclasses
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any, Final

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, DynamicCache

from baton.engine.attention.torch_cpu import TorchAttention
from baton.engine.checkpoint.checkpoint import Checkpoint
from baton.engine.checkpoint.shared_weights import WeightsKey, shared_file
from baton.engine.memory.state_arena import StateArena
from baton.engine.models.causal import named_refusals
from baton.engine.models.causal_once import causal_once
from baton.engine.models.config import latent_spec, layer_spec
from baton.engine.models.hooked_lora import HookedAdapters
from baton.engine.models.lora import Adapter, rows_by_adapter
from baton.engine.models.mla import Absorbed, absorb_latents
from baton.engine.models.recurrent import (
    ProbeCache,
    StepCache,
    cache_name,
    keeps_state,
    split_mixers,
)
from baton.engine.state.attention import AttentionLayer
from baton.engine.state.batch import Batch, flatten
from baton.engine.state.interface import SequenceChunk
from baton.engine.state.work import ParameterCounts
from baton.protocol.errors import InternalError, ModelRefused
from baton.protocol.kv_spec import HeldBlocks, LayerSpec

IMPLEMENTATION: Final = "baton_paged"
# Keywords that models hand to attention and that change nothing once dropout and caches are off.
_HARMLESS: Final = {
    "dropout", "position_ids", "use_cache", "output_router_logits", "output_attentions",
    "cache_position", "output_hidden_states", "return_dict", "deterministic", "training",
    "is_causal", "position_embeddings",
}  # fmt: skip
# A layer without attention.
NO_KV: Final = LayerSpec(0, 0, 0, kind="state")
NO_ATTENTION: Final = AttentionLayer(query_heads=0, scale=1.0)
_CHECK_TOKENS: Final = 12  # tokens of the self-check at load
# Its chunks (from, to), and how many tokens of another sequence lie in front of each.
_CHECK_CHUNKS: Final = ((0, 7, 3), (7, 11, 3), (11, 12, 1))
_MATE_TOKENS: Final = 7
_CHECK_BLOCK: Final = 4
# Greatest mean logit error over mean logit. Two orders of sums differ by 1e-6 in float32, by about
# 1e-2 in half precision.
_TOLERANCE: Final = {torch.float32: 1e-3, torch.float16: 0.05, torch.bfloat16: 0.1}


@dataclass(slots=True)
class _Probe:
    """Records what each attention layer stores and how it attends, instead of attending."""

    specs: dict[int, LayerSpec] = field(default_factory=dict)
    attention: dict[int, AttentionLayer] = field(default_factory=dict)

    def record(
        self,
        module: nn.Module,
        call: _AttentionCall,
        context: _Context,
        options: dict[str, Any],
    ) -> None:
        """Record what `module` stores and how it attends. Raises ModelRefused if Baton's attention
        cannot do what it asks for."""
        name = type(module).__name__
        layer, absorbed = context.layer(module), context.absorbed.get(module)
        if layer is None:
            raise ModelRefused(f"{name} does not number its layers")
        if layer in self.specs:
            raise ModelRefused(f"{name}: layer {layer} attends twice")
        if not getattr(module, "is_causal", True) or options.get("is_causal") is False:
            raise ModelRefused(f"{name} is not causal")
        known = _HARMLESS | {"scaling", "sliding_window", "softcap", "s_aux"}
        given = {option for option, value in options.items() if value is not None}
        unknown = sorted(given - known)
        if unknown:
            raise ModelRefused(f"{name} passes {', '.join(unknown)} to attention")
        window = options.get("sliding_window") or 0
        scale = options.get("scaling")
        _, kv_heads, _, k_dim = call.key.shape
        if absorbed is None:
            self.specs[layer] = layer_spec(kv_heads, k_dim, call.value.shape[3], window)
        else:
            self.specs[layer] = latent_spec(k_dim, window)
        self.attention[layer] = AttentionLayer(
            query_heads=call.query.shape[1],
            scale=float(call.query.shape[3] ** -0.5 if scale is None else scale),
            window=window,
            softcap=options.get("softcap") or None,
            sinks=options.get("s_aux"),
            latent=0 if absorbed is None else absorbed.rank,
        )


@dataclass(frozen=True, slots=True)
class _AttentionCall:
    """One call of attention: query [1, query_heads, T, k_dim], key and value [1, kv_heads, T,
    dim]."""

    query: Tensor
    key: Tensor
    value: Tensor


@dataclass(frozen=True, slots=True)
class _Context:
    """What a forward call passes to each attention module: the step's batch (or a probe), the
    absorbed weights of modules with latent attention, and the cache of a model with recurrent
    state."""

    step: Batch | _Probe
    absorbed: dict[nn.Module, Absorbed]
    cache: StepCache | ProbeCache | None = None

    def layer(self, module: nn.Module) -> int | None:
        """Return the layer for which `module` attends; None if it does not say. A module that
        layers share (Zamba 2) numbers itself -1; the keys that it has just stored tell."""
        layer: int | None = getattr(module, "layer_idx", None)
        return self.cache.stored if layer == -1 and self.cache is not None else layer


def _paged_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None = None,
    **options: Any,
) -> tuple[Tensor, None]:
    """Attend, as transformers calls it: query [1, query_heads, T, k_dim] -> [1, T, query_heads,
    v_dim]. Raises ModelRefused for a module that Baton's attention cannot serve."""
    name = type(module).__name__
    if attention_mask is not None:
        raise ModelRefused(f"{name} builds its own attention mask")
    baton_context: _Context | None = options.pop("baton_context", None)
    if baton_context is None:
        raise ModelRefused(f"{name} does not receive the keywords of the forward call")
    absorbed, step = baton_context.absorbed.get(module), baton_context.step
    if isinstance(step, _Probe):
        step.record(module, _AttentionCall(query, key, value), baton_context, options)
        v_dim = value.shape[3] if absorbed is None else absorbed.v_dim
        return query.new_zeros(1, query.shape[2], query.shape[1], v_dim), None
    q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))
    if absorbed is not None:
        nope = absorbed.key.shape[1]
        q = torch.cat((absorbed.queries(q[..., :nope]), q[..., nope:]), dim=-1)
    layer = baton_context.layer(module)
    assert layer is not None, "checked by the probe"
    attended = step.attend(layer, q, k, v)
    return (attended if absorbed is None else absorbed.values(attended))[None], None


AttentionInterface.register(IMPLEMENTATION, _paged_attention)


class _GivenHidden(nn.Module):
    """Replaces the decoder in the model that computes logits; returns the hidden states that it is
    given as embeddings."""

    def __init__(self, example: Any, decoder: nn.Module) -> None:
        super().__init__()
        self._example = example  # what the real decoder returned to the probe
        for name, value in vars(decoder).items():  # Falcon-H1's head reads a factor there
            if isinstance(value, float):
                setattr(self, name, value)

    @property
    def decoder(self) -> _GivenHidden:
        """Some heads (OPT's) reach through the base model to its decoder."""
        return self

    def forward(self, *_: Any, inputs_embeds: Tensor, **__: Any) -> Any:
        return dataclasses.replace(self._example, last_hidden_state=inputs_embeds)


_EXPERT_COUNTS: Final = ("num_experts", "num_local_experts", "n_routed_experts")
_EXPERTS_MET: Final = ("num_experts_per_tok", "num_experts_per_token", "moe_topk", "top_k_experts")


class UniversalModel:
    """Any decoder-only transformers model whose attention goes through the AttentionInterface."""

    def __init__(self, causal: Any, fixed_shapes: bool = False) -> None:
        """Probe `causal`, which is on its device, in eval mode, with Baton's attention set. Raises
        ModelRefused.

        `fixed_shapes`: the shape of no adapter's product depends on how many rows want it. It does
        not cover experts, which the modelling code computes: see `has_experts`.
        """
        self._fixed_shapes = fixed_shapes
        self._absorbed = absorb_latents(causal)
        self._adapters = HookedAdapters(causal, self._absorbed)
        self._decoder = causal.base_model
        self._device: torch.device = causal.device
        config = causal.config.get_text_config()
        self.vocab_size: int = config.vocab_size
        self.max_positions: int | None = getattr(config, "max_position_embeddings", None)
        self.has_experts = _names_experts(causal.config.to_dict())
        self.weight_bytes: int = sum(p.nbytes for p in causal.parameters())
        self.parameter_counts = _parameter_counts(causal, config)
        self._cache_name = cache_name(self._decoder) if keeps_state(causal) else None
        probe, states = _Probe(), ProbeCache()
        ids = torch.zeros(2, dtype=torch.int64, device=causal.device)
        with states.watch(self._decoder):
            example = self._run(ids, torch.arange(2, device=causal.device), probe, states)
        expected: int = config.num_hidden_layers
        if not states.mixers:
            self._cache_name = None
        if self._cache_name is None and sorted(probe.specs) != list(range(expected)):
            raise ModelRefused(
                f"{len(probe.specs)} of {expected} layers use transformers' attention interface"
            )
        self.layers = tuple(
            dataclasses.replace(probe.specs.get(i, NO_KV), state=states.specs.get(i))
            for i in range(expected)
        )
        self.attention_layers = tuple(probe.attention.get(i, NO_ATTENTION) for i in range(expected))
        split_mixers(states, tuple(probe.specs))
        # Runs what the model's own forward does after its decoder: head, logit scaling, softcap.
        self._head = copy.copy(causal)
        modules = dict(causal._modules)
        if causal.base_model_prefix not in modules:
            raise ModelRefused("its decoder cannot be told from its head")
        modules[causal.base_model_prefix] = _GivenHidden(example, self._decoder)
        self._head.__dict__["_modules"] = modules

    def forward(self, token_ids: Tensor, positions: Tensor, batch: Batch) -> Tensor:
        """Run token_ids [T], positions [T] int64 -> hidden [T, H]; write the batch's KV."""
        with self._adapters.rows(rows_by_adapter(batch, self._fixed_shapes)):
            cache = None if self._cache_name is None else StepCache(batch)
            return self._run(token_ids, positions, batch, cache).last_hidden_state[0]

    def logits(self, hidden: Tensor) -> Tensor:
        """hidden [N, H] -> [N, vocab] float32."""
        return self._head(inputs_embeds=hidden[None], use_cache=False).logits[0].float()

    def add_adapter(self, adapter: Adapter) -> None:
        """Apply `adapter` to the rows that name it. Raises ModelRefused if it changes layers that
        cannot be adapted."""
        if self._cache_name is not None:
            raise ModelRefused(
                f"adapter {adapter.name}: models with recurrent state take no adapters yet",
                field="lora_modules",
            )
        ids = torch.arange(_CHECK_TOKENS, device=self._device)

        def run() -> int:
            self._run(ids % self.vocab_size, ids, _Probe())
            return _CHECK_TOKENS

        self._adapters.add(adapter, run)

    def remove_adapter(self, id_: str) -> None:
        """Forget an adapter, also one that `add_adapter` refused after it had taken a part."""
        self._adapters.remove(id_)

    def _run(
        self,
        token_ids: Tensor,
        positions: Tensor,
        step: Batch | _Probe,
        cache: StepCache | ProbeCache | None = None,
    ) -> Any:
        given: dict[str, Any] = {} if self._cache_name is None else {self._cache_name: cache}
        return self._decoder(
            input_ids=token_ids[None],
            position_ids=positions[None],
            use_cache=False,
            baton_context=_Context(step, self._absorbed, cache),
            **given,
        )


@torch.inference_mode()
def load_universal(
    checkpoint: Checkpoint,
    dtype: torch.dtype,
    device: torch.device,
    fixed_shapes: bool = False,
    key: WeightsKey | None = None,
    keep_bytes: int = 0,
) -> UniversalModel:
    """Load a checkpoint. `key`: of the file in which this host holds the weights once, None = they
    are this process's own; `keep_bytes`: see WeightFolder. Raises ModelRefused with the
    architecture and the reason."""
    with named_refusals(checkpoint.config):
        with nullcontext() if key is None else shared_file(key, keep_bytes) as file:
            causal = causal_once(checkpoint, dtype, file)
        return _checked(causal, dtype, device, fixed_shapes)


def _checked(
    causal: Any, dtype: torch.dtype, device: torch.device, fixed_shapes: bool
) -> UniversalModel:
    """Make the model that serves `causal`. Raises ModelRefused if it computes something else."""
    causal.requires_grad_(False).eval().to(device)
    text_config = causal.config.get_text_config()
    ids = (torch.arange(_CHECK_TOKENS, device=device) * 37 + 5) % text_config.vocab_size
    native = causal(input_ids=ids[None], use_cache=False).logits[0].float()
    causal.set_attn_implementation(IMPLEMENTATION)
    model = UniversalModel(causal, fixed_shapes)
    _check_windows(model, text_config)
    _self_check(model, ids, native, dtype)
    return model


def _names_experts(config: dict[str, Any]) -> bool:
    """Whether a config, or a part of it, sets any key whose name has to do with experts. A key that
    means no experts may match: this costs speed only."""
    for key, value in config.items():
        if isinstance(value, dict):
            if _names_experts(value):
                return True
        elif value and any(part in str(key) for part in ("expert", "moe")):
            return True
    return False


def _parameter_counts(causal: Any, config: Any) -> ParameterCounts:
    """Count the parameters of the matrices, by which rows are multiplied with them. If the config
    does not say how many experts a row meets, all experts count as met by every row."""
    embedding, head = causal.get_input_embeddings(), causal.get_output_embeddings()
    outside = {id(module.weight) for module in (embedding, head) if module is not None}
    dense = experts = 0
    for name, parameter in causal.named_parameters():
        if id(parameter) in outside or parameter.dim() < 2:
            continue
        if ".experts." in name:
            experts += parameter.numel()
        else:
            dense += parameter.numel()
    values = config.to_dict()
    count = next((values[k] for k in _EXPERT_COUNTS if isinstance(values.get(k), int)), 0)
    met = next((values[k] for k in _EXPERTS_MET if isinstance(values.get(k), int)), 0)
    if not count or not met:
        dense, experts, count, met = dense + experts, 0, 0, 0
    tied = head is None or head.weight is embedding.weight
    size = embedding.weight.numel() if head is None else head.weight.numel()
    return ParameterCounts(dense, size, tied, experts, count, met)


def _check_windows(model: UniversalModel, text_config: Any) -> None:
    """Raise ModelRefused if the model's own cache forgets tokens that its attention could still
    see. What transformers generates with such a model depends on where its prefill ended."""
    forgets = DynamicCache(config=text_config).is_sliding
    for index, (sliding, spec) in enumerate(zip(forgets, model.layers, strict=False)):
        if sliding and not spec.window:
            raise ModelRefused(f"layer {index} has a window that its attention is not told of")


def _self_check(model: UniversalModel, ids: Tensor, native: Tensor, dtype: torch.dtype) -> None:
    """Run `ids` in chunks through the paged path, each beside another sequence. Raises
    ModelRefused if the logits differ from the `native` ones."""
    pool = _ScratchPool(model.layers, dtype, ids.device)
    attention = TorchAttention(pool, model.attention_layers)
    states = StateArena(model.layers, 2, ids.device)
    tokens, rows, seen = ids.tolist(), list[Tensor](), 0
    for start, stop, mates in _CHECK_CHUNKS:
        mate = SequenceChunk("mate", tokens[-mates:], seen, (pool.mate_blocks,), state_slot=0)
        chunk = SequenceChunk("self-check", tokens[start:stop], start, (pool.blocks,), state_slot=1)
        step = flatten([mate, chunk], attention, _CHECK_BLOCK, ids.device, states=states)
        hidden = model.forward(step.token_ids, step.positions, step.batch)
        rows.append(model.logits(hidden[mates:]))
        seen += mates
    error = (torch.cat(rows) - native).abs().mean() / native.abs().mean()
    if not error <= _TOLERANCE[dtype]:  # also true for NaN
        raise ModelRefused(
            f"its logits change with paged attention (relative error {float(error):.1e})"
        )


class _ScratchPool:
    """The KV of the self-check's two sequences; implements KVViews."""

    def __init__(
        self, layers: tuple[LayerSpec, ...], dtype: torch.dtype, device: torch.device
    ) -> None:
        num_blocks = -(-_CHECK_TOKENS // _CHECK_BLOCK)
        num_mates = -(-_MATE_TOKENS // _CHECK_BLOCK)
        self.group_of = (0,) * len(layers)
        self.blocks = HeldBlocks(range(num_blocks))
        self.mate_blocks = HeldBlocks(range(num_blocks, num_blocks + num_mates))
        shape = (num_blocks + num_mates, _CHECK_BLOCK)
        self._views = [
            tuple(
                torch.zeros(*shape, spec.kv_heads, dim, dtype=dtype, device=device)
                for dim in (spec.k_dim, spec.v_dim)
            )
            for spec in layers
        ]

    def layer(self, layer: int) -> tuple[Tensor, Tensor]:
        """See KVViews.layer."""
        k, v = self._views[layer]
        return k, v

    def scales(self, layer: int) -> tuple[Tensor, Tensor]:
        """See KVViews.scales."""
        raise InternalError("the self-check's KV is stored as computed")
