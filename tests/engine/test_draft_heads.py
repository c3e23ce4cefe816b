"""Draft heads (MTP): the head's own numbers, outputs that it never changes, what is refused."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from baton.engine.core.sleeping import fall_asleep, reload, wake
from baton.engine.performance.estimate import sized
from baton.engine.performance.ideal import EstimateOptions
from baton.engine.state.batch import flatten
from baton.engine.state.interface import SequenceChunk
from baton.llm import LLM
from baton.llm_inputs import BeamSearchParams
from baton.llm_outputs import GenerationOutput
from baton.protocol.errors import ConfigError
from baton.protocol.request import FinishReason
from baton.protocol.sampling import SamplingParams
from tests.block_lists import held
from tests.engine.driving import assert_all_free
from tests.engine.running import Driver, load, relative_error
from tests.golden.draft_models import add_mtp, make_bigram, mtp_logits, save_eagle3
from tests.golden.latent_models import save_latent
from tests.tiny_models import make_tiny_model

PROMPTS = [[7, 8, 9, 10] * (2 + i) + [40 + i] for i in range(4)]
LONG = list(range(30, 100))


@pytest.fixture(scope="module")
def random_head(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Llama with a random head."""
    return add_mtp(make_tiny_model("llama", tmp_path_factory.mktemp("mtp")))


