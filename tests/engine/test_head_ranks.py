"""Draft heads over tensor-parallel ranks (as threads): tokens and guesses of one rank."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from baton.engine.performance.estimate import sized
from baton.engine.performance.ideal import EstimateOptions
from baton.llm import LLM
from baton.protocol.errors import ModelRefused
from baton.protocol.sampling import SamplingParams
from tests.engine.driving import assert_all_free
from tests.engine.tensor_parallel_ranks import engine_of_ranks
from tests.engine.test_draft_heads import tokens
from tests.golden import hybrid_heads
from tests.golden.draft_models import add_mtp, make_bigram, save_eagle3
from tests.golden.hybrid_models import save_hybrid
from tests.golden.latent_models import save_latent
from tests.system.references import prompts
from tests.tiny_models import make_tiny_model

PROMPTS = [list(prompt) for prompt in prompts((30, 14, 14, 5))]
TAPS: dict[str, Any] = {"eagle_aux_hidden_state_layer_ids": [0, 1, 2]}
CASES = [
    *((kind, 2) for kind in ("llama", "always right", "latent mixture", "hybrid", "eagle3")),
    *((kind, 4) for kind in ("latent mixture", "eagle3")),
]


def make(kind: str, path: Path) -> tuple[Path, dict[str, Any]]:
    """A checkpoint, and the options of its head."""
    mtp: dict[str, Any] = {"speculative_method": "mtp"}
    if kind == "latent mixture":
        return add_mtp(save_latent(path, "v3")), mtp
    if kind == "hybrid":
        return hybrid_heads.add_head(save_hybrid(path, "qwen3.5")), mtp
    if kind == "eagle3":
        target = make_tiny_model("llama", path / "target")
        head = save_eagle3(path / "head", target, 200, **TAPS)
        return target, {"speculative_method": "eagle3", "speculative_model": head}
    model = add_mtp(make_tiny_model("llama", path))
    return (make_bigram(model) if kind == "always right" else model), mtp


def text_of(options: dict[str, Any]) -> dict[str, Any]:
    return {option: str(value) for option, value in options.items()}


@pytest.mark.parametrize(("kind", "size"), CASES)
def test_tokens_and_guesses_are_those_of_one_rank(kind: str, size: int, tmp_path: Path) -> None:
    path, head = make(kind, tmp_path)
    head = text_of(head)
    sizes: dict[str, Any] = {"num_kv_blocks": 64, "block_size": 8, "max_num_batched_tokens": 24}
    sizes |= {"max_num_seqs": 8, "num_speculative_tokens": 3}
    params = [
        SamplingParams(
            seed=i, temperature=0.4 * i, max_tokens=20, ignore_eos=True, n=1 + (i == 2),
            logprobs=2 if i == 3 else None, prompt_logprobs=1 if i == 0 else None,
        )
        for i in range(len(PROMPTS))
    ]  # fmt: skip
    plain = LLM(str(path), "float32", threads=1, **sizes)
    expected = tokens(plain.generate(PROMPTS, params))
    alone = LLM(str(path), "float32", threads=1, **sizes, **head)
    assert tokens(alone.generate(PROMPTS, params)) == expected
    with engine_of_ranks(str(path), size, **sizes, **head) as engine:
        assert tokens(LLM("unread", engine=engine).generate(PROMPTS, params)) == expected
        one, several = alone.engine.stats, engine.stats
        assert several.num_drafted_tokens == one.num_drafted_tokens > 50
        assert several.num_accepted_tokens == one.num_accepted_tokens
        assert several.num_chunked_prompts > 0
        assert (several.acceptance_rate == 1.0) == (kind == "always right")
        assert_all_free(engine)


@pytest.mark.parametrize("kind", ["llama", "eagle3"])
def test_baton_estimate_counts_a_rank_s_share(kind: str, tmp_path: Path) -> None:
    path, head = make(kind, tmp_path)
    found = sized(EstimateOptions(model=path, tensor_parallel_size=2, **head))
    held: list[int] = []
    for options in ({}, text_of(head)):
        with engine_of_ranks(str(path), 2, num_kv_blocks=16, block_size=8, **options) as engine:
            assert engine.model is not None
            held.append(engine.model.weight_bytes)
            layers = engine.info.layers
    assert found.refused is None
    # It takes norms, which each rank holds whole, for cut ones.
    assert found.draft_weight_bytes == pytest.approx(held[1] - held[0], rel=0.02)
    assert found.draft_kv_bytes_per_token == layers[-1].token_bytes("float32") // 2


def test_a_head_that_cannot_be_split_is_refused(tmp_path: Path) -> None:
    target = make_tiny_model("llama", tmp_path / "target")
    other = make_tiny_model("llama", tmp_path / "other", intermediate_size=97)
    head = save_eagle3(tmp_path / "head", other, 200, **TAPS)
    options = text_of({"speculative_method": "eagle3", "speculative_model": head})
    with (
        pytest.raises(ModelRefused, match="cannot be split over 2 ranks"),
        engine_of_ranks(str(target), 2, **options),
    ):
        pass
