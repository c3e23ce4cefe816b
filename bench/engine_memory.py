"""What paging, sharing and the prefix map save: `python -m bench.engine_memory [--trace FILE]`.

    waste     slots without a token, as a share of allocated ones, over a mixed load (chat-like
              lengths). Beside it contiguous memory per request: for the model's longest length, for
              the next power of two of the final length, and for the final length itself, which
              nobody knows beforehand
    sharing   blocks that copy-on-write saves, as a share of those without sharing, for parallel
              samples and for beams (these with a real model, which decides what survives)
    windows   KV of one request of Gemma 3's shape (22 layers see 512 tokens, 4 see all), in blocks
              of all layers and in blocks by layer group, at its peak and at its end
    prefix    hit rate of the scheduler and pool on the Mooncake conversation trace, lengths scaled,
              against an infinite cache and against an exact LRU of the pool's size
    peak      memory of a forward at max_num_batched_tokens, as a start measures it
Everything but `peak` counts blocks, so the machine's speed does not matter. The trace's path comes
from --trace or BATON_MOONCAKE_TRACE; without it that part is left out.
"""

from __future__ import annotations

import json
import lzma
import os
from collections import OrderedDict
from collections.abc import Container, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from baton.engine.config import EngineConfig
from baton.engine.core.active_model import ActiveModel
from baton.engine.core.assembly import EngineParts, assemble
from baton.engine.core.engine import Engine
from baton.engine.loading.loading import LoadedModel, load_model
from baton.engine.memory.kv_cache import KVArena, bytes_per_block
from baton.engine.memory.layer_groups import LayerGroups, group_layers, one_group
from baton.engine.running.runner import ModelRunner
from baton.engine.running.sizing import HostMemory, dummy_steps
from baton.engine.state.interface import SequenceChunk
from baton.protocol.kv_spec import LayerSpec
from baton.protocol.request import Request
from bench.engine_kit import (
    InstantRunner,
    Lengths,
    TimedPart,
    Watcher,
    arguments_parser,
    instant_engine,
    mixed_lengths,
    plain_request,
    prepare,
    random_prompt,
    run_all,
    tell,
)

DEMO_MODEL = Path(__file__).resolve().parents[1] / "demo_model"
LONGEST = 2048  # tokens that contiguous memory would be taken for (OPT's, in vLLM's paper)
POOL_TOKENS = 32_768
# Means of prompt and answer, tokens. Source: vLLM's paper (arXiv 2309.06180), figure 11.
SHAREGPT = (161, 338, 1.0)  # and the sigma of a log-normal that looks like it
ALPACA = (19, 58, 0.5)
SCALE = 32  # a trace's block of 512 tokens becomes one of 16
TRACE_BLOCK = 512 // SCALE
SHARES = (0.1, 0.25, 0.5, 1.0, 1.3)  # pool sizes, of the trace's distinct blocks
IN_FLIGHT = 4  # so few that a prompt is mostly computed before the next one looks for its blocks


# ---- waste ----


@dataclass(slots=True)
class Occupancy:
    """Sums of token slots over steps; `lengths` are by request id."""

    block_size: int
    lengths: dict[str, Lengths]
    used: int = 0
    paged: int = 0
    to_longest: int = 0
    to_power: int = 0
    to_final: int = 0
    most_running: int = 0

    def seen(self, chunks: Sequence[SequenceChunk]) -> None:
        """Count one step, in which every running request has a row."""
        self.most_running = max(self.most_running, len(chunks))
        for chunk in chunks:
            # The KV of a request's last token is never written: it is only known when sampled.
            self.used += chunk.start + len(chunk.token_ids)
            self.paged += sum(len(held.ids) for held in chunk.blocks) * self.block_size
            length = self.lengths[chunk.request_id]
            final = length.prompt + length.output
            self.to_longest += LONGEST
            self.to_power += 1 << (final - 1).bit_length()
            self.to_final += final

    def row(self) -> dict[str, Any]:
        """Return the wasted shares in percent."""
        given = {
            "paged": self.paged, "to longest": self.to_longest,
            "to power of 2": self.to_power, "to final": self.to_final,
        }  # fmt: skip
        wasted = {f"{name} %": 100 * (1 - self.used / slots) for name, slots in given.items()}
        return {"block size": self.block_size, **wasted, "most running": self.most_running}


