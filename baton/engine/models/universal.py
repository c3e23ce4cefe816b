"""The universal route: transformers' own modelling code over our paged attention.

Baton's attention function is registered in transformers' AttentionInterface under its own name. It
gets the step's batch as a keyword of the forward call (or of its module, where a family drops
keywords), so there is no global. At load (loading/universal.py):

    causal_once (refuses by config) -> native logits of a few tokens -> latents absorbed (MLA)
    -> probe forward (discovers layers, heads, windows, scaling, softcap, sinks)
    -> the same tokens through the paged path, in chunks -> the model is refused unless these
    logits equal the native ones

Layers that keep a recurrent state beside KV, or instead of it: recurrent.py. Layers that choose the
keys that they attend to, or count positions from a cache: step_past.py. Tensor-parallel ranks: each
loads and checks the whole model, then keeps its share of it (module_shares.py).

A model that cannot be served this way (cross attention, own masks, ...) is refused with the reason:
no model is ever served approximately.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

import torch
from torch import Tensor, nn
from transformers import AttentionInterface

from baton.engine.attention.indexed import Chosen, index_of
from baton.engine.models.causal import cache_name, decoder_name
from baton.engine.models.config import NO_ATTENTION, latent_spec, layer_spec
from baton.engine.models.hooked_lora import HookedAdapters
from baton.engine.models.lora import Adapter, rows_by_adapter
from baton.engine.models.mla import Absorbed, absorb_latents
from baton.engine.models.module_shares import Call, Collectives, RankHeads, keep_share
from baton.engine.models.recurrent import (
    ProbeCache,
    StepCache,
    keeps_state,
    outputs_differ,
    split_mixers,
)
from baton.engine.models.step_past import StepPast, counts_positions, split_indexers, told
from baton.engine.models.tower import VisionTower
from baton.engine.state.attention import AttentionLayer
from baton.engine.state.batch import Batch
from baton.engine.state.images import StepImages
from baton.engine.state.work import ParameterCounts
from baton.protocol.errors import ModelRefused
from baton.protocol.kv_spec import LayerSpec

IMPLEMENTATION: Final = "baton_paged"
# Keywords that models hand to attention and that change nothing once dropout and caches are off.
_HARMLESS: Final = {
    "dropout", "position_ids", "use_cache", "output_router_logits", "output_attentions",
    "cache_position", "output_hidden_states", "return_dict", "deterministic", "training",
    "is_causal", "position_embeddings",
}  # fmt: skip
# A layer without attention.
NO_KV: Final = LayerSpec(0, 0, 0, kind="state")
CHECK_TOKENS: Final = 12  # tokens of the self-check at load


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
        chunk = _chunk(module, layer)
        window = options.get("sliding_window") or chunk
        scale = options.get("scaling")
        _, kv_heads, _, k_dim = call.key.shape
        if absorbed is None:
            self.specs[layer] = layer_spec(kv_heads, k_dim, call.value.shape[3], window)
        else:
            index_dim = context.past.index_dims.get(layer, 0) if context.past else 0
            self.specs[layer] = dataclasses.replace(latent_spec(k_dim, window), v_dim=index_dim)
        self.attention[layer] = AttentionLayer(
            query_heads=call.query.shape[1],
            scale=float(call.query.shape[3] ** -0.5 if scale is None else scale),
            window=window,
            softcap=options.get("softcap") or None,
            sinks=options.get("s_aux"),
            latent=0 if absorbed is None else absorbed.rank,
            chunked=chunk > 0,
        )


def _chunk(module: Any, layer: int) -> int:
    """Return the size of the chunks within which `module` attends; 0 = it does not."""
    config = getattr(module, "config", None)
    kinds = getattr(config, "layer_types", None)
    chunked = kinds is not None and kinds[layer] == "chunked_attention"
    return getattr(config, "attention_chunk_size", 0) if chunked else 0


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
    absorbed weights of modules with latent attention, the cache of a model with recurrent state,
    the past of a model that asks for it, and the heads of this rank."""

    step: Batch | _Probe
    absorbed: dict[nn.Module, Absorbed]
    cache: StepCache | ProbeCache | None = None
    past: StepPast | None = None
    heads: RankHeads | None = None

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
    given: _Context | None = options.pop("baton_context", None)
    baton_context = given or vars(module).get("baton_context")
    if baton_context is None:
        raise ModelRefused(f"{name} does not receive the keywords of the forward call")
    past = baton_context.past
    if attention_mask is not None and (past is None or attention_mask is not past.mask):
        raise ModelRefused(f"{name} builds its own attention mask")
    chosen: Chosen | None = options.pop("indices", None)
    absorbed, step = baton_context.absorbed.get(module), baton_context.step
    if isinstance(step, _Probe):
        step.record(module, _AttentionCall(query, key, value), baton_context, options)
        v_dim = value.shape[3] if absorbed is None else absorbed.v_dim
        return query.new_zeros(1, query.shape[2], query.shape[1], v_dim), None
    q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))
    if (heads := baton_context.heads) is not None:
        q, k, v = heads.own(q), heads.own(k), heads.own(v)
    if absorbed is not None:
        nope = absorbed.key.shape[1]
        q = torch.cat((absorbed.queries(q[..., :nope]), q[..., nope:]), dim=-1)
    layer = baton_context.layer(module)
    assert layer is not None, "checked by the probe"
    if chosen is None:
        attended = step.attend(layer, q, k, v)
    else:
        step.store(layer, k, v)
        attended = index_of(step).attend_chosen(layer, q, chosen, step)
    found = attended if absorbed is None else absorbed.values(attended)
    return (found if heads is None else heads.gather(found))[None], None


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
        self._causal = causal
        self._heads: RankHeads | None = None
        self._fixed_shapes = fixed_shapes
        self._absorbed = absorb_latents(causal)
        self._adapters = HookedAdapters(causal, self._absorbed)
        self.tower = VisionTower.of(causal)
        self._embed = causal.get_input_embeddings()
        decoder = decoder_name(causal)
        whole = self._decoder = getattr(causal, decoder)
        self._device: torch.device = causal.device
        config = causal.config.get_text_config()
        self.vocab_size: int = config.vocab_size
        self.max_positions: int | None = getattr(config, "max_position_embeddings", None)
        self.has_experts = _names_experts(causal.config.to_dict())
        self.weight_bytes: int = sum(p.nbytes for p in causal.parameters())
        self.parameter_counts = self._counts()
        self._attending = [module for module in causal.modules() if hasattr(module, "layer_idx")]
        self._cache = cache_name(self._decoder.forward) or "past_key_values"
        self._keeps_state = keeps_state(causal)
        self.has_index: bool = split_indexers(causal)
        self._asks_past = self.has_index or counts_positions(causal)
        probe, states = _Probe(), ProbeCache()
        ids = torch.zeros(2, dtype=torch.int64, device=causal.device)
        with states.watch(self._decoder):
            example = self._run(ids, torch.arange(2, device=causal.device), probe, states)
        expected: int = config.num_hidden_layers
        self._keeps_state = bool(states.mixers)
        if not self._keeps_state and sorted(probe.specs) != list(range(expected)):
            raise ModelRefused(
                f"{len(probe.specs)} of {expected} layers use transformers' attention interface"
            )
        self.layers = tuple(
            dataclasses.replace(probe.specs.get(i, NO_KV), state=states.specs.get(i))
            for i in range(expected)
        )
        self.attention_layers = tuple(probe.attention.get(i, NO_ATTENTION) for i in range(expected))
        self._late_mixers = frozenset(states.after_attention)
        self.outputs_differ = outputs_differ(states)
        split_mixers(states, tuple(probe.specs.keys() - self._late_mixers))
        if self.tower is not None:
            self._decoder = whole.language_model  # takes the rows of images as embeddings
        # Runs what the model's own forward does after its decoder: head, logit scaling, softcap.
        self._head = copy.copy(causal)
        modules = dict(causal._modules)
        modules[decoder] = _GivenHidden(example, whole)
        self._head.__dict__["_modules"] = modules

    def forward(self, token_ids: Tensor, positions: Tensor, batch: Batch) -> Tensor:
        """Run token_ids [T], positions [T] int64 -> hidden [T, H]; write the batch's KV."""
        with self._adapters.rows(rows_by_adapter(batch, self._fixed_shapes)):
            cache = StepCache(batch) if self._keeps_state else None
            if self._late_mixers:
                batch = self._without_late(batch)
            hidden = self._run(token_ids, positions, batch, cache).last_hidden_state[0]
        if self._heads is not None:
            self._heads.group.all_reduce(torch.zeros(1))  # behind it, every rank has written
        return hidden

    def logits(self, hidden: Tensor) -> Tensor:
        """hidden [N, H] -> [N, vocab] float32."""
        return self._head(inputs_embeds=hidden[None], use_cache=False).logits[0].float()

    def _without_late(self, batch: Batch) -> Batch:
        """Return the batch for attention, which does not announce layers whose mixer is still to
        run: the mixer has the whole batch, and announces them."""
        announce, late = batch.on_layer, self._late_mixers
        if announce is None:
            return batch
        return dataclasses.replace(
            batch, on_layer=lambda layer: None if layer in late else announce(layer)
        )

    def keep_share(
        self, calls: Mapping[nn.Module, Call], group: Collectives, *, mapped: bool
    ) -> None:
        """Keep this rank's share of the model; see module_shares.keep_share. `layers` stay the
        whole model's. Raises ModelRefused for heads that the ranks cannot share."""
        place = group.place
        for spec, own in zip(self.layers, self.attention_layers, strict=True):
            _refuse_heads(spec, own.query_heads, place.size)
        heads = RankHeads(group)
        self.weight_bytes -= keep_share(self._causal, calls, group, mapped=mapped)
        self._absorbed = {
            module: Absorbed(heads.own(each.key, 0), heads.own(each.value, 0))
            for module, each in self._absorbed.items()
        }
        self.attention_layers = tuple(
            dataclasses.replace(
                layer,
                query_heads=layer.query_heads // place.size,
                sinks=None if layer.sinks is None else heads.own(layer.sinks, 0),
            )
            for layer in self.attention_layers
        )
        self.parameter_counts = dataclasses.replace(self._counts(), tied=self.parameter_counts.tied)
        self._heads = heads

    def _counts(self) -> ParameterCounts:
        """Count the parameters that rows of text meet."""
        tower = () if self.tower is None else self.tower.parameters
        return _parameter_counts(self._causal, {id(each) for each in tower})

    def add_adapter(self, adapter: Adapter) -> None:
        """Apply `adapter` to the rows that name it. Raises ModelRefused if it changes layers that
        cannot be adapted."""
        if self._heads is not None:
            raise ModelRefused(
                f"adapter {adapter.name}: only the lean route splits adapters over ranks",
                field="lora_modules",
            )
        if self._keeps_state:
            raise ModelRefused(
                f"adapter {adapter.name}: models with recurrent state take no adapters yet",
                field="lora_modules",
            )
        ids = torch.arange(CHECK_TOKENS, device=self._device)

        def run() -> int:
            self._run(ids % self.vocab_size, ids, _Probe())
            return CHECK_TOKENS

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
        given = self._inputs(token_ids, positions, step.images if isinstance(step, Batch) else None)
        if self._keeps_state:
            given[self._cache] = cache
        past: StepPast | None = None
        if self._asks_past:
            past = StepPast(None if isinstance(step, _Probe) else step, positions)
            given[self._cache] = past
        if past is not None and self.has_index:
            given["attention_mask"] = {"indexed_attention": past.mask}
        context = _Context(step, self._absorbed, cache, past, self._heads)
        with told(self._attending, context):
            return self._decoder(use_cache=False, baton_context=context, **given)

    def _inputs(
        self, token_ids: Tensor, positions: Tensor, images: StepImages | None
    ) -> dict[str, Any]:
        """Return the inputs of the decoder: token ids, or embeddings with the rows of images."""
        if images is None:
            return {"input_ids": token_ids[None], "position_ids": positions[None]}
        rows, given = self._embed(token_ids), dict[str, Any]()
        if images.embeds is not None:
            rows = rows.index_copy(0, images.rows, images.embeds.to(rows.dtype))
        if images.deep is not None and len(images.deep):
            mask = torch.zeros_like(token_ids, dtype=torch.bool)
            mask[images.rows] = True
            given = {"visual_pos_masks": mask[None], "deepstack_visual_embeds": list(images.deep)}
        placed = positions[None] if images.positions is None else images.positions[:, None]
        return {"inputs_embeds": rows[None], "position_ids": placed, **given}


