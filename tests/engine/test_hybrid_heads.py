"""Draft heads beside recurrent state (Qwen3-Next, Qwen3.5): the numbers of `mtp.*` layers, outputs
that no head changes, states that refused drafts leave as they were, what is refused."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from baton.engine.config import EngineConfig
from baton.engine.core.assembly import load_parts
from baton.engine.core.engine import Engine
from baton.engine.performance.estimate import sized
from baton.engine.performance.ideal import EstimateOptions
from baton.engine.state.batch import flatten
from baton.engine.state.interface import SequenceChunk
from baton.protocol.errors import ConfigError
from tests.block_lists import held
from tests.engine.driving import assert_all_free, run_samples, tokens_of
from tests.engine.running import Driver, load, relative_error
from tests.engine.test_state_models import ask, engine_of
from tests.golden.draft_models import save_eagle3
from tests.golden.hybrid_heads import add_head, make_bigram, reference
from tests.golden.hybrid_models import HYBRID_MODELS, save_hybrid, save_with_images
from tests.tiny_models import make_tiny_model

PROMPTS = [[7, 8, 9, 10] * (2 + i) + [40 + i] for i in range(4)]
LONG = list(range(30, 71))
WITH_IMAGES = ("qwen3_5", "qwen3_5_moe")
KINDS = ("qwen3 next", "qwen3.5", "qwen3.5 moe")
TAPS = "eagle_aux_hidden_state_layer_ids"


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    logging.getLogger("transformers").setLevel(logging.ERROR)
    yield
    logging.getLogger("transformers").setLevel(logging.WARNING)


@pytest.fixture(scope="module")
def random_head(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return add_head(save_hybrid(tmp_path_factory.mktemp("random"), "qwen3 next"))


@pytest.fixture(scope="module")
def perfect_head(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose tokens depend on the one before alone, with a head that is always right."""
    return make_bigram(add_head(save_hybrid(tmp_path_factory.mktemp("bigram"), "qwen3.5")))


