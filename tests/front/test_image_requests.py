"""Images over gRPC, and in requests that are kept: resumable and background ones."""

from __future__ import annotations

import asyncio
import base64
import os
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from baton.client import AsyncClient, GenerateOptions
from baton.protocol.errors import InvalidRequest, UnsupportedFeature
from baton.protocol.sampling import SamplingParams
from router.api.grpc.inference import GrpcServer
from router.models import Models
from router.store.memory_store import MemoryTables
from tests.front.image_front import ImageFront, asked, data_url, image_front, part, placed, said
from tests.front.resumable import HeldRouter, held_router
from tests.images.families import FAMILIES
from tests.images.files import picture
from tests.waiting import WAIT_S

RED, BLUE = picture(), picture("JPEG", (90, 30))
PARAMS = SamplingParams(max_tokens=3, seed=1)
CHAT = "/v1/chat/completions"


# ---- gRPC ----


async def generate(front: ImageFront, prompt: str | list[int], *images: bytes) -> Any:
    """Ask a gRPC door of the front's services, and return what Baton's client gets."""
    front.config = replace(front.config, grpc_port=0)
    server = GrpcServer(front.services)
    port = server.bind()
    await server.start()
    try:
        async with AsyncClient(f"127.0.0.1:{port}", timeout_s=WAIT_S) as client:
            options = GenerateOptions(images=images, timeout_s=WAIT_S)
            return await client.generate(prompt, PARAMS, options)
    finally:
        await server.stop(0)


@pytest.mark.parametrize("name", sorted(FAMILIES))
async def test_grpc_takes_files(tmp_path: Path, name: str) -> None:
    front = image_front(tmp_path, name)
    marker = front.images.marker if front.images is not None else ""
    told = await generate(front, f"see {marker} and {marker}", RED, BLUE)
    request = asked(front)
    assert [file for _, file in placed(front)] == [RED, BLUE]
    assert told.usage.prompt_tokens == len(request.prompt_ids)
    assert told.usage.image_tokens == sum(image.num_tokens for image in request.images) > 0
    if name == "gemma3":
        return  # in token ids its marker is another token
    ids = front.tokenizer.encode(f"see {marker} and {marker}", add_special_tokens=False)
    await generate(front, ids, RED, BLUE)
    assert asked(front).prompt_ids == request.prompt_ids
    assert asked(front).images == request.images


async def test_grpc_names_what_is_wrong(tmp_path: Path) -> None:
    front = image_front(tmp_path)
    for prompt, images, field in (
        ("no marker", (RED,), "text"),
        ("<|image_pad|><|image_pad|>", (RED,), "text"),
        ("<|image_pad|>", (), "text"),
        ("<|image_pad|><|image_pad|>", (RED, RED[:-40]), "images[1]"),
        ("<|image_pad|>", (b"",), "images"),
    ):
        with pytest.raises(InvalidRequest) as caught:
            await generate(front, prompt, *images)
        assert caught.value.field == field, caught.value.message
    front.images = None
    with pytest.raises(UnsupportedFeature, match="reads no images"):
        await generate(front, "a", RED)
    assert not front.dispatcher.requests


# ---- requests that are kept ----


@pytest.fixture
async def held(tmp_path: Path) -> AsyncIterator[tuple[HeldRouter, ImageFront]]:
    front = image_front(tmp_path)
    services = front.services
    config = replace(front.config, allowed_media_domains=("localhost",))
    others = {"models": Models(replace(front.model, config=config)), "registry": services.registry}
    tables = MemoryTables()
    domains = config.allowed_media_domains
    async with held_router("one", tables, others=others, allowed_media_domains=domains) as router:
        yield router, front


async def test_a_resumable_request_keeps_its_images(held: tuple[HeldRouter, ImageFront]) -> None:
    router, front = held
    headers = {"x-baton-resumable": "30", "x-request-id": "with-an-image"}
    body = {"messages": said("see ", part(data_url(RED))), "max_tokens": 4}
    first = await router.http.post(CHAT, json=body, headers=headers)
    again = await router.http.post(CHAT, json=body, headers=headers)
    assert (first.status_code, again.status_code) == (200, 200)
    assert again.json() == first.json()
    [request] = router.dispatcher.script.requests
    assert [image.data for image in request.images] == [RED]
    assert front.images is not None
    count = len(front.images.layout.tokens(60, 40))
    assert first.json()["usage"]["prompt_tokens_details"]["image_tokens"] == count


async def test_what_cannot_be_kept_is_refused(held: tuple[HeldRouter, ImageFront]) -> None:
    router, _ = held
    headers = {"x-baton-resumable": "30"}
    url = "http://localhost/a.png"
    reply = await router.http.post(CHAT, json={"messages": said(part(url))}, headers=headers)
    error = reply.json()["error"]
    assert (reply.status_code, error["param"]) == (400, "messages[0].content[0].image_url")
    assert "resumable" in error["message"]
    items = [{"role": "user", "content": [{"type": "input_image", "image_url": url}]}]
    reply = await router.http.post("/v1/responses", json={"input": items, "background": True})
    assert reply.json()["error"]["param"] == "input[0].content[0].image_url"
    large = RED + base64.b64encode(os.urandom(600 << 10))  # Pillow reads a PNG up to its end
    body = {"messages": said(part(data_url(large)))}
    assert (await router.http.post(CHAT, json=body)).status_code == 200
    reply = await router.http.post(CHAT, json=body, headers=headers)
    error = reply.json()["error"]
    assert (reply.status_code, error["param"]) == (400, "messages")
    assert "at most 1048576 bytes" in error["message"]


async def test_an_image_in_the_background(held: tuple[HeldRouter, ImageFront]) -> None:
    router, _ = held
    items = [{"role": "user", "content": [{"type": "input_image", "image_url": data_url(BLUE)}]}]
    body = {"input": items, "background": True, "max_output_tokens": 3}
    made = (await router.http.post("/v1/responses", json=body)).json()
    async with asyncio.timeout(WAIT_S):
        while made["status"] in ("queued", "in_progress"):
            await asyncio.sleep(0.05)
            made = (await router.http.get(f"/v1/responses/{made['id']}")).json()
    assert made["status"] in ("completed", "incomplete")
    [request] = router.dispatcher.script.requests
    assert [image.data for image in request.images] == [BLUE]
