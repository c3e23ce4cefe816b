"""What a client is told about tokens: log probabilities, ranks and the best alternatives.

Log probabilities are the log-softmax of the model's raw logits, before bias, penalties and
temperature (vLLM's default, raw_logprobs). Rank 1 is the highest logit; of equal logits, the lower
token id has the better rank. A greedy choice takes the token of rank 1.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import torch
from torch import Tensor

from baton.engine.sampling.sampler import require_numbers, top
from baton.protocol.events import TokenLogprob

SLAB_ELEMENTS: Final = 1 << 22  # logits whose log-softmax exists at once: 16 MiB


def report(
    logits: Tensor, tokens: Sequence[int], counts: Sequence[int]
) -> list[tuple[TokenLogprob, ...]]:
    """Return, per row of logits [N, vocab] float32, the row's token, then its best alternatives.

    The entry of row i begins with tokens[i]. The counts[i] best tokens follow (-1 = all), best
    first; tokens[i] is not repeated among them, because its rank says where it belongs.
    """
    vocab_size = logits.shape[1]
    counts = [vocab_size if count < 0 else min(count, vocab_size) for count in counts]
    rows_at_once = max(1, SLAB_ELEMENTS // vocab_size)
    reported: list[tuple[TokenLogprob, ...]] = []
    for at in range(0, len(tokens), rows_at_once):
        rows = slice(at, at + rows_at_once)
        reported.extend(_report(logits[rows], tokens[rows], counts[rows]))
    return reported


def report_ids(logits: Tensor, token: int, ids: Sequence[int]) -> tuple[TokenLogprob, ...]:
    """Return log probabilities of one row of logits [vocab] float32.

    The first entry is about `token`; then come the tokens of `ids`, best first.
    """
    wanted = [token, *(other for other in dict.fromkeys(ids) if other != token)]
    chosen = torch.tensor(wanted, device=logits.device)
    values = logits.log_softmax(-1)[chosen].tolist()
    ranks = _ranks(logits.expand(len(wanted), -1), chosen[:, None])
    own, *others = map(TokenLogprob, wanted, values, ranks)
    return (own, *sorted(others, key=lambda other: other.rank))


def candidates(scores: Tensor, counts: Sequence[int]) -> list[tuple[TokenLogprob, ...]]:
    """Return the counts[i] highest scores of each row of [N, vocab] float32, best first.

    Beam search uses it: the scores are log probabilities that penalties.py has changed. Tokens with
    score -inf are forbidden and left out, so a row may have fewer entries. Raises InternalError if
    a row holds NaN or +inf.
    """
    require_numbers(scores)
    reported: list[tuple[TokenLogprob, ...]] = []
    rows_at_once = max(1, SLAB_ELEMENTS // scores.shape[1])
    for at in range(0, len(counts), rows_at_once):
        slab, wanted = scores[at : at + rows_at_once], counts[at : at + rows_at_once]
        ids = top_exact(slab, max(wanted))
        values = slab.gather(1, ids)
        for count, row_ids, row_values in zip(wanted, ids.tolist(), values.tolist(), strict=True):
            ranked = enumerate(zip(row_ids[:count], row_values, strict=False), start=1)
            reported.append(
                tuple(
                    TokenLogprob(token, value, rank)
                    for rank, (token, value) in ranked
                    if value > -torch.inf
                )
            )
    return reported


def top_exact(logits: Tensor, count: int) -> Tensor:
    """Return the ids [N, min(count, vocab)] of each row's highest logits, highest first.

    Of equal logits the lower id comes first, and the lower id is taken when only some of them fit.
    """
    vocab_size = logits.shape[1]
    if count >= vocab_size:
        return top(logits, vocab_size)[1]
    values, ids = top(logits, count + 1)  # one more than asked: shows a tie at the cut
    tied = (values[:, count] == values[:, count - 1]).nonzero().squeeze(1)
    ids = ids[:, :count]
    if tied.numel():
        order = logits[tied].sort(dim=-1, descending=True, stable=True).indices
        ids[tied] = order[:, :count]
    return ids


def _report(
    logits: Tensor, tokens: Sequence[int], counts: Sequence[int]
) -> list[tuple[TokenLogprob, ...]]:
    chosen = torch.tensor(tokens, device=logits.device)[:, None]
    logprobs = logits.log_softmax(-1)
    own = logprobs.gather(1, chosen).squeeze(1).tolist()
    width = max(counts)
    if width == 0:
        ranks = _ranks(logits, chosen)
        rows = zip(tokens, own, ranks, strict=True)
        return [(TokenLogprob(token, value, rank),) for token, value, rank in rows]
    ids = top_exact(logits, width)
    values = logprobs.gather(1, ids).tolist()
    # Most chosen tokens are among the best. Only the ranks of the others need the whole row.
    found, places = (ids == chosen).max(-1)
    ranks = (places + 1).tolist()
    beyond = (~found).nonzero().squeeze(1)
    for row, rank in zip(beyond.tolist(), _ranks(logits[beyond], chosen[beyond]), strict=True):
        ranks[row] = rank
    reported: list[tuple[TokenLogprob, ...]] = []
    for row, row_ids in enumerate(ids.tolist()):
        others = [
            TokenLogprob(token, values[row][place], place + 1)
            for place, token in enumerate(row_ids[: counts[row]])
            if token != tokens[row]
        ]
        reported.append((TokenLogprob(tokens[row], own[row], ranks[row]), *others))
    return reported


def _ranks(logits: Tensor, chosen: Tensor) -> list[int]:
    """Return the rank of chosen [N, 1] in each row: 1 + the number of tokens that come before
    it.
    """
    value = logits.gather(1, chosen)
    lower_id = torch.arange(logits.shape[1], device=logits.device) < chosen
    before = (logits > value) | ((logits == value) & lower_id)
    # The sum is over int8, because torch's sum of bools took four times as long.
    return (before.view(torch.int8).sum(-1, dtype=torch.int32) + 1).tolist()
