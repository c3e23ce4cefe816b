"""Images in every dialect, to the request that a node gets; counts, usage, and what is refused."""

from __future__ import annotations

import base64
from pathlib import Path
from typing import Any

import pytest

from baton.protocol.images import check_images, digest_of
from tests.front.fakes import FakeModel, Front
from tests.front.image_front import (
    ImageFront,
    asked,
    data_url,
    image_front,
    part,
    placed,
    said,
)
from tests.images.families import FAMILIES
from tests.images.files import SVG, animation, bomb, picture

CHAT, RESPONSES, MESSAGES = "/v1/chat/completions", "/v1/responses", "/v1/messages"
RED = picture(size=(60, 40))
BLUE = picture("JPEG", (90, 30))


@pytest.fixture
def front(tmp_path: Path) -> ImageFront:
    return image_front(tmp_path)


def num_tokens(front: ImageFront, width: int, height: int) -> int:
    assert front.images is not None
    return len(front.images.layout.tokens(width, height))


async def post(front: Front, path: str, body: dict[str, Any]) -> Any:
    async with front.client() as client:
        reply = await client.post(path, json=body)
    return reply.json() if reply.status_code == 200 else reply


# ---- one image, in every dialect ----

BASE64 = base64.b64encode(RED).decode()
ONE_IMAGE: dict[str, tuple[str, dict[str, Any]]] = {
    "chat": (CHAT, {"messages": said("see ", part(data_url(RED)), " it")}),
    "chat, a plain url": (
        CHAT,
        {"messages": said("see ", {"type": "image_url", "image_url": data_url(RED)}, " it")},
    ),
    "responses": (
        RESPONSES,
        {
            "input": [
                {
                    "role": "user",
                    "content": [
                        {"type": "input_text", "text": "see "},
                        {"type": "input_image", "image_url": data_url(RED), "detail": "auto"},
                        {"type": "input_text", "text": " it"},
                    ],
                }
            ]
        },
    ),
    "messages": (
        MESSAGES,
        {
            "max_tokens": 5,
            "messages": [
                {
                    "role": "user",
                    "content": [
                        {"type": "text", "text": "see "},
                        {
                            "type": "image",
                            "source": {"type": "base64", "media_type": "image/png", "data": BASE64},
                        },
                        {"type": "text", "text": " it"},
                    ],
                }
            ],
        },
    ),
    "messages, a data url": (
        MESSAGES,
        {
            "max_tokens": 5,
            "messages": [
                {
                    "role": "user",
                    "content": [
                        {"type": "text", "text": "see "},
                        {"type": "image", "source": {"type": "url", "url": data_url(RED)}},
                        {"type": "text", "text": " it"},
                    ],
                }
            ],
        },
    ),
}


@pytest.mark.parametrize("name", ONE_IMAGE)
async def test_one_image_in_every_dialect(front: ImageFront, name: str) -> None:
    path, body = ONE_IMAGE[name]
    reply = await post(front, path, body)
    request = asked(front)
    assert placed(front) == [("<|user|>\nsee <|vision_start|>", RED)]
    [image] = request.images
    assert image.num_tokens == num_tokens(front, 60, 40)
    check_images(request.images, len(request.prompt_ids))
    after = front.tokenizer.decode(request.prompt_ids[image.end :], False)
    assert after == "<|vision_end|> it<|assistant|>"
    usage = reply["usage"]
    if path == CHAT:
        assert usage["prompt_tokens"] == len(request.prompt_ids)
        assert usage["prompt_tokens_details"]["image_tokens"] == image.num_tokens
    elif path == RESPONSES:
        assert usage["input_tokens"] == len(request.prompt_ids)
        assert usage["input_tokens_details"]["image_tokens"] == image.num_tokens
    else:
        cached = usage["cache_read_input_tokens"]
        assert usage["input_tokens"] + cached == len(request.prompt_ids)


@pytest.mark.parametrize("name", sorted(FAMILIES))
async def test_every_family(tmp_path: Path, name: str) -> None:
    front = image_front(tmp_path, name)
    body = {"messages": said("a", part(data_url(RED)), part(data_url(BLUE, "image/jpeg")), "b")}
    await post(front, CHAT, body)
    request = asked(front)
    assert [image.data for image in request.images] == [RED, BLUE]
    assert front.images is not None
    layout = front.images.layout
    for image, size in zip(request.images, [(60, 40), (90, 30)], strict=True):
        assert request.prompt_ids[image.start : image.end] == layout.tokens(*size)


