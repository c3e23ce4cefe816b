"""PieceEncoder: encodes a text in pieces, and remembers the ids of pieces that it has encoded.

A tokenizer first cuts a text at its added tokens (`<|im_start|>`, ...). Then it normalizes and
encodes each piece alone, so the ids of a text are those of its pieces, in order. The next turn of a
chat is its last prompt and two further pieces, and the chats of an application begin with the same
pieces.

    <|im_start|> system\\nYou are ... <|im_end|> \\n <|im_start|> user\\nHello <|im_end|> ...
                 `-- remembered --'                              `-- new ---'

If clients shared remembered pieces, the time that a prompt takes would tell one client what others
have sent. So pieces are remembered per salt, as KV blocks are (router/request/terms.py). Not here:
what is done to a text before.

Source: tokenizers, added_vocabulary.rs, extract_and_normalize; mod.rs, do_tokenize.
"""

from __future__ import annotations

import re
import sys
import threading
from array import array
from collections import OrderedDict
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Final

import tokenizers

_ENTRY_BYTES: Final = 300  # what a remembered piece takes in addition to its text and ids
_SHARE: Final = 4  # one piece takes at most a quarter of the room
# With this setting Metaspace puts its mark before a text's first piece only, so the ids of a piece
# depend on its place.
_KNOWS_THE_FIRST: Final = b'"prepend_scheme":"first"'


@dataclass(slots=True)
class PieceStats:
    """Counts of characters: `asked` to be encoded, and `kept`, whose ids were remembered."""

    asked: int = 0
    kept: int = 0


class PieceEncoder:
    """Encodes a text piece by piece, like a tokenizer without special tokens around the text.

    It remembers at most `max_bytes` of texts and ids; the least recently used go first. Any thread
    may use it.
    """

    def __init__(
        self, encode: Callable[[str], list[int]], separators: dict[str, int], max_bytes: int
    ) -> None:
        self._encode = encode
        self._separators = separators
        self._cut = re.compile(f"({longest_of(separators)})")
        self._max_bytes = max_bytes
        self._num_bytes = 0
        self._kept: OrderedDict[tuple[str, str], array[int]] = OrderedDict()
        self._lock = threading.Lock()
        self.stats = PieceStats()

    @classmethod
    def of(
        cls, backend: tokenizers.Tokenizer, encode: Callable[[str], list[int]], max_bytes: int
    ) -> PieceEncoder | None:
        """Return an encoder for a tokenizer whose pieces do not depend on each other, else None."""
        found = separators_of(backend)
        return cls(encode, found, max_bytes) if found else None

    def encode(self, text: str, salt: str = "") -> list[int]:
        """Return the ids of `text`: those of the tokenizer's `encode`, whose errors it raises."""
        ids: list[int] = []
        for place, piece in enumerate(self._cut.split(text)):
            if place % 2:
                ids.append(self._separators[piece])
            elif piece:
                ids.extend(self._ids_of(piece, salt))
        return ids

    def _ids_of(self, piece: str, salt: str) -> Iterable[int]:
        key = salt, piece
        with self._lock:
            self.stats.asked += len(piece)
            kept = self._kept.get(key)
            if kept is not None:
                self._kept.move_to_end(key)
                self.stats.kept += len(piece)
                return kept
        ids = self._encode(piece)  # without the lock, because other threads encode, too
        self._keep(key, array("I", ids))
        return ids

    def _keep(self, key: tuple[str, str], ids: array[int]) -> None:
        size = _size(key, ids)
        if size * _SHARE > self._max_bytes:
            return
        with self._lock:
            if key in self._kept:  # another thread has added it meanwhile
                return
            self._kept[key] = ids
            self._num_bytes += size
            while self._num_bytes > self._max_bytes:
                self._num_bytes -= _size(*self._kept.popitem(last=False))


def separators_of(backend: tokenizers.Tokenizer) -> dict[str, int]:
    """Return the added tokens at which a text is cut before anything else.

    Return {} if cutting would change ids: if an added token takes the spaces around it or stands
    only between words, or if the ids of a piece depend on its place.
    """
    first: Any = backend.pre_tokenizer
    if first is not None and _KNOWS_THE_FIRST in first.__getstate__():
        return {}
    found: dict[str, int] = {}
    for token_id, token in backend.get_added_tokens_decoder().items():
        if token.normalized:
            continue  # these tokens are looked for inside the pieces
        if token.lstrip or token.rstrip or token.single_word:
            return {}
        found[token.content] = token_id
    return found


def longest_of(words: Iterable[str]) -> str:
    """Return a pattern that matches the longest of `words` at a place.

    The pattern is a tree of characters. Plain alternatives would be tried one by one, and thousands
    of words begin alike (`<unused7>`).
    """
    tree: dict[str, Any] = {}
    for word in words:
        node = tree
        for char in word:
            node = node.setdefault(char, {})
        node[""] = {}
    return _pattern(tree)


def _pattern(node: dict[str, Any]) -> str:
    ends = "" in node
    ways: list[str] = []
    for char, below in node.items():
        if char == "":
            continue
        run, rest = char, below
        while len(rest) == 1 and "" not in rest:  # no fork: no group is needed
            ((more, rest),) = rest.items()
            run += more
        ways.append(re.escape(run) + _pattern(rest))
    if not ways:
        return ""
    either = f"(?:{'|'.join(ways)})"
    return f"{either}?" if ends else either


def _size(key: tuple[str, str], ids: array[int]) -> int:
    return sys.getsizeof(key[1]) + ids.itemsize * len(ids) + _ENTRY_BYTES
