"""The rows of a step's images on all ranks: the leader's, which alone runs the vision tower."""

from __future__ import annotations

from dataclasses import replace

import torch

from baton.engine.parallel.group import RankGroup
from baton.engine.state.images import StepImages


def share_rows(
    images: StepImages | None, group: RankGroup, dtype: torch.dtype
) -> StepImages | None:
    """Return the images of a step with the leader's rows, in the model's `dtype`. All ranks call
    it; the others' `embeds` and `deep` have the leader's shapes, and are not read. Without rows
    nothing is sent.

    Raises InternalError.
    """
    if images is None or images.embeds is None or images.deep is None:
        return images
    rows = group.broadcast(torch.cat((images.embeds[None], images.deep)).to(dtype))
    return replace(images, embeds=rows[0], deep=rows[1:])
