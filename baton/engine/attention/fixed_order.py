"""Paged attention whose sums have one order, whatever the step: the attention of --deterministic.

    keys      0 ........ 127 | 128 ..... 255 | 256 ...        tiles at absolute positions
    partial   max, sum, P V  | max, sum, P V | ...            each a product of one fixed shape
    merged    the greatest max; then tile 0, tile 1, ... added in this order

Whether a query row decodes or prefills, it sits in a product of QUERY_ROWS rows, which holds its
heads beside those of other rows. Key tiles that a query cannot see add exact zeros, so it does not
matter where the first and the last tile of a chunk lie. Products, sums and maxima have fixed
shapes; exponentials run in slabs that never split a vector (`in_lanes`). One thing is left to the
machine: that the place of a row within a product does not matter. A test at load proves it
(deterministic.py). The twin is reference.py.
Source: the split of FlashDecoding (crfm.stanford.edu/2023/10/12/flashdecoding.html).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from baton.engine.attention.kv_store import KVStore, layer_store
from baton.engine.state.attention import AttentionLayer, KVViews, Reach
from baton.engine.state.batch import Batch, GroupTables, Span

KEY_TILE: Final = 128  # keys of a partial product; block sizes that divide it give equal results
QUERY_ROWS: Final = 16  # rows of a product: query rows times the query heads of one KV head
SLAB_BYTES: Final = 8 << 20  # keys gathered at once, in float32
LANES: Final = 32768  # ATen does not split fewer elements between threads


@dataclass(frozen=True, slots=True)
class Turn:
    """The i-th query tile of each unit of a slab that has so many query tiles.

    `units` [n] are those units, and `tiles` [n] their query tiles. `hidden` [n, positions, keys] is
    True where a query may not see a key.
    """

    units: Tensor | None  # None: all units of the slab
    tiles: Tensor
    hidden: Tensor


@dataclass(frozen=True, slots=True)
class Slab:
    """Units (a unit is one key tile of one sequence) gathered at once, sorted by key tile.

    `blocks` [n * blocks per tile] are the blocks to gather. `unwritten` [m] are the gathered keys
    that hold no token yet.
    """

    blocks: Tensor
    unwritten: Tensor
    turns: tuple[Turn, ...]


@dataclass(frozen=True, slots=True)
class FixedOrderPlan:
    """How one step is computed for one layer group and window.

    `rows` [tiles, positions]: the query rows of each query tile, padded with its first row.
    `taken`: the (tile, position) of each query row of the step.
    """

    rows: Tensor
    taken: tuple[Tensor, Tensor]
    slabs: tuple[Slab, ...]
    order: tuple[Tensor, ...]  # per key tile: indices of its partials
    owners: Tensor  # the query tile of each partial


class FixedOrderAttention:
    """Causal attention (full, windowed, chunked, soft-capped, with sinks, latent) with one order of
    sums."""

    def __init__(self, pool: KVViews, layers: Sequence[AttentionLayer]) -> None:
        self.group_of = pool.group_of
        self._layers = tuple(layers)
        self._stores = [layer_store(pool, index) for index in range(len(self._layers))]

    def write(self, layer: int, k: Tensor, v: Tensor, slots: Tensor) -> None:
        """See Attention.write. Rows beyond `slots` are padding."""
        count = slots.shape[0]
        self._stores[layer].write(k[:count], v[:count], slots)

    def attend(self, layer: int, q: Tensor, batch: Batch) -> Tensor:
        """See Attention.attend. The result of padding rows is zero."""
        spec, store = self._layers[layer], self._stores[layer]
        positions = max(1, QUERY_ROWS // (spec.query_heads // store.kv_heads))
        plan = _plan_of(batch, self.group_of[layer], spec.reach, store, positions)
        tiles = _query_tiles(q, plan.rows, store.kv_heads, spec.scale)
        parts = [_partials(tiles, store, slab, spec) for slab in plan.slabs]
        merged = _merge(parts, plan, spec, store.kv_heads, tiles.shape[2])
        out = q.new_zeros(q.shape[0], q.shape[1], merged.shape[-1])
        heads = merged.view(*merged.shape[:2], positions, -1, merged.shape[-1])
        by_row = heads.permute(0, 2, 1, 3, 4)[plan.taken].flatten(1, 2)
        out[: by_row.shape[0]] = by_row.to(q.dtype)
        return out


def in_lanes(function: Callable[..., Tensor], x: Tensor) -> Tensor:
    """Apply an elementwise function in place so that each element is computed in a full vector.

    ATen splits a large range between threads and computes the rest of each part number by number,
    with another exponential than that of its vectors. x must be contiguous, with a multiple of 64
    elements.
    """
    flat = x.view(-1)
    assert flat.numel() % 64 == 0
    wide = LANES * torch.get_num_threads()
    at = 0
    while at < flat.numel():
        rest = flat.numel() - at
        step = wide if rest >= wide else min(LANES, rest)
        part = flat[at : at + step]
        function(part, out=part)
        at += step
    return x


def tile_keys(block_size: int) -> int:
    """Return the keys per tile: KEY_TILE, or the next multiple of a block size that does not divide
    it.
    """
    return -(-KEY_TILE // block_size) * block_size


def _query_tiles(q: Tensor, rows: Tensor, kv_heads: int, scale: float) -> Tensor:
    """Turn q [T, query_heads, D] into scaled float32 [tiles, kv_heads, positions * group, D]."""
    wide = q.float() * scale
    tiles = wide[rows].unflatten(2, (kv_heads, -1))  # [tiles, positions, kv_heads, group, D]
    return tiles.transpose(1, 2).flatten(2, 3)


def _partials(
    tiles: Tensor, store: KVStore, slab: Slab, spec: AttentionLayer
) -> tuple[Tensor, Tensor, Tensor]:
    """Return max and sum [n, kv_heads, rows] and P V [n, kv_heads, rows, v_dim] of a slab's
    turns.
    """
    keys = tile_keys(store.block_size)

    def gathered(rows: Tensor) -> Tensor:  # -> [units, kv_heads, keys, dim]
        rows.index_fill_(0, slab.unwritten, 0.0)  # old numbers may be NaN, and 0 * NaN is NaN
        return rows.unflatten(0, (-1, keys)).transpose(1, 2).contiguous()

    k = gathered(store.keys.gather(slab.blocks, torch.float32))
    if spec.latent:
        v = k[..., : spec.latent].contiguous()
    else:
        v = gathered(store.values.gather(slab.blocks, torch.float32))
    parts: list[tuple[Tensor, Tensor, Tensor]] = []
    for turn in slab.turns:
        k_part = k if turn.units is None else k[turn.units]
        v_part = v if turn.units is None else v[turn.units]
        parts.append(_partial(tiles[turn.tiles], k_part, v_part, turn.hidden, spec))
    maxima, sums, products = zip(*parts, strict=True)
    return torch.cat(maxima), torch.cat(sums), torch.cat(products)


def _partial(
    q: Tensor, k: Tensor, v: Tensor, hidden: Tensor, spec: AttentionLayer
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute max, sum and P V of one turn.

    q [n, h, rows, D], k [n, h, keys, D], v [n, h, keys, V], hidden [n, positions, keys].
    """
    n, heads, rows, _ = q.shape
    scores = torch.bmm(q.flatten(0, 1), k.flatten(0, 1).transpose(1, 2)).view(n, heads, rows, -1)
    if spec.softcap is not None:
        scores = in_lanes(torch.tanh, scores.div_(spec.softcap)).mul_(spec.softcap)
    by_position = scores.unflatten(2, (hidden.shape[1], -1))
    by_position.masked_fill_(hidden[:, None, :, None], -torch.inf)
    greatest = scores.amax(-1)
    finite = greatest.masked_fill(greatest == -torch.inf, 0.0)
    weights = in_lanes(torch.exp, scores.sub_(finite[..., None]))
    product = torch.bmm(weights.flatten(0, 1), v.flatten(0, 1)).view(n, heads, rows, -1)
    return greatest, weights.sum(-1), product


