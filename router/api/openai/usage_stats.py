"""`stream_options.continuous_usage_stats`, vLLM's: each chunk of a stream tells its choice's usage.

As in vLLM it asks for nothing without `include_usage`, and counts one choice: the prompt's tokens
and that choice's so far, where the chunk at the end sums over all.
"""

from __future__ import annotations

from typing import Final

import orjson

from router.api.openai.replies import Frames
from router.request.completion import Delta

# What chunks say of their usage (openai_replies.Chunk). Quotes within strings are escaped, so
# nothing that a client or a model wrote looks like it.
_NO_USAGE: Final = b'"usage":null'


class CountedFrames:
    """The frames of one choice (openai_replies.Frames), with its usage in each."""

    def __init__(self, frames: Frames, prompt_tokens: int) -> None:
        self._frames = frames
        self._prompt_tokens = prompt_tokens
        self._output_tokens = 0

    def opening(self) -> bytes:
        return self._counted(self._frames.opening())

    def delta(self, delta: Delta) -> bytes:
        self._output_tokens += len(delta.token_ids)
        return self._counted(self._frames.delta(delta))

    def _counted(self, frames: bytes) -> bytes:
        prompt, output = self._prompt_tokens, self._output_tokens
        counts = {
            "prompt_tokens": prompt, "completion_tokens": output, "total_tokens": prompt + output
        }  # fmt: skip
        return frames.replace(_NO_USAGE, b'"usage":' + orjson.dumps(counts))
