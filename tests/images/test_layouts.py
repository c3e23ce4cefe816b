"""The tokens of an image equal those of transformers' processors, whatever its size."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st
from PIL import Image
from transformers.image_utils import ChannelDimension
from transformers.models.pixtral.image_processing_pil_pixtral import get_resize_output_image_size
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from baton.images.layouts import MAX_ASPECT_RATIO, FixedCount, PatchRows, ResizedGrid
from baton.images.model import ImageFile, ImageModel
from baton.protocol.errors import ContextLengthExceeded, InvalidRequest, ModelRefused
from baton.protocol.images import digest_of
from baton.text.tokenizer import Tokenizer
from tests.images.families import FAMILIES, Family, save, theirs

EDGE = st.one_of(st.integers(1, 64), st.integers(1, 6000))


@settings(max_examples=400, deadline=None)
@given(
    width=EDGE,
    height=EDGE,
    patch=st.sampled_from([7, 14, 16]),
    merge=st.integers(1, 3),
    bounds=st.tuples(st.integers(1, 1 << 16), st.integers(0, 1 << 23)),
)
@example(width=1, height=200, patch=14, merge=2, bounds=(3136, 12_845_056))
@example(width=6000, height=6000, patch=14, merge=2, bounds=(3136, 1_003_520))
@example(width=42, height=70, patch=14, merge=2, bounds=(1, 12_845_056))  # halves of a factor
def test_grids_are_those_of_qwens_processor(
    width: int, height: int, patch: int, merge: int, bounds: tuple[int, int]
) -> None:
    assume(max(width, height) <= MAX_ASPECT_RATIO * min(width, height))
    low, high = bounds[0], sum(bounds)
    layout = ResizedGrid(5, patch * merge, low, high)
    theirs = Qwen2VLImageProcessorPil(
        size={"shortest_edge": low, "longest_edge": high}, patch_size=patch, merge_size=merge
    )
    num_patches = theirs.get_number_of_image_patches(height, width, {})
    assert layout.tokens(width, height) == (5,) * (num_patches // merge**2)


def test_an_image_too_narrow_for_qwen_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="too narrow"):
        ResizedGrid(5, 28, 3136, 12_845_056).tokens(1, MAX_ASPECT_RATIO + 1)


@settings(max_examples=400, deadline=None)
@given(width=EDGE, height=EDGE, factor=st.sampled_from([14, 16, 28]), longest=st.integers(28, 2048))
@example(width=1540, height=1541, factor=28, longest=1540)
def test_rows_are_those_of_pixtrals_processor(
    width: int, height: int, factor: int, longest: int
) -> None:
    empty = np.broadcast_to(np.zeros(1, np.uint8), (height, width, 3))
    pixels = get_resize_output_image_size(
        empty, (longest, longest), (factor, factor), ChannelDimension.LAST
    )
    rows, columns = (edge // factor for edge in pixels)
    layout = PatchRows(5, 6, 7, factor, longest)
    if not rows or not columns:
        with pytest.raises(InvalidRequest, match="too narrow"):
            layout.tokens(width, height)
        return
    tokens = layout.tokens(width, height)
    row = [*[5] * columns, 6]
    assert list(tokens) == [*(row * rows)[:-1], 7]


def test_gemmas_count_is_fixed() -> None:
    assert FixedCount(5, 256).tokens(3, 9000) == (5,) * 256


# ---- whole prompts ----


@pytest.fixture(scope="module", params=sorted(FAMILIES))
def family(request: pytest.FixtureRequest) -> Family:
    return FAMILIES[request.param]


@pytest.fixture(scope="module")
def ours(family: Family, tmp_path_factory: pytest.TempPathFactory) -> tuple[ImageModel, Tokenizer]:
    folder = save(family, tmp_path_factory.mktemp(family.name))
    tokenizer = Tokenizer.load(folder)
    model = ImageModel.load(folder, tokenizer)
    assert model is not None
    return model, tokenizer


def image_file(width: int, height: int, number: int = 0) -> ImageFile:
    data = f"{width} {height} {number}".encode()
    return ImageFile(data, digest_of(data), width, height, f"images[{number}]")


def test_prompts_are_those_of_transformers_processor(
    family: Family, ours: tuple[ImageModel, Tokenizer]
) -> None:
    model, tokenizer = ours
    processor = theirs(family)

    @settings(max_examples=60, deadline=None)
    @given(
        sizes=st.lists(st.tuples(st.integers(1, 160), st.integers(1, 160)), max_size=3),
        text=st.sampled_from(["A fox", "\n", "", " ", "\n\n"]),
    )
    def equal(sizes: list[tuple[int, int]], text: str) -> None:
        sizes = [
            size
            for size in sizes
            if max(size) <= min(size) * (20 if family.name == "mistral3" else MAX_ASPECT_RATIO)
        ]
        rendered = f"<|user|>\n{text}" + "".join(f"{family.image}{text}" for _ in sizes)
        pictures = [Image.new("RGB", size) for size in sizes]
        told: Any = processor(text=[rendered], images=[pictures] if pictures else None)
        files = [image_file(*size, number) for number, size in enumerate(sizes)]
        ids = tokenizer.encode(model.rewritten(rendered, len(sizes)), add_special_tokens=False)
        prompt, images = model.placed(ids, files, 1 << 20)
        assert list(prompt) == np.asarray(told["input_ids"]).reshape(-1).tolist()
        assert [image.data for image in images] == [file.data for file in files]
        for image, file in zip(images, files, strict=True):
            tokens = model.tokens_of(file)
            assert prompt[image.start : image.end] == tokens
            assert image.digest == file.digest

    equal()


def test_a_marker_in_a_text_is_no_image(family: Family, ours: tuple[ImageModel, Tokenizer]) -> None:
    model, tokenizer = ours
    for num_images in (0, 1):
        text = "a" + model.marker * (num_images + 1)
        with pytest.raises(InvalidRequest, match="stands for an image"):
            model.rewritten(text, num_images)
    # Past the text's check: a token that only an image has.
    spelled = tokenizer.token(model.marker_id)
    assert spelled is not None
    for forged in {spelled, *(str(tokenizer.token(token)) for token in model.reserved)}:
        with pytest.raises(InvalidRequest):
            model.check_plain(tokenizer.encode(f"a{forged}b", add_special_tokens=False))
    model.check_plain(tokenizer.encode("no token of images", add_special_tokens=False))


def test_a_template_that_leaves_an_image_out_is_told(ours: tuple[ImageModel, Tokenizer]) -> None:
    with pytest.raises(InvalidRequest, match="1 places for 2 images"):
        ours[0].rewritten(f"a{ours[0].marker}b", 2)


def test_a_prompt_is_no_longer_than_allowed(ours: tuple[ImageModel, Tokenizer]) -> None:
    model, tokenizer = ours
    files = [image_file(90, 90, number) for number in range(9)]
    ids = tokenizer.encode(model.rewritten(model.marker * 9, 9), add_special_tokens=False)
    limit = 1 + len(model.tokens_of(files[0]))
    with pytest.raises(ContextLengthExceeded) as caught:
        model.placed(ids, files, limit)
    assert caught.value.field in ("images[0]", "images[1]")


def test_the_shape_of_an_image_is_named() -> None:
    model = ImageModel("x", "x", 5, frozenset(), ResizedGrid(5, 28, 3136, 9999))
    with pytest.raises(InvalidRequest, match=r"images\[0\]: an image of 1 x 900 pixels") as caught:
        model.placed([5], [image_file(1, 900)], 99)
    assert caught.value.field == "images[0]"


# ---- files of models ----


def test_a_model_of_texts_reads_no_images(tmp_path: Path) -> None:
    family = FAMILIES["qwen3_vl"]
    folder = save(family, tmp_path)
    tokenizer = Tokenizer.load(folder)
    (folder / "preprocessor_config.json").unlink()
    assert ImageModel.load(folder, tokenizer) is None
    (folder / "config.json").write_text('{"model_type": "qwen3"}')
    (folder / "preprocessor_config.json").write_text("{}")
    assert ImageModel.load(folder, tokenizer) is None


def test_newer_files_hold_the_image_processor_in_the_processor(tmp_path: Path) -> None:
    folder = save(FAMILIES["qwen3_vl"], tmp_path)
    tokenizer = Tokenizer.load(folder)
    (folder / "processor_config.json").write_text(
        '{"image_processor": {"patch_size": 4, "merge_size": 3, "min_pixels": 9, "max_pixels": 99}}'
    )
    model = ImageModel.load(folder, tokenizer)
    assert model is not None
    assert model.layout == ResizedGrid(model.marker_id, 12, 9, 99)


@pytest.mark.parametrize(
    ("name", "changes", "told"),
    [
        ("qwen3_vl", {"preprocessor_config.json": '{"patch_size": "x"}'}, "patch_size"),
        ("qwen3_vl", {"preprocessor_config.json": '{"size": {"height": 9}}'}, "shortest_edge"),
        ("mistral3", {"preprocessor_config.json": '{"size": {"height": 9}}'}, "longest_edge"),
        ("qwen3_vl", {"preprocessor_config.json": '{"do_resize": false}'}, "do_resize"),
        ("gemma3", {"preprocessor_config.json": '{"do_pan_and_scan": true}'}, "do_pan_and_scan"),
        ("qwen3_vl", {"config.json": '{"model_type": "qwen3_vl"}'}, "no token 151655"),
        ("mistral3", {"processor_config.json": '{"image_end_token": "two words"}'}, "two words"),
    ],
)
def test_files_that_are_not_followed(
    tmp_path: Path, name: str, changes: dict[str, str], told: str
) -> None:
    folder = save(FAMILIES[name], tmp_path)
    tokenizer = Tokenizer.load(folder)
    for file, content in changes.items():
        (folder / file).write_text(content)
    with pytest.raises(ModelRefused, match=told):
        ImageModel.load(folder, tokenizer)
