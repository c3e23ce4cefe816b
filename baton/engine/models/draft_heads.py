"""Draft heads: one more layer behind a lean decoder, which guesses the tokens after the next one.

    row of position i    state of position i, embedding of token i + 1
                         -> one layer, which writes slot i of its own KV
                         -> a state of position i + 1; its logits guess token i + 2

MtpHead is a layer of the target's own checkpoint (DeepSeek-V3, GLM-4, Qwen3-Next, Qwen3.5). The
state of a position is the target's hidden state. Eagle3Head has a checkpoint of its own. The state
of a position is made of what goes into three layers of the target, and the head knows a part of the
vocabulary. For both, behind the first guess the state is the head's own output: of MtpHead behind
its last norm, as the target's hidden state is. A head owns weights only; its KV is one more layer
of the target's pool. A head always attends, also where layers of the target keep recurrent state.
Of several ranks each has its share of the head's layer, as of the target's, and all states.
Sources: DeepSeek-V3 (arXiv 2412.19437, section 2.2); EAGLE-3 (arXiv 2503.01840); transformers'
MtpLayer; vLLM's deepseek_mtp.py, qwen3_next_mtp.py, qwen3_5_mtp.py and llama_eagle3.py.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Final, Protocol

import torch
from torch import Tensor
from torch.nn import functional

from baton.engine.checkpoint.shared_weights import WeightSource
from baton.engine.kernels.rope import Frequencies
from baton.engine.models.config import DecoderConfig
from baton.engine.models.decoder import Decoder
from baton.engine.models.elementwise import Elementwise, choose_elementwise
from baton.engine.models.layers.layer import DecoderLayer, LayerBuilder
from baton.engine.models.tensor_names import tensor_names
from baton.engine.quantization.linear import Linear, in_float32
from baton.engine.state.batch import Batch
from baton.protocol.errors import ModelRefused
from baton.protocol.kv_spec import LayerSpec

# The logit of a token that the head does not know: finite, because a row of a request that allows
# no other token must have numbers.
_UNKNOWN: Final = -1e30


class DraftHead(Protocol):
    """What the runner asks of a draft head. T = rows, N = sampled rows, H = hidden size."""

    @property
    def config(self) -> DecoderConfig:
        """The sizes of its layer alone, of this rank's share: how it attends."""
        ...

    @property
    def layers(self) -> tuple[LayerSpec, ...]:
        """What its layer stores per token, on all ranks together."""
        ...

    @property
    def taps(self) -> tuple[int, ...]:
        """The layers of the target whose inputs `states` needs."""
        ...

    def states(self, hidden: Tensor, tapped: Mapping[int, Tensor]) -> Tensor:
        """Return the states [T, H] of positions whose hidden states are hidden [T, H of the
        target]. `tapped`: what went into the layers `taps`, [T, H of the target] each."""
        ...

    def forward(self, states: Tensor, token_ids: Tensor, positions: Tensor, batch: Batch) -> Tensor:
        """Run states [T, H] of positions [T] with the tokens behind them, token_ids [T].

        Return the states [T, H] of the positions behind; write the rows' KV."""
        ...

    def logits(self, states: Tensor) -> Tensor:
        """Return what follows states [N, H] that `forward` returned, [N, vocab] float32."""
        ...


@dataclass(frozen=True, slots=True)
class HeadLayer:
    """The one decoder layer of a head: weights, rotation and norms."""

    layer: DecoderLayer
    frequencies: Frequencies
    between: Elementwise
    epsilon: float
    reduce: Callable[[Tensor], Tensor]  # sums over the ranks

    def norm(self, x: Tensor, weight: Tensor) -> Tensor:
        """Return the RMSNorm of x [T, H]."""
        return self.between.add_norm(x, None, weight, self.epsilon)[1]

    def __call__(self, residual: Tensor, hidden: Tensor, positions: Tensor, batch: Batch) -> Tensor:
        """Attend with hidden [T, inputs], then the MLP; return the sum with residual [T, H], which
        may be overwritten."""
        rotation = self.frequencies.at(positions, residual.dtype)
        layer = self.layer
        delta = layer.attention(hidden, rotation, batch, (), self.reduce)
        residual, hidden = self.between.add_norm(residual, delta, layer.mlp_norm, self.epsilon)
        return residual + layer.mlp.summed(hidden, (), self.reduce)


@dataclass(frozen=True, slots=True)
class MtpHead:
    """Multi-token prediction: a layer of the target's checkpoint, behind its last one.

    Its embedding and vocabulary head are the target's. A checkpoint may hold copies of both, which
    are not read.
    """

    target: Decoder
    own: HeadLayer
    config: DecoderConfig  # of this layer alone, and this rank's share
    layers: tuple[LayerSpec, ...]  # of this layer alone, on all ranks
    token_norm: Tensor  # [H]
    state_norm: Tensor  # [H]
    join: Linear  # [2H] -> [H]
    final_norm: Tensor  # [H]

    @property
    def taps(self) -> tuple[int, ...]:
        """See DraftHead."""
        return ()

    def states(self, hidden: Tensor, tapped: Mapping[int, Tensor]) -> Tensor:
        """See DraftHead."""
        return hidden

    def forward(self, states: Tensor, token_ids: Tensor, positions: Tensor, batch: Batch) -> Tensor:
        """See DraftHead."""
        tokens = self.own.norm(self.target.embed(token_ids), self.token_norm)
        states = self.own.norm(states, self.state_norm)
        joined = self.join(torch.cat((tokens, states), dim=1))
        hidden = self.own.norm(joined, self.own.layer.input_norm)
        return self.own.norm(self.own(joined, hidden, positions, batch), self.final_norm)

    def logits(self, states: Tensor) -> Tensor:
        """See DraftHead."""
        return self.target.logits(states)


