"""The sampler: one token per row, a pure function of (logits, params, seed, sample, position).

Not here: changes of logits before a token is chosen (penalties.py), reports about the chosen token
(logprobs.py), the choice of the rows to sample (runner.py).

There is no RNG state. The noise of a token is a hash of (seed, sample, position, vocabulary id),
and the token with the highest logit / temperature + Gumbel noise wins. This is exactly a draw from
the softmax. Rows share tensors, but a row's token never depends on the other rows of its batch.

    greedy rows     take the highest logit; on ties, the lowest id
    whole rows      have no filter: approximate noise for all tokens, exact noise for the finalists
                    (on a CPU one compiled pass, if the library is there: kernels/cpu/sampling.h)
    filtered rows   temperature, then min-p, top-k, top-p; noise for the surviving tokens only
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final, TypeAlias

import torch
from torch import Tensor

from baton.engine.kernels.cpu.library import kernels
from baton.engine.kernels.cpu.sampling import SamplingKernels
from baton.engine.kernels.gpu.support import triton_serves
from baton.engine.kernels.noise import BITS, FINALIST_MARGIN, GOLDEN, MULTIPLIERS
from baton.engine.state.occurrences import Occurrences
from baton.protocol.errors import InternalError
from baton.protocol.sampling import SamplingParams

# Lower temperatures choose the maximum (vLLM's _SAMPLING_EPS): division would overflow float32.
GREEDY_TEMPERATURE: Final = 1e-5
# A filtered row looks at its 128 top logits, then at 2048, before it sorts the whole vocabulary.
CANDIDATES: Final = (128, 2048)
SLAB_ELEMENTS: Final = 1 << 18  # logits handled at once: 2 MiB of hashes fit in the caches

_MASK: Final = (1 << 64) - 1

Chosen: TypeAlias = dict[int, int]  # row -> token


@dataclass(frozen=True, slots=True)
class Draw:
    """Which token of which sample is drawn, and how.

    `position` is the index of the token in the output. `history` holds the known tokens, prompt
    first (`num_prompt` of them). `ahead` holds the drafts between `history` and this draw. Only a
    draw with `params.remembers` needs `history` and `ahead`. `occurrences` has the counts of
    `history` from earlier steps, None if the sequence keeps none.
    """

    params: SamplingParams
    sample_index: int
    position: int
    history: Sequence[int] = ()
    num_prompt: int = 0
    ahead: Sequence[int] = ()
    occurrences: Occurrences | None = None

    @property
    def greedy(self) -> bool:
        """Whether the highest logit is taken, without noise."""
        return self.params.temperature < GREEDY_TEMPERATURE

    def filtered(self, vocab_size: int) -> bool:
        """Whether top-k, top-p or min-p rules out some of the vocabulary."""
        p = self.params
        return 0 < p.top_k < vocab_size or p.top_p < 1.0 or p.min_p > 0.0

    @property
    def altered(self) -> bool:
        """Whether penalties.py changes the logits before a token is chosen."""
        p = self.params
        return p.remembers or bool(p.logit_bias) or self.position < p.min_tokens

    @property
    def key(self) -> int:
        """Return the 64-bit start of this draw's noise stream."""
        seed = self.params.seed
        assert seed is not None, "the front door draws the seed"
        mixed = _mix_int(seed)
        for part in (self.sample_index, self.position):
            mixed = _mix_int((mixed ^ part) + GOLDEN)
        return mixed


Choose: TypeAlias = Callable[[Tensor, Sequence[Draw]], list[int]]  # rows' logits -> tokens


def sample(logits: Tensor, draws: Sequence[Draw]) -> list[int]:
    """Choose N token ids from logits [N, vocab] float32, with one draw per row.

    Raises InternalError if a row holds NaN or +inf, or nothing but -inf.
    """
    return _sample(logits, draws, _kernels(logits))


def sample_plainly(logits: Tensor, draws: Sequence[Draw]) -> list[int]:
    """Choose the same tokens as `sample` by torch alone: the twin of the compiled kernels."""
    return _sample(logits, draws, None)


