"""Changes logits, row by row, before a token is chosen. The order is that of vLLM:

    1. bad words         -inf for a token that would complete a bad word in the output
    2. min_tokens        -inf for end-of-sequence and stop tokens while the output is shorter
    3. logit_bias        is added
    4. repetition        divides positive logits of tokens in prompt or output, multiplies others
    5. frequency         subtracts the penalty times the token's occurrences in the output
    6. presence          subtracts the penalty if the token is in the output
    (then temperature, min-p, top-k, top-p and the noise: sampler.py)

Source: the steps in vLLM's v1 Sampler docs. Reported log probabilities are those of the logits
before these steps (logprobs.py). Only cells that a request asks to change are touched. A row
without such a request costs nothing; a long text costs as much as its number of distinct tokens
(occurrences.py).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from baton.engine.sampling.sampler import Draw
from baton.engine.state.occurrences import Occurrences


@dataclass(frozen=True, slots=True)
class Cells:
    """Some cells of the logits, each listed once, and the values that they held before a change.

    `rows`, `tokens` and `values` are all [n]: cell i is logits[rows[i], tokens[i]].
    """

    rows: Tensor
    tokens: Tensor
    values: Tensor


def apply(logits: Tensor, draws: Sequence[Draw], eos_token_ids: Sequence[int]) -> None:
    """Change, in place, the cells of logits [N, vocab] float32 that the draws ask to change.

    A row whose maximum would not be finite afterwards (everything forbidden, an infinite bias)
    keeps its logits, because the demands of one request must not fail the others of its batch.
    """
    altered = {row: draw for row, draw in enumerate(draws) if draw.altered}
    if not altered:
        return
    changed = [
        _forbid(logits, altered, eos_token_ids),
        _bias(logits, altered),
        _penalise(logits, altered),
    ]
    lost = ~torch.isfinite(logits.amax(-1))
    if not bool(lost.any()):
        return
    for cells in reversed(changed):  # last changes first: each cell ends with its original value
        back = lost[cells.rows]
        logits[cells.rows[back], cells.tokens[back]] = cells.values[back]


def forbidden(draw: Draw, eos_token_ids: Sequence[int]) -> set[int]:
    """Return the tokens that bad words and min_tokens forbid at this draw."""
    params = draw.params
    out: set[int] = set()
    num_outputs = len(draw.history) + len(draw.ahead) - draw.num_prompt
    for word in params.bad_words:
        before = len(word) - 1
        if before < 0 or before > num_outputs:
            continue
        tail = (*draw.history[max(0, len(draw.history) - before) :], *draw.ahead)
        if tail[len(tail) - before :] == word[:before]:
            out.add(word[before])
    if draw.position < params.min_tokens:
        out.update(eos_token_ids, params.stop_token_ids)
    return out


def _forbid(logits: Tensor, draws: Mapping[int, Draw], eos_token_ids: Sequence[int]) -> Cells:
    places = [
        (row, token)
        for row, draw in draws.items()
        for token in _in_vocab(forbidden(draw, eos_token_ids), logits)
    ]
    cells = _cells(logits, places)
    logits[cells.rows, cells.tokens] = -torch.inf
    return cells


def _bias(logits: Tensor, draws: Mapping[int, Draw]) -> Cells:
    places: list[tuple[int, int]] = []
    biases: list[float] = []
    for row, draw in draws.items():
        by_token = dict(draw.params.logit_bias)  # of several entries of a token the last counts
        for token in _in_vocab(by_token, logits):
            places.append((row, token))
            biases.append(by_token[token])
    cells = _cells(logits, places)
    bias = torch.tensor(biases, dtype=torch.float32, device=logits.device)
    logits[cells.rows, cells.tokens] = cells.values + bias
    return cells


def _penalise(logits: Tensor, draws: Mapping[int, Draw]) -> Cells:
    """Apply repetition, frequency and presence penalties, in this order, to tokens that
    occurred.
    """
    places: list[np.ndarray] = [np.empty((3, 0), np.int64)]  # row, token, occurrences in the output
    weights: list[np.ndarray] = [np.empty((3, 0), np.float32)]  # repetition, frequency, presence
    for row, draw in draws.items():
        if not draw.params.penalised:
            continue
        params = draw.params
        ids, counts = _occurrences(draw)
        places.append(np.stack([np.full_like(ids, row), ids, counts]))
        weight = (params.repetition_penalty, params.frequency_penalty, params.presence_penalty)
        weights.append(np.repeat(np.array(weight, dtype=np.float32)[:, None], len(ids), axis=1))
    rows, tokens, occurred = torch.from_numpy(np.concatenate(places, axis=1)).to(logits.device)
    repetition, frequency, presence = torch.from_numpy(np.concatenate(weights, axis=1)).to(
        logits.device
    )
    cells = Cells(rows, tokens, logits[rows, tokens])
    values = cells.values
    values = torch.where(values > 0, values / repetition, values * repetition)
    values = values - frequency * occurred
    logits[rows, tokens] = values - presence * (occurred > 0)
    return cells


def _occurrences(draw: Draw) -> tuple[np.ndarray, np.ndarray]:
    """Return the distinct tokens that a draw's penalties concern, and their counts in the output.

    Both arrays are int64. Tokens of the prompt are included only if the draw has a repetition
    penalty.
    """
    counted = Occurrences() if draw.occurrences is None else draw.occurrences
    whole = draw.params.repetition_penalty != 1.0
    return counted.count(draw.history, draw.num_prompt, whole, draw.ahead)


def _cells(logits: Tensor, places: Sequence[tuple[int, int]]) -> Cells:
    places_2d = torch.tensor(places, dtype=torch.int64, device=logits.device).view(-1, 2)
    rows, tokens = places_2d.unbind(1)
    return Cells(rows, tokens, logits[rows, tokens])


def _in_vocab(tokens: Iterable[int], logits: Tensor) -> list[int]:
    return [token for token in tokens if 0 <= token < logits.shape[1]]
