"""Models that read images give transformers' tokens: in chunks, in batches, behind prefix hits,
preempted, forked and speculated on; and an image is encoded once."""

from __future__ import annotations

import io
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from safetensors.torch import load_file, save_file

from baton.engine.config import EngineConfig
from baton.engine.core.assembly import build_engine
from baton.engine.core.engine import Engine
from baton.protocol.errors import InvalidRequest, ModelRefused, UnsupportedFeature
from baton.protocol.images import ImageInput, digest_of
from baton.protocol.request import Request
from baton.protocol.sampling import SamplingParams
from tests.engine.driving import assert_all_free
from tests.golden.hybrid_heads import add_head
from tests.tiny_vision import IMAGE, KINDS, generated, make_vision_model, picture, prompt_of

NEW_TOKENS = 10
CAT, DOG, WIDE = picture(1), picture(2), picture(3, 16, 40)
TEXT = ([5, 6, 7], [9, 10, 11, 12], [20, 21])
Prompt = tuple[tuple[int, ...], tuple[ImageInput, ...]]


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    logging.getLogger("transformers").setLevel(logging.ERROR)
    yield
    logging.getLogger("transformers").setLevel(logging.WARNING)


@pytest.fixture(
    scope="module",
    params=[pytest.param(k, marks=[pytest.mark.long] * k.endswith("_moe")) for k in KINDS],
)
def kind(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(scope="module")
def path(kind: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    logging.getLogger("transformers").setLevel(logging.ERROR)
    return make_vision_model(kind, tmp_path_factory.mktemp(kind))


def engine_of(path: Path, **options: Any) -> Engine:
    given: dict[str, Any] = {
        "dtype": "float32", "device": "cpu", "block_size": 4, "num_kv_blocks": 256,
        "max_num_batched_tokens": 128, "max_num_seqs": 4, "check_invariants": True,
        "measure_limits": False,
    }  # fmt: skip
    return build_engine(EngineConfig(str(path), **(given | options)))


def ask(engine: Engine, name: str, prompt: Prompt, **params: Any) -> None:
    given: dict[str, Any] = {"max_tokens": NEW_TOKENS, "temperature": 0.0, "ignore_eos": True}
    ids, images = prompt
    engine.add(Request(name, ids, SamplingParams(**(given | params)), images=images))


def run(engine: Engine) -> dict[tuple[str, int], list[int]]:
    """The tokens of each sample, once the engine has no work left."""
    found: dict[tuple[str, int], list[int]] = {}
    while engine.has_work:
        for event in engine.step():
            found.setdefault((event.request_id, event.sample), []).extend(event.token_ids)
    assert_all_free(engine)
    return found


def answer(engine: Engine, prompt: Prompt, **params: Any) -> list[int]:
    ask(engine, "one", prompt, **params)
    return run(engine)["one", 0]


def of(path: Path, kind: str, prompt: Prompt) -> list[int]:
    return generated(path, kind, *prompt, NEW_TOKENS)


def test_tokens_are_those_of_generate(path: Path, kind: str) -> None:
    two = prompt_of(kind, [TEXT[0], WIDE, TEXT[1], CAT, TEXT[2]])
    other = prompt_of(kind, [TEXT[0], WIDE, TEXT[1], DOG, TEXT[2]])
    text: Prompt = (two[0], ())  # the same tokens, and no image
    expected = [of(path, kind, each) for each in (two, other, text)]
    assert len(set(map(tuple, expected))) == 3
    # The rows of an image of Gemma see each other: they are one chunk, others are cut.
    least = 40 if kind == "gemma3" else 9
    for tokens in (128, least):
        engine = engine_of(path, max_num_batched_tokens=tokens)
        for name, each in zip("abc", (two, other, text), strict=True):
            ask(engine, name, each)
        found = run(engine)
        assert [found[name, 0] for name in "abc"] == expected
        # The same text: no block of one image serves the other, nor the text.
        assert answer(engine, other) == expected[1]
        assert answer(engine, text) == expected[2]
    assert engine.info.sees
    assert engine.stats.num_chunked_prompts >= 3


def test_an_image_is_encoded_once(path: Path, kind: str) -> None:
    engine = engine_of(path, max_num_batched_tokens=40 if kind == "gemma3" else 9)
    prompts = [prompt_of(kind, [[30 + number], CAT, TEXT[0]]) for number in range(8)]
    for number, prompt in enumerate(prompts):
        ask(engine, str(number), prompt)
    found = run(engine)
    assert (engine.stats.num_encoded_images, engine.stats.num_reused_images) == (1, 7)
    assert found["7", 0] == of(path, kind, prompts[7])
    # Behind a prefix hit nothing is encoded, nor looked up.
    again = prompt_of(kind, [[30], CAT, TEXT[0], TEXT[1]])
    expected = of(path, kind, again)
    assert answer(engine, again) == expected
    states = kind.startswith("qwen3_5")  # no prefix of it is reused yet
    assert engine.stats.num_reused_images == 7 + states
    assert (engine.stats.num_prefix_hit_tokens > 0) == (not states)


def test_without_room_in_the_cache_each_request_encodes_its_image_once(
    path: Path, kind: str
) -> None:
    engine = engine_of(
        path, max_num_batched_tokens=40 if kind == "gemma3" else 9, image_cache_memory="1"
    )
    prompts = [prompt_of(kind, [[30 + number], CAT, TEXT[0]]) for number in range(3)]
    for number, prompt in enumerate(prompts):
        ask(engine, str(number), prompt)
    found = run(engine)
    assert (engine.stats.num_encoded_images, engine.stats.num_reused_images) == (3, 0)
    assert found["2", 0] == of(path, kind, prompts[2])
    images = engine.model and engine.model.images
    assert images is not None
    assert images.num_bytes == 0


@pytest.mark.parametrize("mode", ["swap", "recompute"])
def test_preempted_and_forked(path: Path, kind: str, mode: str) -> None:
    prompts = [prompt_of(kind, [[30 + number], CAT, TEXT[0], DOG, TEXT[1]]) for number in range(3)]
    expected = [generated(path, kind, *prompt, 24) for prompt in prompts]
    room = 44 if kind == "gemma3" else 30  # Gemma has two groups of layers
    engine = engine_of(path, num_kv_blocks=room, preemption_mode=mode)
    for number, prompt in enumerate(prompts):
        ask(engine, str(number), prompt, max_tokens=24)
    found = run(engine)
    assert [found[str(number), 0] for number in range(3)] == expected
    assert engine.stats.num_preemptions > 0
    wide = engine_of(path)
    ask(wide, "n", prompts[0], n=4, temperature=1.0, seed=7)
    samples = run(wide)
    assert wide.stats.num_encoded_images == 2
    alone = engine_of(path, enable_prefix_caching=False, max_num_seqs=1)
    ask(alone, "n", prompts[0], temperature=1.0, seed=7)
    assert samples["n", 0] == run(alone)["n", 0]
    assert len({tuple(tokens) for tokens in samples.values()}) > 1


def test_speculation_and_resumption(path: Path, kind: str) -> None:
    prompt = prompt_of(kind, [TEXT[0], CAT, TEXT[1], WIDE, TEXT[2]])
    expected = of(path, kind, prompt)
    engine = engine_of(path, speculative_method="ngram", num_speculative_tokens=3)
    assert answer(engine, prompt) == expected
    # Out of four tokens pairs come again, and are drafted.
    few = {"allowed_token_ids": (20, 21, 22, 23), "max_tokens": 60}
    plain = answer(engine_of(path), prompt, **few)
    assert answer(engine, prompt, **few) == plain
    assert engine.stats.num_accepted_tokens > 0
    # Another node goes on behind the tokens that were emitted.
    ids, images = prompt
    engine = engine_of(path)
    params = SamplingParams(max_tokens=NEW_TOKENS, temperature=0.0, ignore_eos=True)
    engine.add(Request("r", ids, params, (tuple(expected[:4]),), images=images))
    assert run(engine)["r", 0] == expected[4:]


def test_text_alone(path: Path, kind: str) -> None:
    text: Prompt = (tuple(range(5, 40)), ())
    expected = of(path, kind, text)
    assert answer(engine_of(path), text) == expected
    engine = engine_of(path, language_model_only=True)
    assert answer(engine, text) == expected
    assert not engine.info.sees
    with pytest.raises(UnsupportedFeature, match="reads no images"):
        ask(engine, "image", prompt_of(kind, [TEXT[0], CAT]))


def store_published_experts(path: Path) -> None:
    """Store experts as published checkpoints of the two families do: all of a layer in one tensor,
    [experts, inputs, outputs] of Qwen3-VL, [experts, outputs, inputs] of Qwen3.5."""
    file = path / "model.safetensors"
    tensors = load_file(file)
    for name in [name for name in tensors if name.endswith(".experts.gate_up_proj")]:
        for each in (name, name.replace("gate_up", "down")):
            tensors[each] = tensors[each].transpose(1, 2).contiguous()
    for name in [name for name in tensors if name.endswith(".experts.0.gate_proj.weight")]:
        prefix = name.removesuffix("0.gate_proj.weight")
        parts = {
            part: torch.stack([tensors.pop(f"{prefix}{i}.{part}_proj.weight") for i in range(8)])
            for part in ("gate", "up", "down")
        }
        tensors[f"{prefix}gate_up_proj"] = torch.cat((parts["gate"], parts["up"]), dim=1)
        tensors[f"{prefix}down_proj"] = parts["down"]
    save_file(tensors, file, {"format": "pt"})


@pytest.mark.parametrize("mixture", ["qwen3_vl_moe", "qwen3_5_moe"])
def test_experts_as_they_are_published(mixture: str, tmp_path: Path) -> None:
    path = make_vision_model(mixture, tmp_path)
    prompts = (prompt_of(mixture, [TEXT[0], CAT, TEXT[1]]), (tuple(range(5, 40)), ()))
    expected = [of(path, mixture, prompt) for prompt in prompts]
    store_published_experts(path)
    assert [of(path, mixture, prompt) for prompt in prompts] == expected
    engine = engine_of(path, max_num_batched_tokens=9)
    assert [answer(engine, prompt) for prompt in prompts] == expected
    assert answer(engine_of(path, language_model_only=True), prompts[1]) == expected[1]


@pytest.mark.parametrize("hybrid", ["qwen3_5", "qwen3_5_moe"])
def test_the_language_model_alone_drafts(hybrid: str, tmp_path: Path) -> None:
    """With images its layer that drafts (`mtp`) is refused (test_hybrid_heads.py)."""
    path = make_vision_model(hybrid, tmp_path)
    prompts: list[Prompt] = [(tuple(range(start, start + 20)), ()) for start in (5, 40, 90)]
    expected = [of(path, hybrid, prompt) for prompt in prompts]
    add_head(path)
    engine = engine_of(path, language_model_only=True, speculative_method="mtp")
    for name, prompt in zip("abc", prompts, strict=True):
        ask(engine, name, prompt)
    found = run(engine)
    assert [found[name, 0] for name in "abc"] == expected
    assert engine.stats.num_drafted_tokens > 20
    assert len(engine.info.layers) == 5


def _file(image: Image.Image, format_: str) -> bytes:
    file = io.BytesIO()
    image.save(file, format_)
    return file.getvalue()


BROKEN = [
    pytest.param(b"", "cannot be read", id="empty"),
    pytest.param(b"<svg xmlns='http://www.w3.org/2000/svg'/>", "cannot be read", id="svg"),
    pytest.param(CAT[: len(CAT) // 2], "cannot be read", id="truncated"),
    pytest.param(_file(Image.new("RGB", (8, 8)), "BMP"), "cannot be read", id="another format"),
    pytest.param(_file(Image.new("1", (9000, 9000)), "PNG"), "are the most", id="bomb"),
    pytest.param(picture(5, 48, 48), "rows", id="another size"),
]


@pytest.mark.parametrize(("data", "reason"), BROKEN)
def test_hostile_files_are_refused(path: Path, kind: str, data: bytes, reason: str) -> None:
    if kind == "gemma3" and reason == "rows":
        pytest.skip("Gemma gives each image as many rows")
    engine = engine_of(path)
    ids, (image,) = prompt_of(kind, [TEXT[0], CAT, TEXT[1]])
    wrong = ImageInput(digest_of(data), image.start, image.num_tokens, data)
    with pytest.raises(InvalidRequest, match=reason) as caught:
        ask(engine, "bad", (ids, (wrong,)))
    assert caught.value.field == "images"
    assert not engine.has_work


def _shift(prompt: Prompt, by: int) -> Prompt:
    ids, (image,) = prompt
    return ids, (ImageInput(image.digest, image.start + by, image.num_tokens, image.data),)


def test_what_does_not_fit_is_refused(path: Path, kind: str) -> None:
    engine = engine_of(path)
    prompt = prompt_of(kind, [TEXT[0], CAT, TEXT[1]])
    with pytest.raises(InvalidRequest, match=f"placeholders .token {IMAGE}"):
        ask(engine, "beside", _shift(prompt, 2))
    with pytest.raises(ModelRefused, match="deterministic"):
        engine_of(path, deterministic=True)
    if kind == "gemma3":
        with pytest.raises(InvalidRequest, match="must be computed in one step"):
            ask(engine_of(path, max_num_batched_tokens=32), "large", prompt)
        exact = Request(
            "exact", prompt[0], SamplingParams(seed=1), resume="exact", images=prompt[1]
        )
        with pytest.raises(UnsupportedFeature, match="exact"):
            engine.add(exact)