def prepare(device: torch.device) -> None:
    """Compile the kernels that sampling on `device` uses, unless they are compiled already."""
    if device.type == "cpu":
        kernels()


def _sample(logits: Tensor, draws: Sequence[Draw], compiled: SamplingKernels | None) -> list[int]:
    """Choose a token per row. `compiled` None means by torch alone."""
    noisy = [row for row, draw in enumerate(draws) if not draw.greedy]
    if compiled is not None:
        highest, tokens = compiled.highest(logits)
    else:
        highest = logits.amax(-1).tolist()
        tokens = [0] * len(draws) if len(noisy) == len(draws) else _argmax(logits)
    _require_finite(highest)
    if noisy:
        for row, token in _draw(logits, highest, draws, noisy, compiled).items():
            tokens[row] = token
    return tokens


def _draw(
    logits: Tensor,
    highest: Sequence[float],
    draws: Sequence[Draw],
    noisy: Sequence[int],
    compiled: SamplingKernels | None,
) -> Chosen:
    """Draw tokens for the noisy rows: by a kernel where one can decide, else by torch."""
    filtered = [row for row in noisy if draws[row].filtered(logits.shape[1])]
    whole = [row for row in noisy if not draws[row].filtered(logits.shape[1])]
    chosen: Chosen = {}
    if compiled is not None:
        peaks = torch.tensor(highest, dtype=torch.float32)
        chosen = _race(compiled, logits, peaks, draws, whole)
        chosen |= _among_top(compiled, logits, peaks, draws, filtered)
    elif whole and triton_serves(logits.device):
        chosen = dict(zip(whole, _keyed_on_gpu(logits, whole, draws), strict=True))
    if len(chosen) < len(noisy):
        for rows, choose in ((whole, _choose_whole), (filtered, _choose_filtered)):
            left = [row for row in rows if row not in chosen]
            chosen |= _in_slabs(choose, logits, draws, left)
    return chosen


