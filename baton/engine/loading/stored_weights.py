"""How a checkpoint stores its weights, and what of them stays narrow in memory, by its config.json.

Not here: how many parameters a model has (model_shape.py).
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from typing import Any

from baton.engine.checkpoint.kinds import (
    FLOAT8_GROUP,
    GGUF_KEPT_BYTES,
    MXFP4_KEPT_BYTES,
    WIDENED_BITS,
    rounded_inputs,
    unstated_dtype,
    widened_kind,
)
from baton.protocol.errors import ModelRefused


@dataclass(frozen=True, slots=True)
class StoredWeights:
    """How the matrices of a model's layers are held."""

    method: str
    bits: int
    group_size: int = 0  # weights that share a scale; 0 = a whole row or more
    widened: bool = False  # weights are widened while they are read, and kept in the model's dtype
    zeros: bool = True  # each group has a zero beside its scale
    mean_bytes: float | None = None  # mean bytes of a weight, if matrices differ in format
    integers: StoredWeights | None = None  # the integers that are kept unless widening is asked for
    head: StoredWeights | None = None  # the integers that are kept of the head
    only_experts: bool = False  # matrices other than routed experts are kept in the model's dtype
    act_order: bool = False  # groups are no runs of inputs
    if_multiplied: bool = False  # `integers` are floats, which only some GPUs multiply

    @property
    def bytes_per_group(self) -> int:
        """Of a scale, and of a zero, which are float32."""
        return 8 if self.zeros else 4

    @property
    def bytes_per_weight(self) -> float:
        """Mean bytes of a weight in memory, with its share of the group's scale and zero."""
        if self.mean_bytes is not None:
            return self.mean_bytes
        if not self.group_size:
            return self.bits / 8
        return self.bits / 8 + self.bytes_per_group / self.group_size


def stored_dtype(c: dict[str, Any]) -> str:
    """Return the checkpoint's own dtype (`unstated_dtype` if its config states none)."""
    stated = c.get("dtype") or c.get("torch_dtype") or unstated_dtype(c)
    return str(stated).removeprefix("torch.")


def stored_weights(c: dict[str, Any]) -> StoredWeights | None:
    """Return how a checkpoint stores weights, by its quantization_config; None if it has none.
    Raises ModelRefused if that does not state the bits."""
    given = c.get("quantization_config")
    if not given:
        return None
    method = str(given.get("quant_method", "unknown"))
    with contextlib.suppress(ModelRefused):  # the route refuses it later; its size is still counted
        kind = widened_kind(given)
        if kind is not None:
            types = ", ".join(given.get("types") or ())
            named = f"{kind} ({types})" if types else kind
            if kind == "fp8":
                return _float8(given)
            kept, head = _kept_integers(c, given)
            return StoredWeights(named, WIDENED_BITS[kind], widened=True, integers=kept, head=head)
    if method == "bitsandbytes":
        return StoredWeights(method, 4 if given.get("load_in_4bit") else 8)
    groups = given.get("config_groups") or {}
    weights = next((g.get("weights") or {} for g in groups.values()), given)
    bits = weights.get("num_bits") or weights.get("bits") or weights.get("w_bit")
    if not isinstance(bits, int):
        raise ModelRefused(
            f"the quantization of method {method} does not say its bits", field="model"
        )
    group_size = weights.get("group_size") or weights.get("q_group_size") or 0
    symmetric = weights.get("sym", weights.get("symmetric", not weights.get("zero_point", True)))
    return StoredWeights(
        method, bits, max(0, group_size), zeros=not symmetric,
        act_order=bool(weights.get("desc_act")) or weights.get("actorder") == "group",
    )  # fmt: skip


def _float8(given: dict[str, Any]) -> StoredWeights:
    """Return how a checkpoint of 8-bit floats is stored, with the form in which a GPU that
    multiplies them keeps them, if products can."""
    groups = (given.get("config_groups") or {}).values()
    structures = [(group.get("weights") or {}).get("block_structure") for group in groups]
    in_blocks = any([given.get("weight_block_size"), *structures])
    kept = StoredWeights("fp8", 8, FLOAT8_GROUP if in_blocks else 0, zeros=False)
    return StoredWeights(
        "fp8", 8, widened=True, integers=kept if rounded_inputs(given) else None, if_multiplied=True
    )


def _kept_integers(
    c: dict[str, Any], given: dict[str, Any]
) -> tuple[StoredWeights | None, StoredWeights | None]:
    """Return what is kept narrow of the matrices (of a GGUF file's, of gpt-oss's experts), and of
    the head; None for matrices or a head that are kept in the model's dtype."""
    if c.get("model_type") == "gpt_oss" and given["quant_method"] == "mxfp4":
        named = "mxfp4 (experts)"
        return StoredWeights(named, 4, mean_bytes=MXFP4_KEPT_BYTES, only_experts=True), None
    counts: dict[str, int] = dict(given.get("types") or {})
    head: str | None = given.get("head")
    if head is None:
        return None, None
    for kind in (head,) if c.get("tie_word_embeddings") else (head, given["embedding"]):
        counts[kind] -= c["vocab_size"] * c["hidden_size"]
    counts.pop("F32", None)  # norms
    dtype_bytes = 4 if stored_dtype(c) == "float32" else 2
    kept = sum(count * GGUF_KEPT_BYTES.get(kind, dtype_bytes) for kind, count in counts.items())
    matrices, of_head = None, None
    if any(count and kind in GGUF_KEPT_BYTES for kind, count in counts.items()):
        matrices = StoredWeights("integers", 8, mean_bytes=kept / sum(counts.values()))
    if head in GGUF_KEPT_BYTES:
        of_head = StoredWeights("integers", 8, mean_bytes=GGUF_KEPT_BYTES[head])
    return matrices, of_head
