"""A whole engine over two and four ranks (as threads): the tokens of an engine of one."""

from __future__ import annotations

import gc
import threading
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from baton.engine.config import EngineConfig
from baton.engine.core.engine import Engine
from baton.engine.loading.leader import load_leader
from baton.engine.loading.loading import load_model
from baton.engine.parallel.group import RankGroup
from baton.engine.parallel.pool import GroupArena
from baton.engine.parallel.ranks import cores_of, threads_of
from baton.engine.state.place import RankPlace
from baton.llm import LLM, GenerationOutput
from baton.protocol.errors import ConfigError, InternalError, ModelRefused
from baton.protocol.request import Request
from baton.protocol.sampling import SamplingParams
from tests.adapters import id_of
from tests.engine.driving import assert_all_free, run, tokens_of
from tests.engine.tensor_parallel_ranks import engine_of_ranks, start_thread
from tests.engine.test_models_lora import make_adapter
from tests.system.references import prompts
from tests.tiny_models import make_tiny_model

GREEDY = SamplingParams(temperature=0.0, max_tokens=16, ignore_eos=True)
PROMPTS = prompts((30, 14, 14, 5))
PATIENCE_S = 60.0
LINEAR = {  # of the tiny llama: inputs and outputs
    f"model.layers.{layer}.{part}": sizes
    for layer in range(3)
    for part, sizes in {
        "self_attn.q_proj": (64, 64), "self_attn.k_proj": (64, 32), "self_attn.v_proj": (64, 32),
        "self_attn.o_proj": (64, 64), "mlp.gate_proj": (64, 96), "mlp.up_proj": (64, 96),
        "mlp.down_proj": (96, 64),
    }.items()
}  # fmt: skip


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(make_tiny_model("llama", tmp_path_factory.mktemp("model") / "m"))


def generate(engine: Engine, params: SamplingParams) -> list[GenerationOutput]:
    return LLM("unread", engine=engine).generate([list(p) for p in PROMPTS], params)


def alone(model: str, params: SamplingParams, **options: Any) -> list[GenerationOutput]:
    return generate(LLM(model, "float32", threads=1, **options).engine, params)


def tokens(outputs: Sequence[GenerationOutput]) -> list[list[tuple[int, ...]]]:
    return [[tuple(sample.token_ids) for sample in output.outputs] for output in outputs]


@pytest.mark.parametrize("size", [2, 4])
def test_chunked_prompts_swaps_and_log_probabilities(model: str, size: int) -> None:
    """Three things at once, each proven by its counter: prompts in chunks, a pool so small that
    requests are swapped out of all ranks' pools and back, log probabilities of some rows."""
    params = SamplingParams(
        temperature=0.0, max_tokens=16, ignore_eos=True, logprobs=2, prompt_logprobs=1
    )
    options = {
        "num_kv_blocks": 13, "block_size": 8, "max_num_batched_tokens": 24, "max_num_seqs": 8,
        "preemption_mode": "swap",
    }  # fmt: skip
    expected = alone(model, params, **options)
    with engine_of_ranks(model, size, **options) as engine:
        found = generate(engine, params)
        assert tokens(found) == tokens(expected)
        for here, there in zip(found, expected, strict=True):
            for mine, theirs in zip(here.prompt_logprobs, there.prompt_logprobs, strict=True):
                assert [each.token_id for each in mine] == [each.token_id for each in theirs]
                assert [each.logprob for each in mine] == pytest.approx(
                    [each.logprob for each in theirs], abs=1e-3
                )
        assert engine.stats.num_chunked_prompts > 0
        assert engine.stats.num_swap_ins > 0
        assert isinstance(engine.arena, GroupArena)
        assert_all_free(engine)


def test_samples_fork_their_blocks_on_all_ranks(model: str) -> None:
    params = SamplingParams(temperature=1.0, seed=5, n=3, max_tokens=12, ignore_eos=True)
    options: dict[str, Any] = {"num_kv_blocks": 96, "block_size": 8}
    expected = tokens(alone(model, params, **options))
    assert len(set(expected[0])) == 3
    with engine_of_ranks(model, 2, **options) as engine:
        assert tokens(generate(engine, params)) == expected
        assert engine.stats.num_copied_blocks > 0
        assert_all_free(engine)


@pytest.mark.parametrize(
    "options",
    [{"kv_cache_dtype": "int8"}, {"speculative_method": "ngram"}],
    ids=lambda options: next(iter(options.values())),
)
def test_int8_kv_and_guessed_tokens(model: str, options: dict[str, Any]) -> None:
    options = {"num_kv_blocks": 64, "block_size": 8, **options}
    expected = tokens(alone(model, GREEDY, **options))
    with engine_of_ranks(model, 2, **options) as engine:
        assert tokens(generate(engine, GREEDY)) == expected
        assert_all_free(engine)