@pytest.fixture(scope="module")
def perfect_head(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Llama without context, with a head that is always right."""
    return make_bigram(add_mtp(make_tiny_model("llama", tmp_path_factory.mktemp("bigram"))))


def llm(path: Path, **config: Any) -> LLM:
    chosen: dict[str, Any] = {"dtype": "float32", "num_kv_blocks": 64, "block_size": 8, **config}
    return LLM(str(path), **chosen)


def drafting(path: Path, **config: Any) -> LLM:
    return llm(path, speculative_method="mtp", check_invariants=True, **config)


def tokens(outputs: list[GenerationOutput]) -> list[list[tuple[int, ...]]]:
    """The tokens of each sample of each prompt."""
    return [[sample.token_ids for sample in output.outputs] for output in outputs]


@torch.inference_mode()
def test_the_head_is_what_its_checkpoint_says(random_head: Path) -> None:
    loaded = load(random_head, speculative_method="mtp")
    assert loaded.head is not None
    assert len(loaded.info.layers) == 4
    driver = Driver(loaded)
    ids = [*LONG, 5]
    rows: list[torch.Tensor] = []
    hidden: list[torch.Tensor] = []
    for start, stop in ((0, 33), (33, 70)):  # its KV lasts from chunk to chunk
        steps = [
            flatten(
                [SequenceChunk("s", ids[start + by : stop + by], start, held(range(12)))],
                driver.attention, 8, loaded.device,
            )
            for by in (0, 1)
        ]  # fmt: skip
        plain, shifted = steps
        hidden.append(loaded.forward(plain.token_ids, plain.positions, plain.batch))
        states = loaded.head.forward(
            hidden[-1].clone(), shifted.token_ids, shifted.positions, shifted.batch
        )
        rows.append(loaded.head.logits(states))
    wanted = mtp_logits(random_head, torch.cat(hidden), torch.tensor(ids[1:]))
    assert relative_error(torch.cat(rows), wanted) < 1e-5


@pytest.mark.parametrize("temperature", [0.0, 0.4, 1.0])
def test_a_random_head_changes_no_token(random_head: Path, temperature: float) -> None:
    params = [
        SamplingParams(
            seed=i, temperature=temperature, max_tokens=24, ignore_eos=i % 2 == 0, n=1 + i % 2,
            top_k=8 * (i % 2), frequency_penalty=0.3 * (i == 2), logprobs=2 if i == 3 else None,
        )
        for i in range(4)
    ]  # fmt: skip
    wanted = llm(random_head).generate(PROMPTS, params)
    fast = drafting(random_head, num_kv_blocks=24, num_speculative_tokens=3)
    again = fast.generate(PROMPTS, params)
    assert tokens(again) == tokens(wanted)
    assert fast.engine.stats.num_drafted_tokens > 50
    assert_all_free(fast.engine)


@pytest.mark.parametrize(
    "seeds", [range(10), pytest.param(range(200), marks=pytest.mark.soak)], ids=["few", "200"]
)
@pytest.mark.parametrize("temperature", [0.5, 1.0])
def test_seeded_outputs_are_equal(random_head: Path, seeds: range, temperature: float) -> None:
    params = [SamplingParams(seed=seed, temperature=temperature, max_tokens=20) for seed in seeds]
    prompts = [PROMPTS[seed % 4] for seed in seeds]
    wanted = llm(random_head, num_kv_blocks=640).generate(prompts, params)
    given = drafting(random_head, num_kv_blocks=640).generate(prompts, params)
    assert tokens(given) == tokens(wanted)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_perfect_head_is_always_right(perfect_head: Path, temperature: float) -> None:
    params = SamplingParams(seed=3, temperature=temperature, max_tokens=22, ignore_eos=True)
    wanted = llm(perfect_head).generate([LONG], params)[0].outputs[0].token_ids
    fast = drafting(perfect_head, block_size=128)
    assert fast.generate([LONG], params)[0].outputs[0].token_ids == wanted
    stats = fast.engine.stats
    assert (stats.acceptance_rate, stats.num_drafted_tokens) == (1.0, 16)
    # Token 1 with the prompt; then five a step, and the last one, which needs no draft.
    assert stats.num_steps == 6


def test_drafts_end_with_the_sequence_s_blocks(perfect_head: Path) -> None:
    """No block is taken to draft: behind a full block there is one draft, which needs no slot."""
    params = SamplingParams(seed=3, max_tokens=9, ignore_eos=True)
    fast = drafting(perfect_head, block_size=8)
    engine = fast.engine
    fast.generate([LONG[:16]], params)
    assert engine.stats.num_drafted_tokens < 8
    assert engine.stats.acceptance_rate == 1.0
    assert_all_free(engine)


def test_chunks_prefix_hits_and_preemption(perfect_head: Path) -> None:
    params = SamplingParams(seed=5, temperature=0.8, max_tokens=30, ignore_eos=True)
    prompts = [LONG, [*LONG[:40], 5, 6, 7], LONG[:64], LONG[3:50]]
    wanted = tokens(llm(perfect_head).generate(prompts, params))
    for mode in ("swap", "recompute"):
        fast = drafting(
            perfect_head, num_kv_blocks=28, max_num_batched_tokens=32, max_num_seqs=8,
            preemption_mode=mode,
        )  # fmt: skip
        for _ in range(2):  # the second time over the KV of the first
            given = fast.generate(prompts, params)
            assert tokens(given) == wanted
        stats = fast.engine.stats
        assert stats.num_preemptions > 0
        assert stats.num_prefix_hit_tokens > 0
        assert stats.num_chunked_prompts > 0
        assert stats.acceptance_rate > 0.95  # slots of shared blocks may hold another next token
        assert_all_free(fast.engine)


def test_it_never_drafts_for_beams(perfect_head: Path) -> None:
    fast = drafting(perfect_head)
    search = BeamSearchParams(beam_width=3, max_tokens=6)
    wanted = llm(perfect_head).beam_search([LONG], search)
    assert tokens(fast.beam_search([LONG], search)) == tokens(wanted)
    assert fast.engine.stats.num_drafted_tokens == 0


def test_a_mixture_with_latent_attention(tmp_path: Path) -> None:
    """DeepSeek-V3's own kind of head: a sparse layer, with latents as its KV."""
    path = add_mtp(save_latent(tmp_path, "v3"))
    params = SamplingParams(seed=1, temperature=0.7, max_tokens=20, ignore_eos=True)
    wanted = llm(path).generate(PROMPTS, params)
    fast = drafting(path)
    assert tokens(fast.generate(PROMPTS, params)) == tokens(wanted)
    assert fast.engine.stats.num_drafted_tokens > 50
    assert [layer.kind for layer in fast.engine.info.layers] == ["mla"] * 4


def test_stop_strings_within_accepted_drafts(perfect_head: Path) -> None:
    """A text that ends in the middle of what a step accepted ends there, for each of its places."""
    whole = SamplingParams(seed=3, max_tokens=40, ignore_eos=True)
    plain, fast = llm(perfect_head), drafting(perfect_head, block_size=128)
    text = plain.generate(["what is it?"], whole)[0].outputs[0].text or ""
    pieces = {text[at : at + 2] for at in range(len(text) - 1)}
    stops = sorted(piece for piece in pieces if piece.isascii() and len(piece) == 2)
    assert len(stops) > 3
    for stop in stops:
        params = replace(whole, stop=(stop,))
        found, wanted = (
            each.generate(["what is it?"], params)[0].outputs[0] for each in (fast, plain)
        )
        assert found == wanted
        assert found.finish_reason is FinishReason.STOP
        assert found.text == text[: text.index(stop)]
    assert fast.engine.stats.num_accepted_tokens > 3 * len(stops)
    assert_all_free(fast.engine)


def test_it_drafts_again_after_a_sleep(perfect_head: Path) -> None:
    fast = drafting(perfect_head, block_size=128)
    engine, stats = fast.engine, fast.engine.stats
    params = SamplingParams(seed=3, max_tokens=22, ignore_eos=True)
    before = tokens(fast.generate([LONG], params))
    drafted = stats.num_drafted_tokens
    assert drafted > 0
    fall_asleep(engine)
    assert engine.model is None
    wake(engine, reload(engine.config))
    assert tokens(fast.generate([LONG], params)) == before
    assert stats.num_drafted_tokens == 2 * drafted
    assert stats.acceptance_rate == 1.0


@pytest.mark.parametrize(
    "config",
    [{"deterministic": True}, {"quantization": "int8"}, {"dtype": "bfloat16"}, {"kv_cache_dtype":
     "int8"}],
    ids=str,
)  # fmt: skip
def test_with_other_options(perfect_head: Path, config: dict[str, Any]) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
    fast = drafting(perfect_head, **config)
    assert fast.generate([LONG], params)[0].outputs[0].token_ids == (
        llm(perfect_head, **config).generate([LONG], params)[0].outputs[0].token_ids
    )
    assert fast.engine.stats.num_accepted_tokens > 5


def test_a_full_pool_of_slots_is_left_alone(random_head: Path) -> None:
    """What one sequence drafts is written into no block of another: prove_private holds."""
    fast = drafting(random_head, num_kv_blocks=40, num_speculative_tokens=6, block_size=4)
    params = [SamplingParams(seed=i, max_tokens=17, ignore_eos=True, n=3) for i in range(4)]
    wanted = llm(random_head).generate(PROMPTS, params)
    assert tokens(fast.generate(PROMPTS, params)) == tokens(wanted)


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        ({"model_impl": "transformers"}, "only the lean route"),
        ({"data_parallel_size": 2}, "data-parallel"),
    ],
)
def test_what_is_refused(random_head: Path, config: dict[str, Any], reason: str) -> None:
    with pytest.raises(ConfigError, match=reason) as caught:
        load(random_head, speculative_method="mtp", **config)
    assert caught.value.field == "speculative_method"


