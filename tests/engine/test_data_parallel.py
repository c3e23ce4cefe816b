"""Data-parallel ranks as threads over gloo, each with rows of its own, against one engine.

What needs processes (nodes, death) is in tests/system/test_data_parallel.py; waves are in
test_lockstep.py.
"""

from __future__ import annotations

import queue
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._C._distributed_c10d import HashStore

from baton.engine.config import EngineConfig
from baton.engine.core import sleeping
from baton.engine.core.assembly import assemble, build_engine, load_parts
from baton.engine.core.engine import Engine
from baton.engine.core.pooling import PoolingJob
from baton.engine.loading.loading import LoadedModel, load_model
from baton.engine.memory.kv_cache import KVArena
from baton.engine.memory.layer_groups import one_group
from baton.engine.parallel.data_rank import DataRank
from baton.engine.performance.estimate import sized
from baton.engine.performance.ideal import EstimateOptions
from baton.engine.running.attention_choice import choose_attention
from baton.engine.state.batch import flatten
from baton.engine.state.interface import SequenceChunk
from baton.engine.state.place import RankPlace
from baton.engine.thread import EngineThread, StepReport
from baton.protocol.errors import ConfigError, UnsupportedFeature
from baton.protocol.kv_spec import HeldBlocks
from baton.protocol.request import Request
from baton.protocol.sampling import SamplingParams
from tests.engine.driving import run as driven
from tests.engine.driving import tokens_of
from tests.engine.quantized_models import make_quantized
from tests.engine.running import relative_error
from tests.engine.tensor_parallel_ranks import BLOCK, CHUNKS, NEXT, config_of
from tests.golden.random_models import save_random

PATIENCE_S = 60.0
LONG = (SequenceChunk("c", range(100, 150), 0, (HeldBlocks((0, 1, 2, 3, 4, 5, 6)),)),)
# What each rank computes: more steps than others, more rows, none at all.
STEPS: tuple[Sequence[Sequence[SequenceChunk]], ...] = ((CHUNKS, NEXT), (), (CHUNKS,), (LONG,))

MOE = {"num_experts_per_tok": 2, "moe_intermediate_size": 48}
MODELS: dict[str, Callable[[Path], Path]] = {
    "qwen3_moe": lambda path: save_random(path, "qwen3_moe", num_experts=8, **MOE),
    "qwen2_moe: a shared expert": lambda path: save_random(
        path, "qwen2_moe", shared_expert_intermediate_size=40, num_experts=4, **MOE
    ),
    "deepseek_v3: latents, a dense layer": lambda path: save_random(
        path, "deepseek_v3", n_routed_experts=8, n_group=2, topk_group=1, n_shared_experts=1,
        first_k_dense_replace=1, kv_lora_rank=32, q_lora_rank=24, qk_nope_head_dim=16,
        qk_rope_head_dim=8, v_head_dim=16, num_key_value_heads=4, **MOE,
    ),
    "w8a8": lambda path: make_quantized("w8a8", path, "qwen3_moe")[0],
    "gptq": lambda path: make_quantized("gptq", path, "qwen3_moe")[0],
}  # fmt: skip


def logits_of(loaded: LoadedModel, steps: Sequence[Sequence[SequenceChunk]]) -> list[Tensor]:
    info = loaded.info
    arena = KVArena(one_group(info.layers), 8, BLOCK, info.kv_dtype)
    attention = choose_attention(loaded, arena)
    found: list[Tensor] = []
    for chunks in steps:
        step = flatten(chunks, attention, BLOCK, loaded.device)
        found.append(loaded.logits(loaded.forward(step.token_ids, step.positions, step.batch)))
    return found


