"""The vision tower of a checkpoint alone, for a process that encodes images and writes no text."""

from __future__ import annotations

import logging

from baton.engine.checkpoint.checkpoint import open_checkpoint
from baton.engine.checkpoint.seeing import as_served
from baton.engine.config import EngineConfig
from baton.engine.kernels.rope import position_limit
from baton.engine.loading.loading import model_digest
from baton.engine.loading.route import DTYPES, choose_dtype
from baton.engine.models.tower import VisionTower
from baton.engine.state.images import ROWS_RULE
from baton.engine.state.interface import ModelInfo
from baton.engine.state.place import choose_device
from baton.engine.vision.encoder import ImageEncoder
from baton.engine.vision.pixels import PixelReader
from baton.protocol.errors import ModelRefused

logger = logging.getLogger(__name__)


def load_image_encoder(config: EngineConfig) -> ImageEncoder:
    """Load the tower of `config.model`; no weight of its language model is read.

    Raises ModelRefused for a checkpoint that reads no images.
    """
    checkpoint = as_served(open_checkpoint(config.model), config)
    device, dtype_name = choose_device(config.device), choose_dtype(config.dtype, checkpoint.config)
    tower = VisionTower.alone(checkpoint, DTYPES[dtype_name], device)
    if tower is None:
        raise ModelRefused("an encode node needs a model that reads images", field="model")
    text = checkpoint.text_config
    info = ModelInfo(
        name=config.model_name,
        digest=model_digest(checkpoint, config, lean=False),
        layers=tower.row_layers,
        rope=ROWS_RULE,
        vocab_size=text["vocab_size"],
        max_model_len=position_limit(text) or 1,
        eos_token_ids=checkpoint.eos_token_ids,
        kv_dtype=dtype_name,
        model_impl="transformers",
        generates=False,
        dtype=dtype_name,
        sees=True,
    )
    logger.info(
        "loaded the vision tower of %s: %s on %s, %.1f MB of weights",
        info.name, dtype_name, device, tower.weight_bytes / 1e6,
    )  # fmt: skip
    return ImageEncoder(info, PixelReader(checkpoint.path, tower.reading), tower)
