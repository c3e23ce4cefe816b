"""The great test at the size of two nodes: P + D over gRPC == one local engine, token for token."""

from __future__ import annotations

import gc
import weakref
from contextlib import AsyncExitStack
from pathlib import Path

import pytest

from baton.engine.config import EngineConfig
from baton.engine.core.assembly import EngineParts, assemble, load_parts
from baton.engine.state.interface import Task
from baton.node.config import NodeConfig
from baton.node.main import NodeProcess, NodeProgram, Surroundings
from baton.protocol.clock import SystemClock
from baton.protocol.messages import ControlNode
from baton.protocol.request import Request
from baton.protocol.sampling import SamplingParams
from kv_transfer.lanes.grpc_stream import GrpcLane
from tests.node.fakes import DECODE, PREFILL, TIMING, RawRouter, connected
from tests.tiny_models import make_tiny_model

PROMPTS = [tuple(range(5 + i, 60 + 3 * i)) for i in range(4)]


def parts_of(model: Path, block_size: int, max_num_batched_tokens: int = 2048) -> EngineParts:
    return load_parts(
        EngineConfig(
            model=str(model),
            dtype="float32",
            block_size=block_size,
            num_kv_blocks=64,
            max_num_seqs=8,
            max_num_batched_tokens=max_num_batched_tokens,
            check_invariants=True,
            threads=1,
        )
    )


def asked(temperature: float) -> list[Request]:
    return [
        Request(
            id=f"r{i}",
            prompt_ids=prompt,
            params=SamplingParams(
                temperature=temperature, top_p=0.95, seed=7 + i, max_tokens=16, ignore_eos=True
            ),
        )
        for i, prompt in enumerate(PROMPTS)
    ]


def one_local_engine(model: Path, requests: list[Request]) -> dict[str, list[int]]:
    engine = assemble(parts_of(model, 16))
    for request in requests:
        engine.add(request, Task.LOCAL)
    tokens: dict[str, list[int]] = {request.id: [] for request in requests}
    while engine.has_work:
        for event in engine.step():
            tokens[event.request_id] += event.token_ids
    return tokens


async def start(stack: AsyncExitStack, program: NodeProgram, parts: EngineParts) -> RawRouter:
    around = Surroundings(TIMING, SystemClock(), (GrpcLane(TIMING),))
    node = NodeProcess(program, NodeConfig(), parts, around)
    await node.start()
    stack.push_async_callback(node.stop)
    return await stack.enter_async_context(connected(node))


@pytest.mark.parametrize("temperature", [0.0, 0.7])
@pytest.mark.parametrize("kind", ["llama", "mistral", "gpt2"])
async def test_two_nodes_equal_one_engine(kind: str, temperature: float, tmp_path: Path) -> None:
    model = make_tiny_model(kind, tmp_path / kind)
    requests = asked(temperature)
    async with AsyncExitStack() as stack:
        # 16-token blocks and chunks of 24 on P, 8-token blocks on D.
        to_p = await start(stack, PREFILL, parts_of(model, 16, max_num_batched_tokens=24))
        to_d = await start(stack, DECODE, parts_of(model, 8))
        for request in requests:
            await to_p.prefill(request)
        for request in requests:
            await to_d.decode(request, await to_p.handle_of(request.id))
        got = {request.id: await to_d.all_tokens(request.id) for request in requests}
        await to_p.until(lambda: all(to_p.tokens(request.id) for request in requests))
    assert got == one_local_engine(model, requests)
    assert {r.id: to_p.tokens(r.id) for r in requests} == {i: t[:1] for i, t in got.items()}


@pytest.mark.parametrize("program", [PREFILL, DECODE])
async def test_a_node_that_sleeps_keeps_no_model(program: NodeProgram, tmp_path: Path) -> None:
    parts = parts_of(make_tiny_model("llama", tmp_path), 16)
    assert parts.active.model is not None
    model = weakref.ref(parts.active.model.model)
    async with AsyncExitStack() as stack:
        starting = start(stack, program, parts)
        del parts
        router = await starting
        assert model() is not None
        await router.send(ControlNode(1, "sleep"))
        await router.until(
            lambda: any(answer.number == 1 for step in router.steps for answer in step.controlled)
        )
        assert router.load.asleep
        gc.collect()
        assert model() is None
