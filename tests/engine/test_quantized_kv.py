"""int8 and fp8 KV: what is stored is what is read, errors are bounded, and everything that moves
blocks (copies, swaps, preemption, prefix hits) moves scales too."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from baton.engine.attention.kv_store import Fp8Rows, Int8Rows, layer_store
from baton.engine.attention.reference import ReferenceAttention
from baton.engine.attention.torch_cpu import TorchAttention
from baton.engine.memory.kv_cache import KVArena, bytes_per_block
from baton.engine.state.attention import AttentionLayer
from baton.engine.state.batch import flatten
from baton.engine.state.interface import SequenceChunk
from baton.llm import LLM
from baton.protocol.errors import InternalError
from baton.protocol.kv_spec import LayerSpec
from baton.protocol.request import Request
from baton.protocol.sampling import SamplingParams
from kv_transfer.pool.layout import ArenaMemory
from tests.block_lists import held
from tests.engine.running import Driver, load, logits_of, relative_error
from tests.tiny_models import VOCAB_SIZE, make_tiny_model

SPEC = LayerSpec(kv_heads=2, k_dim=16, v_dim=16)
LATENT = LayerSpec(kv_heads=1, k_dim=24, v_dim=0, kind="mla")
CPU = torch.device("cpu")
PROMPT = torch.randint(5, VOCAB_SIZE, (60,), generator=torch.Generator().manual_seed(3)).tolist()


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model("qwen3", tmp_path_factory.mktemp("model"))


def random(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))


@pytest.mark.parametrize(("dtype", "bound"), [("int8", 1 / 254), ("fp8", 1 / 16)])
def test_what_is_stored_is_near_what_was_computed(dtype: str, bound: float) -> None:
    arena = KVArena((SPEC, LATENT), 6, 4, dtype)
    store = layer_store(arena, 0)
    k, v = random(3, 2, 16) * 5, random(3, 2, 16)
    store.write(k, v, torch.tensor([21, 2, 9]))
    found = store.keys.gather(torch.tensor([5, 0, 2]), torch.float32)
    assert found.shape == (12, 2, 16)
    rows = found[[1, 6, 9]]
    # int8: half a step of a head's range; fp8: 3 bits of mantissa, of the number itself.
    limit = bound * (k.abs().amax(-1, keepdim=True) if dtype == "int8" else k.abs() + 1e-2)
    assert ((rows - k).abs() <= limit).all()
    assert found.count_nonzero() == rows.count_nonzero()
    latent = layer_store(arena, 1)
    latent.write(random(1, 1, 24), random(1, 1, 0), torch.tensor([3]))
    assert latent.keys.gather(torch.tensor([0]), torch.bfloat16)[3].any()


def test_fp8_clamps_what_it_cannot_hold() -> None:
    rows = Fp8Rows(torch.zeros(1, 2, 1, 4, dtype=torch.uint8))
    rows.write(torch.tensor([[[1e6, -1e6, 448.0, 0.5]]]), torch.tensor([0]), torch.tensor([1]))
    found = rows.gather(torch.tensor([0]), torch.float32)[1, 0]
    assert found.tolist() == [448.0, -448.0, 448.0, 0.5]


def test_int8_of_zeros_is_zero() -> None:
    rows = Int8Rows(torch.ones(1, 1, 1, 4, dtype=torch.int8), torch.ones(1, 1, 1))
    rows.write(torch.zeros(1, 1, 4), torch.tensor([0]), torch.tensor([0]))
    assert not rows.gather(torch.tensor([0]), torch.float32).any()


@pytest.mark.parametrize("dtype", ["int8", "fp8"])
@pytest.mark.parametrize("window", [0, 5])
def test_attention_equals_its_twin_over_the_widened_pool(dtype: str, window: int) -> None:
    layer = AttentionLayer(4, 0.25, window)
    arena, wide = KVArena((SPEC,), 8, 4, dtype), KVArena((SPEC,), 8, 4, "float32")
    chunks = [
        SequenceChunk("a", [0] * 9, 0, held([5, 1, 2])),
        SequenceChunk("b", [0], 0, held([7])),
    ]
    attention = TorchAttention(arena, [layer])
    step = flatten(chunks, attention, 4, CPU)
    q, k, v = random(10, 4, 16), random(10, 2, 16), random(10, 2, 15)[..., :1].expand(10, 2, 16)
    found = step.batch.attend(0, q, k, v)
    store = layer_store(arena, 0)
    every = torch.arange(8)
    for rows, target in zip((store.keys, store.values), wide.layer(0), strict=True):
        target.copy_(rows.gather(every, torch.float32).view(target.shape))
    expected = ReferenceAttention(wide, [layer]).attend(0, q, step.batch)
    torch.testing.assert_close(found, expected, atol=2e-6, rtol=1e-5)


@pytest.mark.parametrize(("dtype", "bound"), [("int8", 0.02), ("fp8", 0.1)])
def test_logits_stay_near(dtype: str, bound: float, model: Path) -> None:
    exact = logits_of(load(model), PROMPT)
    rounded = load(model, kv_cache_dtype=dtype)
    assert rounded.info.kv_dtype == dtype
    # Measured: 0.007 and 0.05.
    assert 0 < relative_error(logits_of(rounded, PROMPT), exact) < bound


@pytest.mark.parametrize("dtype", ["int8", "fp8"])
def test_prefill_reads_what_it_stored(dtype: str, model: Path) -> None:
    driver = Driver(load(model, kv_cache_dtype=dtype))
    whole = driver.logits(PROMPT, range(8), [60])
    chunked = driver.logits(PROMPT, range(8, 16), [7, 1, 20, 1, 1, 30])
    # The same stored numbers; a sum in another order may round one of them to its neighbour.
    assert relative_error(chunked, whole) < 2e-3


@pytest.mark.parametrize("dtype", ["int8", "fp8"])
@pytest.mark.parametrize("mode", ["swap", "recompute"])
def test_preemption_and_prefix_hits_change_no_token(dtype: str, mode: str, model: Path) -> None:
    prompts = [PROMPT[:20], PROMPT[:33], PROMPT[:20] + PROMPT[40:50], PROMPT[30:]]
    params = SamplingParams(max_tokens=30, temperature=0.0, ignore_eos=True)
    options: dict[str, Any] = {
        "model": str(model),
        "block_size": 8,
        "kv_cache_dtype": dtype,
        "device": "cpu",
    }
    roomy = LLM(**options, num_kv_blocks=64, enable_prefix_caching=False)
    tight = LLM(**options, num_kv_blocks=16, preemption_mode=mode, check_invariants=True)
    expected = [output.token_ids for output in roomy.generate(prompts, params)]
    for count in (4, 4, 1, 1):  # the last over prefix hits
        found = [output.token_ids for output in tight.generate(prompts[:count], params)]
        assert found == expected[:count]
    stats = tight.engine.stats
    assert stats.num_preemptions > 0
    assert (stats.num_swap_ins > 0) == (mode == "swap")
    assert stats.num_prefix_hit_tokens > 0


def test_parallel_samples_share_rounded_blocks(model: Path) -> None:
    params = SamplingParams(max_tokens=12, temperature=0.8, seed=5, n=3, ignore_eos=True)
    options: dict[str, Any] = {
        "model": str(model),
        "block_size": 8,
        "kv_cache_dtype": "int8",
        "device": "cpu",
    }
    engine = LLM(**options, num_kv_blocks=64)
    (together,) = engine.generate([PROMPT[:21]], params)
    assert engine.engine.stats.num_copied_blocks > 0
    assert len({output.token_ids for output in together.outputs}) == 3
    (first,) = LLM(**options, num_kv_blocks=64).generate(
        [PROMPT[:21]], SamplingParams(max_tokens=12, temperature=0.8, seed=5, ignore_eos=True)
    )
    assert first.token_ids == together.outputs[0].token_ids


def test_scales_travel_with_their_blocks() -> None:
    arena = KVArena((SPEC, LATENT), 6, 4, "int8")
    for layer, spec in enumerate(arena.layers):
        store = layer_store(arena, layer)
        store.write(random(4, spec.kv_heads, spec.k_dim), random(4, spec.kv_heads, spec.v_dim),
                    torch.arange(4, 8))  # fmt: skip

    def block(index: int) -> list[torch.Tensor]:
        at = torch.tensor([index])
        stores = [layer_store(arena, layer) for layer in range(2)]
        return [store.keys.gather(at, torch.float32) for store in stores]

    expected = block(1)
    arena.copy_block(1, 4)
    host = arena.read_blocks([0, 1])
    arena.write_blocks(host, [1], [2])
    for index in (2, 4):
        assert all(torch.equal(a, b) for a, b in zip(block(index), expected, strict=True))


def test_sizes_count_scales() -> None:
    assert bytes_per_block((SPEC, LATENT), 64, "int8") == 64 * (2 * 32 + 4 * 4 + 24 + 4)
    assert bytes_per_block((SPEC, LATENT), 64, "fp8") == 64 * (2 * 32 + 24)
    assert KVArena((SPEC,), 8, 4, "int8").num_bytes == 8 * bytes_per_block((SPEC,), 4, "int8")
    with pytest.raises(InternalError, match="no scales"):
        KVArena((SPEC,), 8, 4, "fp8").scales(0)


def test_each_precision_has_its_own_prefix_hashes(model: Path) -> None:
    roots: set[bytes] = set()
    for dtype in ("auto", "int8", "fp8"):
        engine = LLM(model=str(model), num_kv_blocks=8, kv_cache_dtype=dtype, device="cpu").engine
        asked = Request("r", tuple(PROMPT), SamplingParams())
        roots.add(engine.known_root_hash(asked))
    assert len(roots) == 3


@pytest.mark.parametrize(("dtype", "scales"), [("int8", 4 * 4), ("fp8", 0)])
def test_transfer_carries_quantized_kv_with_its_scales(dtype: str, scales: int) -> None:
    memory = ArenaMemory(KVArena((SPEC,), 8, 4, dtype))
    assert sum(len(part) for part in memory.read(0, held([3]), 0, 4)) == 4 * (2 * 32 + scales)