def test_adapters_are_split_too(model: str, tmp_path: Path) -> None:
    """Rows of two adapters and of none share steps."""
    modules = tuple(
        f"{name}={make_adapter(tmp_path / name, LINEAR, seed=seed)}"
        for seed, name in enumerate(("first", "second"))
    )
    options: dict[str, Any] = {"num_kv_blocks": 64, "block_size": 8, "lora_modules": modules}
    engine = LLM(model, "float32", threads=1, **options).engine
    asked = [
        Request(f"r{i}", PROMPTS[i], GREEDY, adapter=id_of(engine.info, name))
        for i, name in enumerate(("second", "", "first"))
    ]
    expected = answers(engine, asked)
    plain = answers(engine, [replace(request, adapter="") for request in asked])
    assert sorted(name for name in plain if plain[name] != expected[name]) == ["r0", "r2"]
    with engine_of_ranks(model, 2, **options) as engine:
        assert answers(engine, asked) == expected
        assert_all_free(engine)


def answers(engine: Engine, requests: Sequence[Request]) -> dict[str, list[int]]:
    for request in requests:
        engine.add(request)
    return {name: tokens_of(events) for name, events in run(engine).items()}


def test_hidden_states_are_the_leaders(model: str) -> None:
    options: dict[str, Any] = {"num_kv_blocks": 64, "block_size": 8}
    expected = LLM(model, "float32", threads=1, **options).embed([list(PROMPTS[0])])
    with engine_of_ranks(model, 2, **options) as engine:
        [found] = LLM("unread", engine=engine).embed([list(PROMPTS[0])])
        assert list(found) == pytest.approx(list(expected[0]), abs=1e-4)


def test_a_rank_that_goes_loses_the_group(model: str) -> None:
    told, lost = list[str](), threading.Event()

    def tell() -> None:
        told.append("lost")
        lost.set()

    with engine_of_ranks(model, 2, num_kv_blocks=64, block_size=8) as engine:
        assert engine.ranks is not None
        engine.ranks.on_lost(tell)
        engine.add(Request("r", PROMPTS[0], GREEDY))
        assert engine.step()
        engine.ranks.processes[0].process.kill()
        with pytest.raises(InternalError):
            engine.step()
        assert [request.id for request in engine.fail_step()] == ["r"]
        assert lost.wait(PATIENCE_S)
        engine.ranks.lose("again")
        engine.add(Request("s", PROMPTS[1], GREEDY))
        with pytest.raises(InternalError, match="the tensor-parallel group has ended"):
            engine.step()
        assert told == ["lost"]
        engine.ranks.on_lost(lambda: told.append("late"))
    assert told == ["lost", "late"]


def test_what_a_rank_refuses_is_told(model: str, tmp_path: Path) -> None:
    """The leader reads the model and finds nothing wrong; its second rank finds another one."""
    good = EngineConfig(model, tensor_parallel_size=2, device="cpu", dtype="float32")
    other = make_tiny_model("gpt2", tmp_path / "other", n_head=1)
    with pytest.raises(ConfigError, match=r"rank 1: .*1 query heads") as refused:
        load_leader(
            good,
            lambda start: start_thread(replace(start, config=replace(good, model=str(other)))),
        )
    assert refused.value.field == "tensor_parallel_size"


def test_an_adapter_of_another_model_is_refused(model: str, tmp_path: Path) -> None:
    for part, sizes in (("v_proj", (64, 64)), ("q_proj", (64, 96)), ("o_proj", (96, 64))):
        layers = {f"model.layers.0.self_attn.{part}": sizes}
        modules = (f"a={make_adapter(tmp_path / part, layers, seed=1)}",)
        with pytest.raises(ModelRefused):
            load_model(
                EngineConfig(model, tensor_parallel_size=2, lora_modules=modules),
                RankGroup(RankPlace(0, 2), "gloo"),
            )


def test_a_model_that_is_forgotten_takes_its_ranks_along(model: str) -> None:
    config = EngineConfig(model, tensor_parallel_size=2, device="cpu", dtype="float32", threads=1)
    loaded = load_leader(config, start_thread)
    assert loaded.ranks is not None
    [rank] = loaded.ranks.processes
    assert rank.process.poll() is None
    del loaded
    gc.collect()
    assert rank.process.poll() == 0


def test_ranks_share_threads_and_cores(monkeypatch: pytest.MonkeyPatch, model: str) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: {4, 5, 6, 7, 9})
    monkeypatch.setattr("os.cpu_count", lambda: 16)
    config = EngineConfig(model, tensor_parallel_size=2)
    assert threads_of(config) == 2
    assert [cores_of(RankPlace(rank, 2)) for rank in range(2)] == [[4, 5], [6, 7]]
    assert cores_of(RankPlace(0, 6)) == [], "fewer cores than ranks: the kernel shares them"
    monkeypatch.setattr("os.cpu_count", lambda: 5)
    assert cores_of(RankPlace(0, 2)) == [], "the whole machine: others run here too"
