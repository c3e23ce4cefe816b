"""Models that read images over tensor-parallel ranks: the tokens of one rank and of transformers'
generate, and an image is encoded by the first rank alone. Ranks are threads."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from baton.engine.core.engine import Engine
from baton.engine.loading.loading import LoadedModel, load_model
from baton.engine.memory.state_sizes import slot_bytes
from baton.engine.parallel.group import RankGroup
from baton.engine.parallel.image_rows import share_rows
from baton.engine.parallel.messages import decode_step, encode_step
from baton.engine.performance.estimate import rows, sized
from baton.engine.performance.ideal import EstimateOptions
from baton.engine.state.attention import Attention
from baton.engine.state.batch import Step, flatten
from baton.engine.state.images import ImageRows, PromptImage, PromptImages, StepImages
from baton.engine.state.interface import SequenceChunk
from baton.engine.state.place import RankPlace, rank_layers
from baton.protocol.images import ImageInput
from baton.protocol.kv_spec import HeldBlocks
from tests.engine.tensor_parallel_ranks import by_threads, config_of, engine_of_ranks
from tests.engine.test_images import CAT, DOG, TEXT, WIDE, Prompt, answer, ask, engine_of, of, run
from tests.engine.test_shared_weights import files
from tests.tiny_models import VOCAB_SIZE
from tests.tiny_vision import KINDS, generated, make_vision_model, prompt_of

# Of each way in which images are placed, in every run: three parts of a position and rows for the
# first layers; rows that see each other.
QUICK = ("qwen3_vl", "gemma3")
OPTIONS: dict[str, Any] = {
    "block_size": 4, "num_kv_blocks": 256, "max_num_seqs": 4, "measure_limits": False,
}  # fmt: skip
COUNTED = (
    "num_encoded_images", "num_reused_images", "num_prompt_tokens", "num_prefix_hit_tokens",
    "num_chunked_prompts", "num_preemptions", "num_swap_ins", "num_forks", "num_accepted_tokens",
)  # fmt: skip


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    logging.getLogger("transformers").setLevel(logging.ERROR)
    yield
    logging.getLogger("transformers").setLevel(logging.WARNING)


@pytest.fixture(
    scope="module",
    params=[pytest.param(k, marks=() if k in QUICK else pytest.mark.long) for k in KINDS],
)
def kind(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(scope="module")
def path(kind: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    logging.getLogger("transformers").setLevel(logging.ERROR)
    return make_vision_model(kind, tmp_path_factory.mktemp(kind))


def chunk_of(kind: str) -> int:
    """Tokens of a step: fewer than an image has, unless these must be computed together."""
    return 40 if kind == "gemma3" else 9


def counts(engine: Engine) -> dict[str, int]:
    return {name: getattr(engine.stats, name) for name in COUNTED}


@pytest.mark.parametrize("size", [2, pytest.param(4, marks=pytest.mark.long)])
def test_tokens_are_those_of_generate(path: Path, kind: str, size: int) -> None:
    """Chunks cut an image's rows; steps mix prompts with images, one without, and decode rows; a
    later prompt begins behind a prefix with images."""
    two = prompt_of(kind, [TEXT[0], WIDE, TEXT[1], CAT, TEXT[2]])
    other = prompt_of(kind, [TEXT[0], WIDE, TEXT[1], DOG, TEXT[2]])
    text: Prompt = (two[0], ())  # the same tokens, and no image
    longer = prompt_of(kind, [TEXT[0], WIDE, TEXT[1], CAT, TEXT[2], TEXT[1]])
    expected = [of(path, kind, each) for each in (two, other, text, longer)]
    assert len(set(map(tuple, expected[:3]))) == 3
    options: dict[str, Any] = {**OPTIONS, "max_num_batched_tokens": chunk_of(kind)}
    if kind.startswith("qwen3_5"):
        options |= {"num_state_checkpoints": 4, "state_checkpoint_spacing": 4}
    alone = engine_of(path, **options)
    with engine_of_ranks(str(path), size, **options) as engine:
        for each in (alone, engine):
            for name, prompt in zip("abc", (two, other, text), strict=True):
                ask(each, name, prompt)
            found = run(each)
            assert [found[name, 0] for name in "abc"] == expected[:3]
            assert answer(each, longer) == expected[3]
        assert counts(engine) == counts(alone)
        assert engine.stats.num_chunked_prompts > 0
        assert engine.stats.num_prefix_hit_tokens > 0
        assert engine.ranks is not None
        assert engine.ranks.size == size


@pytest.mark.parametrize("mode", ["swap", "recompute"])
def test_preempted_and_forked(path: Path, kind: str, mode: str) -> None:
    prompts = [prompt_of(kind, [[30 + number], CAT, TEXT[0], DOG, TEXT[1]]) for number in range(3)]
    expected = [generated(path, kind, *prompt, 24) for prompt in prompts]
    room = 44 if kind == "gemma3" else 30  # Gemma has two groups of layers
    options: dict[str, Any] = {**OPTIONS, "num_kv_blocks": room, "preemption_mode": mode}
    alone = engine_of(path, **options)
    with engine_of_ranks(str(path), 2, **options) as engine:
        samples: list[dict[tuple[str, int], list[int]]] = []
        for each in (alone, engine):
            for number, prompt in enumerate(prompts):
                ask(each, str(number), prompt, max_tokens=24)
            found = run(each)
            assert [found[str(number), 0] for number in range(3)] == expected
            ask(each, "n", prompts[0], n=2, temperature=1.0, seed=7)
            samples.append(run(each))
        assert samples[0] == samples[1]
        assert counts(engine) == counts(alone)
        assert engine.stats.num_preemptions > 0
        assert engine.stats.num_forks > 0
        assert (engine.stats.num_swap_ins > 0) == (mode == "swap")


@pytest.mark.long
def test_speculation_and_planning_ahead(path: Path, kind: str) -> None:
    prompt = prompt_of(kind, [TEXT[0], CAT, TEXT[1], WIDE, TEXT[2]])
    expected = of(path, kind, prompt)
    few = {"allowed_token_ids": (20, 21, 22, 23), "max_tokens": 60}  # pairs come again
    options: dict[str, Any] = {
        **OPTIONS,
        "speculative_method": "ngram",
        "num_speculative_tokens": 3,
    }
    plain = answer(engine_of(path), prompt, **few)
    with engine_of_ranks(str(path), 2, **options) as engine:
        assert answer(engine, prompt) == expected
        assert answer(engine, prompt, **few) == plain
        assert engine.stats.num_accepted_tokens > 0
    with engine_of_ranks(str(path), 2, **OPTIONS, async_scheduling=True) as engine:
        assert answer(engine, prompt) == expected
        assert engine.stats.num_steps_ahead > 0


@pytest.mark.long
def test_text_alone_over_ranks(path: Path, kind: str) -> None:
    text: Prompt = (tuple(range(5, 40)), ())
    expected = of(path, kind, text)
    for alone in (False, True):
        options: dict[str, Any] = {**OPTIONS, "language_model_only": alone}
        with engine_of_ranks(str(path), 2, **options) as engine:
            assert answer(engine, text) == expected
            assert engine.info.sees == (not alone)


# ---- what a rank keeps ----


def share(path: Path, rank: int, size: int, **options: Any) -> LoadedModel:
    group = RankGroup(RankPlace(rank, size), "gloo")
    return load_model(config_of(path, tensor_parallel_size=size, **options), group)


def towers(loaded: LoadedModel) -> list[Tensor]:
    """The weights of a rank's vision tower."""
    model: Any = loaded.model
    parts = dict(model._causal.base_model.named_children())
    del parts["language_model"]
    return [parameter for part in parts.values() for parameter in part.parameters()]