def by_ranks(
    config: EngineConfig, directory: Path, work: Callable[[LoadedModel], Any]
) -> list[tuple[LoadedModel, Any]]:
    """What `work` returns for each rank; then all take part until the wave is over."""
    store, size = HashStore(), config.data_parallel_size

    def run(rank: int) -> tuple[LoadedModel, Any]:
        data = DataRank(RankPlace(rank, size), directory)
        try:
            with torch.inference_mode():
                loaded = load_model(config, data=data)
                data.meet(store)
                found = work(loaded)
                data.lockstep.take_part()
                while data.lockstep.wanted:
                    data.lockstep.take_part()
        finally:
            data.close()
        return loaded, found

    with ThreadPoolExecutor(size) as pool:
        return list(pool.map(run, range(size)))


@pytest.mark.parametrize("kind", MODELS)
@torch.inference_mode()
def test_logits_of_every_rank_are_those_of_one_engine(kind: str, tmp_path: Path) -> None:
    path = MODELS[kind](tmp_path / "m")
    whole = load_model(config_of(path))
    for size in (2, 4):
        steps = STEPS[:size] if size == 4 else ((CHUNKS, NEXT), (LONG,))
        expected = [logits_of(whole, mine) for mine in steps]
        config = config_of(path, data_parallel_size=size)
        ranks = by_ranks(
            config,
            tmp_path,
            lambda loaded: logits_of(loaded, steps[loaded.lockstep.place.rank]),  # type: ignore[union-attr]  # noqa: B023
        )
        for (loaded, found), wanted in zip(ranks, expected, strict=True):
            assert loaded.info == whole.info, "a node like any other"
            assert loaded.weight_bytes < whole.weight_bytes
            assert len(found) == len(wanted)
            for mine, one in zip(found, wanted, strict=True):
                torch.testing.assert_close(mine, one, atol=2e-4, rtol=2e-4)
        rounds = {loaded.lockstep.num_rounds for loaded, _ in ranks if loaded.lockstep}
        assert rounds == {max(map(len, steps)) + 1}


@pytest.mark.parametrize("kind", [kind for kind in MODELS if "_" in kind])
def test_what_a_rank_holds_is_what_the_estimate_says(kind: str, tmp_path: Path) -> None:
    path = MODELS[kind](tmp_path / "m")
    for size in (1, 2, 4):
        options = EstimateOptions(path, dtype="float32", data_parallel_size=size)
        found = sized(options)
        assert found.refused is None
        data = DataRank(RankPlace(size - 1, size), tmp_path)
        held = load_model(config_of(path, data_parallel_size=size), data=data).weight_bytes
        data.close()
        assert found.weight_bytes == pytest.approx(held, rel=0.01)


@torch.inference_mode()
def test_bfloat16_by_compiled_kernels(tmp_path: Path) -> None:
    """Sizes that they take. What a rank's experts say is rounded once more."""
    sizes = {"hidden_size": 128, "head_dim": 32, "moe_intermediate_size": 64, "num_experts": 8}
    path = save_random(tmp_path / "m", "qwen3_moe", num_experts_per_tok=4, **sizes)
    config = EngineConfig(str(path), device="cpu", dtype="bfloat16", data_parallel_size=2)
    whole = load_model(replace(config, data_parallel_size=1))
    for steps in ((CHUNKS, NEXT), (LONG,)):
        [expected, *_] = logits_of(whole, steps)
        for _, (found, *_) in by_ranks(config, tmp_path, lambda each: logits_of(each, steps)):  # noqa: B023
            assert relative_error(found, expected) < 0.04