@dataclass(frozen=True, slots=True)
class Eagle3Head:
    """EAGLE-3: attention takes the embedding of a token beside the state, each normalized.

    `targets` [draft vocab] int64: the target's token ids of the head's own ones; None = the same.
    """

    target: Decoder
    own: HeadLayer
    config: DecoderConfig  # of this layer alone, and this rank's share
    layers: tuple[LayerSpec, ...]  # of this layer alone, on all ranks
    taps: tuple[int, ...]
    embedding: Tensor | None  # [vocab, H]; None = the target's
    join: Linear  # [len(taps) * H of the target] -> [H]
    state_norm: Tensor  # [H]
    norm_before_residual: bool  # whether the state is normalized before it is added
    final_norm: Tensor  # [H]
    head: Linear  # [H] -> [draft vocab]
    targets: Tensor | None

    def states(self, hidden: Tensor, tapped: Mapping[int, Tensor]) -> Tensor:
        """See DraftHead."""
        return self.join(torch.cat([tapped[layer] for layer in self.taps], dim=1))

    def forward(self, states: Tensor, token_ids: Tensor, positions: Tensor, batch: Batch) -> Tensor:
        """See DraftHead."""
        if self.embedding is None:
            tokens = self.target.embed(token_ids)
        else:
            tokens = functional.embedding(token_ids, self.embedding)
        normal = self.own.norm(states, self.state_norm)
        hidden = torch.cat((self.own.norm(tokens, self.own.layer.input_norm), normal), dim=1)
        residual = normal if self.norm_before_residual else states.clone()
        return self.own(residual, hidden, positions, batch)

    def logits(self, states: Tensor) -> Tensor:
        """See DraftHead."""
        logits = in_float32(self.head, self.own.norm(states, self.final_norm))
        if self.targets is None:
            return logits
        whole = logits.new_full((logits.shape[0], self.target.vocab_size), _UNKNOWN)
        whole[:, self.targets] = logits
        return whole


@dataclass(frozen=True, slots=True)
class _TensorNames:
    """What the checkpoint calls the parts of MtpHead. `layer`: stands before the names of its
    decoder layer."""

    layer: str
    token_norm: str
    state_norm: str
    join: str
    final_norm: str

    @classmethod
    def of(cls, config: DecoderConfig) -> _TensorNames:
        """Return the names in a checkpoint of `config`."""
        if first := config.extra_prefix:
            norm = f"{first}pre_fc_norm_"
            return cls(
                f"{first}layers.0.", norm + "embedding", norm + "hidden", first + "fc",
                first + "norm",
            )  # fmt: skip
        own = f"model.layers.{config.num_layers}."
        return cls(own, own + "enorm", own + "hnorm", own + "eh_proj", own + "shared_head.norm")


def read_mtp_head(
    config: DecoderConfig,
    target: Decoder,
    source: WeightSource,
    names: frozenset[str],
    layers: tuple[LayerSpec, ...],
) -> MtpHead:
    """Read the layer that drafts behind the last one of `target`, which `config` describes.

    `names`: those of the checkpoint's tensors. `layers`: what the layer stores on all ranks, also
    if `config` is that of a rank's share. Raises ModelRefused, naming them, if some are missing.
    """
    index, own, experts = config.num_layers, _TensorNames.of(config), config.experts
    if experts is not None and f"{own.layer}{experts.prefix}{experts.router}.weight" in names:
        experts = replace(experts, layers=experts.layers | {index})
    whole = replace(
        config, num_layers=index + 1, windows=(*config.windows, 0), local_rope=None, experts=experts
    )
    last = f"model.layers.{index}."
    needed = {n.replace(last, own.layer) for n in tensor_names(whole) if n.startswith(last)}
    needed |= {f"{n}.weight" for n in (own.token_norm, own.state_norm, own.join, own.final_norm)}
    missing = sorted(needed - names)
    if missing:
        raise ModelRefused(
            f"the layer that drafts lacks tensors: {missing[:3]}", field="speculative_method"
        )
    layer = read_layer(whole, target, source, own.layer)
    norm = layer.between.norm_weight
    return MtpHead(
        target=target,
        own=layer,
        config=mtp_config(config),
        layers=layers,
        token_norm=norm(source.tensor(f"{own.token_norm}.weight")),
        state_norm=norm(source.tensor(f"{own.state_norm}.weight")),
        join=source.read([own.join], False),
        final_norm=norm(source.tensor(f"{own.final_norm}.weight")),
    )


def mtp_config(config: DecoderConfig) -> DecoderConfig:
    """Return the config of the layer that drafts alone, of a model with `config`."""
    return replace(config, num_layers=1, windows=(0,), local_rope=None, delta=None)


def read_layer(
    config: DecoderConfig, target: Decoder, source: WeightSource, prefix: str
) -> HeadLayer:
    """Read the decoder layer whose tensors' names begin with `prefix`. `config`: as if it were the
    last layer of `target`."""
    dtype, device = target.place
    between = choose_elementwise(config, dtype, device)
    builder = LayerBuilder(config, source.tensor, source, False, between)
    return HeadLayer(
        builder.layer(config.num_layers - 1, prefix),
        Frequencies.of(config.rope, config.turned, config.pairs, device),
        between,
        config.rms_norm_eps,
        target.reduce,
    )
