"""The images of a request on their way into the engine: read, checked, given to its samples."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

from baton.engine.config import EngineConfig
from baton.engine.loading.loading import LoadedModel
from baton.engine.state.images import PromptImages
from baton.protocol.errors import InvalidRequest, Unavailable, UnsupportedFeature
from baton.protocol.request import Request

if TYPE_CHECKING:  # lazy at run time: it takes transformers
    from baton.engine.vision.images import KnownImage


@asynccontextmanager
async def read_ahead(
    model: LoadedModel | None, request: Request, fetched: Mapping[bytes, KnownImage] | None = None
) -> AsyncIterator[None]:
    """Read the images of a request on another thread, so that the engine's finds them read; the
    caller adds the request within the context. `fetched`: images that encode nodes have encoded, by
    digest. Raises InvalidRequest; RowsLost without a vision tower. From asyncio."""
    if not request.images or model is None or model.images is None:
        yield
        return
    with model.images.lent(fetched or {}):
        await asyncio.to_thread(model.images.read, request)
        yield


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
