"""ExpertExchange: sends rows of a sparse layer to the ranks that hold their experts, and brings
the answers back.

    rank 0   t0 t1 t2          chosen experts 0..3 lie on rank 0, 4..7 on rank 1
      rows and choices   t0 t2 -> rank 0    t1 t2 -> rank 1      (one all-to-all)
      each rank computes its experts' answers, weighted and summed in the row's order of choices
      answers            rank 0, rank 1 -> summed in rank order  (one all-to-all)

So a row's result depends on its own choices alone, not on other rows. Over loopback a collective
costs more than a few rows do. So if every rank has few rows, or a token chooses at least twice as
many experts as there are ranks, each rank sends all its rows to all ranks, and all ranks know how
many rows arrive. Otherwise one more all-to-all tells them first. Both ways give the same numbers: a
rank that holds none of a row's experts answers zeros.

Source: GShard (arXiv 2006.16668, section 3.2), DeepSpeed-MoE (arXiv 2201.05596).
"""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor

from baton.engine.models.experts import Mix
from baton.engine.parallel.group import RankGroup
from baton.engine.parallel.lockstep import Lockstep
from baton.engine.state.place import RankPlace
from baton.protocol.errors import ModelRefused

FIELD: Final = "data_parallel_size"
FEW_ROWS: Final = 32  # up to so many rows on every rank are sent to all ranks


def held_experts(count: int, place: RankPlace) -> range:
    """Return which of `count` experts the rank at `place` holds. Raises ModelRefused if the ranks
    cannot share them evenly."""
    if count % place.size:
        raise ModelRefused(f"{count} experts cannot be split over {place.size} ranks", field=FIELD)
    return place.share(count)


class ExpertExchange:
    """Implements models.experts.ExpertDispatch. The group's ranks share `num_experts` evenly."""

    def __init__(self, group: RankGroup, lockstep: Lockstep, num_experts: int) -> None:
        self._group = group
        self._lockstep = lockstep
        self._share = num_experts // group.place.size

    def __call__(self, hidden: Tensor, weights: Tensor, chosen: Tensor, own: Mix) -> Tensor:
        """See ExpertDispatch. Raises InternalError."""
        size, count = self._group.place.size, len(hidden)
        message = torch.cat([_bytes(hidden), _bytes(weights), _bytes(chosen.to(torch.int32))], 1)
        if max(self._lockstep.rows) <= FEW_ROWS or 2 * size <= chosen.shape[1]:
            sends, receives = [count] * size, list(self._lockstep.rows)
            targets = torch.arange(size, device=hidden.device).repeat_interleave(count)
            rows = torch.arange(count, device=hidden.device).repeat(size)
        else:
            holders = chosen // self._share
            wanted = holders.new_zeros(size, count, dtype=torch.bool)
            wanted[holders.T, torch.arange(count, device=hidden.device)] = True
            targets, rows = wanted.nonzero(as_tuple=True)
            sends = wanted.sum(1).tolist()
            receives = self._group.all_to_all(torch.tensor(sends), [1] * size, [1] * size).tolist()
        arrived = self._group.all_to_all(message[rows], sends, receives)
        width, of = _width(hidden), _width(weights)
        theirs, their_weights, their_choices = arrived.tensor_split([width, width + of], 1)
        mixed = own(
            _values(theirs, hidden.dtype),
            _values(their_weights, weights.dtype),
            _values(their_choices, torch.int32).to(chosen.dtype),
        )
        answers = hidden.new_zeros(size, *hidden.shape)
        back = self._group.all_to_all(_bytes(mixed), receives, sends)
        answers[targets, rows] = _values(back, hidden.dtype)
        return answers.sum(0)


def _width(rows: Tensor) -> int:
    """Return the bytes of one row of `rows` [n, width]."""
    return rows.shape[1] * rows.itemsize


def _bytes(rows: Tensor) -> Tensor:
    """View rows [n, width] of any dtype as [n, bytes] uint8."""
    return rows.contiguous().view(torch.uint8).view(len(rows), _width(rows))


def _values(rows: Tensor, dtype: torch.dtype) -> Tensor:
    """View rows [n, bytes] uint8 as [n, width] of `dtype`."""
    return rows.contiguous().view(dtype)
