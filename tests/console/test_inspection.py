"""What a node tells of itself: against a real small engine, and bounded for a large one."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx

from baton.engine.core.inspection import MOST_PREFIXES, MOST_RUNS, EngineCopy, detail_of
from baton.engine.state.work import Limits, Work
from baton.protocol.sampling import SamplingParams
from router.admin.server import create_admin_app
from tests.cluster import Cluster, Plan, cluster
from tests.tiny_models import make_tiny_model
from tests.waiting import eventually


def copy(**changes: Any) -> EngineCopy:
    plain: dict[str, Any] = {
        "block_size": 4, "block_bytes": 100, "refs": [], "keys": [], "parents": [], "hits": [],
        "idle": [],
        "exported": frozenset(), "held": [], "num_holes": 0, "steps": [], "now": 50.0,
        "limits": None, "hit_tokens": 0, "swapped_blocks": 0, "num_swap_ins": 0,
    }  # fmt: skip
    return EngineCopy(**(plain | changes))


def test_blocks_are_runs_of_states_with_their_requests() -> None:
    found = detail_of(
        copy(
            refs=[1, 1, 0, 0, 2, 1],
            keys=[None, b"k", b"l", None, None, None],
            parents=[None] * 6,
            hits=[0] * 6,
            exported=frozenset({5}),
            held=[("r", [0, 1, 4, 77]), ("s", [4])],
            num_holes=3,
        ),
        at=0.0,
    )["blocks"]
    assert found["states"] == [
        ("used", 2, "r"), ("cached", 1, None), ("free", 1, None), ("used", 1, "s"),
        ("exported", 1, None),
    ]  # fmt: skip
    assert (found["total"], found["adopted"], found["holes"]) == (6, 1, 3)
    assert found["ages"] == [(0, 6)]


def test_cached_blocks_have_an_age_by_the_order_of_eviction() -> None:
    found = detail_of(
        copy(refs=[1, 0, 0, 0, 0, 0], keys=[b"%d" % n for n in range(6)], parents=[None] * 6,
             hits=[0] * 6, idle=[4, 3, 1, 2]),
        at=0.0,
    )["blocks"]  # fmt: skip
    assert found["ages"] == [(0, 1), (2, 1), (1, 1), (3, 1), (4, 1), (0, 1)]


def test_the_prefix_tree_joins_chains_and_splits_at_branches() -> None:
    keys = [b"a", b"b", b"c", b"d", b"e"]  # a - b - (c - d | e); others hang elsewhere
    found = detail_of(
        copy(
            refs=[0] * 5,
            keys=keys,
            parents=[b"root", b"a", b"b", b"c", b"b"],
            hits=[3, 3, 1, 1, 0],
        ),
        at=0.0,
    )["prefixes"]
    first, *others = found
    assert (first["blocks"], first["hits"], first["depth"], first["parent"]) == (2, 3, 0, None)
    assert {(it["blocks"], it["hits"], it["tokens"], it["parent"]) for it in others} == {
        (2, 1, 8, 0),
        (1, 0, 4, 0),
    }


def test_a_large_pool_is_told_in_bounds() -> None:
    count = 100_000
    found = detail_of(
        copy(
            refs=[index % 2 for index in range(count)],
            keys=[b"%d" % index for index in range(count)],
            parents=[b"root" for _ in range(count)],
            hits=[index % 7 for index in range(count)],
            held=[(f"r{index}", [index]) for index in range(1, count, 2)],
            idle=list(range(0, count, 2)),
        ),
        at=0.0,
    )
    states = found["blocks"]["states"]
    assert len(states) <= MOST_RUNS
    assert sum(run for _, run, _ in states) == count
    ages = found["blocks"]["ages"]
    assert len(ages) <= MOST_RUNS
    assert sum(run for _, run in ages) == count
    assert {age for age, _ in ages} == {0, 1, 2, 3, 4}
    assert len(found["prefixes"]) == MOST_PREFIXES
    assert all(it["parent"] is None for it in found["prefixes"])
    assert len(json.dumps(found)) < 1 << 19


def test_steps_are_points_under_the_roofline() -> None:
    work = Work(read_bytes=2e9, flops=4e9)
    found = detail_of(
        copy(steps=[(49.0, 0.5, 3, 5, ["r", "r", "s"], work)], limits=Limits(8e9, 64e9)), at=1000.0
    )
    assert found["steps"] == [
        {"at": 999.0, "ms": 500.0, "prefill_tokens": 3, "decode_rows": 2, "requests": ["r", "s"]}
    ]
    assert found["roofline"] == {
        "peak_gbs": 8.0,
        "peak_gflops": 64.0,
        "points": [{"intensity": 2.0, "gflops": 8.0, "kind": "prefill"}],
    }
    assert detail_of(copy(), at=0.0)["roofline"] is None


@asynccontextmanager
async def served(model: Path) -> AsyncIterator[tuple[Cluster, httpx.AsyncClient]]:
    """A cluster of two nodes, and a client of its admin port."""
    make_tiny_model("llama", model, max_position_embeddings=512, seed=3)
    limits = {"memory_bandwidth": 10.0, "peak_flops": 0.1}
    plan = Plan(model, router={"admin_key": ("sesame",)}, prefill=[limits], decode=[limits])
    async with cluster(plan) as c:
        app = httpx.ASGITransport(create_admin_app(c.router.services))
        key = {"authorization": "Bearer sesame"}
        async with httpx.AsyncClient(transport=app, base_url="http://x", headers=key) as client:
            yield c, client


PROMPT = [5 + number % 50 for number in range(70)]
ANSWER = SamplingParams(temperature=0.0, seed=1, max_tokens=200, ignore_eos=True)


async def test_real_nodes_tell_what_they_hold(tmp_path: Path) -> None:
    async with served(tmp_path) as (c, client):
        p_id, d_id = (each.node.shell.node_id for each in c.members)
        await c.generate([PROMPT], ANSWER)
        told = (await client.get(f"/console/data/nodes/{p_id}")).json()
        size = told["blocks"]["size"]
        assert "cached" in {state for state, _, _ in told["blocks"]["states"]}
        assert {age for age, _ in told["blocks"]["ages"]} >= {0, 1}
        assert sum(each["blocks"] for each in told["prefixes"]) == 70 // size
        assert {each["hits"] for each in told["prefixes"]} == {0}
        assert told["steps"][0]["prefill_tokens"] > 0
        await c.generate([PROMPT], ANSWER)
        told = (await client.get(f"/console/data/nodes/{p_id}")).json()
        assert (told["id"], told["role"], told["blocks"]["total"]) == (p_id, "prefill", 64)
        assert sum(run for _, run, _ in told["blocks"]["states"]) == 64
        assert max(each["hits"] for each in told["prefixes"]) == 1
        told = (await client.get(f"/console/data/nodes/{d_id}")).json()
        assert len(told["steps"]) == 32
        last = told["steps"][-1]
        assert (last["decode_rows"], last["prefill_tokens"], len(last["requests"])) == (1, 0, 1)
        ended = [each["at"] for each in told["steps"]]
        assert ended == sorted(ended)
        point = told["roofline"]["points"][-1]
        assert (told["roofline"]["peak_gbs"], point["kind"]) == (10.0, "decode")
        assert point["gflops"] > 0
        assert point["intensity"] > 0
        assert {each["name"] for each in told["tiers"]} == {"pool", "host"}


async def test_a_running_requests_blocks_bear_its_name(tmp_path: Path) -> None:
    async with served(tmp_path) as (c, client):
        shell = c.decode[0].node.shell
        shell.thread.hold(True)  # it takes the request in, and makes no step
        answer = asyncio.create_task(c.generate([PROMPT], ANSWER))

        async def owners() -> list[str]:
            told = (await client.get(f"/console/data/nodes/{shell.node_id}")).json()
            states = told["blocks"]["states"]
            return [owner for state, _, owner in states if state == "used" and owner]

        (owner, *_) = await eventually(owners)
        shell.thread.hold(False)
        await answer
        found = (await client.get("/console/data/snapshot")).json()
        assert [each["request_id"] for each in found["requests"]["ended"]] == [owner]


async def test_flows_of_real_nodes(tmp_path: Path) -> None:
    async with served(tmp_path) as (c, client):
        await c.generate([PROMPT], ANSWER)
        p, d = c.prefill[0].node.shell, c.decode[0].node.shell

        async def flows() -> Any:
            d.send_load(beat=True)
            p.ask_engine()
            found = (await client.get("/console/data/snapshot")).json()
            cached = {each["id"]: each["kv_cached"] for each in found["nodes"]}[p.node_id]
            return found if found["flows"] and cached else None

        found = await eventually(flows)
        (flow,) = found["flows"]
        assert (flow["from"], flow["to"], flow["lane"]) == (p.node_id, d.node_id, "grpc")
        assert flow["faults"] == 0
        assert flow["bytes_per_s"] > 0
        by_id = {each["id"]: each for each in found["nodes"]}
        assert by_id[p.node_id]["kv_cached"] == p.engine.pool.num_cached
        ended = found["requests"]["ended"][0]
        assert (ended["prompt_tokens"], ended["output_tokens"]) == (70, 200)