def test_the_first_rank_alone_has_the_tower(path: Path) -> None:
    whole = load_model(config_of(path))
    first, second = share(path, 0, 2), share(path, 1, 2)
    tower = sum(each.nbytes for each in towers(whole))
    assert sum(each.nbytes for each in towers(first)) == tower > 0
    assert towers(second) == []
    assert first.weight_bytes - second.weight_bytes == tower
    assert first.images is not None
    assert first.images.has_tower
    assert second.images is not None
    assert not second.images.has_tower
    assert first.info == second.info == whole.info
    assert first.model.parameter_counts == second.model.parameter_counts, "no row meets the tower"


@pytest.mark.long
def test_ranks_map_one_file_of_weights(path: Path, folder: Path) -> None:
    """The tower lies in it; the second rank does not read it."""
    first = share(path, 0, 2)
    second = share(path, 1, 2)
    assert len(files(folder)) == 1
    assert second.images is not None
    assert not second.images.has_tower
    assert first.info == second.info
    blind = share(path, 0, 2, vision_tower=False), share(path, 1, 2, vision_tower=False)
    assert [towers(each) for each in blind] == [[], []]
    assert len(files(folder)) == 2


def test_memory_is_what_the_estimate_says(path: Path) -> None:
    for size in (1, 2, 4):
        found = sized(EstimateOptions(path, tensor_parallel_size=size, memory="40MB"))
        assert found.refused is None
        loaded = load_model(config_of(path)) if size == 1 else share(path, 0, size)
        assert 0.97 < loaded.weight_bytes / found.weight_bytes < 1.03
        assert found.tower_bytes == sum(each.nbytes for each in towers(loaded))
        layers = rank_layers(loaded.info.layers, size)
        assert found.kv_bytes_per_token == sum(each.token_bytes("float32") for each in layers)
        assert found.state_bytes == slot_bytes(layers)
        named = dict(rows(found))["vision tower"]
        assert named.endswith("on the first device alone" if size > 1 else "of them")
    text = sized(EstimateOptions(path, language_model_only=True))
    assert text.refused is None
    assert text.tower_bytes == 0


