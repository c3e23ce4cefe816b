"""ImagePart: one image of a request, as its client sent it. Pure.

    OpenAI's chats     {"type": "image_url", "image_url": {"url": "data:...", "detail": "auto"}}
    /v1/responses      {"type": "input_image", "image_url": "data:..."}
    /v1/messages       {"type": "image", "source": {"type": "base64", "media_type", "data"}}
    gRPC               bytes

`detail` says how many tokens an image may take: `low` shrinks it to LOW_EDGE pixels, as OpenAI
does; with all others the model's own processor decides.
"""

from __future__ import annotations

import binascii
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final, cast

from baton.protocol.errors import InvalidRequest, UnsupportedFeature

LOW_EDGE: Final = 512
MAX_URL_CHARS: Final = 8192
_DETAILS: Final = ("auto", "low", "high", "original")
_MEDIA_TYPE: Final = re.compile(r"image/[a-z0-9.+-]+", re.IGNORECASE)
_NOT_BASE64: Final = "its base64 is not valid"
# One call decodes so many characters: it holds the GIL, and other threads run between two calls.
_SLICE: Final = 256 << 10


@dataclass(frozen=True, slots=True)
class ImagePart:
    """One image: exactly one of `url` (http or https), `base64` and `data` is set. `field`: its
    place in the client's request, for errors. `low`: shrink it."""

    field: str
    url: str = ""
    base64: str = ""
    data: bytes = b""
    low: bool = False

    @property
    def num_bytes(self) -> int:
        """The size of the file; 0 if it must be fetched first."""
        return len(self.data) or len(self.base64) // 4 * 3


def of_chat(item: dict[str, Any], where: str) -> ImagePart:
    """Return the image of a chat's part `image_url` or `input_image`; `image_url` is an object or
    the URL itself. Raises InvalidRequest, naming `where` and the field."""
    field, given = f"{where}.image_url", item.get("image_url")
    if isinstance(given, dict):
        fields = cast("dict[str, Any]", given)
        return of_url(fields.get("url"), field, fields.get("detail"), f"{field}.detail")
    if item.get("file_id") is not None:
        message = f"{where}.file_id: no files are kept here: send a data URL"
        raise UnsupportedFeature(message, field=f"{where}.file_id")
    return of_url(given, field, item.get("detail"), f"{where}.detail")


def of_block(block: dict[str, Any], where: str) -> ImagePart:
    """Return the image of one of Anthropic's `image` blocks. Raises InvalidRequest."""
    field, given = f"{where}.source", block.get("source")
    source = cast("dict[str, Any]", given) if isinstance(given, dict) else {}
    match source.get("type"):
        case "base64":
            kind, content = source.get("media_type"), source.get("data")
            if not isinstance(kind, str) or not _MEDIA_TYPE.fullmatch(kind):
                message = f"{field}.media_type must be a type of images, like image/png"
                raise InvalidRequest(message, field=f"{field}.media_type")
            if not isinstance(content, str) or not content:
                raise InvalidRequest(f"{field}.data must be base64", field=f"{field}.data")
            return ImagePart(f"{field}.data", base64=content)
        case "url":
            return of_url(source.get("url"), f"{field}.url", None, "")
        case _:
            message = f"{field}.type: only base64 and url are supported"
            raise UnsupportedFeature(message, field=f"{field}.type")


def of_url(url: object, field: str, detail: object, detail_field: str) -> ImagePart:
    """Return the image of a URL: of a data URL its base64. Raises InvalidRequest."""
    if detail is not None and detail not in _DETAILS:
        message = f"{detail_field} must be one of {', '.join(_DETAILS)}"
        raise InvalidRequest(message, field=detail_field)
    if not isinstance(url, str) or not url:
        raise InvalidRequest(f"{field} must be the URL of an image", field=field)
    low = detail == "low"
    if url[:5].lower() == "data:":
        return ImagePart(field, base64=_base64_of(url, field), low=low)
    if url[:8].lower().startswith(("http://", "https://")):
        if len(url) > MAX_URL_CHARS:
            raise InvalidRequest(f"{field}: at most {MAX_URL_CHARS} characters", field=field)
        return ImagePart(field, url=url, low=low)
    message = f"{field} must be a data URL (data:image/png;base64,...), or an http or https URL"
    raise InvalidRequest(message, field=field)


def refuse_remote(parts: Sequence[ImagePart]) -> None:
    """Raise UnsupportedFeature if an image must be fetched. For requests that are kept: they are
    made again from their body, perhaps by another router and later."""
    for part in parts:
        if part.url:
            message = f"{part.field}: a resumable request has its images in it: send a data URL"
            raise UnsupportedFeature(message, field=part.field)


def decoded(part: ImagePart) -> bytes:
    """Return the bytes of a part that has its image with it. For threads: it takes a millisecond
    per megabyte. Raises InvalidRequest."""
    if part.data:
        return part.data
    text, pieces = part.base64, list[bytes]()
    padding = text.find("=")
    try:
        if 0 <= padding < len(text) - 2:
            raise binascii.Error("padding within")
        for start in range(0, len(text), _SLICE):
            pieces.append(binascii.a2b_base64(text[start : start + _SLICE], strict_mode=True))
    except ValueError as error:
        raise InvalidRequest(f"{part.field}: {_NOT_BASE64}", field=part.field) from error
    return b"".join(pieces)


def _base64_of(url: str, field: str) -> str:
    """Return the base64 of a data URL. Source: RFC 2397."""
    head, comma, content = url[5 : 5 + 256].partition(",")
    if not comma:
        raise InvalidRequest(f"{field} is a data URL without data", field=field)
    kind, *options = head.split(";")
    if not _MEDIA_TYPE.fullmatch(kind.strip()):
        message = f"{field} is a data URL of no image: it must begin with data:image/"
        raise InvalidRequest(message, field=field)
    if not options or options[-1].strip().lower() != "base64":
        raise InvalidRequest(f"{field}: a data URL must be in base64", field=field)
    content = url[5 + len(head) + 1 :]
    if not content:
        raise InvalidRequest(f"{field} is a data URL without data", field=field)
    return content
