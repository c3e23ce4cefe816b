"""Faults that no process dies of: an error, a delay, a damaged frame, at every stage.

A delay changes nothing. A damaged frame is noticed and fetched again. An error of ours at one stage
may cost that request its life, said in one terminal event and at once, but nothing else.
"""

from __future__ import annotations

from baton.failpoints import DATA_STAGES, STAGES
from tests.chaos.cases import Case, World
from tests.chaos.cluster import PLAIN, Layout
from tests.chaos.kills import EARLY, KINDS, PASSAGES, processes_of
from tests.chaos.oracle import Broken, Terms, check_all
from tests.chaos.streams import finish_all

DELAY_MS = 400
PROMPT_S = 20.0  # an error is told long before a deadline is over
GRPC = Layout(lanes="grpc")
OWN_ERROR = Terms(may_fail=True)
STRICT = Terms()


async def happens_at(world: World, stage: str, action: str, terms: Terms) -> str:
    cluster = world.cluster
    beside = cluster.begin(world.specs["beside"], "beside")
    await beside.at_least(EARLY)
    cluster.arm(processes_of(stage), f"{stage}:{PASSAGES.get(stage, 1)}:{action}")
    stream = cluster.begin(world.specs[world.draw.choice(KINDS)], "fault")
    _, line = await cluster.fired()
    cluster.disarm()
    await finish_all([beside, stream])
    if stream.error is not None and stream.ended - stream.started > PROMPT_S:
        raise Broken(f"{stream.request_id}: {stream.error.code} only after {PROMPT_S:.0f} s")
    await check_all(cluster, [beside, stream], terms)
    end = stream.error.code if stream.error is not None else f"retries {stream.retries}"
    return f"{line}; {stream.spec.name}, {end}"


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