async def test_images_stand_where_their_parts_stand(front: ImageFront) -> None:
    messages = [
        *said(part(data_url(RED)), "one"),
        {"role": "assistant", "content": "yes"},
        {"role": "tool", "tool_call_id": "c", "content": [part(data_url(BLUE))]},
        *said("and ", part(data_url(RED))),
    ]
    await post(front, CHAT, {"messages": messages})
    begun = "<|vision_start|>"
    assert placed(front) == [
        (f"<|user|>\n{begun}", RED),
        (f"<|vision_end|>one<|assistant|>\nyes<|tool|>\n{begun}", BLUE),
        (f"<|vision_end|><|user|>\nand {begun}", RED),
    ]
    first, second, third = asked(front).images
    assert first.digest == third.digest == digest_of(RED) != second.digest


async def test_results_of_tools_hold_images(front: ImageFront) -> None:
    image = {
        "type": "image",
        "source": {"type": "base64", "media_type": "image/png", "data": BASE64},
    }
    call = {"type": "tool_use", "id": "t", "name": "look", "input": {}}
    result = {"type": "tool_result", "tool_use_id": "t",
              "content": [{"type": "text", "text": "seen:"}, image]}  # fmt: skip
    body = {"max_tokens": 5, "messages": [
        {"role": "user", "content": "look"},
        {"role": "assistant", "content": [call]},
        {"role": "user", "content": [result, {"type": "text", "text": "what?"}]},
    ]}  # fmt: skip
    await post(front, MESSAGES, body)
    [(before, file)] = placed(front)
    assert (before.endswith("seen:<|vision_start|>"), file) == (True, RED)
    items = [
        {"role": "user", "content": "look"},
        {"type": "function_call", "call_id": "t", "name": "look", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "t",
         "output": [{"type": "input_image", "image_url": data_url(RED)}]},
    ]  # fmt: skip
    await post(front, RESPONSES, {"input": items})
    [(before, file)] = placed(front)
    assert (before.endswith("<|tool|>\n<|vision_start|>"), file) == (True, RED)


async def test_a_stored_response_keeps_its_images(front: ImageFront) -> None:
    first = await post(front, RESPONSES, ONE_IMAGE["responses"][1])
    assert first["store"] is True
    await post(front, RESPONSES, {"input": "more", "previous_response_id": first["id"]})
    assert placed(front) == [("<|user|>\nsee <|vision_start|>", RED)]


async def test_image_tokens_are_counted(front: ImageFront) -> None:
    body = ONE_IMAGE["chat"][1]
    await post(front, CHAT, body)
    length = len(asked(front).prompt_ids)
    told = await post(front, "/tokenize", body)
    assert (told["count"], told["tokens"]) == (length, list(asked(front).prompt_ids))
    for name, path in (("responses", f"{RESPONSES}/input_tokens"),
                       ("messages", f"{MESSAGES}/count_tokens")):  # fmt: skip
        asked_for = {key: value for key, value in ONE_IMAGE[name][1].items() if key != "max_tokens"}
        assert (await post(front, path, asked_for))["input_tokens"] == length
    assert len(front.dispatcher.requests) == 1  # counting runs nothing


async def test_usage_of_a_stream_and_of_texts(front: ImageFront) -> None:
    body = {**ONE_IMAGE["chat"][1], "stream": True, "stream_options": {"include_usage": True}}
    async with front.client() as client:
        streamed = (await client.post(CHAT, json=body)).text
    assert f'"image_tokens":{num_tokens(front, 60, 40)}' in streamed
    plain = await post(front, CHAT, {"messages": said("no image")})
    assert "image_tokens" not in plain["usage"]["prompt_tokens_details"]


async def test_a_low_detail_is_obeyed(front: ImageFront) -> None:
    large = picture("JPEG", (1200, 600))
    await post(front, CHAT, {"messages": said(part(data_url(large), detail="low"))})
    [image] = asked(front).images
    assert image.num_tokens == num_tokens(front, 512, 256)
    assert image.data.startswith(b"\x89PNG")
    assert image.digest == digest_of(image.data)
    for detail in ("auto", "high", None):
        await post(front, CHAT, {"messages": said(part(data_url(large), detail=detail))})
        assert asked(front).images[0].data == large
    reply = await post(front, CHAT, {"messages": said(part(data_url(RED), detail="best"))})
    assert reply.json()["error"]["param"] == "messages[0].content[0].image_url.detail"


