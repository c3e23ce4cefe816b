"""transformers' encoders over texts without padding: packed end to end, or grouped by length.

packed    All texts of a batch are one row of T tokens. What looks at single tokens (norms, MLPs,
          projections) sees T rows. Attention is registered in transformers' AttentionInterface
          under a name of its own, and attends within each text; embeddings run text by text, so
          positions begin anew. Position ids go to models that rotate by them.
grouped   For families whose attention does not go through the AttentionInterface, or that look at
          neighbouring tokens elsewhere (convolutions): texts of equal length are one batch of the
          model's own code.
Either way no token meets one of another text: tests/engine/test_encoders.py compares with each text
alone, and load_encoder() does so for each model.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, groupby, pairwise
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import AttentionInterface
from transformers.modeling_outputs import BaseModelOutputWithPooling

from baton.engine.state.encoder_texts import EncoderText
from baton.protocol.errors import ModelRefused

IMPLEMENTATION: Final = "baton_packed"
# Families that are packed; the others of sentence_files.FAMILIES are grouped.
PACKED: Final = frozenset(
    {
        "bert", "camembert", "data2vec-text", "distilbert", "electra", "ernie",
        "eurobert", "gte", "modernbert", "nomic_bert", "roberta", "roberta-prelayernorm",
        "xlm-roberta", "xlm-roberta-xl",
    }
)  # fmt: skip
# Keywords that models hand to attention and that change nothing once dropout and caches are off.
_HARMLESS: Final = frozenset(
    {
        "dropout", "position_ids", "use_cache", "output_attentions", "output_hidden_states",
        "return_dict", "deterministic", "position_embeddings", "cache_position", "is_causal",
    }
)  # fmt: skip


class EncoderForward:
    """A model of transformers over batches of texts. Not thread-safe."""

    def __init__(self, model: Any, *, packs: bool, tells_texts: bool) -> None:
        """`model`: in eval mode, on its device; changed if `packs`. `tells_texts`: it takes token
        types."""
        self._model = model
        self._base = model.base_model
        self._packs = packs
        self._tells_texts = tells_texts
        self._embeddings: _TextByText | None = None
        if packs:
            model.set_attn_implementation(IMPLEMENTATION)
            if hasattr(self._base, "embeddings"):
                self._embeddings = _TextByText(self._base.embeddings)
                self._base.embeddings = self._embeddings
        self._head = _head_of(model) if packs and self._base is not model else None

    @torch.inference_mode()
    def hidden(self, texts: Sequence[EncoderText]) -> list[Tensor]:
        """Return the last hidden states of each text, [its tokens, H], in the model's dtype."""
        if self._packs:
            return [rows[0] for rows in self._packed(texts)]
        found: list[Tensor | None] = [None] * len(texts)
        for places, batch in self._grouped(texts):
            for place, rows in zip(places, self._base(**batch).last_hidden_state, strict=True):
                found[place] = rows
        return [rows for rows in found if rows is not None]

    @torch.inference_mode()
    def logits(self, texts: Sequence[EncoderText]) -> Tensor:
        """Return the logits of each text's classes, [texts, classes] float32."""
        found: list[Tensor | None] = [None] * len(texts)
        if self._packs:
            assert self._head is not None, "a model of classes has a head"
            for place, rows in enumerate(self._packed(texts)):
                ones = torch.ones(rows.shape[:2], dtype=torch.int64, device=rows.device)
                found[place] = self._head(inputs_embeds=rows, attention_mask=ones).logits[0]
        else:
            for places, batch in self._grouped(texts):
                for place, row in zip(places, self._model(**batch).logits, strict=True):
                    found[place] = row
        return torch.stack([row for row in found if row is not None]).float()

    def _packed(self, texts: Sequence[EncoderText]) -> list[Tensor]:
        """Return the hidden states of each text, [1, its tokens, H]."""
        order = sorted(range(len(texts)), key=lambda place: len(texts[place].ids))
        placed = [texts[place] for place in order]
        lengths = [len(text.ids) for text in placed]
        device = self._model.device
        ids = [token for text in placed for token in text.ids]
        positions = [place for length in lengths for place in range(length)]
        options: dict[str, Any] = {"position_ids": torch.tensor([positions], device=device)}
        if self._tells_texts:
            kinds = [kind for text in placed for kind in _types(text)]
            options["token_type_ids"] = torch.tensor([kinds], device=device)
        if self._embeddings is not None:
            self._embeddings.lengths = lengths
        made = self._base(
            input_ids=torch.tensor([ids], device=device),
            baton_texts=_Texts.of(lengths),
            **options,
        )
        rows = made.last_hidden_state.split(lengths, dim=1)
        found = dict(zip(order, rows, strict=True))
        return [found[place] for place in range(len(texts))]

    def _grouped(
        self, texts: Sequence[EncoderText]
    ) -> Iterator[tuple[list[int], dict[str, Tensor]]]:
        """Yield batches of texts of equal length: their places, and the model's arguments."""

        def length(place: int) -> int:
            return len(texts[place].ids)

        device = self._model.device
        for _, group in groupby(sorted(range(len(texts)), key=length), length):
            places = list(group)
            ids = [list(texts[place].ids) for place in places]
            batch = {"input_ids": torch.tensor(ids, device=device)}
            if self._tells_texts:
                kinds = [_types(texts[place]) for place in places]
                batch["token_type_ids"] = torch.tensor(kinds, device=device)
            yield places, batch


