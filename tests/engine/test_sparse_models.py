"""Layers that see a part of their keys (chunks, or keys that a query chooses), in fp32.

`generate` says the tokens, or the same engine with one block for everything; counters prove what
happened on the way.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from baton.engine.attention.indexed import IndexedAttention
from baton.engine.attention.torch_cpu import TorchAttention
from baton.engine.performance.estimate import sized
from baton.engine.performance.ideal import EstimateOptions
from baton.engine.state.attention import AttentionLayer
from baton.engine.state.batch import flatten
from baton.llm import LLM
from baton.protocol.errors import ConfigError
from baton.protocol.sampling import SamplingParams
from tests.engine.driving import assert_all_free
from tests.engine.running import load
from tests.engine.test_attention import BLOCK, CPU, SHAPES, Pool, chunks_of, fill_past, random_rows
from tests.golden.greedy import our_tokens, random_prompts
from tests.golden.sparse_models import SPARSE_MODELS, save_sparse
from tests.system.references import Tokens, prompts, transformers_tokens
from tests.tiny_models import VOCAB_SIZE

NUM_TOKENS = 30
PROMPTS = prompts((61, 40, 75, 3, 10))
GREEDY = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True)
# The others come with the long tests.
FEW = {"llama4", "deepseek v3.2", "glm 5"}
EVERY = [pytest.param(name, marks=[pytest.mark.long] * (name not in FEW)) for name in SPARSE_MODELS]
BOTH = ["llama4", "glm 5"]


@pytest.fixture(scope="module")
def known(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A function: the checkpoint of a name, and what transformers makes of PROMPTS with it."""
    made: dict[str, tuple[Path, list[Tokens]]] = {}

    def find(name: str) -> tuple[Path, list[Tokens]]:
        if name not in made:
            path = save_sparse(tmp_path_factory.mktemp("sparse"), name)
            made[name] = path, transformers_tokens(path, PROMPTS, NUM_TOKENS)
        return made[name]

    return find


def small(path: Path, **options: Any) -> LLM:
    chosen: dict[str, Any] = {
        "block_size": 4, "num_kv_blocks": 240, "check_invariants": True, "max_num_seqs": 8,
        "max_num_batched_tokens": 24, **options,
    }  # fmt: skip
    return LLM(str(path), dtype="float32", **chosen)


def roomy(path: Path, **options: Any) -> LLM:
    """One block holds any sequence whole."""
    return LLM(str(path), dtype="float32", block_size=128, num_kv_blocks=64, **options)


def tokens_of(llm: LLM, asked: SamplingParams = GREEDY) -> list[Tokens]:
    return [tuple(out.token_ids) for out in llm.generate([list(each) for each in PROMPTS], asked)]


@pytest.mark.parametrize("name", EVERY)
def test_tokens_are_those_of_generate(name: str, known: Any) -> None:
    """In chunks of a few tokens, beside other sequences, over shuffled blocks."""
    path, expected = known(name)
    loaded = load(path)
    assert loaded.info.model_impl == "transformers"
    assert our_tokens(loaded, PROMPTS, NUM_TOKENS) == [list(each) for each in expected]
    assert len({token for output in expected for token in output}) > 10  # decisive
    if name.startswith("llama4"):
        assert [layer.chunked for layer in loaded.attention_layers] == [True, False] * 2
        assert [layer.window for layer in loaded.info.layers] == [10, 0, 10, 0]
    else:
        dims = [16, 0, 16] if name == "glm 5" else None
        assert dims in (None, [layer.v_dim for layer in loaded.info.layers])
        assert {layer.kind for layer in loaded.info.layers} == {"mla"}


@pytest.mark.parametrize("name", BOTH)
def test_chunked_prompts_and_prefix_hits(name: str, known: Any) -> None:
    path, expected = known(name)
    llm = small(path)
    stats = llm.engine.stats
    assert tokens_of(llm) == expected
    assert stats.num_chunked_prompts > 0
    assert stats.num_prefix_hit_tokens == 0
    assert tokens_of(llm) == expected
    assert stats.num_prefix_hit_tokens > 150
    assert (stats.num_window_freed_blocks > 30) == (name == "llama4")
    assert_all_free(llm.engine)


@pytest.mark.parametrize("mode", ["swap", "recompute"])
@pytest.mark.parametrize("name", BOTH)
def test_preempted_requests_come_back(name: str, mode: Any, known: Any) -> None:
    # Each needs 22 blocks of the layers that see all at its end: four do not fit.
    path, _ = known(name)
    short = [list(prompt) for prompt in prompts((8, 8, 8, 8))]
    asked = SamplingParams(temperature=0.0, max_tokens=80, ignore_eos=True)
    num_blocks = 22 * (2 if name == "llama4" else 1) + 4
    llm = small(path, num_kv_blocks=num_blocks, preemption_mode=mode)
    stats = llm.engine.stats
    assert llm.generate(short, asked) == roomy(path).generate(short, asked)
    assert stats.num_preemptions > 0
    assert (stats.num_swap_ins > 0) == (mode == "swap")
    assert_all_free(llm.engine)


