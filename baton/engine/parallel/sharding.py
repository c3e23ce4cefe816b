"""A rank's share of a lean model: which part of each tensor it reads, and how shares are combined.

    column parallel   q, k, v, gate, up (also of each expert): a slice of the outputs, whole heads
    row parallel      o, down: the matching slice of the inputs; products are summed over the ranks
    vocabulary        embedding and head: a slice of the tokens; lookups summed, logits gathered
    heads             sinks: those of this rank's query heads
    linear attention  whole key heads, and the value heads that each of them serves. Where queries,
                      keys and values lie one behind the other (in_proj_qkv, the convolution), each
                      of the three is cut by itself. out_proj is row parallel
    replicated        norms, routers with their biases, the gate of a shared expert. Of latent
                      attention: the product that makes latents, since every rank's pool holds
                      them whole, and the first of two products that make queries. Of a draft
                      head: the product of a state and an embedding
    experts           cut like other gates, ups and downs; with `whole_experts` each rank holds
                      some experts, and those whole

Query heads are split evenly. With fewer KV heads than ranks, each KV head lies on several ranks;
kv_transfer/protocol/shares.py cuts pools in the same way. The leader alone adds the bias of a
row-parallel product. Integers and 8-bit floats are cut like plain weights: the numbers of a part
are those of the whole weight (quantization/parts.py). A row-parallel product with rows of int8
(w8a8, w4a8) sums over the ranks by itself.
Source: Megatron-LM (arXiv 1909.08053, section 3).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Final

import torch
from torch import Tensor
from torch.nn import functional

from baton.engine.checkpoint.weights import StoredWeight
from baton.engine.models.config import DecoderConfig, DeltaConfig, ExpertsConfig
from baton.engine.models.experts import ExpertDispatch
from baton.engine.models.lora import Adapter, LowRank
from baton.engine.parallel.group import RankGroup
from baton.engine.quantization.float8 import Float8Weight
from baton.engine.quantization.int_weight import IntWeight
from baton.engine.quantization.linear import EmbeddingTable
from baton.engine.quantization.parts import (
    float8_inputs,
    float8_outputs,
    of_inputs,
    of_outputs,
)
from baton.engine.state.place import RankPlace
from baton.protocol.errors import ModelRefused

FIELD: Final = "tensor_parallel_size"
_BY_TOKEN: Final = frozenset({"model.embed_tokens.weight", "lm_head.weight"})
_COLUMN: Final = frozenset({
    "q_proj", "q_b_proj", "kv_b_proj", "gate_proj", "up_proj", "w1", "w3",
    "in_proj_qkvz", "in_proj_ba", "in_proj_z", "in_proj_b", "in_proj_a",
})  # fmt: skip
_MIXED: Final = frozenset({"in_proj_qkv", "conv1d"})  # of linear attention: queries, keys, values
# Several column-parallel ones in a tensor.
_FUSED: Final = _MIXED | {"qkv_proj", "gate_up_proj"}
_ROW: Final = frozenset({"o_proj", "down_proj", "w2", "out_proj"})
_BY_HEAD: Final = frozenset({"sinks", "A_log", "dt_bias"})  # a number for each head
# "eh_proj", "fc": of a draft head, which join a state and an embedding.
_WHOLE: Final = frozenset({"q_a_proj", "kv_a_proj_with_mqa", "router", "eh_proj", "fc"})
_ROUTED: Final = ".experts."  # occurs in the names of products of routed experts


def rank_config(
    config: DecoderConfig, place: RankPlace, whole_experts: bool = False
) -> DecoderConfig:
    """Return the config of a rank's share of each layer. The vocabulary in it stays the whole
    model's.

    Raises ModelRefused for a model that cannot be split over so many ranks.
    """
    heads, kv_heads, experts, size = (
        config.num_heads, config.num_kv_heads, config.experts, place.size
    )  # fmt: skip
    inner = {"query heads": heads}
    if config.delta is not None:
        inner["key heads of linear attention"] = config.delta.sizes.key_heads
    if experts is None or len(experts.layers) < config.num_layers:
        inner["intermediate size"] = config.intermediate_size
    if experts is not None:
        inner["shared expert's size"] = experts.shared_size
        if whole_experts:
            inner["experts"] = experts.count
        else:
            inner["experts' intermediate size"] = experts.size
    for what, count in inner.items():
        if count % size:
            raise ModelRefused(f"{count} {what} cannot be split over {size} ranks", field=FIELD)
    if config.latent is None and kv_heads % size and size % kv_heads:
        raise ModelRefused(
            f"{kv_heads} KV heads can be neither split over {size} ranks nor repeated on them",
            field=FIELD,
        )
    if (size - 1) * _vocabulary_width(config.vocab_size, size) >= config.vocab_size:
        raise ModelRefused(f"the vocabulary is too small for {size} ranks", field=FIELD)
    return replace(
        config,
        num_heads=heads // size,
        num_kv_heads=max(1, kv_heads // size),
        intermediate_size=config.intermediate_size // size,
        experts=None if experts is None else _rank_experts(experts, place, whole_experts),
        delta=None if config.delta is None else _rank_delta(config.delta, size),
    )


def _rank_delta(delta: DeltaConfig, size: int) -> DeltaConfig:
    """Return a rank's share of linear attention: key heads with all their value heads."""
    whole = delta.sizes
    keys, values = whole.key_heads // size, whole.value_heads // size
    return replace(delta, sizes=replace(whole, key_heads=keys, value_heads=values))


