"""Rows of images in the pool of an encode node: found by digest, pinned, evicted, refused."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
import torch

from baton.engine.config import EngineConfig
from baton.engine.core.assembly import assemble, load_parts, load_tower_parts
from baton.engine.core.engine import Engine
from baton.engine.vision.image_rows import PinnedRows, encode, encoder_of, pin_known
from baton.protocol.errors import InvalidRequest, ModelRefused, RowsLost, Unavailable
from baton.protocol.images import digest_of
from baton.protocol.request import Request
from baton.protocol.sampling import SamplingParams
from tests.tiny_models import make_tiny_model
from tests.tiny_vision import make_vision_model, picture, prompt_of

KIND = "qwen3_vl"
CAT, DOG = picture(1), picture(2)


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    logging.getLogger("transformers").setLevel(logging.ERROR)
    return make_vision_model(KIND, tmp_path_factory.mktemp("model"))


def tower_of(path: Path, memory: str = "256MB") -> Engine:
    config = EngineConfig(
        str(path), dtype="float32", device="cpu", block_size=4, image_cache_memory=memory
    )
    return assemble(load_tower_parts(config))


def encoded(engine: Engine, file: bytes) -> PinnedRows | None:
    return encode(engine, digest_of(file), encoder_of(engine).read(file))


def test_rows_are_those_of_the_whole_model(path: Path) -> None:
    tower = tower_of(path)
    whole = load_parts(
        EngineConfig(str(path), dtype="float32", device="cpu", num_kv_blocks=8, block_size=4)
    )
    assert tower.info.digest == whole.info.digest
    model = whole.active.model
    assert model is not None
    assert model.images is not None
    pixels = encoder_of(tower).read(CAT)
    with torch.inference_mode():
        expected = model.images.tower.rows(pixels)
    pinned = encoded(tower, CAT)
    assert pinned is not None
    assert (pinned.height, pinned.width) == model.images.tower.grid(pixels)
    for layer, rows in enumerate((expected.embeds, *expected.deep)):
        held = torch.cat([tower.arena.layer(layer)[0][b, :, 0] for b in pinned.blocks[0].ids])
        assert torch.equal(held[: pinned.num_rows], rows)
    assert len(tower.info.layers) == 1 + len(expected.deep) == 3


def test_rows_stay_until_others_need_the_room(path: Path) -> None:
    engine = tower_of(path)
    first = encoded(engine, CAT)
    assert first is not None
    assert pin_known(engine, digest_of(CAT)) == first
    assert pin_known(engine, digest_of(DOG)) is None
    engine.unpin(first.blocks)
    engine.unpin(first.blocks)
    engine.check()
    assert engine.pool.num_free == engine.pool.num_blocks  # kept, and free
    again = pin_known(engine, digest_of(CAT))
    assert again == first
    assert (engine.stats.num_encoded_images, engine.stats.num_reused_images) == (1, 2)

    page = engine.arena.page_bytes
    small = tower_of(path, str(len(first.blocks[0].ids) * page))  # room for one image
    held = encoded(small, CAT)
    assert held is not None
    assert encoded(small, DOG) is None  # it has to wait
    small.unpin(held.blocks)
    assert encoded(small, DOG) is not None
    assert pin_known(small, digest_of(CAT)) is None  # evicted
    small.check()


def test_refusals(path: Path, tmp_path: Path) -> None:
    with pytest.raises(Unavailable, match="--image-cache-memory"):
        encoded(tower_of(path, "1"), picture(3, 64, 64))
    with pytest.raises(InvalidRequest, match="cannot be read"):
        encoder_of(tower_of(path)).read(b"broken")
    with pytest.raises(ModelRefused, match="reads images"):
        tower_of(make_tiny_model("llama", tmp_path))
    config = EngineConfig(
        str(path), dtype="float32", device="cpu", num_kv_blocks=64, block_size=4,
        vision_tower=False,
    )  # fmt: skip
    blind = assemble(load_parts(config))
    assert blind.info.sees
    ids, images = prompt_of(KIND, [[5], CAT, [6]])
    with pytest.raises(RowsLost):
        blind.add(Request("r", ids, SamplingParams(max_tokens=1, seed=1), images=images))
