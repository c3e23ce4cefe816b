"""Reads the checkpoint of an EAGLE-3 head: its config.json and its tensors.

    fc                     [3 * H of the target -> H]     states of what goes into three layers
    midlayer.*             a Llama layer; attention takes [embedding | state], so 2 * H
    norm, lm_head          [H -> draft vocab]
    d2t                    [draft vocab]: the target's token id less the head's own one
    embed_tokens           optional; without it the target's
Source: vLLM's llama_eagle3.py.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final

from baton.engine.checkpoint.checkpoint import open_checkpoint
from baton.engine.checkpoint.weights import HEAD, open_weights
from baton.engine.checkpoint.widening import open_tensors
from baton.engine.config import EngineConfig
from baton.engine.models.config import DecoderConfig
from baton.engine.models.decoder import Decoder
from baton.engine.models.draft_heads import Eagle3Head, read_layer
from baton.engine.models.families.keys import NotLean
from baton.engine.models.families.read import decoder_config
from baton.engine.models.tensor_names import tensor_names
from baton.protocol.errors import ModelRefused

if TYPE_CHECKING:
    from baton.engine.parallel.group import RankGroup

ARCHITECTURES: Final = ("LlamaForCausalLMEagle3", "Eagle3LlamaForCausalLM", "LlamaForCausalLM")
LAYER: Final = "midlayer."
_TAPS: Final = "eagle_aux_hidden_state_layer_ids"
_OWN: Final = {
    "architectures", "draft_vocab_size", "target_hidden_size", "eagle_config", _TAPS,
    "norm_before_residual", "tie_word_embeddings", "modules_to_not_convert", "num_hidden_layers",
}  # fmt: skip


def read_eagle3_head(
    config: EngineConfig, lean: DecoderConfig, target: Decoder, group: RankGroup | None = None
) -> tuple[Eagle3Head, int]:
    """Read the head of `config.speculative_model` for `target`, a share of what `lean` describes.

    `group`: read this rank's share of the head's layer, and the rest whole. Return the head with
    the bytes of its weights. Raises ModelRefused, whose field is speculative_model,
    for a checkpoint that is no EAGLE-3 head, or is one for another model.
    """
    assert config.speculative_model is not None
    checkpoint = open_checkpoint(config.speculative_model, has_tokenizer=False)
    values = checkpoint.config
    own, share = head_config(values, lean), None
    layers = own.layers
    if group is not None:
        from baton.engine.parallel.sharding import Cuts, RankShare  # lazy: most have one rank

        cuts = Cuts(own, group.place)
        own, share = cuts.own, RankShare(cuts, group)
    whole = replace(own, num_layers=lean.num_layers + 1)
    taps = head_taps(values, lean.num_layers)
    dtype, device = target.place
    reader = open_tensors(checkpoint, dtype, device)
    weights = open_weights(reader, None, None, device)
    last = f"model.layers.{lean.num_layers}."
    expected = {n.replace(last, LAYER) for n in tensor_names(whole) if n.startswith(last)}
    expected |= {f"{LAYER}hidden_norm.weight", "fc.weight", "norm.weight", f"{HEAD}.weight"}
    if missing := sorted(expected - weights.names):
        raise _refused(f"tensors missing: {missing[:3]}")
    cut = weights if share is None else open_weights(reader, None, None, device, share=share)
    layer = read_layer(whole, target, cut, LAYER)
    norm = layer.between.norm_weight
    targets = None
    if "d2t" in weights.names:
        targets = reader.read_as_stored("d2t").long()
        targets += targets.new_tensor(range(len(targets)))
        if int(targets.min()) < 0 or int(targets.max()) >= lean.vocab_size:
            raise _refused("d2t names tokens that the model does not have")
    head = Eagle3Head(
        target=target,
        own=layer,
        config=own,
        layers=layers,
        taps=taps,
        embedding=weights.tensor("embed_tokens.weight")
        if "embed_tokens.weight" in weights.names
        else None,
        join=weights.read(["fc"], False),
        state_norm=norm(weights.tensor(f"{LAYER}hidden_norm.weight")),
        norm_before_residual=bool(values.get("norm_before_residual", False)),
        final_norm=norm(weights.tensor("norm.weight")),
        head=weights.read([HEAD], False),
        targets=targets,
    )
    return head, weights.num_bytes + (0 if cut is weights else cut.num_bytes)


def head_config(values: dict[str, Any], target: DecoderConfig) -> DecoderConfig:
    """Return the config of the head's one layer, of a config.json. Raises ModelRefused."""
    named = (values.get("architectures") or [""])[0]
    if named not in ARCHITECTURES or values.get("num_hidden_layers", 1) != 1:
        raise _refused(f"{named or 'it'} is no EAGLE-3 head of one layer")
    plain = {key: value for key, value in values.items() if key not in _OWN}
    try:
        own = decoder_config(
            {"model_type": "llama", "tie_word_embeddings": False, **plain, "num_hidden_layers": 1}
        )
    except NotLean as reason:
        raise _refused(str(reason)) from reason
    width = values.get("target_hidden_size") or own.hidden_size
    for what, ours, theirs in (
        ("hidden states of width", width, target.hidden_size),
        ("a vocabulary of", own.vocab_size, target.vocab_size),
    ):
        if ours != theirs:
            raise _refused(f"it is made for {what} {ours}, the model has {theirs}")
    return replace(own, windows=(0,))


def head_taps(values: dict[str, Any], num_layers: int) -> tuple[int, ...]:
    """Return the layers of the target whose inputs the head takes. Raises ModelRefused."""
    given = values.get(_TAPS) or (values.get("eagle_config") or {}).get(_TAPS)
    taps = tuple(given or (2, num_layers // 2, num_layers - 3))
    if not all(isinstance(tap, int) and 0 <= tap < num_layers for tap in taps):
        raise _refused(f"{_TAPS} {taps}: the model has the layers 0 to {num_layers - 1}")
    return taps


def _refused(reason: str) -> ModelRefused:
    return ModelRefused(f"speculative_model: {reason}", field="speculative_model")
