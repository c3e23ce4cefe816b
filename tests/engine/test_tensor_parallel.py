"""Tensor parallelism without processes: ranks as threads over gloo, against the model in one piece.

What needs processes (an engine, nodes, death) is in tests/system/test_tensor_parallel.py.
"""

from __future__ import annotations

import socket
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch._C._distributed_c10d import HashStore

from baton.engine.config import EngineConfig
from baton.engine.loading.leader import Written
from baton.engine.loading.loading import LoadedModel, load_model
from baton.engine.memory.kv_cache import KVArena
from baton.engine.parallel.group import RankGroup
from baton.engine.parallel.messages import Gone, Link, MessageKind, decode_step, encode_step
from baton.engine.parallel.pool import GroupArena, SharedMemory, make_memory
from baton.engine.parallel.rank import refuse
from baton.engine.state.attention import Attention
from baton.engine.state.batch import flatten
from baton.engine.state.interface import SequenceChunk
from baton.engine.state.place import RankPlace
from baton.protocol.errors import ConfigError, InternalError, ModelRefused
from baton.protocol.kv_spec import HeldBlocks, LayerSpec
from tests.engine.running import relative_error
from tests.engine.tensor_parallel_ranks import BLOCK, by_threads, config_of, logits_of
from tests.engine.widened_models import make_widened
from tests.golden.gpt_oss_models import save_gpt_oss
from tests.golden.random_models import save_random
from tests.tiny_models import make_tiny_model

LLAMA_BIASED = {"attention_bias": True, "mlp_bias": True}
MOE = {"num_experts_per_tok": 2, "moe_intermediate_size": 48, "num_experts": 4}
MODELS: dict[str, Callable[[Path], Path]] = {
    "llama": lambda path: make_tiny_model("llama", path),
    "llama, biases everywhere": lambda path: make_tiny_model("llama", path, **LLAMA_BIASED),
    "qwen2: q, k, v biases, tied": lambda path: make_tiny_model("qwen2", path),
    "qwen3: norms of heads": lambda path: make_tiny_model("qwen3", path),
    "mistral: a window": lambda path: make_tiny_model("mistral", path),
    "a vocabulary that is odd": lambda path: make_tiny_model("llama", path, vocab_size=317),
    "fp8, widened": lambda path: make_widened("fp8-deepseek", path)[0],
    "mixtral": lambda path: save_random(
        path, "mixtral", num_experts_per_tok=2, num_local_experts=4
    ),
    "gpt_oss: sinks, biased experts": lambda path: save_gpt_oss(path, num_key_value_heads=2),
    "qwen2_moe: a shared expert": lambda path: save_random(
        path, "qwen2_moe", shared_expert_intermediate_size=40, **MOE
    ),
}