def _rank_experts(experts: ExpertsConfig, place: RankPlace, whole: bool) -> ExpertsConfig:
    """Return a rank's share of a mixture: a slice of every expert, or with `whole` some experts as
    a whole; of the shared expert always a slice."""
    shared = experts.shared_size // place.size
    if whole:
        return replace(experts, shared_size=shared, held=place.share(experts.count))
    return replace(experts, shared_size=shared, size=experts.size // place.size)


def _vocabulary_width(vocab_size: int, size: int) -> int:
    """Return how many tokens of the vocabulary a rank holds; the last rank may hold fewer."""
    return -(-vocab_size // size)


class RankShards:
    """Implements models.decoder.Shards over a group. `config`: the whole model's."""

    dispatch: ExpertDispatch | None = None  # every rank has all rows

    def __init__(self, config: DecoderConfig, group: RankGroup) -> None:
        self._group = group
        self._vocab_size = config.vocab_size
        self._width = _vocabulary_width(config.vocab_size, group.place.size)
        self._first = group.place.rank * self._width

    def embed(self, token_ids: Tensor, table: EmbeddingTable) -> Tensor:
        """See Shards. The rank that holds a token looks it up, the others add zeros, so the sum is
        exact."""
        local = token_ids - self._first
        elsewhere = (local < 0) | (local >= table.outputs)
        found = table.rows(local.clamp(0, table.outputs - 1))
        return self._group.all_reduce(found.masked_fill_(elsewhere[:, None], 0))

    def reduce(self, partial: Tensor) -> Tensor:
        """See Shards."""
        return self._group.all_reduce(partial)

    def gather(self, logits: Tensor) -> Tensor:
        """See Shards. Ranks that do not sample keep their own share."""
        padding = self._width - logits.shape[1]
        parts = self._group.gather(functional.pad(logits, (0, padding)) if padding else logits)
        return logits if parts is None else torch.cat(parts, dim=1)[:, : self._vocab_size]


@dataclass(frozen=True, slots=True)
class Cuts:
    """Which outputs or inputs of a product belong to this rank. `config`: the whole model's.
    `whole_experts`: a rank holds some experts, and those whole."""

    config: DecoderConfig
    place: RankPlace
    whole_experts: bool = False

    @property
    def own(self) -> DecoderConfig:
        """The config of this rank's share; see rank_config."""
        return rank_config(self.config, self.place, self.whole_experts)

    def is_whole(self, module: str) -> bool:
        """Whether a rank holds the product `module` whole, if it holds it at all."""
        routed = self.whole_experts and _ROUTED in module
        return routed or module.rpartition(".")[2] in _WHOLE

    def outputs(self, module: str, count: int) -> slice | Tensor | None:
        """Return which of `count` outputs of a column-parallel product are this rank's: a slice,
        for a fused product their indices. None for a row-parallel product, which is cut by inputs.

        Raises ModelRefused for an unknown product, and for a product of another size.
        """
        if self.is_whole(module):
            return slice(0, count)
        part = module.rpartition(".")[2]
        if part in _ROW:
            return None
        if part in _FUSED:
            return self._fused_outputs(module, part, count)
        if part in ("k_proj", "v_proj"):
            return self._kv_outputs(module, count)
        if part not in _COLUMN:
            raise ModelRefused(f"{module}: nobody knows how to split it over ranks", field=FIELD)
        return self._even(count)

    def inputs(self, module: str, count: int) -> slice:
        """Return which of `count` inputs of a product are this rank's: all, unless the product is
        row-parallel."""
        is_cut = module.rpartition(".")[2] in _ROW and not self.is_whole(module)
        return self._even(count) if is_cut else slice(0, count)

    def adapter(self, adapter: Adapter) -> Adapter:
        """Return this rank's share of a LoRA adapter: each delta is cut like the product it adapts.

        Raises ModelRefused for the products for which `outputs` does.
        """
        deltas = {module: self._delta(module, delta) for module, delta in adapter.deltas.items()}
        return replace(adapter, deltas=deltas)

    def _delta(self, module: str, delta: LowRank) -> LowRank:
        outputs = self.outputs(module, len(delta.up))
        down = delta.down[:, self.inputs(module, delta.down.shape[1])].contiguous()
        return LowRank(down, delta.up if outputs is None else delta.up[outputs].clone())

    def heads(self, count: int) -> slice:
        """Return which of `count` query heads, or value heads of linear attention, are this
        rank's."""
        return self._even(count)

    def _fused_outputs(self, module: str, part: str, count: int) -> Tensor:
        """Return the indices of this rank's outputs of each product in a fused tensor, in the
        tensor's order."""
        config = self.config
        if part == "qkv_proj":
            keys = config.num_kv_heads * config.head_dim
            queries = config.num_heads * config.head_dim
            cuts = [
                (queries, self._even(queries)),
                *[(keys, self._kv_outputs(module, keys))] * 2,
            ]
        elif part in _MIXED and config.delta is not None:
            cuts = [(segment, self._even(segment)) for segment in config.delta.sizes.segments]
        else:
            cuts = [(count // 2, self._even(count // 2))] * 2
        ids: list[Tensor] = []
        first = 0
        for size, cut in cuts:
            ids.append(torch.arange(first + cut.start, first + cut.stop))
            first += size
        if count != first:
            raise ModelRefused(f"{module} has {count} outputs, not {first}")
        return torch.cat(ids)

    def _even(self, count: int) -> slice:
        """Return this rank's part of `count` items, which the ranks share evenly. No query head is
        cut: rank_config has checked that the ranks divide their number."""
        share = self.place.share(count)
        return slice(share.start, share.stop)

    def _kv_outputs(self, module: str, count: int) -> slice:
        """Return the outputs of this rank's KV heads, or of the KV head that it shares with other
        ranks."""
        heads, dim = self.config.num_kv_heads, self.config.head_dim
        if count != heads * dim:
            raise ModelRefused(f"{module} has {count} outputs, not {heads} heads of {dim}")
        own = self.place.heads(heads)
        return slice(own.start * dim, own.stop * dim)


class RankShare:
    """Cuts a checkpoint's tensors and weights to one rank's share. Implements weights.Share."""

    def __init__(self, cuts: Cuts, group: RankGroup) -> None:
        self._cuts = cuts
        self._group = group

    def tensor(self, name: str, whole: Tensor) -> Tensor:
        """See Share. It also cuts two weights that are not read as products: `kv_b_proj`, which is
        absorbed into attention, and a convolution's."""
        if name in _BY_TOKEN:
            return whole[self._tokens(len(whole))].clone()  # a view would keep all of it in memory
        module, _, kind = name.rpartition(".")
        if kind in _BY_HEAD:
            return whole[self._cuts.heads(len(whole))].clone()
        is_cut = kind == "bias" or module.endswith((".kv_b_proj", ".conv1d"))
        is_cut = is_cut and not self._cuts.is_whole(module)
        outputs = self._cuts.outputs(module, len(whole)) if is_cut else None
        return whole if outputs is None else whole[outputs].clone()

    def weight(self, module: str, whole: StoredWeight) -> StoredWeight:
        """See Share."""
        if self._cuts.is_whole(module):
            return whole
        outputs = self._outputs(module, whole.shape[0])
        inputs = self._cuts.inputs(module, whole.shape[1])
        try:
            return self._cut(whole, outputs, inputs)
        except ValueError as error:
            size = self._group.place.size
            raise ModelRefused(
                f"{module} cannot be split over {size} ranks: {error}", field=FIELD
            ) from error

    def _cut(
        self, whole: StoredWeight, outputs: slice | Tensor | None, inputs: slice
    ) -> StoredWeight:
        """Return these outputs of a weight; None = these inputs. Raises ValueError if groups of
        inputs would become too small."""
        if isinstance(whole, Tensor):
            return whole[:, inputs].contiguous() if outputs is None else whole[outputs].clone()
        if isinstance(whole, Float8Weight):
            return (
                float8_inputs(whole, inputs) if outputs is None else float8_outputs(whole, outputs)
            )
        if outputs is not None:
            return of_outputs(whole, outputs)
        part = of_inputs(whole, inputs)
        return replace(part, exchange=self._group) if part.is_w8a8 or part.is_w4a8 else part

    def adds_bias(self, module: str, part: StoredWeight) -> bool:
        """See Share. Of a row-parallel product, whose results are summed over the ranks, only the
        leader adds the bias. Every rank adds it if the product sums by itself (Int8Share), except
        in routed experts, whose results are summed later."""
        is_whole = isinstance(part, IntWeight) and part.exchange is not None
        is_whole = is_whole and _ROUTED not in module
        is_cut = module.rpartition(".")[2] in _ROW and not self._cuts.is_whole(module)
        return self._group.place.leads or is_whole or not is_cut

    def _outputs(self, module: str, count: int) -> slice | Tensor | None:
        """See Cuts.outputs. The outputs of the head are tokens of the vocabulary."""
        if f"{module}.weight" in _BY_TOKEN:
            return self._tokens(count)
        return self._cuts.outputs(module, count)

    def _tokens(self, vocab_size: int) -> slice:
        """This rank's slice of the vocabulary."""
        rank, size = self._group.place.rank, self._group.place.size
        width = _vocabulary_width(vocab_size, size)
        return slice(rank * width, (rank + 1) * width)
