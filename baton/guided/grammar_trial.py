"""The child of baton/guided/grammar_trials.py: builds grammars and follows each for a little while.

    python -m baton.guided.grammar_trial CPU_S BYTES

A question is JSON, a GuidedDecoding's fields; the answer is empty if it can be followed, else
{"message", "unsupported"}. Limits are those of baton/runtime/child.py. Tokens are single bytes,
which is enough for what a grammar is made of.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from typing import Final

import llguidance

from baton.guided.grammars import check_size, check_start, limits, llguidance_grammar
from baton.protocol.errors import InvalidRequest, UnsupportedFeature
from baton.protocol.sampling import GuidedDecoding
from baton.runtime import child

_END: Final = 256
NICE: Final = 5  # an answer waits for it; streams that go on do, too


class _Bytes:
    """What llguidance.TokenizerWrapper wants: a token per byte, and one that ends the text."""

    eos_token_id = _END
    bos_token_id = None
    special_token_ids = (_END,)
    tokens = (*(bytes([byte]) for byte in range(256)), b"<end>")

    def __call__(self, text: str | bytes) -> list[int]:
        return list(text if isinstance(text, bytes) else text.encode())


def tried() -> Callable[[GuidedDecoding], None]:
    """A trial: raises InvalidRequest for a grammar that cannot be followed."""
    tokenizer = llguidance.LLTokenizer(llguidance.TokenizerWrapper(_Bytes()))

    def trial(guided: GuidedDecoding) -> None:
        check_size(guided)
        text = llguidance_grammar(guided)
        matcher = llguidance.LLMatcher(tokenizer, text, log_level=0, limits=limits())
        check_start(matcher, _END)

    return trial


def serve(trial: Callable[[GuidedDecoding], None], cpu_s: float, memory_bytes: int) -> None:
    """Answer until the input ends."""

    def answer(question: bytes) -> bytes:
        try:
            trial(GuidedDecoding(**json.loads(question)))
        except InvalidRequest as error:
            unsupported = isinstance(error, UnsupportedFeature)
            return json.dumps({"message": error.message, "unsupported": unsupported}).encode()
        return b""

    child.serve(answer, cpu_s, memory_bytes, nice=NICE)


if __name__ == "__main__":
    serve(tried(), float(sys.argv[1]), int(sys.argv[2]))
