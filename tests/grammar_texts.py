"""A byte tokenizer for llguidance, and whole texts against grammars."""

from __future__ import annotations

import llguidance

from baton.guided.grammars import llguidance_grammar
from baton.protocol.sampling import GuidedDecoding

TOKENS = [bytes([byte]) for byte in range(256)] + [b"<end>", b"[X]", b"</x>"]
END, OPEN, CLOSE = 256, 257, 258
SPECIALS = {"[X]": OPEN, "</x>": CLOSE}


class Bytes:
    """What llguidance.TokenizerWrapper wants: one token per byte, and a few special ones."""

    eos_token_id = END
    bos_token_id = None
    tokens = TOKENS
    special_token_ids = (END, OPEN, CLOSE)

    def __call__(self, text: str | bytes) -> list[int]:
        return list(text if isinstance(text, bytes) else text.encode())


def byte_tokenizer() -> llguidance.LLTokenizer:
    return llguidance.LLTokenizer(llguidance.TokenizerWrapper(Bytes()))


def spelled(text: str) -> list[int]:
    """Tokens of a text in which special tokens are themselves."""
    ids: list[int] = []
    while text:
        special = next((name for name in SPECIALS if text.startswith(name)), "")
        ids += [SPECIALS[special]] if special else list(text[0].encode())
        text = text[len(special) or 1 :]
    return ids


def takes(tokenizer: llguidance.LLTokenizer, guided: GuidedDecoding, text: str) -> bool:
    """Whether `text` is a whole match."""
    matcher = llguidance.LLMatcher(tokenizer, llguidance_grammar(guided, SPECIALS), log_level=0)
    assert not matcher.is_error(), matcher.get_error()
    return matcher.consume_tokens(spelled(text)) and matcher.is_accepting()