@pytest.mark.parametrize("name", BOTH)
def test_samples_and_beams(name: str, known: Any) -> None:
    path, _ = known(name)
    whole = roomy(path)
    for asked in (
        SamplingParams(seed=5, n=3, max_tokens=NUM_TOKENS, ignore_eos=True),
        SamplingParams(temperature=0.0, beam_width=3, n=2, max_tokens=NUM_TOKENS),
    ):
        llm = small(path)
        assert tokens_of(llm, asked) == tokens_of(whole, asked)
        assert llm.engine.stats.num_forks >= 6
        assert_all_free(llm.engine)


@pytest.mark.parametrize("name", BOTH)
def test_drafts_and_rounded_kv(name: str, known: Any) -> None:
    path, expected = known(name)
    own: dict[str, Any] = {"speculative_method": "draft", "speculative_model": str(path)}
    llm = small(path, max_num_batched_tokens=200, **own)
    assert tokens_of(llm) == expected
    assert llm.engine.stats.num_accepted_tokens > 50
    rounded = [make(path, kv_cache_dtype="int8") for make in (small, roomy)]
    assert tokens_of(rounded[0]) == tokens_of(rounded[1])
    assert tokens_of(rounded[0]) == tokens_of(rounded[1])  # over what the first time left


def test_chunks_in_a_fixed_order(known: Any) -> None:
    path, expected = known("llama4")
    llm, whole = (make(path, deterministic=True) for make in (small, roomy))
    found = tokens_of(llm)
    assert found == tokens_of(whole)
    assert found == expected


def test_keys_that_are_chosen_have_no_fixed_order(known: Any) -> None:
    with pytest.raises(ConfigError, match="scores of index keys") as caught:
        load(known("glm 5")[0], deterministic=True)
    assert caught.value.field == "deterministic"


@pytest.mark.parametrize("name", BOTH)
def test_baton_estimate_knows_them(name: str, known: Any) -> None:
    path, _ = known(name)
    found = sized(EstimateOptions(model=path))
    assert found.refused is None
    token_bytes = sum(layer.token_bytes("float32") for layer in load(path).info.layers)
    assert found.kv_bytes_per_token == token_bytes


@pytest.mark.parametrize("few", [1, 3, 12])
def test_each_query_sees_what_it_chose(few: int) -> None:
    """Against softmax over the chosen keys alone, row by row."""
    spec, chunks = AttentionLayer(4, 0.25, latent=12), chunks_of(SHAPES)
    pool = Pool.make(1, 16, 16, torch.float32)
    fill_past(pool, chunks)
    attention = IndexedAttention(pool, [spec], TorchAttention(pool, [spec]))
    step = flatten(chunks, attention, BLOCK, CPU)
    q, k, index = (random_rows(step, heads, 16, heads, torch.float32) for heads in (4, 1, 1))
    generator = torch.Generator().manual_seed(1)
    chosen: list[torch.Tensor] = []
    for at, span in enumerate(step.batch.spans):
        rows = slice(span.first_row, span.first_row + span.num_rows)
        held = attention.keep_index(0, index[rows, 0], at, step.batch)
        assert held.shape == (span.num_tokens, 16)
        assert torch.equal(held[span.start :], index[rows, 0])
        scores = torch.rand(span.num_rows, span.num_tokens, generator=generator)
        scores += torch.full_like(scores, -9.0).triu(span.start + 1)  # the past first
        chosen.append(scores.topk(min(few, span.num_tokens)).indices.int())
    step.batch.store(0, k, k[..., :0])
    found = attention.attend_chosen(0, q, chosen, step.batch)
    keys, _ = pool.layer(0)
    for chunk, span, picks in zip(chunks, step.batch.spans, chosen, strict=True):
        for row in range(span.num_rows):
            seen = [p for p in picks[row].tolist() if p <= span.start + row]
            own = torch.stack(
                [keys[chunk.blocks[0].ids[p // BLOCK], p % BLOCK, 0] for p in sorted(seen)]
            )
            weights = (q[span.first_row + row] @ own.T * 0.25).softmax(-1)
            torch.testing.assert_close(found[span.first_row + row], weights @ own[:, :12])


def test_other_lengths_than_the_window_of_a_prompt(known: Any) -> None:
    """Every length around a chunk's end: the first token behind the prompt is generate's."""
    path, _ = known("llama4")
    lengths = (8, 9, 10, 11, 19, 20, 21)
    several = random_prompts(VOCAB_SIZE, lengths)
    expected = transformers_tokens(path, [tuple(each) for each in several], 3)
    assert our_tokens(load(path), several, 3) == [list(each) for each in expected]
