"""What must be true after every case, whatever happened.

1. A stream equals the undisturbed one; of a router that died with it, a prefix and no end. A
   resumable one is excused by no such death, and told again, it is the same.
2. Positions 1..n once each, one end per sample, one usage, usage == tokens == log.
3. No row of the log comes from an epoch below one that was logged before it.
4. Every pool is whole, nobody runs, waits, fetches or exports anything, no lease is left.
5. Descriptors, threads and tasks of those who lived are what they were after their first case, kind
   by kind, but for what KEPT names.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from baton.protocol.handles import NodeLoad
from baton.protocol.request import TERMINAL, RequestState
from kv_transfer.fetches import MAX_CONTROL, MAX_FETCHES
from tests.chaos.cluster import Cluster
from tests.chaos.counts import grown
from tests.chaos.streams import Stream

IDLE_S = 40.0  # the longest lease (10 s), the sweep of a dead router, and a slow machine
HEARTBEAT_S = 1.1
LOOK_S = 0.1
SETTLE_S = 20.0
# What a process may hold more of than after its first case; of everything else not one.
KEPT: Final[dict[str, int]] = {
    "socket": 8,  # KV connections that are kept, and those of the Redis pool that came with a crowd
    "event_engine": 8,  # gRPC's pool, which grows when its work waits, on a crowded machine
    "grpc_global_tim": 1,  # gRPC's second one, while the first is late, on a crowded machine
    "arena": 3,  # those of the peers that live, over lane shm
    "pipe": 2,  # to the child that tries grammars out, which the first of them starts
    "python": MAX_FETCHES + MAX_CONTROL,  # threads of the data plane, made as they are needed
}


class Broken(AssertionError):
    """A promise was not kept; the text says which."""


@dataclass(frozen=True)
class Terms:
    """What a case may excuse. `cut`: the router died, so clients were cut off. `unlogged`: Redis
    was away, so the log may miss tokens. `may_fail`: an error of ours may end a request."""

    cut: bool = False
    unlogged: bool = False
    may_fail: bool = False


STRICT = Terms()


def check_stream(stream: Stream, terms: Terms) -> None:
    """1 and 2, of what one client saw. Raises Broken."""
    spec, name = stream.spec, f"{stream.request_id} ({stream.spec.name})"
    if stream.faults:
        raise Broken(f"{name}: {'; '.join(stream.faults)}")
    for sample, expected in enumerate(spec.expected):
        seen = stream.tokens(sample)
        if seen != expected[: len(seen)]:
            at = next(i for i, (a, b) in enumerate(zip(seen, expected, strict=False)) if a != b)
            raise Broken(f"{name}: sample {sample} differs from position {at} on")
    if stream.error is not None:
        excused = (terms.cut and not stream.resumable) or terms.may_fail
        if not excused or stream.ends.keys() == set(range(len(spec.expected))):
            raise Broken(
                f"{name}: {stream.error.code} after {stream.num_tokens} tokens: "
                f"{stream.error.message}"
            )
        return
    for sample, expected in enumerate(spec.expected):
        if stream.tokens(sample) != expected:
            raise Broken(f"{name}: sample {sample} ends after {len(stream.tokens(sample))} tokens")
        if stream.ends.get(sample) != spec.reasons[sample]:
            raise Broken(f"{name}: sample {sample} ended by {stream.ends.get(sample)}")
    if stream.usage is None or stream.usage.completion_tokens != stream.num_tokens:
        raise Broken(f"{name}: usage {stream.usage} for {stream.num_tokens} tokens")
    if stream.ended - stream.started > stream.deadline_s:
        raise Broken(f"{name}: took {stream.ended - stream.started:.1f} s")


async def check_log(cluster: Cluster, stream: Stream, terms: Terms) -> None:
    """2 and 3, of what Redis kept. Raises Broken."""
    rows = await cluster.log_rows(stream.stored_id)
    logged: defaultdict[int, list[int]] = defaultdict(list)
    epoch = 0
    for row in rows:
        if int(row["e"]) < epoch:
            raise Broken(f"{stream.request_id}: epoch {row['e']} was appended after {epoch}")
        epoch = int(row["e"])
        tokens = logged[int(row["s"])]
        if int(row["p"]) != len(tokens):
            raise Broken(f"{stream.request_id}: log position {row['p']} after {len(tokens)}")
        tokens += map(int, filter(None, row["t"].split(",")))  # an end may come alone
    for sample, tokens in logged.items():
        if tuple(tokens) != stream.spec.expected[sample][: len(tokens)]:
            raise Broken(f"{stream.request_id}: the log of sample {sample} differs")
    dead_with_it = terms.cut and stream.error is not None  # its router, which logs soon
    if (terms.unlogged or dead_with_it) and not stream.resumable:
        return
    for sample in range(len(stream.spec.expected)):
        if len(logged[sample]) < len(stream.tokens(sample)):
            raise Broken(
                f"{stream.request_id}: sample {sample}: {len(stream.tokens(sample))} "
                f"tokens were shown, {len(logged[sample])} logged"
            )
    if stream.error is None:
        fields = await cluster.request_fields(stream.stored_id)
        ended = TERMINAL if terms.may_fail else {RequestState.FINISHED}
        if fields.get("state") not in ended:
            raise Broken(f"{stream.request_id}: recorded as {fields.get('state')}")
        if sum(map(len, logged.values())) != stream.num_tokens:
            raise Broken(f"{stream.request_id}: the log is not what was shown")


async def check_idle(cluster: Cluster) -> None:
    """4. Raises Broken with what is left."""
    left = "nothing was looked at"
    try:
        async with asyncio.timeout(IDLE_S):
            while left:
                left = await _unclean(cluster)
                # What a node says may be as old as its last heartbeat: clean is clean twice.
                if not left:
                    await asyncio.sleep(HEARTBEAT_S)
                    left = await _unclean(cluster)
                await asyncio.sleep(LOOK_S)
    except TimeoutError:
        raise Broken(f"after {IDLE_S:.0f} s: {left}") from None


async def check_counts(cluster: Cluster) -> None:
    """5, of every process that has lived through a case before. Raises Broken with what came, and
    was there at every look: heartbeats and scrapes come and go."""
    left = await _grown(cluster)
    try:
        async with asyncio.timeout(SETTLE_S):
            while left:
                await asyncio.sleep(LOOK_S)
                now = await _grown(cluster)
                left = {what: now[what] for what in left.keys() & now.keys()}
    except TimeoutError:
        raise Broken(f"after {SETTLE_S:.0f} s: {'; '.join(left.values())}") from None


async def _grown(cluster: Cluster) -> dict[tuple[str, str], str]:
    """What each process has more of, by process and kind."""
    found: dict[tuple[str, str], str] = {}
    for name in cluster.names:
        if cluster.alive(name):
            now = await cluster.vitals(name)
            more = grown(cluster.held.setdefault(now.pid, now), now, KEPT)
            found |= {(name, kind): f"{name}: {text}" for kind, text in more.items()}
    return found


async def _unclean(cluster: Cluster) -> str:
    """What is not at rest yet; empty when all is."""
    for name, record in (await cluster.records()).items():
        if busy(record.load):
            return f"{name}: {record.load}"
    for name in cluster.layout.nodes:
        if cluster.alive(name) and await cluster.metric(name, "baton_kv_transfer_active_exports"):
            return f"{name} has exports"
    for name in cluster.layout.routers:
        if cluster.alive(name) and await cluster.metric(name, "baton_live_requests"):
            return f"{name} has live requests"
    leases = await cluster.leases()
    return f"{leases} leases in Redis" if leases else ""


def busy(load: NodeLoad) -> bool:
    under_way = load.running + load.waiting + load.fetching + load.export_bytes
    return under_way != 0 or load.free_blocks != load.total_blocks


async def check_told_again(cluster: Cluster, stream: Stream) -> None:
    """1, of a resumable request asked for by its id, at the router that did not begin it."""
    again = cluster.ask_again(stream)
    await again.finish()
    check_stream(again, STRICT)
    first, second = (
        [(seen.sample, seen.position, seen.token_ids) for seen in each.seen]
        for each in (stream, again)
    )
    if sorted(first) != sorted(second):
        raise Broken(f"{stream.request_id}: told again, its events are others")


async def check_all(
    cluster: Cluster,
    streams: Sequence[Stream],
    terms: Terms = STRICT,
) -> None:
    """Everything but 5, which is the run's (cases.py). Redis must run (again). Raises Broken."""
    for stream in streams:
        check_stream(stream, terms)
        if stream.resumable:
            await check_told_again(cluster, stream)
    await check_idle(cluster)
    for stream in streams:
        await check_log(cluster, stream, terms)