def use_paged_attention(causal: Any) -> None:
    """Let the language model of `causal` attend by Baton; its vision tower, if any, goes on."""
    if VisionTower.of(causal) is None:
        causal.set_attn_implementation(IMPLEMENTATION)
    else:
        causal.set_attn_implementation({"text_config": IMPLEMENTATION})


def _refuse_heads(spec: LayerSpec, query_heads: int, size: int) -> None:
    """Raise ModelRefused for heads of a layer that `size` ranks can neither split nor repeat."""
    unshared = spec.kv_heads % size and size % spec.kv_heads if spec.kv_heads else 0
    if query_heads % size or unshared:
        raise ModelRefused(
            f"{query_heads} query heads and {spec.kv_heads} KV heads cannot be split over {size} "
            "ranks",
            field="tensor_parallel_size",
        )


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


def _parameter_counts(causal: Any, tower: set[int]) -> ParameterCounts:
    """Count the parameters of the matrices, by which rows are multiplied with them; `tower`: ids of
    those that no row meets. If the config does not say how many experts a row meets, all experts
    count as met by every row."""
    embedding, head = causal.get_input_embeddings(), causal.get_output_embeddings()
    outside = tower | {id(module.weight) for module in (embedding, head) if module is not None}
    dense = experts = 0
    for name, parameter in causal.named_parameters():
        if id(parameter) in outside or parameter.dim() < 2:
            continue
        if ".experts." in name:
            experts += parameter.numel()
        else:
            dense += parameter.numel()
    values = causal.config.get_text_config().to_dict()
    count = next((values[k] for k in _EXPERT_COUNTS if isinstance(values.get(k), int)), 0)
    met = next((values[k] for k in _EXPERTS_MET if isinstance(values.get(k), int)), 0)
    if not count or not met:
        dense, experts, count, met = dense + experts, 0, 0, 0
    tied = head is None or head.weight is embedding.weight
    size = embedding.weight.numel() if head is None else head.weight.numel()
    return ParameterCounts(dense, size, tied, experts, count, met)