async def test_a_marker_in_a_text_is_refused(front: ImageFront) -> None:
    refused = [
        said("a <|image_pad|> b"),
        said("<|image", "_pad|>", part(data_url(RED))),  # the template joins the two
        said("a <|video_pad|> b"),
    ]
    for messages in refused:
        reply = await post(front, CHAT, {"messages": messages})
        assert (reply.status_code, reply.json()["error"]["param"]) == (400, "messages"), messages
    reply = await post(front, "/v1/completions", {"prompt": "a <|image_pad|>"})
    assert (reply.status_code, reply.json()["error"]["param"]) == (400, "prompt")
    assert front.images is not None
    ids = [65, front.images.marker_id]
    reply = await post(front, "/v1/completions", {"prompt": ids})
    assert (reply.status_code, reply.json()["error"]["param"]) == (400, "prompt")
    reply = await post(front, "/inference/v1/generate", {"token_ids": ids, "sampling_params": {}})
    assert (reply.status_code, reply.json()["error"]["param"]) == (400, "token_ids")
    assert not front.dispatcher.requests


# ---- refused, by the field's name ----


def _in_chat(url: Any, **more: Any) -> tuple[str, dict[str, Any], str]:
    messages = [{"role": "system", "content": "s"}, *said("look", part(url, **more))]
    return CHAT, {"messages": messages}, "messages[1].content[1].image_url"


def _in_messages(source: Any, field: str) -> tuple[str, dict[str, Any], str]:
    blocks = [{"type": "text", "text": "look"}, {"type": "image", "source": source}]
    body = {"max_tokens": 5, "messages": [{"role": "user", "content": blocks}]}
    return MESSAGES, body, f"messages[0].content[1].source.{field}"


def _in_responses(image: dict[str, Any], field: str) -> tuple[str, dict[str, Any], str]:
    content = [{"type": "input_text", "text": "look"}, {"type": "input_image", **image}]
    body = {"input": [{"role": "user", "content": content}]}
    return RESPONSES, body, f"input[0].content[1].{field}"


WRONG: dict[str, tuple[str, dict[str, Any], str]] = {
    "svg": _in_chat(data_url(SVG, "image/svg+xml")),
    "svg called png": _in_chat(data_url(SVG)),
    "no image": _in_chat(data_url(b"hello", "text/plain")),
    "cut short": _in_chat(data_url(RED[:-40])),
    "wrong base64": _in_chat("data:image/png;base64,%%%%"),
    "base64 in two": _in_chat("data:image/png;base64,QQ==QUJD"),
    "base64 of a wrong length": _in_chat(data_url(RED)[:-3]),
    "no base64": _in_chat("data:image/png,abc"),
    "no data": _in_chat("data:image/png;base64,"),
    "no comma": _in_chat("data:image/png;base64"),
    "file": _in_chat("file:///etc/passwd"),
    "ftp": _in_chat("ftp://example.org/a.png"),
    "no scheme": _in_chat("example.org/a.png"),
    "a number": _in_chat(7),
    "empty": _in_chat(""),
    "remote, and none is allowed": _in_chat("https://example.org/a.png"),
    "too many pixels": _in_chat(data_url(bomb(1500))),
    "too many bytes": _in_chat(data_url(RED + bytes(1 << 20))),
    "messages: base64": _in_messages(
        {"type": "base64", "media_type": "image/png", "data": "%%%%"}, "data"
    ),
    "messages: broken": _in_messages(
        {"type": "base64", "media_type": "image/gif", "data": BASE64[:40]}, "data"
    ),
    "messages: type": _in_messages(
        {"type": "base64", "media_type": "text/html", "data": BASE64}, "media_type"
    ),
    "messages: file": _in_messages({"type": "file", "file_id": "f"}, "type"),
    "messages: url": _in_messages({"type": "url", "url": "file:///etc/passwd"}, "url"),
    "responses: base64": _in_responses({"image_url": "data:image/png;base64,%"}, "image_url"),
    "responses: file": _in_responses({"file_id": "f"}, "file_id"),
    "responses: nothing": _in_responses({}, "image_url"),
}


