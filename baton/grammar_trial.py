"""The child of baton/grammar_trials.py: builds grammars and follows each for a little while.

    python -m baton.grammar_trial CPU_S BYTES

A line of JSON in, a GuidedDecoding's fields; a line out: {} if it can be followed, else
{"message", "unsupported"}. It ends with its input. Where a grammar uses up CPU_S, the kernel ends
the process (SIGPROF, which nothing here catches: no call has to come back for that); with BYTES,
the allocator does. Tokens are single bytes, which is enough for what a grammar is made of.
"""

from __future__ import annotations

import json
import resource
import signal
import sys
from collections.abc import Callable
from typing import Final

import llguidance

from baton.errors import InvalidRequest, UnsupportedFeature
from baton.grammars import check_size, check_start, limits, llguidance_grammar
from baton.sampling import GuidedDecoding

_END: Final = 256


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
    resource.setrlimit(resource.RLIMIT_DATA, (memory_bytes, memory_bytes))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    _say({})
    for line in sys.stdin.buffer:
        guided = GuidedDecoding(**json.loads(line))
        signal.setitimer(signal.ITIMER_PROF, cpu_s)
        answer: dict[str, object] = {}
        try:
            trial(guided)
        except InvalidRequest as error:
            unsupported = isinstance(error, UnsupportedFeature)
            answer = {"message": error.message, "unsupported": unsupported}
        signal.setitimer(signal.ITIMER_PROF, 0)
        _say(answer)


def _say(answer: dict[str, object]) -> None:
    sys.stdout.buffer.write(json.dumps(answer).encode() + b"\n")
    sys.stdout.buffer.flush()


if __name__ == "__main__":
    serve(tried(), float(sys.argv[1]), int(sys.argv[2]))