def _merge(
    parts: list[tuple[Tensor, Tensor, Tensor]],
    plan: FixedOrderPlan,
    spec: AttentionLayer,
    kv_heads: int,
    rows: int,
) -> Tensor:
    """Merge the partials into [tiles, kv_heads, rows, v_dim], key tile after key tile."""
    maxima, sums, products = (torch.cat(part) for part in zip(*parts, strict=True))
    count = plan.rows.shape[0]
    greatest = maxima.new_full((count, kv_heads, rows), -torch.inf)
    sinks = None
    if spec.sinks is not None:
        group = spec.query_heads // kv_heads
        sinks = spec.sinks.float().view(kv_heads, 1, group).expand(-1, rows // group, -1).flatten(1)
        greatest = sinks.expand(count, -1, -1).clone()  # reduced in place below
    index = plan.owners[:, None, None].expand_as(maxima)
    greatest.scatter_reduce_(0, index, maxima, "amax")
    # Not every shape of query tiles is a multiple of a vector: `_exp` pads it.
    shares = _exp(maxima - greatest[plan.owners])
    sums.mul_(shares)
    products.mul_(shares[..., None])
    total = sums.new_zeros(count, kv_heads, rows)
    merged = products.new_zeros(count, *products.shape[1:])
    for members in plan.order:
        owners = plan.owners[members]
        total.index_add_(0, owners, sums[members])
        merged.index_add_(0, owners, products[members])
    if sinks is not None:
        total += _exp(sinks - greatest)
    return merged.div_(total[..., None])


def _exp(x: Tensor) -> Tensor:
    padded = x.new_zeros(-(-x.numel() // 64) * 64)
    padded[: x.numel()] = x.flatten()
    return in_lanes(torch.exp, padded)[: x.numel()].view(x.shape)


def _plan_of(
    batch: Batch, layer_group: int, reach: Reach, store: KVStore, positions: int
) -> FixedOrderPlan:
    """Return the step's plan for these tables and this reach; made once, at their first layer."""
    keys = tile_keys(store.block_size)
    per_slab = max(1, SLAB_BYTES // (keys * store.kv_heads * store.keys.dim * 4))
    key = (layer_group, reach, positions, per_slab)
    if key not in batch.plans:
        planner = _Planner(batch, batch.tables[layer_group], reach, store.block_size, positions)
        batch.plans[key] = planner.plan(per_slab)
    return batch.plans[key]


@dataclass(frozen=True, slots=True)
class _Unit:
    """One key tile of one span."""

    span: int
    key_tile: int


class _Planner:
    """Lays a step out as units, turns and slabs, with lists of integers only."""

    def __init__(
        self, batch: Batch, table: GroupTables, reach: Reach, block_size: int, positions: int
    ) -> None:
        self._batch, self._table, self._reach = batch, table, reach
        self._block_size, self._keys, self._positions = block_size, tile_keys(block_size), positions
        self._device = table.blocks.device
        self._tiles: list[list[int]] = []  # query tiles of each span
        self._rows: list[list[int]] = []  # rows of each query tile
        self._starts: list[int] = []  # position of each query tile's first row
        self._taken: list[tuple[int, int]] = []
        for span in batch.spans:
            self._tiles.append(self._tiles_of(span))

    def plan(self, per_slab: int) -> FixedOrderPlan:
        """Return the whole plan: slabs of at most `per_slab` units, in the order of their key
        tiles.
        """
        units = [
            _Unit(index, key_tile)
            for index, span in enumerate(self._batch.spans)
            for key_tile in range(self._first_key(span) // self._keys, self._last_tile(span) + 1)
        ]
        units.sort(key=lambda unit: unit.key_tile)
        slabs: list[Slab] = []
        partials: list[tuple[int, int]] = []  # (key tile, query tile), as the slabs give them
        for at in range(0, len(units), per_slab):
            slab, given = self._slab(units[at : at + per_slab])
            slabs.append(slab)
            partials += given
        by_key: dict[int, list[int]] = {}
        for index, (key_tile, _) in enumerate(partials):
            by_key.setdefault(key_tile, []).append(index)
        tiles, places = zip(*self._taken, strict=True)
        return FixedOrderPlan(
            self._tensor(self._rows),
            (self._tensor(tiles), self._tensor(places)),
            tuple(slabs),
            tuple(self._tensor(by_key[key_tile]) for key_tile in sorted(by_key)),
            self._tensor([query_tile for _, query_tile in partials]),
        )

    def _tiles_of(self, span: Span) -> list[int]:
        found: list[int] = []
        for offset in range(0, span.num_rows, self._positions):
            count = min(self._positions, span.num_rows - offset)
            row = span.first_row + offset
            tile = len(self._rows)
            found.append(tile)
            self._rows.append([*range(row, row + count), *[row] * (self._positions - count)])
            self._starts.append(span.start + offset)
            self._taken.extend((tile, place) for place in range(count))
        return found

    def _slab(self, units: list[_Unit]) -> tuple[Slab, list[tuple[int, int]]]:
        table = self._table
        width, per_tile = table.blocks.shape[1], self._keys // self._block_size
        first = self._tensor([unit.key_tile * per_tile for unit in units])
        columns = first[:, None] + torch.arange(per_tile, device=self._device)
        if any(table.first):
            columns -= self._tensor([table.first[unit.span] for unit in units])[:, None]
        # Beyond either end of a table lie keys that no query sees: any of its blocks will do there.
        columns.clamp_(min=0, max=width - 1)
        spans = self._tensor([unit.span for unit in units])
        blocks = table.blocks[spans[:, None], columns]
        total = self._tensor([self._batch.spans[unit.span].num_tokens for unit in units])
        positions = first[:, None] * self._block_size + self._tensor(range(self._keys))
        unwritten = (positions >= total[:, None]).flatten().nonzero().squeeze(1)
        turns: list[Turn] = []
        given: list[tuple[int, int]] = []
        for ordinal in range(max(len(self._tiles[unit.span]) for unit in units)):
            members = [i for i, unit in enumerate(units) if len(self._tiles[unit.span]) > ordinal]
            tiles = [self._tiles[units[i].span][ordinal] for i in members]
            chosen = None if len(members) == len(units) else self._tensor(members)
            seen = positions if chosen is None else positions[chosen]
            turns.append(Turn(chosen, self._tensor(tiles), self._hidden(tiles, seen)))
            given += [(units[i].key_tile, tile) for i, tile in zip(members, tiles, strict=True)]
        return Slab(blocks.flatten(), unwritten, tuple(turns)), given

    def _hidden(self, tiles: list[int], keys: Tensor) -> Tensor:
        """Return where keys are hidden, [n, positions, keys], given the positions `keys` [n,
        keys].
        """
        starts = self._tensor([self._starts[tile] for tile in tiles])
        queries = (starts[:, None] + self._tensor(range(self._positions)))[:, :, None]
        return self._reach.hidden(keys[:, None], queries)

    def _first_key(self, span: Span) -> int:
        return self._reach.first(span.start)

    def _last_tile(self, span: Span) -> int:
        return (span.num_tokens - 1) // self._keys

    def _tensor(self, numbers: Sequence[int] | Sequence[list[int]]) -> Tensor:
        return torch.tensor(list(numbers), device=self._device)
