"""A part of transformers' model with images: its vision tower alone, or all but the tower.

transformers makes a model without memory and drops no part of it. A class of this file drops one as
soon as the model is made, so that its weights are never read.
"""

from __future__ import annotations

import enum
from typing import Any

from torch import nn


class ModelPart(enum.Enum):
    WHOLE = "whole"
    TOWER = "tower"  # vision tower and projector
    TEXT = "text"  # all but these


def class_of(family: Any, part: ModelPart) -> Any:
    """Return the class `family` of a model with images, of which only `part` is kept."""
    if part is ModelPart.WHOLE:
        return family

    def make(self: Any, config: Any) -> None:
        family.__init__(self, config)
        base = self.base_model
        if part is ModelPart.TOWER:
            self.lm_head = nn.Identity()
        for name, _ in list(base.named_children()):
            if (name == "language_model") == (part is ModelPart.TOWER):
                setattr(base, name, nn.Identity())

    # By its name and module transformers finds how it renames the family's tensors.
    named = {
        "__init__": make,
        "__module__": family.__module__,
        "_keys_to_ignore_on_load_unexpected": [".*"],  # those of what is dropped
    }
    return type(family.__name__, (family,), named)