@pytest.fixture(scope="module")
def strict(tmp_path_factory: pytest.TempPathFactory) -> ImageFront:
    folder = tmp_path_factory.mktemp("strict")
    return image_front(folder, max_image_mb=1, max_image_megapixels=2)


@pytest.mark.parametrize("name", WRONG)
async def test_wrong_images_are_refused_by_name(strict: ImageFront, name: str) -> None:
    path, body, field = WRONG[name]
    reply = await post(strict, path, body)
    assert reply.status_code == 400, reply
    error = reply.json()["error"]
    if path == MESSAGES:
        assert field in error["message"]
    else:
        assert error["param"] == field
        assert field in error["message"]
    assert len(error["message"]) < 400  # it quotes no image
    assert not strict.dispatcher.requests


async def test_a_model_of_texts_names_the_image(front: ImageFront) -> None:
    front.images = None
    fields = {
        "chat": "messages[0].content[1].image_url",
        "responses": "input[0].content[1].image_url",
        "messages": "messages[0].content[1].source.data",
    }
    for name, field in fields.items():
        path, body = ONE_IMAGE[name]
        reply = await post(front, path, body)
        assert reply.status_code == 400
        assert reply.json()["error"]["message"] == f"{field}: the served model reads no images"


async def test_there_may_be_so_many_images(tmp_path: Path) -> None:
    front = image_front(tmp_path, limit_mm_per_prompt='{"image": 2}')
    image = part(data_url(RED))
    await post(front, CHAT, {"messages": said(image, image)})
    assert len(asked(front).images) == 2
    reply = await post(front, CHAT, {"messages": [*said(image, image), *said(image)]})
    assert reply.json()["error"]["param"] == "messages[1].content[0].image_url"
    assert "--limit-mm-per-prompt" in reply.json()["error"]["message"]


async def test_the_first_frame_of_an_animation_counts(front: ImageFront) -> None:
    for kind in ("GIF", "WEBP", "PNG"):
        await post(front, CHAT, {"messages": said(part(data_url(animation(kind, 40))))})
        assert asked(front).images[0].num_tokens == num_tokens(front, 60, 40)


async def test_what_cannot_go_with_images_is_named(front: ImageFront) -> None:
    image = part(data_url(RED))
    for body, field in (
        ({"messages": said(image), "truncate_prompt_tokens": 9}, "truncate_prompt_tokens"),
        ({"messages": said(image), "continue_final_message": True,
          "add_generation_prompt": False}, "continue_final_message"),
    ):  # fmt: skip
        reply = await post(front, CHAT, body)
        assert (reply.status_code, reply.json()["error"]["param"]) == (400, field)


async def test_images_count_towards_the_context(front: ImageFront) -> None:
    front.registry.served = FakeModel(max_model_len=40, vocab_size=front.tokenizer.vocab_size)
    reply = await post(front, CHAT, {"messages": said(*[part(data_url(RED))] * 9)})
    error = reply.json()["error"]
    assert (reply.status_code, error["code"]) == (400, "context_length_exceeded")
    assert error["param"].startswith("messages[0].content[")


async def test_large_bodies_are_for_images_alone(front: ImageFront) -> None:
    large = picture(size=(60, 40)) + bytes(7 << 20)  # Pillow reads a PNG up to its end
    await post(front, CHAT, {"messages": said(part(data_url(large)))})
    assert asked(front).images[0].data == large
    async with front.client() as client:
        body = {"prompt": "a" * (9 << 20)}
        assert (await client.post("/v1/completions", json=body)).status_code == 413
        body = {"messages": said("a" * (33 << 20))}
        assert (await client.post(CHAT, json=body)).status_code == 413
    front.images = None
    async with front.client() as client:
        assert (
            await client.post(CHAT, json={"messages": said("a" * (9 << 20))})
        ).status_code == 413


async def test_no_log_line_holds_an_image(
    front: ImageFront, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("DEBUG")
    await post(front, CHAT, ONE_IMAGE["chat"][1])
    await post(front, CHAT, {"messages": said(part(data_url(RED[:-40])))})
    assert BASE64[20:60] not in caplog.text
    assert "\\x89PNG" not in caplog.text
    assert "PNG" not in repr(asked(front))