@torch.inference_mode()
def test_a_row_says_the_same_whoever_else_is_there(tmp_path: Path) -> None:
    """Bit for bit: alone in the group, and beside rows of others that go another way round."""
    path = MODELS["qwen3_moe"](tmp_path / "m")
    config = config_of(path, data_parallel_size=2)

    def work(beside: Sequence[Sequence[SequenceChunk]]) -> Callable[[LoadedModel], list[Tensor]]:
        def run(loaded: LoadedModel) -> list[Tensor]:
            assert loaded.lockstep is not None
            return logits_of(loaded, (CHUNKS,) if loaded.lockstep.place.leads else beside)

        return run

    alone = by_ranks(config, tmp_path, work(()))[0][1]
    beside = by_ranks(config, tmp_path, work((LONG,)))[0][1]
    # Products of other shapes may round otherwise: equal up to float32's last bits.
    torch.testing.assert_close(alone, beside, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(
    ("kind", "options", "message"),
    [
        ("llama", {}, "start more nodes"),
        ("qwen3_moe", {"data_parallel_size": 3}, "8 experts cannot be split over 3 ranks"),
        ("qwen3_moe", {"tensor_parallel_size": 2}, "tensor_parallel_size above 1 does not go"),
        ("qwen3_moe", {"deterministic": True}, "deterministic does not go"),
        ("qwen3_moe", {"async_scheduling": True}, "async_scheduling does not go"),
        ("qwen3_moe", {"model_impl": "transformers"}, "universal route"),
        ("qwen3_moe", {}, "data_parallel_size is for nodes"),
    ],
)
def test_refusals(kind: str, options: dict[str, Any], message: str, tmp_path: Path) -> None:
    experts = {"num_experts": 8, **MOE} if kind == "qwen3_moe" else {}
    path = save_random(tmp_path, kind, **experts)
    with pytest.raises(ConfigError, match=message):
        load_model(replace(config_of(path, data_parallel_size=2), **options))


GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)


def asked(name: str, length: int) -> Request:
    return Request(name, tuple(range(40, 40 + length)), GREEDY)


def test_engines_with_requests_of_their_own(tmp_path: Path) -> None:
    """Chats on one rank, a chat and an embedding on the other; then all stop, and none sleeps."""
    path = MODELS["qwen3_moe"](tmp_path / "m")
    config = config_of(
        path, data_parallel_size=2, num_kv_blocks=64, block_size=8, measure_limits=False
    )
    alone = build_engine(replace(config, data_parallel_size=1))
    pooler = alone.pooler
    assert pooler is not None
    vector = PoolingJob(alone, pooler, [range(50, 90)]).run()
    requests = [[asked("a", 40), asked("b", 7), asked("c", 60)], [asked("d", 9)]]
    expected: dict[str, list[int]] = {}
    for request in (each for mine in requests for each in mine):
        alone.add(request)
        for events in driven(alone).values():
            expected[request.id] = tokens_of(events)
    store, reports = HashStore(), [queue.SimpleQueue[StepReport]() for _ in range(2)]
    data = [DataRank(RankPlace(rank, 2), tmp_path) for rank in range(2)]
    with ThreadPoolExecutor(2) as pool:
        parts = list(pool.map(lambda each: load_parts(config, data=each), data))
        list(pool.map(lambda each: each.meet(store), data))
    threads = [
        EngineThread(assemble(each), mine.put) for each, mine in zip(parts, reports, strict=True)
    ]
    for thread, mine in zip(threads, requests, strict=True):
        thread.start()
        for request in mine:
            thread.post(lambda engine, request=request: engine.add(request))
    vectors: queue.SimpleQueue[Tensor] = queue.SimpleQueue()
    threads[1].post(lambda engine: vectors.put(embedded(engine)))
    torch.testing.assert_close(vectors.get(timeout=PATIENCE_S), vector, atol=2e-4, rtol=2e-4)
    for mine, wanted in zip(reports, requests, strict=True):
        tokens: dict[str, list[int]] = {}
        while sum(map(len, tokens.values())) < 12 * len(wanted):
            report = mine.get(timeout=PATIENCE_S)
            assert not report.failed
            for event in report.events:
                tokens.setdefault(event.request_id, []).extend(event.token_ids)
        assert tokens == {request.id: expected[request.id] for request in wanted}
    with pytest.raises(UnsupportedFeature, match="a rank of a data-parallel group cannot sleep"):
        sleeping.check(threads[0].engine)
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(lambda thread: thread.stop(), threads))
    for each, thread in zip(data, threads, strict=True):
        assert each.lockstep.all_leave
        thread.engine.check()
        each.close()


def embedded(engine: Engine) -> Tensor:
    assert engine.pooler is not None
    return PoolingJob(engine, engine.pooler, [range(50, 90)]).run()