@dataclass(frozen=True, slots=True)
class _Texts:
    """Where texts lie in a packed row: runs of `count` texts of `length` tokens, from `start`."""

    runs: tuple[tuple[int, int, int], ...]

    @classmethod
    def of(cls, lengths: Sequence[int]) -> _Texts:
        """Return where texts of these `lengths` (tokens, sorted) lie, one behind the other."""
        sizes = [(length, len(list(group))) for length, group in groupby(lengths)]
        ends = accumulate((length * count for length, count in sizes), initial=0)
        return cls(
            tuple(
                (start, length, count)
                for (start, _), (length, count) in zip(pairwise(ends), sizes, strict=True)
            )
        )


def _packed_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None = None,
    **options: Any,
) -> tuple[Tensor, None]:
    """Attend within each text, as transformers calls it: query [1, heads, T, dim] -> [1, T, heads,
    dim]. Raises ModelRefused for a module that asks for more than that."""
    name = type(module).__name__
    texts: _Texts | None = options.pop("baton_texts", None)
    if texts is None:
        raise ModelRefused(f"{name} does not receive the keywords of the forward call")
    if attention_mask is not None:
        raise ModelRefused(f"{name} builds its own attention mask")
    if getattr(module, "is_causal", False) or options.get("is_causal"):
        raise ModelRefused(f"{name} is causal")
    scale, window = options.pop("scaling", None), options.pop("sliding_window", None)
    unknown = sorted(o for o, v in options.items() if v is not None and o not in _HARMLESS)
    if unknown:
        raise ModelRefused(f"{name} passes {', '.join(unknown)} to attention")
    parts: list[Tensor] = []
    for start, length, count in texts.runs:
        q, k, v = (
            # [1, heads, count * length, dim] -> [count, heads, length, dim]
            x[0, :, start : start + length * count].unflatten(1, (count, length)).transpose(0, 1)
            for x in (query, key, value)
        )
        attended = functional.scaled_dot_product_attention(
            q, k, v,
            attn_mask=_window_mask(length, window, query.device),
            scale=scale,
            enable_gqa=q.shape[1] != k.shape[1],
        )  # fmt: skip
        parts.append(attended.transpose(1, 2).flatten(0, 1))
    return torch.cat(parts)[None], None


def _window_mask(length: int, window: int | None, device: torch.device) -> Tensor | None:
    """Return which tokens see each other, [length, length]: those nearer than `window`, in both
    directions; None = all."""
    if window is None or length <= window:
        return None
    places = torch.arange(length, device=device)
    return (places[:, None] - places[None, :]).abs() < window


AttentionInterface.register(IMPLEMENTATION, _packed_attention)


class _TextByText(nn.Module):
    """Runs a model's embeddings for each text of a packed row alone, so that positions begin anew
    as the model counts them."""

    def __init__(self, embeddings: nn.Module) -> None:
        super().__init__()
        self.embeddings = embeddings
        self.lengths: Sequence[int] = ()

    def forward(
        self, input_ids: Tensor, *_: Any, token_type_ids: Tensor | None = None, **__: Any
    ) -> Tensor:
        """input_ids [1, T] -> [1, T, H]."""
        lengths = list(self.lengths)
        ids = input_ids.split(lengths, dim=1)
        if token_type_ids is None:
            return torch.cat([self.embeddings(input_ids=part) for part in ids], dim=1)
        kinds = token_type_ids.split(lengths, dim=1)
        parts = [
            self.embeddings(input_ids=part, token_type_ids=kind)
            for part, kind in zip(ids, kinds, strict=True)
        ]
        return torch.cat(parts, dim=1)


class _GivenStates(nn.Module):
    """Stands in for the encoder in the model that computes logits: returns the hidden states that
    it is given as embeddings, and what the encoder's pooler makes of them."""

    def __init__(self, pooler: nn.Module | None) -> None:
        super().__init__()
        self._pooler = pooler

    def forward(self, *_: Any, inputs_embeds: Tensor, **__: Any) -> BaseModelOutputWithPooling:
        pooled = None if self._pooler is None else self._pooler(inputs_embeds)
        return BaseModelOutputWithPooling(last_hidden_state=inputs_embeds, pooler_output=pooled)  # pyright: ignore[reportArgumentType]


def _head_of(model: Any) -> Any:
    """Return `model` with _GivenStates in place of its encoder. Weights are shared."""
    head = copy.copy(model)
    modules = dict(model._modules)
    modules[model.base_model_prefix] = _GivenStates(getattr(model.base_model, "pooler", None))
    head.__dict__["_modules"] = modules
    return head


def _types(text: EncoderText) -> list[int]:
    second = len(text.ids) if text.second_from is None else text.second_from
    return [0] * second + [1] * (len(text.ids) - second)
