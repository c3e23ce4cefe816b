"""Reads an OpenAI-style event stream: one line in, one chunk out. No socket here.

It is for any server that speaks OpenAI's API. An error inside a stream, after HTTP 200, is raised.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable, Iterator
from typing import Any

import orjson

DONE = b"[DONE]"


class StreamError(Exception):
    """The server reported an error inside the stream, or broke the stream off."""


def parse_line(line: str) -> dict[str, Any] | None:
    """Return the chunk of a line; None for comments, blank lines, ids and the end marker.

    Raises StreamError for an error object, and for text that is not JSON.
    """
    if not line.startswith("data:"):
        return None
    data = line[5:].strip().encode()
    if data == DONE:
        return None
    try:
        chunk = orjson.loads(data)
    except orjson.JSONDecodeError as error:
        raise StreamError(f"not JSON: {line[:200]!r}") from error
    if not isinstance(chunk, dict):
        raise StreamError(f"not an object: {line[:200]!r}")
    if chunk.get("error"):
        error = chunk["error"]
        raise StreamError(str(error.get("message") if isinstance(error, dict) else error))
    return chunk


def parse_lines(lines: Iterable[str]) -> Iterator[dict[str, Any]]:
    """Yield all chunks of a stream. Raises StreamError if it ends without its end marker."""
    for line in lines:
        if _is_end(line):
            return
        chunk = parse_line(line)
        if chunk is not None:
            yield chunk
    raise StreamError("the stream broke off before [DONE]")


async def parse_lines_async(lines: AsyncIterator[str]) -> AsyncIterator[dict[str, Any]]:
    """Do `parse_lines` for an asynchronous client."""
    async for line in lines:
        if _is_end(line):
            return
        chunk = parse_line(line)
        if chunk is not None:
            yield chunk
    raise StreamError("the stream broke off before [DONE]")


def text_of(chunk: dict[str, Any]) -> str:
    """Return the new text in a chunk of a chat or of a plain completion; "" if it has none."""
    for choice in chunk.get("choices") or ():
        delta = choice.get("delta")
        text = delta.get("content") if isinstance(delta, dict) else choice.get("text")
        if text:
            return str(text)
    return ""


def _is_end(line: str) -> bool:
    return line.startswith("data:") and line[5:].strip() == "[DONE]"