def test_checkpoints_without_a_head_are_refused(tmp_path: Path) -> None:
    path = make_tiny_model("llama", tmp_path)
    with pytest.raises(ConfigError, match="no layer that drafts") as caught:
        load(path, speculative_method="mtp")
    assert caught.value.field == "speculative_method"
    make_tiny_model("llama", tmp_path, num_nextn_predict_layers=1)
    with pytest.raises(ConfigError, match=r"lacks tensors.*eh_proj") as caught:
        load(path, speculative_method="mtp")
    assert caught.value.field == "speculative_method"


def test_both_nodes_need_the_head(random_head: Path) -> None:
    plain, head = load(random_head), load(random_head, speculative_method="mtp")
    assert plain.info.digest != head.info.digest
    assert plain.head is None
    assert len(plain.info.layers) == 3


@pytest.mark.parametrize("kind", ["llama", "v3", "eagle3"])
def test_baton_estimate_counts_the_head(kind: str, tmp_path: Path) -> None:
    if kind == "v3":
        path = add_mtp(save_latent(tmp_path / "model", "v3"))
    else:
        path = add_mtp(make_tiny_model("llama", tmp_path / "model", num_hidden_layers=5))
    own: dict[str, Any] = {"speculative_method": "mtp"}
    if kind == "eagle3":
        head = save_eagle3(tmp_path / "head", path, 200)
        own = {"speculative_method": "eagle3", "speculative_model": head}
    found = sized(EstimateOptions(model=path, **own))
    loaded = load(path, **{name: str(value) for name, value in own.items()})
    bias = 32 if kind == "v3" else 0  # of the gate: a buffer, which no family counts
    assert found.refused is None
    assert found.draft_weight_bytes == loaded.weight_bytes - load(path).weight_bytes - bias
    assert found.draft_kv_bytes_per_token == loaded.info.layers[-1].token_bytes("float32")


def test_baton_estimate_refuses_a_model_without_a_head(tmp_path: Path) -> None:
    path = make_tiny_model("llama", tmp_path)
    with pytest.raises(ConfigError, match="no layer that drafts") as caught:
        sized(EstimateOptions(model=path, speculative_method="mtp"))
    assert caught.value.field == "speculative_method"
