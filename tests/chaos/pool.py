"""A KV pool for one and a half requests, and fifty clients: everybody is served, in turn."""

from __future__ import annotations

from tests.chaos.cases import Case, World
from tests.chaos.cluster import Layout
from tests.chaos.oracle import check_all
from tests.chaos.streams import Stream, finish_all

NUM_CLIENTS = 50
PATIENCE_S = 300.0
BLOCKS = 19  # of 32 tokens: a request has 300 + 96
TIGHT = Layout(node_flags=("--num-kv-blocks", str(BLOCKS)))
KINDS = ("greedy", "seeded", "penalties", "logprobs")


async def crowd(world: World, *, kill: bool) -> str:
    """All at once; `kill`: a decode node dies when a few tokens have been shown."""
    cluster = world.cluster
    streams: list[Stream] = []
    for _ in range(NUM_CLIENTS):
        spec = world.specs[world.draw.choice(KINDS)]
        streams.append(cluster.begin(spec, "crowd", PATIENCE_S))
    totals = {name: record.load.total_blocks for name, record in (await cluster.records()).items()}
    proof = f"{NUM_CLIENTS} clients, blocks {totals}"
    if kill:
        await streams[0].at_least(8, PATIENCE_S)
        proof += "; " + await cluster.kill(world.draw.choice(("d0", "d1", "p0", "p1")))
        await cluster.heal()
    await finish_all(streams)
    await cluster.heal()
    await check_all(cluster, streams)
    slowest = max(stream.ended - stream.started for stream in streams)
    return f"{proof}; the last one took {slowest:.1f} s"


def pool_cases() -> list[Case]:
    return [
        Case("pool", "1.5 requests, 50 clients", lambda w: crowd(w, kill=False), TIGHT),
        Case("pool", "the same, and a node dies", lambda w: crowd(w, kill=True), TIGHT),
    ]