def test_a_step_of_text_reads_no_tower(tmp_path: Path) -> None:
    path = make_vision_model("mistral3", tmp_path)
    found = sized(EstimateOptions(path, bandwidth="1GB/s"))
    table = 4 * VOCAB_SIZE * 64  # of which a step looks up a few rows
    assert found.decode[0].weight_bytes == found.weight_bytes - found.tower_bytes - table
    assert 4 * (found.parameters - found.active_parameters) == found.tower_bytes > 0
    # A config.json alone does not say that no file of an image processor lies beside it.
    alone = tmp_path / "elsewhere" / "config.json"
    alone.parent.mkdir()
    alone.write_bytes((path / "config.json").read_bytes())
    assert sized(EstimateOptions(alone)).tower_bytes == found.tower_bytes
    assert sized(EstimateOptions(alone.parent)).tower_bytes == 0
    assert sized(EstimateOptions(alone, language_model_only=True)).tower_bytes == 0


# ---- what is told ----


class Nowhere:
    """An attention that is never asked."""

    group_of = (0,)


ATTENTION: Attention = Nowhere()  # type: ignore[assignment]
CPU = torch.device("cpu")
HIDDEN = 6


@st.composite
def prompts_with_images(draw: st.DrawFn, deep: int) -> PromptImages | None:
    """Some images, one behind the other, with gaps; None = a prompt of text."""
    images, at = list[PromptImage](), 0
    sizes = st.tuples(st.integers(1, 3), st.integers(1, 4))
    for height, width in draw(st.lists(sizes, max_size=3)):
        at += draw(st.integers(1, 3))
        count = height * width
        made = ImageRows(torch.zeros(count, HIDDEN), torch.zeros(deep, count, HIDDEN))
        grid = (height, width) if draw(st.booleans()) else None
        given = ImageInput(b"digest", at, count, b"")
        images.append(PromptImage(given, tuple(range(at, at + count)), grid, made))
        at += count
    return PromptImages(tuple(images), draw(st.booleans())) if images else None


@st.composite
def steps(draw: st.DrawFn) -> Step:
    """A step of one to three chunks, some of them with images, which they may cut."""
    deep, chunks = draw(st.integers(0, 2)), list[SequenceChunk]()
    for number in range(draw(st.integers(1, 3))):
        start, count = draw(st.integers(0, 20)), draw(st.integers(1, 20))
        end = start + count
        blocks = (HeldBlocks(tuple(range(-(-end // 4)))),)
        images = draw(prompts_with_images(deep))
        chunks.append(
            SequenceChunk(str(number), range(count), start, blocks, num_prompt=end, images=images)
        )
    return flatten(chunks, ATTENTION, 4, CPU)


def arrived(step: Step) -> Step:
    body = encode_step(step.token_ids, step.positions, step.batch)
    return decode_step(body, ATTENTION, CPU)


@given(steps())
def test_a_step_with_images_arrives_as_it_was_told(told: Step) -> None:
    """All but the rows, whose shapes arrive."""
    found = arrived(told)
    assert torch.equal(found.token_ids, told.token_ids)
    assert torch.equal(found.positions, told.positions)
    assert found.batch.spans == told.batch.spans
    mine, theirs = found.batch.images, told.batch.images
    assert (mine is None) == (theirs is None)
    if mine is None or theirs is None:
        return
    assert torch.equal(mine.rows, theirs.rows)
    for name in ("positions", "embeds", "deep"):
        here, there = getattr(mine, name), getattr(theirs, name)
        assert (here is None) == (there is None), name
        assert here is None or here.shape == there.shape, name
    if theirs.positions is not None:
        assert mine.positions is not None
        assert torch.equal(mine.positions, theirs.positions)


def test_a_step_of_text_tells_no_more_than_before() -> None:
    """Head, tokens and positions; of each span seven numbers, its slots and blocks."""
    chunk = SequenceChunk("a", range(5), 0, (HeldBlocks((0, 1)),))
    step = flatten([chunk], ATTENTION, 4, CPU)
    body = encode_step(step.token_ids, step.positions, step.batch)
    assert len(body) == 8 * (3 + 2 * 5 + 7 + (1 + 1 + 5 + 2))
    assert arrived(step).batch.images is None


def test_a_step_without_rows_broadcasts_nothing() -> None:
    """A group that is not connected can send nothing."""
    group, none = RankGroup(RankPlace(0, 2), "gloo"), torch.tensor([], dtype=torch.int64)
    images = StepImages(torch.arange(6).view(3, 2), none, None, None)
    assert share_rows(images, group, torch.float32) is images
    assert share_rows(None, group, torch.float32) is None


@pytest.mark.parametrize("deep", [0, 2])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_all_ranks_have_the_leaders_rows(dtype: torch.dtype, deep: int) -> None:
    """In the model's dtype, whatever an encode node has sent."""
    where = torch.tensor([1, 4, 5])
    embeds, layers = torch.randn(3, HIDDEN), torch.randn(deep, 3, HIDDEN)

    def work(group: RankGroup) -> StepImages | None:
        own = embeds, layers
        if not group.place.leads:
            own = torch.full_like(embeds, torch.nan), torch.full_like(layers, torch.nan)
        return share_rows(StepImages(None, where, *own), group, dtype)

    for found in by_threads(2, work):
        assert torch.equal(found.embeds, embeds.to(dtype))
        assert torch.equal(found.deep, layers.to(dtype))
