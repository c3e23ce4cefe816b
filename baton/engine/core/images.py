"""The images of a request on their way into the engine: read, checked, given to its samples."""

from __future__ import annotations

import asyncio

from baton.engine.config import EngineConfig
from baton.engine.loading.loading import LoadedModel
from baton.engine.state.images import PromptImages
from baton.protocol.errors import InvalidRequest, Unavailable, UnsupportedFeature
from baton.protocol.request import Request


async def read_ahead(model: LoadedModel | None, request: Request) -> None:
    """Read the images of a request on another thread, so that the engine's finds them read. Raises
    InvalidRequest. From asyncio."""
    if request.images and model is not None and model.images is not None:
        await asyncio.to_thread(model.images.read, request)


def images_of(
    request: Request, model: LoadedModel | None, config: EngineConfig
) -> PromptImages | None:
    """Read the images of a request that has some.

    Raises InvalidRequest for images that the model cannot take or a step cannot compute,
    UnsupportedFeature for what does not go with them, Unavailable while the engine sleeps.
    """
    if model is None or model.images is None:
        raise Unavailable("the engine sleeps")
    if request.resume == "exact" and model.images.mutual:
        raise UnsupportedFeature("this model's images: not with exact resumes", field="resume")
    found = model.images.read(request)
    # As in replay.py: decode rows never take more than max_num_seqs, drafts half of what is left.
    room = (config.max_num_batched_tokens - config.max_num_seqs) // 2
    most = max(each.image.num_tokens for each in found.images) if found else 0
    if model.images.mutual and most > room:
        raise InvalidRequest(
            f"an image of {most} tokens must be computed in one step, which has room for {room} "
            "(max_num_batched_tokens)",
            field="images",
        )
    return found
