"""What a node's engine holds now, for people who look: blocks, prefixes, last steps, tiers.

    look(engine)    between steps: copies of plain lists, a few hundred microseconds
    detail_of(...)  elsewhere: the JSON that the router passes on. Bounded whatever the pool's size

Counts, ids of requests and shortened hashes; never a token. docs/console.md names the fields.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any, Final

from baton.engine.core.engine import Engine
from baton.engine.state.work import Limits, Work

MOST_RUNS: Final = 4096  # of equal neighbours in the map of blocks
MOST_PREFIXES: Final = 200
AGES: Final = 4  # classes of cached blocks
KEY_CHARS: Final = 8
Block = tuple[str, str | None]  # its state, its request


@dataclass(frozen=True, slots=True)
class EngineCopy:
    """A copy of what an engine holds. Per block: references, key, parent's key, hits. `idle`: the
    cached blocks, the one that is evicted next first.

    `exported`: blocks that an export pins. `held`: (request, blocks) of each table. `steps`: as
    Steps.recent.
    """

    block_size: int
    block_bytes: int
    refs: list[int]
    keys: list[bytes | None]
    parents: list[bytes | None]
    hits: list[int]
    idle: list[int]
    exported: frozenset[int]
    held: list[tuple[str, list[int]]]
    num_holes: int
    steps: list[tuple[float, float, int, int, list[str], Work]]
    now: float
    limits: Limits | None
    hit_tokens: int
    swapped_blocks: int
    num_swap_ins: int


def look(engine: Engine) -> EngineCopy:
    """Copy what is shown. Engine thread, between steps."""
    pool, stats = engine.pool, engine.stats
    tables = [(it.request.id, table) for it in engine.scheduler.sequences() for table in it.tables]
    arena = engine.arena
    return EngineCopy(
        pool.block_size,
        arena.num_bytes // arena.num_blocks,
        *pool.copy_of_state(),
        idle=list(pool.idle),
        exported=frozenset(engine.pins.counts),
        held=[(name, table.blocks[:]) for name, table in tables],
        num_holes=sum(table.num_freed for _, table in tables),
        steps=list(engine.steps.recent),
        now=engine.steps.clock.monotonic(),
        limits=stats.utilization.limits,
        hit_tokens=stats.num_prefix_hit_tokens,
        swapped_blocks=stats.num_swapped_out_blocks - stats.num_swapped_in_blocks,
        num_swap_ins=stats.num_swap_ins,
    )


def detail_of(copy: EngineCopy, at: float) -> dict[str, Any]:
    """Return what the console shows of a node. `at`: wall-clock seconds of the copy. Any thread."""
    total = len(copy.refs)
    adopted = [(name, sum(block >= total for block in blocks)) for name, blocks in copy.held]
    return {
        "blocks": {
            "size": copy.block_size,
            "total": total,
            "states": _runs(_blocks(copy)),
            "ages": _ages(copy),
            "adopted": sum(count for _, count in adopted),
            "holes": copy.num_holes,
        },
        "prefixes": _prefixes(copy),
        "steps": [_step(step, at - copy.now) for step in copy.steps],
        "roofline": None if copy.limits is None else _roofline(copy, copy.limits),
        "tiers": _tiers(copy),
    }


def _blocks(copy: EngineCopy) -> list[Block]:
    owners = {block: name for name, blocks in copy.held for block in blocks}
    found: list[Block] = []
    for block, refs in enumerate(copy.refs):
        if refs and block in copy.exported:
            found.append(("exported", owners.get(block)))
        elif refs:
            found.append(("used", owners.get(block)))
        else:
            found.append(("free" if copy.keys[block] is None else "cached", None))
    return found


def _runs(blocks: Sequence[Block]) -> list[tuple[str, int, str | None]]:
    """Return runs of equal neighbours; if there are too many, without owners, and then with the
    state of the first of each few blocks for all of them."""
    runs = list(_grouped(blocks))
    if len(runs) > MOST_RUNS:
        plain: list[Block] = [(state, None) for state, _ in blocks]
        runs = list(_grouped(plain))
        if len(runs) > MOST_RUNS:
            few = -(-len(plain) // MOST_RUNS)
            coarse = [plain[index - index % few] for index in range(len(plain))]
            runs = list(_grouped(coarse))
    return runs


def _ages(copy: EngineCopy) -> list[tuple[int, int]]:
    """Return runs of ages: 1 for cached blocks that were used last, to AGES for those that are
    evicted next, 0 for all others. If there are too many runs, in steps of a few blocks."""
    ages = [0] * len(copy.refs)
    for place, block in enumerate(reversed(copy.idle)):
        ages[block] = 1 + place * AGES // len(copy.idle)
    few = 1 if sum(1 for _ in groupby(ages)) <= MOST_RUNS else -(-len(ages) // MOST_RUNS)
    coarse = [ages[index - index % few] for index in range(len(ages))]
    return [(age, sum(1 for _ in same)) for age, same in groupby(coarse)]


def _grouped(blocks: Sequence[Block]) -> Iterator[tuple[str, int, str | None]]:
    for (state, owner), same in groupby(blocks):
        yield state, sum(1 for _ in same), owner


def _prefixes(copy: EngineCopy) -> list[dict[str, Any]]:
    """Return the tree of known prefixes. A chain without a branch and with equal hits is one node;
    of the nodes the biggest are returned, parents always before their children."""
    blocks = {
        key: block
        for block, key in enumerate(copy.keys)
        if key is not None and copy.parents[block] is not None
    }
    children: dict[bytes, list[bytes]] = {}
    for key, block in blocks.items():
        children.setdefault(copy.parents[block] or b"", []).append(key)
    nodes: list[dict[str, Any]] = []
    roots = [key for parent, keys in children.items() if parent not in blocks for key in keys]
    open_: list[tuple[bytes, int | None, int]] = [(key, None, 0) for key in roots]
    while open_:
        key, parent, depth = open_.pop()
        hits, chain = copy.hits[blocks[key]], 1
        after = children.get(key, [])
        while len(after) == 1 and copy.hits[blocks[after[0]]] == hits:
            chain += 1
            after = children.get(after[0], [])
        nodes.append(
            {
                "depth": depth,
                "blocks": chain,
                "hits": hits,
                "tokens": chain * copy.block_size,
                "parent": parent,
                "key": key.hex()[:KEY_CHARS],
            }
        )
        open_ += [(child, len(nodes) - 1, depth + 1) for child in after]
    return _biggest(nodes)


def _biggest(nodes: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the nodes with the most hit tokens and blocks, each with all its parents."""
    kept: set[int] = set()

    def worth(index: int) -> tuple[int, int]:
        node = nodes[index]
        return node["hits"] * node["tokens"], node["blocks"]

    for index in sorted(range(len(nodes)), key=worth, reverse=True):
        if len(kept) == MOST_PREFIXES:
            break
        way, at = set[int](), index
        while at is not None and at not in kept:
            way.add(at)
            at = nodes[at]["parent"]
        if len(kept) + len(way) <= MOST_PREFIXES:
            kept |= way
    places = {old: new for new, old in enumerate(sorted(kept))}
    return [
        node | {"parent": None if node["parent"] is None else places[node["parent"]]}
        for index, node in enumerate(nodes)
        if index in places
    ]


