"""VisionTower: the part of transformers' model that turns the pixels of an image into rows.

A node whose rows come from encode nodes has no weights of it: it only asks what the rows are like.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from baton.engine.checkpoint.checkpoint import Checkpoint
from baton.engine.checkpoint.seeing import Family, family_of
from baton.engine.models.causal import ModelPart, named_refusals, read_causal
from baton.engine.state.images import ImageRows
from baton.protocol.errors import ModelRefused
from baton.protocol.kv_spec import LayerSpec


class VisionTower:
    """The tower and projector of `causal`, transformers' model. It only reads weights."""

    def __init__(self, causal: Any, family: Family) -> None:
        """`causal` may lack its language model or the weights of the tower (causal.py)."""
        self.family = family
        self.token: int = causal.config.image_token_id  # the placeholder
        self._causal = causal
        weights = causal.base_model.language_model.parameters
        own = {id(p) for p in weights()} | {id(p) for p in causal.lm_head.parameters()}
        self.parameters: list[Tensor] = [p for p in causal.parameters() if id(p) not in own]
        self.weight_bytes: int = sum(p.nbytes for p in self.parameters)
        vision = causal.config.vision_config
        merge: int = getattr(vision, "spatial_merge_size", 0) or getattr(
            causal.config, "spatial_merge_size", 1
        )
        self._merge = merge
        self._patch: int = vision.patch_size
        deep = getattr(vision, "deepstack_visual_indexes", None) or ()
        row = LayerSpec(1, causal.config.get_text_config().hidden_size, 0, kind="mla")
        # ImageRows as layers of KV: `embeds`, then each of `deep`; a token of it is a row.
        self.row_layers: tuple[LayerSpec, ...] = (row,) * (1 + len(deep))

    @property
    def reading(self) -> dict[str, Any]:
        """What the image processor is told beside its own file: Pixtral's resizes to whole tokens.
        Source: transformers, processing_pixtral.py."""
        return {"patch_size": self._patch * self._merge} if self.family.breaks else {}

    @classmethod
    def of(cls, causal: Any) -> VisionTower | None:
        """Return the tower of `causal`; None if it has none."""
        family = family_of(causal.config.to_dict())
        return None if family is None else cls(causal, family)

    @classmethod
    @torch.inference_mode()
    def alone(
        cls, checkpoint: Checkpoint, dtype: torch.dtype, device: torch.device
    ) -> VisionTower | None:
        """Load the tower without the language model; None if the checkpoint reads no images. Raises
        ModelRefused."""
        with named_refusals(checkpoint.config):
            if family_of(checkpoint.config) is None:
                return None
            causal = read_causal(checkpoint, dtype, part=ModelPart.TOWER)
            causal.requires_grad_(False).eval().to(device)
            return cls.of(causal)

    def grid(self, pixels: dict[str, Tensor]) -> tuple[int, int]:
        """Return how many rows and columns of tokens an image has. `pixels`: what the image
        processor made of this image alone."""
        if self.family.sizes is None:
            count: int = self._causal.config.mm_tokens_per_image
            return 1, count
        sizes = pixels[self.family.sizes][0].tolist()
        step = self._merge if self.family.grid else self._merge * self._patch
        return sizes[-2] // step, sizes[-1] // step

    def rows(self, pixels: dict[str, Tensor]) -> ImageRows:
        """Run the tower over one image. Raises ModelRefused if it gives other rows than grid()."""
        device, dtype = self._causal.device, self._causal.dtype
        values = {"pixel_values": pixels["pixel_values"].to(device, dtype)}
        if self.family.sizes is not None:
            values[self.family.sizes] = pixels[self.family.sizes].to(device)
        found = self._causal.base_model.get_image_features(**values, return_dict=True)
        embeds: Tensor = found.pooler_output[0]
        layers = getattr(found, "deepstack_features", None) or ()
        height, width = self.grid(pixels)
        if len(embeds) != height * width:
            raise ModelRefused(f"the vision tower made {len(embeds)} rows of {height} x {width}")
        deep = [layer[0] for layer in layers]
        return ImageRows(embeds, torch.stack(deep) if deep else embeds.new_empty(0, *embeds.shape))
