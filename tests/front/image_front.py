"""A front door of a model that reads images, for the tests of images in every dialect."""

from __future__ import annotations

import base64
from dataclasses import replace
from pathlib import Path
from typing import Any

from baton.images.model import ImageModel
from baton.protocol.request import Request
from baton.text.chat_template import ChatTemplate
from baton.text.tokenizer import Tokenizer
from router.config import RouterConfig
from router.models import ServedModel
from tests.front.fakes import FakeDispatcher, FakeModel, FakeRegistry, Front
from tests.images.families import FAMILIES, save

MAX_MODEL_LEN = 2048


class ImageFront(Front):
    """A Front whose services have the model's images."""

    images: ImageModel | None = None

    @property
    def model(self) -> ServedModel:
        return replace(super().model, images=self.images)


def image_front(folder: Path, name: str = "qwen3_vl", **config: Any) -> ImageFront:
    """A front door of a family, over the files of its model folder. Answers are of no meaning."""
    save(FAMILIES[name], folder)
    tokenizer = Tokenizer.load(folder)
    made = ImageFront(
        dispatcher=FakeDispatcher(answer=""),
        registry=FakeRegistry(
            FakeModel(max_model_len=MAX_MODEL_LEN, vocab_size=tokenizer.vocab_size)
        ),
        config=RouterConfig(request_timeout_s=20.0, **config),
        chat_template=ChatTemplate.load(folder),
        tokenizer=tokenizer,
    )
    made.images = ImageModel.load(folder, tokenizer)
    assert made.images is not None
    return made


def asked(front: Front) -> Request:
    """The request that a node would get; the last one."""
    return front.dispatcher.requests[-1]


def placed(front: Front) -> list[tuple[str, bytes]]:
    """What stands before each image of the last request, as text, and the image's file."""
    request, at, found = asked(front), 0, list[tuple[str, bytes]]()
    for image in request.images:
        before = front.tokenizer.decode(request.prompt_ids[at : image.start], False)
        found.append((before, image.data))
        at = image.end
    return found


def data_url(file: bytes, kind: str = "image/png") -> str:
    return f"data:{kind};base64,{base64.b64encode(file).decode()}"


def part(url: str, **more: Any) -> dict[str, Any]:
    """A part of OpenAI's chats."""
    return {"type": "image_url", "image_url": {"url": url, **more}}


def said(*parts: Any) -> list[dict[str, Any]]:
    """The messages of a user who says these parts; a string is text."""
    content = [{"type": "text", "text": it} if isinstance(it, str) else it for it in parts]
    return [{"role": "user", "content": content}]