def _step(step: tuple[float, float, int, int, list[str], Work], wall: float) -> dict[str, Any]:
    ended, seconds, prefill_tokens, num_tokens, names, _ = step
    return {
        "at": round(ended + wall, 3),
        "ms": round(seconds * 1000, 3),
        "prefill_tokens": prefill_tokens,
        "decode_rows": num_tokens - prefill_tokens,
        "requests": list(dict.fromkeys(names)),
    }


def _roofline(copy: EngineCopy, limits: Limits) -> dict[str, Any]:
    points = [
        {
            "intensity": round(work.intensity(), 3),
            "gflops": round(work.flops / seconds / 1e9, 3),
            "kind": "prefill" if prefill_tokens else "decode",
        }
        for _, seconds, prefill_tokens, _, _, work in copy.steps
        if seconds > 0 and work.read_bytes
    ]
    return {
        "peak_gbs": round(limits.read_bytes_per_s / 1e9, 3),
        "peak_gflops": round(limits.flops_per_s / 1e9, 3),
        "points": points,
    }


def _tiers(copy: EngineCopy) -> list[dict[str, Any]]:
    total = len(copy.refs) * copy.block_bytes
    used = sum(
        bool(refs) or key is not None for refs, key in zip(copy.refs, copy.keys, strict=True)
    )
    return [
        {
            "name": "pool",
            "used_bytes": used * copy.block_bytes,
            "total_bytes": total,
            "hits": copy.hit_tokens // copy.block_size,
        },
        {
            "name": "host",  # of preempted requests
            "used_bytes": max(0, copy.swapped_blocks) * copy.block_bytes,
            "total_bytes": total,
            "hits": copy.num_swap_ins,
        },
    ]
