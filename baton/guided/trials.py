"""Tries grammars in a child process before anything depends on them. This file has both sides.

Building a grammar and its first mask can take minutes or gigabytes (`multipleOf: 9999991`), in one
call in which a thread cannot be stopped. So it is first done in a process that can be killed
(baton/runtime/children.py):

    python -m baton.guided.trials CPU_S BYTES

A question is JSON with the fields of a GuidedDecoding. The answer is empty if the grammar can be
followed, else {"message", "unsupported"}. The child builds the grammar and follows it for a few
tokens, which are single bytes: that suffices to build the parts of a grammar.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import asdict
from typing import Final

import llguidance

from baton.guided.grammar_text import limits, llguidance_grammar, reason_of
from baton.guided.spec import FIELD, check_size
from baton.protocol.errors import InvalidRequest, Unavailable, UnsupportedFeature
from baton.protocol.sampling import GuidedDecoding
from baton.runtime import child
from baton.runtime.children import ChildBudget, Children, Excess, GivenUp

TRIAL: Final = (sys.executable, "-m", "baton.guided.trials")
RETRY_S: Final = 5  # seconds after which a client may ask a busy machine again
NICE: Final = 5  # of a child: running streams go before it, but an answer waits for it
_FAULTS: Final = {
    Excess.CPU: "guided: the grammar takes too long to build",
    Excess.MEMORY: "guided: the grammar needs too much memory to build",
}
_END: Final = 256  # the token that ends a text
_STEPS: Final = 32  # bytes of the text with which a grammar is tried
_BLANK: Final = 33  # the first byte above the white space of ASCII
_QUOTE: Final = ord('"')


class GrammarTrials:
    """The parent's side. Any thread may call `run`; `close` may be called twice."""

    def __init__(self, command: Sequence[str] = TRIAL, budget: ChildBudget | None = None) -> None:
        self.children = Children(command, budget or ChildBudget())

    def run(self, guided: GuidedDecoding) -> None:
        """Try a grammar. Return if it can be followed.

        Raises InvalidRequest (field `guided`) for one that cannot be built within the budget or
        allows no text, UnsupportedFeature for structural tags that cannot be written, Unavailable
        if this machine was too busy to find out.
        """
        try:
            answer = self.children.ask(json.dumps(asdict(guided)).encode())
        except GivenUp as error:
            fault = _FAULTS.get(error.excess)
            if fault is None:
                raise too_busy() from error
            raise InvalidRequest(fault, field=FIELD) from error
        if answer:
            refusal = json.loads(answer)
            kind = UnsupportedFeature if refusal["unsupported"] else InvalidRequest
            raise kind(refusal["message"], field=FIELD)

    def close(self) -> None:
        """End the idle children; those at work end when their question is answered."""
        self.children.close()


def too_busy() -> Unavailable:
    """Return an error that tells the client to ask again, because the grammar may be good."""
    message = "guided: the server is too busy to compile the grammar now"
    return Unavailable(message, field=FIELD, retry_after_s=RETRY_S)


# ---- in the child ----


class _Bytes:
    """A tokenizer for llguidance.TokenizerWrapper: one token per byte, and one that ends the
    text.
    """

    eos_token_id = _END
    bos_token_id = None
    special_token_ids = (_END,)
    tokens = (*(bytes([byte]) for byte in range(256)), b"<end>")

    def __call__(self, text: str | bytes) -> list[int]:
        return list(text if isinstance(text, bytes) else text.encode())


def _serve(cpu_s: float, memory_bytes: int) -> None:
    """Answer questions until the input ends."""
    tokenizer = llguidance.LLTokenizer(llguidance.TokenizerWrapper(_Bytes()))

    def answer(question: bytes) -> bytes:
        try:
            _try(GuidedDecoding(**json.loads(question)), tokenizer)
        except InvalidRequest as error:
            unsupported = isinstance(error, UnsupportedFeature)
            return json.dumps({"message": error.message, "unsupported": unsupported}).encode()
        return b""

    child.serve(answer, cpu_s, memory_bytes, nice=NICE)


def _try(guided: GuidedDecoding, tokenizer: llguidance.LLTokenizer) -> None:
    """Build a grammar and follow one text of at most _STEPS bytes.

    Parts of a grammar are built only when a text reaches them. Raises InvalidRequest if no text or
    only the empty text is allowed, or if a limit is met.
    """
    check_size(guided)
    text = llguidance_grammar(guided)
    matcher = llguidance.LLMatcher(tokenizer, text, log_level=0, limits=limits())
    for step in range(_STEPS):
        allowed = int.from_bytes(b"" if matcher.is_error() else matcher.compute_bitmask(), "little")
        if matcher.is_error():
            raise InvalidRequest(f"guided: {reason_of(matcher.get_error())}", field=FIELD)
        if not allowed & ((1 << _END) - 1):
            if step == 0:
                reason = "nothing but an empty answer matches the grammar"
                raise InvalidRequest(f"guided: {reason}", field=FIELD)
            return
        # A quote is chosen wherever it is allowed, so that a JSON text leaves its first string.
        byte = _QUOTE if allowed >> _QUOTE & 1 else _lowest(allowed, _BLANK)
        matcher.consume_token(byte if _BLANK <= byte < _END else _lowest(allowed))


def _lowest(bits: int, start: int = 0) -> int:
    """Return the lowest bit that is set, from `start` on; `start` - 1 if none is."""
    rest = bits >> start
    return start + (rest & -rest).bit_length() - 1


if __name__ == "__main__":
    _serve(float(sys.argv[1]), int(sys.argv[2]))
