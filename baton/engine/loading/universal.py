"""From a checkpoint to a checked model of the universal route; models/universal.py says how."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, Final, TypeAlias

import torch
from torch import Tensor
from transformers import DynamicCache

from baton.engine.attention.indexed import with_index
from baton.engine.attention.torch_cpu import TorchAttention
from baton.engine.checkpoint.checkpoint import Checkpoint
from baton.engine.checkpoint.weight_file import ReadingFile, WritingFile
from baton.engine.loading.causal_once import causal_once
from baton.engine.memory.state_arena import StateArena
from baton.engine.models.causal import ModelPart, named_refusals
from baton.engine.models.module_shares import Collectives, first_calls
from baton.engine.models.universal import CHECK_TOKENS, UniversalModel, use_paged_attention
from baton.engine.state.batch import flatten
from baton.engine.state.interface import SequenceChunk
from baton.protocol.errors import InternalError, ModelRefused
from baton.protocol.kv_spec import HeldBlocks, LayerSpec

HostFile: TypeAlias = AbstractContextManager[ReadingFile | WritingFile | None]
# The self-check's chunks (from, to), and how many tokens of another sequence lie in front of each.
_CHECK_CHUNKS: Final = ((0, 7, 3), (7, 11, 3), (11, 12, 1))
_MATE_TOKENS: Final = 7
_CHECK_BLOCK: Final = 4
# Greatest mean logit error over mean logit. Two orders of sums differ by 1e-6 in float32, by about
# 1e-2 in half precision.
_TOLERANCE: Final = {torch.float32: 1e-3, torch.float16: 0.05, torch.bfloat16: 0.1}


@dataclass(frozen=True, slots=True)
class HowToLoad:
    """How the modules of a checkpoint are loaded.

    `fixed_shapes`: see UniversalModel. `shared`: the file in which this host holds the weights
    once, None = they are this process's own. `part`: not the tower alone. `group`: keep the share
    of this rank, None = the whole model.
    """

    dtype: torch.dtype
    device: torch.device
    fixed_shapes: bool = False
    shared: HostFile | None = None
    part: ModelPart = ModelPart.WHOLE
    group: Collectives | None = None


@torch.inference_mode()
def load_universal(checkpoint: Checkpoint, how: HowToLoad) -> UniversalModel:
    """Load a checkpoint. Raises ModelRefused with the architecture and the reason; also for heads
    that ranks cannot share."""
    with named_refusals(checkpoint.config):
        with nullcontext() if how.shared is None else how.shared as file:
            causal = causal_once(checkpoint, how.dtype, file, how.part)
        with nullcontext({}) if how.group is None else first_calls(causal) as calls:
            model = _checked(causal, how)
    if how.group is not None:
        model.keep_share(calls, how.group, mapped=how.shared is not None)
    return model


def _checked(causal: Any, how: HowToLoad) -> UniversalModel:
    """Make the model that serves `causal`. Raises ModelRefused if it computes something else."""
    causal.requires_grad_(False).eval().to(how.device)
    text_config = causal.config.get_text_config()
    ids = (torch.arange(CHECK_TOKENS, device=how.device) * 37 + 5) % text_config.vocab_size
    native = causal(input_ids=ids[None], use_cache=False).logits[0].float()
    use_paged_attention(causal)
    model = UniversalModel(causal, how.fixed_shapes)
    _check_windows(model, text_config)
    _self_check(model, ids, native, how.dtype)
    return model


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
    layers = model.attention_layers
    attention = with_index(pool, layers, TorchAttention(pool, layers))
    states = StateArena(model.layers, 2, ids.device)
    tokens, rows, seen = ids.tolist(), list[Tensor](), 0
    for start, stop, mates in _CHECK_CHUNKS:
        mate = SequenceChunk("mate", tokens[-mates:], seen, (pool.mate_blocks,), state_slot=0)
        chunk = SequenceChunk(
            "self-check", tokens[start:stop], start, (pool.blocks,), num_prompt=len(tokens),
            state_slot=1,
        )  # fmt: skip
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
        num_blocks = -(-CHECK_TOKENS // _CHECK_BLOCK)
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
