"""A byte tokenizer for llguidance, and whole texts against grammars."""

from __future__ import annotations

import llguidance

from baton.guided.grammar_text import limits, llguidance_grammar, reason_of
from baton.guided.spec import FIELD, check_size
from baton.protocol.errors import InvalidRequest
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


def check_grammar(guided: GuidedDecoding) -> None:
    """Raise InvalidRequest (UnsupportedFeature for tags that cannot be written) if llguidance could
    not follow it. Needs no vocabulary, and has no budget."""
    check_size(guided)
    text = llguidance_grammar(guided)
    failed, messages = llguidance.LLMatcher.validate_grammar_with_warnings(text, limits=limits())
    if failed:
        raise InvalidRequest(f"guided: {reason_of(messages[0])}", field=FIELD)
