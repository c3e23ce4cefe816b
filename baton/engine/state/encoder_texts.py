"""What an encoder is asked: texts as token ids, which vector of each, and how many at once."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class EncoderText:
    """The tokens of a text, or of a pair. Those from `second_from` on are of the second text; None
    = there is no second one, or the model is not told."""

    ids: Sequence[int]
    second_from: int | None = None


@dataclass(frozen=True, slots=True)
class VectorAsk:
    """Which vector is wanted of a text. `kind`: "own" is the checkpoint's modules, "last" and
    "mean" are a pooling in their place, "classify" the logits of its classes. `normalize`: scale to
    length 1 at the end. `dimensions`: how many leading ones to keep, 0 = all."""

    kind: str = "own"
    normalize: bool = False
    dimensions: int = 0


def batch_sizes(
    lengths: Sequence[int], max_num_batched_tokens: int, max_num_seqs: int
) -> Iterator[int]:
    """Yield how many of the next texts make each batch: neighbours, of at most so many tokens and
    texts. A longer text is a batch of its own."""
    count = tokens = 0
    for length in lengths:
        if count and (tokens + length > max_num_batched_tokens or count == max_num_seqs):
            yield count
            count = tokens = 0
        count += 1
        tokens += length
    if count:
        yield count