def waste(block_size: int, count: int) -> dict[str, Any]:
    """Run one load through a pool of POOL_TOKENS tokens, and return its row."""
    lengths = [
        Lengths(min(each.prompt, LONGEST // 2), min(each.output, LONGEST // 2))
        for each in mixed_lengths(count, *SHAREGPT[:2], seed=1)
    ]
    occupancy = Occupancy(block_size, {f"r{i}": each for i, each in enumerate(lengths)})
    engine = instant_engine(
        POOL_TOKENS // block_size, block_size, Watcher(InstantRunner(), occupancy.seen),
        max_num_seqs=256, max_num_batched_tokens=8192,
    )  # fmt: skip
    run_all(
        engine,
        [
            plain_request(f"r{i}", random_prompt(each.prompt, i), each.output)
            for i, each in enumerate(lengths)
        ],
    )
    return occupancy.row()


# ---- windows ----

GEMMA3 = ((LayerSpec(1, 1, 0, 512, "sliding"),) * 5 + (LayerSpec(1, 1, 0),)) * 4 + (
    LayerSpec(1, 1, 0, 512, "sliding"),
) * 2
GEMMA3_LAYER_BYTES = 1024  # of a token in one layer: Gemma 3 1B has one KV head of 256 in bfloat16


def held_bytes(groups: LayerGroups, prompt: int, output: int) -> tuple[float, float]:
    """Return the megabytes of KV that one request of Gemma 3 1B holds: at most, and at its end."""
    longest = prompt + output
    held: list[int] = []
    engine = instant_engine(
        groups.num_groups * (longest // 16 + 2), 16, None, groups, max_num_batched_tokens=512
    )
    engine.add(plain_request("r", random_prompt(prompt, 1), output))
    while engine.has_work:
        engine.step()
        held.append(engine.pool.num_used * groups.num_slots)
    scale = 16 * GEMMA3_LAYER_BYTES / 1e6
    return max(held) * scale, held[-2] * scale  # after its last step it holds nothing


def window_rows() -> list[dict[str, Any]]:
    """Return one row per request of given prompt and answer lengths."""
    rows: list[dict[str, Any]] = []
    for prompt, output in ((100, 900), (900, 100), (100, 7900), (4000, 4000)):
        whole, _ = held_bytes(one_group(GEMMA3), prompt, output)
        peak, end = held_bytes(group_layers(GEMMA3, "float16"), prompt, output)
        rows.append(
            {
                "prompt": prompt, "answer": output, "all layers MB": whole, "groups: peak MB": peak,
                "groups: end MB": end, "end / all layers": end / whole,
            }
        )  # fmt: skip
    return rows


# ---- sharing ----


@dataclass(slots=True)
class Sharing:
    """Sums over steps: entries of all block tables, and the different blocks in them."""

    entries: int = 0
    blocks: int = 0

    def seen(self, chunks: Sequence[SequenceChunk]) -> None:
        """Count one step."""
        tables = [held.ids for chunk in chunks for held in chunk.blocks]
        self.entries += sum(map(len, tables))
        self.blocks += len({block for ids in tables for block in ids})

    @property
    def saved(self) -> float:
        """The percentage of blocks that sharing saves."""
        return 100 * (1 - self.blocks / self.entries)


def share_samples(n: int, means: tuple[int, int, float], count: int) -> float:
    """Return the percentage that `n` parallel samples per request save."""
    sharing = Sharing()
    engine = instant_engine(
        8192, 16, Watcher(InstantRunner(), sharing.seen),
        max_num_seqs=128, max_num_batched_tokens=8192,
    )  # fmt: skip
    requests = [
        plain_request(f"r{i}", random_prompt(each.prompt, i), each.output, n=n)
        for i, each in enumerate(mixed_lengths(count, means[0], means[1], seed=2, sigma=means[2]))
    ]
    run_all(engine, requests)
    return sharing.saved


def share_beams(model: LoadedModel, width: int, means: tuple[int, int, float], count: int) -> float:
    """Return the percentage that beams of `width` of a real model save."""
    sharing = Sharing()
    info = model.info
    arena = KVArena(info.layers, 2048, 16, info.kv_dtype, model.device)
    config = EngineConfig(model="demo", max_num_seqs=64)
    watcher = Watcher(ModelRunner(model, arena), sharing.seen)
    engine = assemble(EngineParts(config, ActiveModel(watcher), arena, info))
    requests = [
        plain_request(
            f"r{i}", random_prompt(each.prompt, i, info.vocab_size), each.output,
            beam_width=width, temperature=0,
        )
        for i, each in enumerate(mixed_lengths(count, means[0], means[1], seed=2, sigma=means[2]))
    ]  # fmt: skip
    run_all(engine, requests)
    return sharing.saved


def sharing_rows(model: LoadedModel, full: bool) -> list[dict[str, Any]]:
    """Return rows for n and beam width 2, 4, 6, beside those of the paper (its figure 15)."""
    paper = {
        ("parallel samples", "Alpaca"): "6.1-9.8",
        ("parallel samples", "ShareGPT"): "16.2-30.5",
        ("beams", "Alpaca"): "37.6-55.2",
        ("beams", "ShareGPT"): "44.3-66.3",
    }
    rows: list[dict[str, Any]] = []
    for name, means in (("Alpaca", ALPACA), ("ShareGPT", SHAREGPT)):
        count = 128 if full else 48
        saved = {w: share_samples(w, means, count) for w in (2, 4, 6)}
        rows.append(_sharing_row("parallel samples", name, saved, paper))
        if name == "Alpaca" or full:
            few = 16 if full else 4
            saved = {w: share_beams(model, w, means, few) for w in (2, 4, 6)}
            rows.append(_sharing_row("beams", name, saved, paper))
    return rows


def _sharing_row(
    kind: str, load: str, saved: dict[int, float], paper: dict[tuple[str, str], str]
) -> dict[str, Any]:
    ours = {f"{width}: saved %": value for width, value in saved.items()}
    return {"kind": kind, "load": load, **ours, "paper %": paper[kind, load]}


# ---- prefix hits ----


@dataclass(frozen=True, slots=True)
class Chain:
    """A prompt's full blocks by hash id. The first `findable` of them leave a token to compute."""

    keys: tuple[int, ...]
    findable: int

    def known_in(self, cache: Container[int]) -> int:
        """Return how many leading blocks a look-up in `cache` finds."""
        found = (i for i, key in enumerate(self.keys[: self.findable]) if key not in cache)
        return next(found, self.findable)


@dataclass(slots=True)
class InfiniteCache:
    """All blocks ever seen: the best that any cache could find, given the order of requests."""

    known: set[int] = field(default_factory=set[int])

    def hits(self, chain: Chain) -> int:
        """Return how many leading blocks of the chain are known; then note all its blocks."""
        found = chain.known_in(self.known)
        self.known.update(chain.keys)
        return found


@dataclass(slots=True)
class LruCache:
    """Exactly the pool's rule, without requests in flight: the `size` most recently used blocks."""

    size: int
    known: OrderedDict[int, None] = field(default_factory=OrderedDict[int, None])

    def hits(self, chain: Chain) -> int:
        """See InfiniteCache.hits. The oldest blocks are forgotten."""
        found = chain.known_in(self.known)
        for key in reversed(chain.keys):  # a chain's tail is forgotten before its head
            self.known.pop(key, None)
            self.known[key] = None
        while len(self.known) > self.size:
            self.known.popitem(last=False)
        return found


def read_trace(path: Path, limit: int) -> list[tuple[list[int], Lengths]]:
    """Return (hash ids, scaled lengths) of the first `limit` requests, in order of arrival."""
    with lzma.open(path, "rt") as lines:
        return [_scaled(json.loads(line)) for _, line in zip(range(limit), lines, strict=False)]


def _scaled(entry: dict[str, Any]) -> tuple[list[int], Lengths]:
    prompt = max(1, entry["input_length"] // SCALE)
    return entry["hash_ids"], Lengths(prompt, max(1, entry["output_length"] // SCALE))


def trace_prompt(hash_ids: Sequence[int], length: int) -> list[int]:
    """Return `length` tokens made of the hash ids: equal ids give equal tokens."""
    tokens = list(_tokens(hash_ids))
    return tokens[:length]


def _tokens(hash_ids: Sequence[int]) -> Iterator[int]:
    for hash_id in hash_ids:
        high, low = divmod(hash_id, 1000)
        yield from (8 + high, 8 + low)
        yield from (8 + (hash_id * 31 + k) % 30_000 for k in range(TRACE_BLOCK - 2))


def chain_of(hash_ids: Sequence[int], length: int) -> Chain:
    """Return the full blocks of a prompt. A Mooncake id names a block together with all before
    it.
    """
    return Chain(tuple(hash_ids[: length // TRACE_BLOCK]), (length - 1) // TRACE_BLOCK)


def prefix_rows(path: Path, limit: int) -> list[dict[str, Any]]:
    """Return one row per pool size, given as a share of the trace's distinct blocks."""
    trace = read_trace(path, limit)
    chains = [chain_of(hash_ids, length.prompt) for hash_ids, length in trace]
    infinite = InfiniteCache()
    best = sum(infinite.hits(chain) for chain in chains)
    total = sum(length.prompt for _, length in trace)
    distinct = len(infinite.known)
    # The pool must hold the longest request. Room for requests in flight is not part of a cache.
    largest = IN_FLIGHT * max(-(-(e.prompt + e.output) // TRACE_BLOCK) for _, e in trace)
    rows: list[dict[str, Any]] = []
    for share in SHARES:
        size = max(int(share * distinct), largest)
        lru = LruCache(size)
        bounded = sum(lru.hits(chain) for chain in chains)
        engine = instant_engine(size, TRACE_BLOCK, max_num_seqs=8, max_num_batched_tokens=8192)
        requests = [
            plain_request(f"r{i}", trace_prompt(hash_ids, length.prompt), length.output)
            for i, (hash_ids, length) in enumerate(trace)
        ]
        run_in_order(engine, requests)
        rows.append(
            {
                "pool / distinct": share,
                "pool blocks": size,
                "engine hit %": 100 * engine.stats.prefix_hit_rate,
                "same LRU hit %": 100 * bounded * TRACE_BLOCK / total,
                "infinite hit %": 100 * best * TRACE_BLOCK / total,
                "requests": len(trace),
            }
        )
    return rows


def run_in_order(engine: Engine, requests: Sequence[Request]) -> None:
    """Run the requests in order of arrival, at most IN_FLIGHT at once."""
    waiting = iter(requests)
    upcoming = next(waiting, None)
    while engine.has_work or upcoming is not None:
        load = engine.current_load()
        while upcoming is not None and load.running + load.waiting < IN_FLIGHT:
            engine.add(upcoming)
            upcoming = next(waiting, None)
            load = engine.current_load()
        engine.step()
        engine.take_block_events()


# ---- peak ----


def peak_rows(model: LoadedModel, full: bool) -> list[dict[str, Any]]:
    """Return the growth of the resident set during a dummy step, beside the weights."""
    rows: list[dict[str, Any]] = []
    for tokens in (512, 2048, 8192) if full else (512, 2048):
        config = EngineConfig(model="demo", max_num_batched_tokens=tokens)
        peak = HostMemory().peak_of(dummy_steps(config, model, 32))
        rows.append(
            {
                "max_num_batched_tokens": tokens,
                "peak MB": (peak or 0) / 1e6,
                "weights MB": model.weight_bytes / 1e6,
                "KV kB per token": bytes_per_block(model.info.layers, 1, model.info.kv_dtype) / 1e3,
            }
        )
    return rows


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command. Return the exit status."""
    parser = arguments_parser("engine_memory", __doc__)
    parser.add_argument("--trace", type=Path, help="mooncake_fast25_conversation.jsonl.xz")
    parser.add_argument("--trace-requests", type=int, help="of it (default: 1500; --full: all)")
    given = parser.parse_args(arguments)
    prepare(given)
    model = load_model(EngineConfig(model=str(DEMO_MODEL)))
    count = 512 if given.full else 128
    parts = [
        TimedPart("waste on a mixed load", [waste(size, count) for size in (8, 16, 32, 64, 128)]),
        TimedPart("one request of Gemma 3's shape", window_rows()),
        TimedPart("saved by sharing", sharing_rows(model, given.full)),
        TimedPart("peak of a forward", peak_rows(model, given.full)),
    ]
    trace = given.trace or os.environ.get("BATON_MOONCAKE_TRACE")
    if trace is not None:
        limit = given.trace_requests or (100_000 if given.full else 1500)
        rows = prefix_rows(Path(trace), limit)
        parts.append(TimedPart("prefix hits on the Mooncake conversation trace", rows))
    tell(parts, given.json)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