@pytest.mark.parametrize("kind", MODELS)
@torch.inference_mode()
def test_logits_of_two_and_four_ranks_are_those_of_one(kind: str, tmp_path: Path) -> None:
    """Two KV heads: four ranks hold them twice."""
    path = MODELS[kind](tmp_path)
    whole = load_model(config_of(path))
    expected = logits_of(whole, 1)
    for size in (2, 4):
        config = config_of(path, tensor_parallel_size=size)

        def share(group: RankGroup) -> tuple[LoadedModel, torch.Tensor]:
            loaded = load_model(config, group)  # noqa: B023 - runs within this turn
            return loaded, logits_of(loaded, group.place.size)

        ranks = by_threads(size, share)
        (leader, found), *others = ranks
        torch.testing.assert_close(found, expected, atol=2e-4, rtol=2e-4)
        assert leader.info.layers == whole.info.layers, "the model's, whoever computes them"
        assert leader.info.digest == whole.info.digest
        assert leader.weight_bytes < (0.75 if size == 2 else 0.6) * whole.weight_bytes
        for other, logits in others:
            assert logits.shape[1] <= -(-whole.info.vocab_size // size)
            assert other.attention_layers[0].query_heads == 4 // size


@torch.inference_mode()
def test_bfloat16_over_two_ranks(tmp_path: Path) -> None:
    """By the compiled kernels, where there are any: sizes that they take. Sums are rounded once
    more, so logits differ as much as bfloat16 does."""
    path = make_tiny_model(
        "qwen3", tmp_path, hidden_size=128, intermediate_size=256, head_dim=32,
        torch_dtype="bfloat16",
    )  # fmt: skip
    config = EngineConfig(str(path), device="cpu", tensor_parallel_size=2)
    expected = logits_of(load_model(replace(config, tensor_parallel_size=1)), 1)
    [found, _] = by_threads(2, lambda group: logits_of(load_model(config, group), 2))
    assert relative_error(found, expected) < 0.04


def test_a_collective_has_a_deadline() -> None:
    """The other rank is there, and does not come."""

    store = HashStore()
    with ThreadPoolExecutor(2) as pool:
        groups = [RankGroup(RankPlace(rank, 2), "gloo", deadline_s=0.2) for rank in range(2)]
        list(pool.map(lambda group: group.connect(store), groups))
        with pytest.raises(InternalError, match="a collective of the tensor-parallel group"):
            groups[0].all_reduce(torch.ones(2))
    with pytest.raises(InternalError, match="not met"):
        RankGroup(RankPlace(0, 2), "gloo").broadcast(torch.ones(1))


# ---- what is told ----


class Nowhere:
    """An attention that is never asked."""

    group_of = (0, 1)


def test_a_step_arrives_as_it_was_told() -> None:
    attention: Attention = Nowhere()  # type: ignore[assignment]
    chunks = [
        SequenceChunk(
            "a", (3, 4, 5), 6, (HeldBlocks((2, 3)), HeldBlocks((7,), first=1)), adapter="y"
        ),
        SequenceChunk("b", (9,), 0, (HeldBlocks((4,)), HeldBlocks((5,)))),
    ]
    told = flatten(chunks, attention, BLOCK, torch.device("cpu"))
    body = encode_step(told.token_ids, told.positions, told.batch, ("x", "y"))
    found = decode_step(body, attention, torch.device("cpu"), ("x", "y"))
    assert found.token_ids.tolist() == [3, 4, 5, 9]
    assert found.positions.tolist() == [6, 7, 8, 0]
    assert found.batch.spans == told.batch.spans
    for here, there in zip(found.batch.tables, told.batch.tables, strict=True):
        assert here.first == there.first
        assert torch.equal(here.slots, there.slots)
        assert torch.equal(here.blocks, there.blocks)


def test_links_tell_of_the_other_end() -> None:
    ours, theirs = (Link(end) for end in socket.socketpair())
    ours.send_json(MessageKind.SETUP, {"rank": 1})
    assert theirs.expect(MessageKind.SETUP) == (MessageKind.SETUP, {"rank": 1})
    ours.send(MessageKind.LOADED)
    with pytest.raises(InternalError, match="LOADED between ranks, not POOL"):
        theirs.expect(MessageKind.POOL)
    ours.close()
    ours.close()
    with pytest.raises(Gone):
        theirs.receive()
    with pytest.raises(Gone):
        ours.send(MessageKind.POOL)
    theirs.close()


def test_a_layer_is_told_of_when_the_next_one_has_been_written() -> None:
    """Only then has every rank written it: the sum behind it has come."""
    told: list[int] = []
    written = Written(told.append)
    for layer in range(3):
        written(layer)
        assert told == list(range(layer))
    written.finish()
    written.finish()
    assert told == [0, 1, 2]


# ---- pools ----

LAYERS = (LayerSpec(4, 8, 8), LayerSpec(4, 8, 8))


def pools(dtype: str, size: int, layers: tuple[LayerSpec, ...] = LAYERS) -> GroupArena:
    memory = SharedMemory(make_memory(), RankPlace(0, size), (6, 3), layers, dtype)
    return GroupArena(memory, layers, dtype)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8"])
@pytest.mark.parametrize("size", [2, 4, 8])
def test_what_the_leader_does_to_a_block_happens_on_every_rank(dtype: str, size: int) -> None:
    arena = pools(dtype, size)
    assert len(arena.ranks) == size
    for rank, each in enumerate(arena.ranks):
        assert all(spec.kv_heads == max(1, 4 // size) for spec in each.layers)
        bytes_of(each)[2] = rank + 1
    arena.copy_block(2, 5)
    host = arena.read_blocks([2, 0])
    arena.clear_block(2)
    arena.write_blocks(host, [0], [3])
    for rank, each in enumerate(arena.ranks):
        found = bytes_of(each)
        for block, value in enumerate((0, 0, 0, rank + 1, 0, rank + 1)):
            assert bool((found[block] == value).all()), (rank, block)


def bytes_of(arena: KVArena) -> torch.Tensor:
    """[blocks, bytes of a page] of a pool."""
    return torch.frombuffer(arena.buffer(), dtype=torch.uint8).view(arena.num_blocks, -1)


def test_ranks_see_one_memory() -> None:
    descriptor = make_memory()
    blocks = (6, 3)
    leader = SharedMemory(descriptor, RankPlace(0, 2), blocks, LAYERS, "float32")
    other = SharedMemory(descriptor, RankPlace(1, 2), blocks, LAYERS, "float32")
    k, _ = other.arena(1).layer(1)
    k[4, 2] = 7.0
    arena = GroupArena(leader, LAYERS, "float32")
    assert bool((arena.ranks[1].layer(1)[0][4, 2] == 7.0).all())
    assert not arena.layer(1)[0].any(), "rank 0's own heads"


# ---- refusals ----


@pytest.mark.parametrize(
    ("field", "options"),
    [
        ("deterministic", {"deterministic": True}),
        ("deterministic", {"deterministic": True, "model_impl": "transformers"}),
    ],
)
def test_options_that_do_not_go_with_ranks_are_refused(field: str, options: Any) -> None:
    with pytest.raises(ConfigError, match="tensor_parallel_size") as refused:
        refuse(EngineConfig("/nowhere", tensor_parallel_size=2, **options))
    assert refused.value.field == field


@pytest.mark.parametrize("device", ["auto", "cuda"])
def test_gpus_are_refused(device: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    with pytest.raises(ConfigError, match="--device cpu") as refused:
        refuse(EngineConfig("/nowhere", tensor_parallel_size=2, device=device))
    assert refused.value.field == "device"


@pytest.mark.parametrize(
    ("size", "kind", "overrides", "why"),
    [
        (3, "llama", {}, "4 query heads"),
        (4, "llama", {"num_attention_heads": 12, "num_key_value_heads": 6}, "6 KV heads"),
        (4, "llama", {"intermediate_size": 98}, "98 intermediate size"),
        (3, "gpt2", {}, "4 query heads"),
    ],
)
def test_models_that_cannot_be_split_are_refused(
    size: int, kind: str, overrides: Any, why: str, tmp_path: Path
) -> None:
    path = make_tiny_model(kind, tmp_path, **overrides)
    with pytest.raises(ModelRefused, match=why) as refused:
        load_model(
            config_of(path, tensor_parallel_size=size), RankGroup(RankPlace(0, size), "gloo")
        )
    assert refused.value.field == "tensor_parallel_size"


def test_a_size_below_one_is_no_size() -> None:
    with pytest.raises(ConfigError, match="tensor_parallel_size must be at least 1"):
        EngineConfig("/nowhere", tensor_parallel_size=0)