@pytest.fixture(scope="module")
def good_head(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose states change a token now and then, which its head cannot know."""
    path = add_head(save_hybrid(tmp_path_factory.mktemp("good"), "qwen3.5"))
    return make_bigram(path, added=0.12)


def saved(path: Path, name: str) -> Path:
    """A checkpoint with a random layer that drafts."""
    return add_head(
        save_with_images(path, name) if name in WITH_IMAGES else save_hybrid(path, name)
    )


def drafting(path: Path, **options: Any) -> Engine:
    given = {"speculative_method": "mtp", "num_speculative_tokens": 3}
    return engine_of(path, **(given | options))


def answers(engine: Engine, *prompts: list[int], **params: Any) -> list[list[int]]:
    """The tokens of all prompts together, of all their samples; prompt i has seed i."""
    for index, prompt in enumerate(prompts):
        ask(engine, f"{index:03}", prompt, **({"seed": index} | params))
    return [tokens_of(events) for _, events in sorted(run_samples(engine).items())]


def assert_states(engine: Engine, plain: Driver) -> int:
    """Each running sequence has the state of its computed tokens; return how many were compared.

    `plain`: of the same model without a head.
    """
    compared = 0
    for sequence in engine.scheduler.sequences():
        count = sequence.num_computed
        if sequence.state_slot < 0 or not count:
            continue
        plain.logits(sequence.tokens[:count], range(-(-count // 8)), [count])
        assert engine.arena.states is not None
        for layer, spec in enumerate(plain.loaded.info.layers):
            if spec.state is None:
                continue
            ours, wanted = (each.views(layer) for each in (engine.arena.states, plain.states))
            for one, other in zip(ours, wanted, strict=True):
                assert one is not None
                assert other is not None
                assert relative_error(one[sequence.state_slot], other[1]) < 1e-4
        compared += 1
    return compared


@torch.inference_mode()
@pytest.mark.parametrize("name", [*HYBRID_MODELS, *WITH_IMAGES])
def test_the_layer_that_drafts_is_transformers_own(name: str, tmp_path: Path) -> None:
    """Behind the model's hidden states, and behind its own."""
    path = saved(tmp_path, name)
    hidden, wanted = reference(path, LONG)
    loaded = load(path, speculative_method="mtp")
    plain = load(path)
    assert loaded.head is not None
    assert loaded.info.layers[:-1] == plain.info.layers
    assert loaded.info.layers[-1].kind == "full"
    assert loaded.info.digest != plain.info.digest
    driver, states = Driver(loaded), hidden.clone()
    for ahead, other in enumerate(wanted, start=1):
        ids = LONG[ahead : len(hidden) + ahead]
        chunk = SequenceChunk("s", ids, 0, held(range(12)))
        step = flatten([chunk], driver.attention, 8, loaded.device)
        states = loaded.head.forward(states, step.token_ids, step.positions, step.batch)
        assert relative_error(states, other) < 1e-5
        assert torch.equal(loaded.head.logits(states), loaded.logits(states))


@pytest.mark.parametrize("name", [*KINDS, "qwen3_5_moe"])
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_a_random_head_changes_no_token(name: str, temperature: float, tmp_path: Path) -> None:
    path = saved(tmp_path, name)
    params: dict[str, Any] = {"temperature": temperature, "max_tokens": 16}
    wanted = answers(engine_of(path), *PROMPTS, **params)
    engine = drafting(path)
    assert answers(engine, *PROMPTS, **params) == wanted
    stats = engine.stats
    assert stats.num_drafted_tokens > 50
    assert stats.acceptance_rate < 0.3
    assert stats.num_rollbacks > 20
    assert_all_free(engine)
    assert engine.tables.states.num_free == engine.tables.states.num_slots == 8


@pytest.mark.parametrize("head", ["random_head", "perfect_head", "good_head"])
def test_states_are_those_of_the_computed_tokens(head: str, request: Any) -> None:
    """After each step: where drafts were accepted, where they were refused, and computed again."""
    path: Path = request.getfixturevalue(head)
    plain, engine, compared = Driver(load(path)), drafting(path), 0
    for index, prompt in enumerate([*PROMPTS[:2], LONG]):
        ask(engine, str(index), prompt, max_tokens=24, temperature=0.7, seed=index)
    while engine.has_work:
        engine.step()
        compared += assert_states(engine, plain)
    assert compared > 20
    least, most = {"random": (0, 0.2), "good": (0.3, 0.95), "perfect": (1, 1)}[head[:-5]]
    assert least <= engine.stats.acceptance_rate <= most
    assert (engine.stats.num_rollbacks > 10) == (head != "perfect_head")


@pytest.mark.parametrize(
    "seeds", [20, pytest.param(200, marks=pytest.mark.soak)], ids=["few", "200"]
)
@pytest.mark.parametrize("temperature", [0.5, 1.0])
@pytest.mark.parametrize("head", ["random_head", "good_head"])
def test_seeded_outputs_are_equal(head: str, seeds: int, temperature: float, request: Any) -> None:
    path: Path = request.getfixturevalue(head)
    prompts = [PROMPTS[seed % 4] for seed in range(seeds)]
    sizes: dict[str, Any] = {"max_num_seqs": 16, "max_num_batched_tokens": 128}
    params: dict[str, Any] = {"temperature": temperature, "max_tokens": 12}
    wanted = answers(engine_of(path, **sizes), *prompts, **params)
    engine = drafting(path, **sizes)
    assert answers(engine, *prompts, **params) == wanted
    assert len({tuple(tokens) for tokens in wanted}) > seeds // 4  # they do differ
    assert engine.stats.num_rollbacks > seeds // 2
    assert engine.stats.num_accepted_tokens > (seeds if head == "good_head" else 0)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_perfect_head_is_always_right(perfect_head: Path, temperature: float) -> None:
    params: dict[str, Any] = {"temperature": temperature, "max_tokens": 22, "seed": 3}
    wanted = answers(engine_of(perfect_head), LONG, **params)
    engine = drafting(
        perfect_head, block_size=64, max_num_batched_tokens=64, num_speculative_tokens=4
    )
    assert answers(engine, LONG, **params) == wanted
    stats = engine.stats
    assert (stats.acceptance_rate, stats.num_drafted_tokens) == (1.0, 16)
    assert stats.num_rollbacks == 0
    # Token 1 with the prompt; then five a step, and the last one, which needs no draft.
    assert stats.num_steps == 6


@pytest.mark.parametrize("mode", ["swap", "recompute"])
def test_chunks_checkpoints_and_preemption(perfect_head: Path, mode: str) -> None:
    prompts = [LONG, [*LONG[:24], 5, 6, 7], LONG[:32], LONG[3:40]]
    params: dict[str, Any] = {"temperature": 0.8, "max_tokens": 20}
    wanted = answers(engine_of(perfect_head), *prompts, **params)
    engine = drafting(
        perfect_head, block_size=8, num_kv_blocks=18, preemption_mode=mode,
        num_state_checkpoints=8, state_checkpoint_spacing=8,
    )  # fmt: skip
    for _ in range(3):  # later ones over the KV and the states of the first
        assert answers(engine, *prompts, **params) == wanted
    stats = engine.stats
    assert stats.num_preemptions > 0
    assert (stats.num_swap_ins > 0) == (mode == "swap")
    assert stats.num_checkpoint_hits > 0
    assert stats.num_chunked_prompts > 0
    assert stats.acceptance_rate > 0.95  # slots of shared blocks may hold another next token
    assert_all_free(engine)


def test_a_head_goes_on_from_a_checkpoint(good_head: Path) -> None:
    """Drafts behind a prefix hit are those of a prompt that was computed whole."""
    params: dict[str, Any] = {"temperature": 0.0, "max_tokens": 24}
    engine = drafting(good_head, num_state_checkpoints=8, state_checkpoint_spacing=4)
    counts: list[tuple[int, int]] = []
    for _ in range(2):
        before = engine.stats.num_drafted_tokens, engine.stats.num_accepted_tokens
        found = answers(engine, LONG, **params)
        assert found == answers(engine_of(good_head), LONG, **params)
        after = engine.stats.num_drafted_tokens, engine.stats.num_accepted_tokens
        counts.append((after[0] - before[0], after[1] - before[1]))
    assert engine.stats.num_checkpoint_hits == 1
    assert counts[0] == counts[1]
    assert counts[0][1] > 0


def test_samples_fork_and_beams_have_no_drafts(good_head: Path) -> None:
    params: dict[str, Any] = {"temperature": 0.9, "max_tokens": 14, "n": 3}
    engine = drafting(good_head, max_num_seqs=8)
    assert answers(engine, *PROMPTS, **params) == answers(
        engine_of(good_head, max_num_seqs=8), *PROMPTS, **params
    )
    assert engine.stats.num_forks > 0 < engine.stats.num_accepted_tokens
    drafted = engine.stats.num_drafted_tokens
    search: dict[str, Any] = {"beam_width": 3, "n": 1, "max_tokens": 6}
    assert answers(engine, LONG, **search) == answers(engine_of(good_head), LONG, **search)
    assert engine.stats.num_drafted_tokens == drafted
    assert_all_free(engine)


@pytest.mark.parametrize(
    "config", [{"quantization": "int8"}, {"dtype": "bfloat16"}, {"kv_cache_dtype": "int8"}], ids=str
)
def test_with_other_options(perfect_head: Path, config: dict[str, Any]) -> None:
    engine = drafting(perfect_head, **config)
    params: dict[str, Any] = {"max_tokens": 12}
    assert answers(engine, LONG, **params) == answers(
        engine_of(perfect_head, **config), LONG, **params
    )
    assert engine.stats.num_accepted_tokens > 5


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_an_eagle3_head(random_head: Path, temperature: float, tmp_path: Path) -> None:
    """It takes what goes into layers with a state, too."""
    llama = make_tiny_model("llama", tmp_path / "llama")
    head = save_eagle3(tmp_path / "head", llama, 200, 5, **{TAPS: [0, 1, 2]})
    params: dict[str, Any] = {"temperature": temperature, "max_tokens": 16}
    engine = drafting(random_head, speculative_method="eagle3", speculative_model=str(head))
    assert answers(engine, *PROMPTS, **params) == answers(
        engine_of(random_head), *PROMPTS, **params
    )
    assert engine.stats.num_drafted_tokens > 50
    assert engine.stats.num_rollbacks > 20
    assert_all_free(engine)


def test_what_is_refused(random_head: Path, tmp_path: Path) -> None:
    headless, images = save_hybrid(tmp_path / "m", "qwen3 next"), tmp_path / "images"
    save_with_images(images, "qwen3_5")
    (images / "preprocessor_config.json").write_text("{}")
    cases: list[tuple[Path, dict[str, Any], str]] = [
        (headless, {}, r"lacks tensors.*mtp\.fc\.weight"),
        (save_hybrid(tmp_path / "dense", "qwen3.5"), {}, "no layer that drafts"),
        (save_hybrid(tmp_path / "own", "qwen3.5", mtp_num_hidden_layers=1,
                     mtp_use_dedicated_embeddings=True), {}, "embedding of its own"),
        (random_head, {"model_impl": "transformers"}, "only the lean route"),
        (random_head, {"data_parallel_size": 2}, "data-parallel"),
        (images, {}, "images.*language-model-only"),
    ]  # fmt: skip
    for path, options, text in cases:
        with pytest.raises(ConfigError, match=text) as error:
            load(path, speculative_method="mtp", **options)
        assert error.value.field in ("speculative_method", *options)


@pytest.mark.parametrize("name", ["qwen3 next", "qwen3.5, biased", "qwen3.5 moe", "qwen3_5"])
def test_baton_estimate_counts_the_head(name: str, tmp_path: Path) -> None:
    path = saved(tmp_path, name)
    found = sized(EstimateOptions(model=path, speculative_method="mtp"))
    loaded = load(path, speculative_method="mtp")
    assert found.draft_weight_bytes == loaded.weight_bytes - load(path).weight_bytes
    assert found.draft_kv_bytes_per_token == loaded.info.layers[-1].token_bytes("float32")


def test_memory_is_what_the_estimate_says(random_head: Path) -> None:
    found = sized(
        EstimateOptions(
            random_head, memory="40MB", context=128, max_num_seqs=8, speculative_method="mtp"
        )
    )
    config = EngineConfig(
        str(random_head), dtype="float32", max_model_len=128, block_size=16, max_num_seqs=8,
        kv_cache_memory=f"{found.kv_bytes}B", speculative_method="mtp",
    )  # fmt: skip
    arena = load_parts(config).arena
    assert arena.states is not None
    assert (found.state_bytes, found.state_slots) == (arena.states.slot_bytes, 16)
    assert found.state_checkpoints == arena.states.num_checkpoints > 0
    assert found.num_blocks == arena.num_blocks
