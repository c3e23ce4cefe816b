"""Faults that no process dies of: an error, a delay, a damaged frame, at every stage.

A delay changes nothing. The decode node notices a damaged frame and fetches again. An error of ours
at one stage may cost that request its life, said in one terminal event and at once, but nothing
else.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from baton.runtime.failpoints import DATA_STAGES, STAGES
from tests.chaos.cases import Case, World
from tests.chaos.cluster import PLAIN, Cluster, Layout
from tests.chaos.kills import EARLY, KINDS, PASSAGES, RESUMABLE_ONLY, processes_of
from tests.chaos.oracle import Broken, Terms, check_all
from tests.chaos.streams import Stream, finish_all

DELAY_MS = 400
PROMPT_S = 20.0  # an error is told long before a deadline is over
GRPC = Layout(lanes="grpc")
OWN_ERROR = Terms(may_fail=True)
STRICT = Terms()


async def happens_at(world: World, stage: str, action: str, terms: Terms) -> str:
    cluster = world.cluster
    damaged = action == "corrupt"
    before = await refused(cluster) if damaged else {}
    beside = cluster.begin(world.specs["beside"], "beside")
    await beside.at_least(EARLY)
    cluster.arm(processes_of(cluster, stage), f"{stage}:{PASSAGES.get(stage, 1)}:{action}")
    resumable = stage == RESUMABLE_ONLY
    stream = cluster.begin(world.specs[world.draw.choice(KINDS)], "fault", resumable=resumable)
    _, line = await cluster.fired()
    cluster.disarm()
    await finish_all([beside, stream])
    if stream.error is not None and stream.ended - stream.started > PROMPT_S:
        raise Broken(f"{stream.request_id}: {stream.error.code} only after {PROMPT_S:.0f} s")
    await check_all(cluster, [beside, stream], terms)
    if damaged:
        await check_noticed(cluster, before, [beside, stream])
    end = stream.error.code if stream.error is not None else f"retries {stream.retries}"
    return f"{line}; {stream.spec.name}, {end}"


async def refused(cluster: Cluster) -> dict[str, float]:
    """What the decode nodes have counted of damage on the lane that KV takes."""
    lane = cluster.layout.lanes.partition(",")[0]
    names = [
        f'baton_kv_lane_{what}_total{{lane="{lane}"}}' for what in ("corrupt_frames", "retries")
    ]
    return {
        name: sum([await cluster.metric(node, name) for node in cluster.nodes_of("d")])
        for name in names
    }


async def check_noticed(
    cluster: Cluster, before: Mapping[str, float], streams: Sequence[Stream]
) -> None:
    """The frame was refused and fetched again, and the router never knew. Raises Broken."""
    for name, count in (await refused(cluster)).items():
        if count <= before[name]:
            raise Broken(f"{name} is {count:.0f} as before the damage")
    for stream in streams:
        if stream.retries:
            raise Broken(f"{stream.request_id}: the router tried {stream.retries} more times")


def fault_cases() -> list[Case]:
    def case(stage: str, action: str, terms: Terms, layout: Layout = PLAIN) -> Case:
        async def run(world: World) -> str:
            return await happens_at(world, stage, action, terms)

        lane = "" if layout is PLAIN else f", lane {layout.lanes}"
        return Case("fault", f"{action} at {stage}{lane}", run, layout)

    cases = [case(stage, f"delay={DELAY_MS}", STRICT) for stage in STAGES]
    cases += [case(stage, "raise", OWN_ERROR) for stage in STAGES]
    cases += [case(stage, "corrupt", STRICT) for stage in DATA_STAGES]
    cases += [case(stage, "corrupt", STRICT, GRPC) for stage in DATA_STAGES]
    return cases
