"""What must be true after every case, whatever happened.

1. A stream equals the undisturbed one; of a router that died with it, a prefix and no end.
2. Positions 1..n once each, one end per sample, one usage, usage == tokens == log.
3. No row of the log comes from an epoch below one that was logged before it.
4. Every pool is whole, nobody runs, waits, fetches or exports anything, no lease is left.
5. Descriptors and threads of those who lived are back where they were, but for kept connections.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from baton.handles import NodeLoad
from baton.request import TERMINAL, RequestState
from tests.chaos.cluster import Cluster, Vitals
from tests.chaos.streams import Stream

IDLE_S = 40.0  # the longest lease (10 s), the sweep of a dead router, and a slow machine
HEARTBEAT_S = 1.1
LOOK_S = 0.1
KEPT_DESCRIPTORS = 24  # KV connections and channels that are kept for a while
KEPT_THREADS = 80  # threads of the data plane are made on demand, up to 64 + 8, and kept


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
        excused = terms.cut or terms.may_fail
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
    rows = await cluster.log_rows(stream.request_id)
    logged: defaultdict[int, list[int]] = defaultdict(list)
    epoch = 0
    for row in rows:
        if int(row["e"]) < epoch:
            raise Broken(f"{stream.request_id}: epoch {row['e']} was appended after {epoch}")
        epoch = int(row["e"])
        tokens = logged[int(row["s"])]
        if int(row["p"]) != len(tokens):
            raise Broken(f"{stream.request_id}: log position {row['p']} after {len(tokens)}")
        tokens += map(int, row["t"].split(","))
    for sample, tokens in logged.items():
        if tuple(tokens) != stream.spec.expected[sample][: len(tokens)]:
            raise Broken(f"{stream.request_id}: the log of sample {sample} differs")
    if terms.unlogged:
        return
    for sample in range(len(stream.spec.expected)):
        if len(logged[sample]) < len(stream.tokens(sample)):
            raise Broken(
                f"{stream.request_id}: sample {sample}: {len(stream.tokens(sample))} "
                f"tokens were shown, {len(logged[sample])} logged"
            )
    if stream.error is None:
        fields = await cluster.request_fields(stream.request_id)
        ended = TERMINAL if terms.may_fail else {RequestState.FINISHED}
        if fields.get("state") not in ended:
            raise Broken(f"{stream.request_id}: recorded as {fields.get('state')}")
        if sum(map(len, logged.values())) != stream.num_tokens:
            raise Broken(f"{stream.request_id}: the log is not what was shown")


async def check_idle(cluster: Cluster, before: Mapping[str, Vitals]) -> None:
    """4 and 5. Raises Broken with what is left."""
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
    for name, now in cluster.vitals().items():
        then = before.get(name)
        if then is None or then.pid != now.pid:
            continue
        if now.descriptors > then.descriptors + KEPT_DESCRIPTORS:
            raise Broken(f"{name}: {then.descriptors} descriptors became {now.descriptors}")
        if now.threads > then.threads + KEPT_THREADS:
            raise Broken(f"{name}: {then.threads} threads became {now.threads}")


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


async def check_all(
    cluster: Cluster,
    streams: Sequence[Stream],
    before: Mapping[str, Vitals],
    terms: Terms = STRICT,
) -> None:
    """Everything. Redis must run (again). Raises Broken."""
    for stream in streams:
        check_stream(stream, terms)
    await check_idle(cluster, before)
    for stream in streams:
        await check_log(cluster, stream, terms)
