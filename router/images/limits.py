"""ImageLimits: what images of requests may be, from the router's options. Pure."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any, Final, cast

import orjson

from baton.protocol.errors import ConfigError

MAX_IMAGES: Final = 32
# All images of a request together: they travel to two nodes in messages of at most 64 MiB.
MAX_REQUEST_BYTES: Final = 32 << 20
# A body with images: 32 MiB, as Anthropic's API has it. In base64 that is 24 MiB of files.
MAX_BODY_BYTES: Final = 32 << 20
_OPTION: Final = "limit_mm_per_prompt"
_HOST: Final = re.compile(r"\*|[a-z0-9.-]+(:[0-9]{1,5})?|\[[0-9a-f:.]+\](:[0-9]{1,5})?")


@dataclass(frozen=True, slots=True)
class ImageLimits:
    """`num_images`: most of one request. `image_bytes`, `image_pixels`: most of one image.
    `domains`: hosts that may be fetched from (`HOST` at ports 80 and 443, `HOST:PORT`, `*`); none:
    nothing is fetched. `private_addresses`: they may be in private networks. `fetch_s`: seconds for
    one file, redirects included."""

    num_images: int = MAX_IMAGES
    image_bytes: int = 20 << 20
    image_pixels: int = 50_000_000
    domains: tuple[str, ...] = ()
    private_addresses: bool = False
    fetch_s: float = 5.0


def images_per_request(text: str) -> int:
    """Read vLLM's `--limit-mm-per-prompt`: JSON, or `image=N`. Return the number of images; other
    media are not served, so their numbers mean nothing.

    Raises ConfigError."""
    given: object = _json(text)
    if "=" in text:
        pairs = (pair.partition("=") for pair in text.split(","))
        given = {name: value for name, _, value in pairs}
    found: object = cast("dict[str, Any]", given).get("image") if isinstance(given, dict) else None
    if isinstance(found, dict):  # vLLM's newer form: {"image": {"count": 3, ...}}
        found = cast("dict[str, Any]", found).get("count")
    if isinstance(found, str) and found.isdigit():
        found = int(found)
    if isinstance(given, dict) and "image" not in given:
        found = MAX_IMAGES
    if not isinstance(found, int) or isinstance(found, bool) or not 0 <= found <= MAX_IMAGES:
        message = f'{_OPTION} must be like {{"image": 4}}, with 0 to {MAX_IMAGES} images'
        raise ConfigError(message, field=_OPTION)
    return found


def check_domains(domains: tuple[str, ...]) -> None:
    """Raise ConfigError for an entry that is no host, such as a URL."""
    for each in domains:
        if not _HOST.fullmatch(each):
            message = f"allowed_media_domains: {each!r} is no HOST, HOST:PORT or *, in lower case"
            raise ConfigError(message, field="allowed_media_domains")


def _json(text: str) -> object:
    try:
        return orjson.loads(text)
    except orjson.JSONDecodeError:
        return None
