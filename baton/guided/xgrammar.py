"""xgrammar as backend: the second one, for structural tags and grammars that the first lacks.

An optional package that imports torch and transformers (a second), so it is imported with the first
grammar that needs it. What it does not know of a JSON schema it ignores: a schema that must be
followed is refused for that here (baton/guided/schema_keywords.py).
"""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Sequence
from typing import Any, Final

import numpy as np

from baton.guided.base import Vocabulary
from baton.guided.bounded import bounded_tag
from baton.guided.grammars import FIELD, choices_of, reason_of
from baton.guided.schema_keywords import check_xgrammar
from baton.protocol.errors import InvalidRequest, UnsupportedFeature
from baton.protocol.sampling import GuidedDecoding

MAX_SPACES: Final = 16
_CONTROL: Final = re.compile(rb"[\x00-\x09\x0b-\x1f]")  # all but the line break


class XgrammarBackend:
    """Implements base.Backend. Raises UnsupportedFeature if the package is not installed."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        try:
            import xgrammar
        except ImportError as error:
            raise UnsupportedFeature(
                "guided: the backend xgrammar is not installed here", field=FIELD
            ) from error
        self._xgrammar: Any = xgrammar
        self._vocabulary = vocabulary
        self._lock = threading.Lock()
        self._compilers: dict[tuple[frozenset[int], bool], Any] = {}

    def compile(self, guided: GuidedDecoding) -> XgrammarMatcher:
        """See base.Backend.compile."""
        if guided.whitespace:
            raise UnsupportedFeature("guided: xgrammar takes no whitespace pattern", field=FIELD)
        check_xgrammar(guided)
        is_json = guided.kind in ("json_schema", "json_object")
        compiler = self._compiler(self._spoken(guided), is_json)
        try:
            compiled = self._compile(compiler, guided)
            matcher = self._xgrammar.GrammarMatcher(compiled)
        except InvalidRequest:
            raise
        except Exception as error:  # its C++ raises several kinds
            raise InvalidRequest(f"guided: {reason_of(str(error))}", field=FIELD) from error
        return XgrammarMatcher(matcher)

    def _compile(self, compiler: Any, guided: GuidedDecoding) -> Any:
        match guided.kind:
            case "free":
                raise InvalidRequest("guided: there is no grammar", field=FIELD)
            case "regex":
                return compiler.compile_regex(guided.grammar)
            case "choice":
                return compiler.compile_grammar(_choice(choices_of(guided.grammar)))
            case "ebnf" if "::=" in guided.grammar:
                return compiler.compile_grammar(guided.grammar)
            case "ebnf":
                return compiler.compile_lark(guided.grammar)
            case "structural_tag":
                tag = bounded_tag(guided.grammar, lambda schema: self._grammar(schema, guided))
                return compiler.compile_structural_tag(tag)
            case "json_schema" | "json_object":
                options = _json_options(guided)
                return compiler.compile_json_schema(
                    guided.grammar or '{"type": "object"}', **options
                )

    def _grammar(self, schema: Any, guided: GuidedDecoding) -> str:
        """EBNF of a JSON schema within a tag."""
        of = self._xgrammar.Grammar.from_json_schema
        return str(of(json.dumps(schema), **_json_options(guided)))

    def _spoken(self, guided: GuidedDecoding) -> frozenset[int]:
        """The special tokens that a grammar spells out: elsewhere text must not hold them, because
        readers leave them out."""
        if guided.kind != "structural_tag":
            return frozenset()
        text = json.dumps(json.loads(guided.grammar), ensure_ascii=False)
        specials = self._vocabulary.specials
        return frozenset(token_id for special, token_id in specials.items() if special in text)

    def _compiler(self, spoken: frozenset[int], is_json: bool) -> Any:
        with self._lock:
            key = (spoken, is_json)
            if key not in self._compilers:
                tokens = list(self._vocabulary.tokens)
                if is_json:
                    # In strings of bounded length it lets pass what JSON must escape.
                    tokens = [b"" if _CONTROL.search(token) else token for token in tokens]
                for text, token_id in self._vocabulary.specials.items():
                    tokens[token_id] = text.encode() if token_id in spoken else b""
                info = self._xgrammar.TokenizerInfo(
                    tokens,
                    vocab_size=len(tokens),
                    stop_token_ids=list(self._vocabulary.eos_token_ids),
                )
                self._compilers[key] = self._xgrammar.GrammarCompiler(
                    info, max_threads=1, cache_enabled=False
                )
            return self._compilers[key]


def _json_options(guided: GuidedDecoding) -> dict[str, Any]:
    """What a JSON text may be like, beside its schema."""
    return {
        "any_whitespace": guided.whitespace is None,
        "separators": (",", ":") if guided.whitespace == "" else None,
        "strict_mode": False,
        "max_whitespace_cnt": MAX_SPACES if guided.whitespace is None else None,
    }


class XgrammarMatcher:
    """Implements base.Matcher."""

    def __init__(self, matcher: Any) -> None:
        self._matcher = matcher

    @property
    def error(self) -> str:
        return ""

    def fill(self, row: np.ndarray) -> None:
        if self._matcher.is_terminated():
            row.fill(-1)  # nothing follows the end: whatever is drawn here is thrown away
        elif not self._matcher.fill_next_token_bitmask(row[None]):
            row.fill(-1)

    def advance(self, token_id: int) -> bool:
        return not self._matcher.is_terminated() and self._matcher.accept_token(token_id)

    def accepts(self, token_ids: Sequence[int]) -> int:
        taken = 0
        while taken < len(token_ids) and self.advance(token_ids[taken]):
            taken += 1
        if taken:
            self._matcher.rollback(taken)
        return taken

    def clone(self) -> XgrammarMatcher:
        return XgrammarMatcher(self._matcher.fork())


def _choice(choices: Sequence[str]) -> str:
    return "root ::= " + " | ".join(json.dumps(choice, ensure_ascii=False) for choice in choices)