def _in_slabs(choose: Choose, logits: Tensor, draws: Sequence[Draw], rows: list[int]) -> Chosen:
    """Call `choose` on slabs of these rows that fit in the caches; return row -> token."""
    chosen: Chosen = {}
    rows_at_once = max(1, SLAB_ELEMENTS // logits.shape[1])
    for at in range(0, len(rows), rows_at_once):
        slab = rows[at : at + rows_at_once]
        chosen |= zip(slab, choose(logits[slab], [draws[row] for row in slab]), strict=True)
    return chosen


def _race(
    compiled: SamplingKernels,
    logits: Tensor,
    highest: Tensor,
    draws: Sequence[Draw],
    rows: Sequence[int],
) -> Chosen:
    """Return tokens of unfiltered rows; rows that the kernel cannot decide are missing."""
    if not rows:
        return {}
    every = len(rows) == len(draws)
    won = compiled.race(
        logits if every else logits[rows],
        highest if every else highest[rows],
        [draws[row].params.temperature for row in rows],
        [draws[row].key for row in rows],
    )
    return {row: token for row, token in zip(rows, won, strict=True) if token is not None}


def _among_top(
    compiled: SamplingKernels,
    logits: Tensor,
    highest: Tensor,
    draws: Sequence[Draw],
    rows: Sequence[int],
) -> Chosen:
    """Return tokens of filtered rows; rows that the kernel's top candidates do not decide are
    missing.

    A row is decided if all tokens that survive its filters are among the candidates.
    """
    vocab_size = logits.shape[1]
    count = min(CANDIDATES, default=vocab_size)
    if not rows or count >= vocab_size:
        return {}
    asking = [draws[row] for row in rows]
    values, ids = compiled.top(logits if len(rows) == len(draws) else logits[rows], count)
    values = (values - highest[rows, None]) / _temperatures(asking, logits.device)
    mass = _masses(logits, highest, draws, rows)
    tokens, decided = _choose_of(*_descending(values, ids), vocab_size, asking, mass)
    found = zip(rows, tokens, decided, strict=True)
    return {row: token for row, token, done in found if done}


def _masses(
    logits: Tensor, highest: Tensor, draws: Sequence[Draw], rows: Sequence[int]
) -> Tensor | None:
    """Return the probability mass that top-p cuts of each row, [n, 1] float64; None if none needs
    it.

    A row needs it if it has top-p without top-k, because the candidates do not show its whole mass.
    """
    masses = torch.zeros(len(rows), 1, dtype=torch.float64)
    needed = False
    for index, row in enumerate(rows):
        params = draws[row].params
        if params.top_p < 1.0 and not 0 < params.top_k < logits.shape[1]:
            needed = True
            one = draws[row : row + 1]
            scaled = (logits[row : row + 1] - highest[row]) / _temperatures(one, logits.device)
            masses[index] = _mass(scaled, one)
    return masses if needed else None


def require_numbers(logits: Tensor) -> None:
    """Raise InternalError if a row of logits holds NaN or +inf, or nothing but -inf."""
    _require_finite(logits.amax(-1).tolist())


def _require_finite(highest: Sequence[float]) -> None:
    # A NaN is the maximum of its row. Python tests them: torch took ten times as long for so few.
    if not all(map(math.isfinite, highest)):
        raise InternalError("the model produced logits that are not numbers")


def top(scores: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Return the `count` highest values of each row and their ids, highest value first.

    Of equal values the lower id comes first. If only some of several equal lowest values fit, it is
    not defined which ones are taken.
    """
    if count == scores.shape[1]:
        values, ids = scores.sort(dim=-1, descending=True, stable=True)
        return values, ids
    return _descending(*scores.topk(count, dim=-1))


def _descending(values: Tensor, ids: Tensor) -> tuple[Tensor, Tensor]:
    """Sort each row by descending value; of equal values the lower id comes first."""
    ids, by_id = ids.sort(-1)
    values, by_value = values.gather(1, by_id).sort(dim=-1, descending=True, stable=True)
    return values, ids.gather(1, by_value)


def _kernels(logits: Tensor) -> SamplingKernels | None:
    if logits.device.type != "cpu" or logits.dtype != torch.float32 or logits.stride(1) != 1:
        return None
    found = kernels()
    return None if found is None else found.sampling


def _argmax(logits: Tensor) -> list[int]:
    """Return the lowest id of each row's maximum."""
    if logits.device.type == "cpu":
        # numpy's argmax is vectorised: 32 x 152k took 0.4 ms, torch's 2.6 ms, on one core.
        return logits.numpy().argmax(-1).tolist()
    if triton_serves(logits.device):  # torch's argmax may take any of several equal maxima on a GPU
        from baton.engine.kernels.gpu import sampling  # imports triton

        return sampling.greatest(logits)[1].tolist()
    return logits.argmax(-1).tolist()


def _keyed_on_gpu(logits: Tensor, rows: Sequence[int], draws: Sequence[Draw]) -> list[int]:
    """Do `_choose_whole` for some rows in one pass of a Triton kernel."""
    from baton.engine.kernels.gpu import sampling  # imports triton

    mine, device = [draws[row] for row in rows], logits.device
    if len(mine) < len(draws):
        logits = logits[torch.tensor(rows, device=device)]
    heat = torch.tensor([draw.params.temperature for draw in mine], device=device)
    return sampling.keyed(logits, heat, _keys(mine, device).flatten()).tolist()


def _scaled(logits: Tensor, draws: Sequence[Draw]) -> Tensor:
    """Return logits / temperature, shifted so that each row's maximum is 0: [n, vocab] float32."""
    return (logits - logits.max(-1, keepdim=True).values) / _temperatures(draws, logits.device)


def _temperatures(draws: Sequence[Draw], device: torch.device) -> Tensor:
    """Return the temperatures of the draws, [n, 1] float32."""
    degrees = [draw.params.temperature for draw in draws]
    return torch.tensor(degrees, dtype=torch.float32, device=device)[:, None]


def _choose_whole(logits: Tensor, draws: Sequence[Draw]) -> list[int]:
    """Choose a token per row by Gumbel-max over the whole vocabulary.

    Float32 noise picks the finalists, about two per row. Float64 noise decides among them. The
    winner is the same as with float64 for all tokens, at a fraction of the cost.
    """
    scaled = _scaled(logits, draws)
    ids = torch.arange(logits.shape[1], device=logits.device)[None]
    bits = _noise_bits(_keys(draws, logits.device), ids)
    # Compute -log(u) from 1 - u: float32 holds 1 - u precisely where scores are high.
    complement = ((1 << BITS) - bits).float().sub_(0.5).mul_(2.0**-BITS)
    complement.clamp_(max=1 - 2.0**-24)
    approximate = scaled - complement.neg_().log1p_().neg_().log_()
    best = approximate.max(-1, keepdim=True).values
    rows, columns = (approximate >= best - FINALIST_MARGIN).nonzero(as_tuple=True)
    exact = scaled[rows, columns].double() + _gumbel(bits[rows, columns])
    winners: list[tuple[float, int]] = [(-math.inf, 0)] * len(draws)
    for row, token, score in zip(rows.tolist(), columns.tolist(), exact.tolist(), strict=True):
        if score > winners[row][0]:
            winners[row] = (score, token)
    return [token for _, token in winners]


def _choose_filtered(logits: Tensor, draws: Sequence[Draw]) -> list[int]:
    """Choose a token per row by Gumbel-max over the tokens that survive min-p, top-k and top-p."""
    scaled = _scaled(logits, draws)
    vocab_size = logits.shape[1]
    tokens = [0] * len(draws)
    rows = list(range(len(draws)))
    for count in (*CANDIDATES, vocab_size):
        if not rows:
            break
        chosen, decided = _choose_among(
            scaled[rows], [draws[row] for row in rows], min(count, vocab_size)
        )
        for row, token in zip(rows, chosen, strict=True):
            tokens[row] = token
        rows = [row for row, done in zip(rows, decided, strict=True) if not done]
    return tokens


def _choose_among(
    scaled: Tensor, draws: Sequence[Draw], num_candidates: int
) -> tuple[list[int], list[bool]]:
    """Draw among each row's top candidates; return the tokens, and whether each is decided.

    A row is decided if no token beyond the candidates can survive the filters.
    """
    mass = _mass(scaled, draws) if any(draw.params.top_p < 1.0 for draw in draws) else None
    return _choose_of(*top(scaled, num_candidates), scaled.shape[1], draws, mass)


def _choose_of(
    values: Tensor, ids: Tensor, vocab_size: int, draws: Sequence[Draw], mass: Tensor | None
) -> tuple[list[int], list[bool]]:
    """Draw among the surviving candidates of each row; return the tokens, and whether each is
    decided.

    `values` are the candidates' logits over temperature, in descending order.
    """
    num_candidates = values.shape[1]
    num_kept, decided = _survivors(values, vocab_size, draws, mass)
    width = int(num_kept.max())
    values, ids = values[:, :width], ids[:, :width]
    scores = values.double() + _gumbel(_noise_bits(_keys(draws, values.device), ids))
    ranks = torch.arange(width, device=values.device)
    scores.masked_fill_(ranks >= num_kept, -torch.inf)
    tokens = ids.gather(1, scores.argmax(-1, keepdim=True)).squeeze(1).tolist()
    everything = num_candidates == vocab_size
    return tokens, [everything or done for done in decided.squeeze(1).tolist()]


def _mass(scaled: Tensor, draws: Sequence[Draw]) -> Tensor:
    """Return the mass that top-p cuts in rows without top-k: all above min-p's floor, [n, 1]
    float64.
    """
    kept = scaled.exp()
    if any(draw.params.min_p for draw in draws):
        kept = torch.where(scaled >= _floor(draws, scaled), kept, 0.0)
    return kept.sum(-1, keepdim=True, dtype=torch.float64)


def _floor(draws: Sequence[Draw], like: Tensor) -> Tensor:
    """Return the lowest logits that min-p lets pass, [n, 1] float32. The row's maximum is at 0."""
    floors = [math.log(d.params.min_p) if d.params.min_p else -math.inf for d in draws]
    return _column(floors, like).float()


def _survivors(
    values: Tensor, vocab_size: int, draws: Sequence[Draw], mass: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Return how many leading `values` [n, candidates] pass the filters, and whether that is
    decided.

    Both results are [n, 1]: int64 (at least 1) and bool. The survivors are a prefix of the order. A
    row is decided if two things hold: its survivors end above the lowest candidate (equal logits
    beyond the candidates could have lower ids), and the mass that top-p cuts is known. `mass` is
    the result of `_mass`; it may be None if no row has top-p without top-k.
    """
    num_candidates = values.shape[1]
    top_k = _column([d.params.top_k if d.params.top_k > 0 else vocab_size for d in draws], values)
    top_p = _column([d.params.top_p for d in draws], values)
    floor = _floor(draws, values)
    ranks = torch.arange(num_candidates, device=values.device)
    kept = (values >= floor) & (ranks < top_k)
    count = kept.sum(-1, keepdim=True)
    lowest = values[:, -1:]
    if all(draw.params.top_p >= 1.0 for draw in draws):
        return count, _decided(values, count, lowest)
    weights = values.exp().double()
    cumulative = weights.cumsum(-1)
    # The mass that top-p cuts: what top-k left, or without top-k the row above min-p's floor.
    total = cumulative.gather(1, count - 1)
    if mass is not None:
        total = torch.where(top_k < vocab_size, total, mass)
    mass_known = (top_k >= vocab_size) | (top_k <= num_candidates) | (count < num_candidates)
    nucleus = ((cumulative - weights) < top_p * total) | (top_p >= 1.0)
    count = (kept & nucleus).sum(-1, keepdim=True)
    return count, mass_known & _decided(values, count, lowest)


def _decided(values: Tensor, count: Tensor, lowest: Tensor) -> Tensor:
    """Return whether no token beyond the candidates can survive: [n, 1] bool.

    A forbidden token (-inf, for instance by a grammar) never wins. So if the lowest candidate is
    -inf, there are no further tokens to look at.
    """
    return (values.gather(1, count - 1) > lowest) | lowest.isneginf()


def _column(numbers: Sequence[float], like: Tensor) -> Tensor:
    return torch.tensor(numbers, dtype=torch.float64, device=like.device)[:, None]


def _keys(draws: Sequence[Draw], device: torch.device) -> Tensor:
    """Return the draws' noise keys as [n, 1] int64 (two's complement)."""
    signed = [draw.key - (1 << 64) if draw.key >> 63 else draw.key for draw in draws]
    return torch.tensor(signed, dtype=torch.int64, device=device)[:, None]


def _noise_bits(keys: Tensor, ids: Tensor) -> Tensor:
    """Return 52 random bits per (key [n, 1], vocabulary id [n or 1, m]): [n, m] int64 in [0, 2^52).

    Counter-based: SplitMix64's output function at key + (id + 1) * golden ratio, where int64 wraps
    around. Source: Steele, Lea, Flood, "Fast splittable pseudorandom number generators", OOPSLA
    2014.
    """
    z = (ids + 1) * _signed(GOLDEN) + keys
    for shift, multiplier in zip((30, 27), MULTIPLIERS, strict=True):
        z.bitwise_xor_(_shift_right(z, shift)).mul_(_signed(multiplier))
    z.bitwise_xor_(_shift_right(z, 31))
    return _shift_right(z, 64 - BITS)


def _shift_right(z: Tensor, count: int) -> Tensor:
    """Shift int64 right and fill with zeros instead of copies of the sign bit."""
    return (z >> count).bitwise_and_((1 << (64 - count)) - 1)


def _gumbel(bits: Tensor) -> Tensor:
    """Turn uniform bits into standard Gumbel noise, float64."""
    uniform = (bits.double() + 0.5) * 2.0**-BITS
    return -torch.log(-torch.log(uniform))


def _signed(number: int) -> int:
    return number - (1 << 64) if number >> 63 else number


def _mix_int(number: int) -> int:
    """Apply SplitMix64's output function to a Python integer modulo 2^64."""
    z = number & _MASK
    for shift, multiplier in zip((30, 27), MULTIPLIERS, strict=True):
        z = ((z ^ (z >> shift)) * multiplier) & _MASK
    return z ^ (z >> 31)
