"""Text to token ids and back with the `tokenizers` library; and the decoder of a stream.

transformers' AutoTokenizer gives the same ids, but takes 2.2 s instead of 0.14 s to load, and needs
torch. The chat template is in baton/text/chat_template.py.

The stream decoder DEFINES the text of an output: text that has been shown never changes. It equals
a decode of all ids at once, with one exception: that decode may take back a finished character (in
a byte-fallback run with an invalid byte), which no stream can do.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Mapping, Sequence
from encodings.utf_8 import IncrementalDecoder as Utf8Decoder
from functools import cached_property
from pathlib import Path
from typing import Any, Final, Protocol, cast

import tokenizers
from tokenizers import decoders, normalizers

from baton.protocol.errors import InvalidRequest, ModelRefused
from baton.text.pieces import PieceEncoder

# A UTF-8 character has at most 4 bytes, and no decoder here spreads a byte over two tokens. So a
# tail that is still unreadable after this many tokens is no unfinished character, and is shown.
_MAX_PENDING_TOKENS: Final = 6
# The library's calls for one text hold the GIL. If one thread makes many of them in a row, every
# other thread waits 5 ms each time it wakes. The calls for several texts release the GIL.
SHORT_TOKENS: Final = 4096  # the most tokens that are decoded under the GIL
_MOST_COMPOSED: Final = 4  # characters of a text that a normalizer may join into one
_BYTE_TOKEN: Final = re.compile("<0x([0-9A-F]{2})>")
_REPLACEMENT: Final = "\N{REPLACEMENT CHARACTER}"


class StreamDecoder(Protocol):
    """Turns one sample's token ids into text, token by token."""

    def push(self, token_id: int) -> str:
        """Add a token; return the text that is now final, "" while a character is unfinished."""
        ...

    def push_all(self, token_ids: Sequence[int]) -> str:
        """Add several tokens in a row; return the text that is now final."""
        ...

    def flush(self) -> str:
        """Return, once, the replacement characters of an unfinished character at the end."""
        ...


class Tokenizer:
    """A loaded tokenizer. Safe to use from several threads at once."""

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        special_tokens: Mapping[str, str],
        keep_bytes: int = 0,
    ) -> None:
        self._backend = backend
        self.special_tokens = dict(special_tokens)
        self._special_ids = frozenset(
            token_id for token_id, t in backend.get_added_tokens_decoder().items() if t.special
        )
        self._skipped: dict[tuple[str, ...], frozenset[int]] = {}
        self._bytes_of = _ByteTable(backend) if _is_byte_level(backend) else None
        self.pieces = (
            PieceEncoder.of(backend, lambda text: self.encode(text, False), keep_bytes)
            if keep_bytes
            else None
        )

    @classmethod
    def load(cls, model_dir: str | Path, keep_bytes: int = 0) -> Tokenizer:
        """Read tokenizer.json, and from tokenizer_config.json which of its tokens are special.

        `keep_bytes` is the memory for pieces that `encode_chat` remembers. BOS and EOS are added as
        tokenizer.json's post-processor says. `add_bos_token` in the config is ignored: it is for
        checkpoints without that file (as transformers 5 reads it: tokenization_utils_base.py,
        `_from_pretrained`). Raises ModelRefused naming the file and the way out.
        """
        directory = Path(model_dir)
        path = directory / "tokenizer.json"
        if not path.is_file():
            raise ModelRefused(
                f"{directory} has no tokenizer.json; `baton convert {directory}` writes one"
                " from the tokenizer files that it has"
            )
        try:
            backend = tokenizers.Tokenizer.from_file(str(path))
        except Exception as error:
            raise ModelRefused(f"{path} cannot be read: {error}") from error
        if read_json(directory / "sentence_bert_config.json").get("do_lower_case") is True:
            backend.normalizer = _lowering(backend.normalizer)
        # Both are settings of training. Some checkpoints leave them on, and they would cut prompts.
        backend.no_truncation()
        backend.no_padding()
        special = read_special_tokens(directory)
        # The file may hold a named token as a plain added token; outputs would show it.
        backend.add_special_tokens([t for t in special.values() if _known(backend, t)])
        return cls(backend, special, keep_bytes)

    @property
    def vocab_size(self) -> int:
        """The number of ids, added tokens included (a model's embedding may be larger)."""
        return self._backend.get_vocab_size(with_added_tokens=True)

    @property
    def special_ids(self) -> frozenset[int]:
        """The tokens that mean something other than text; an output's text leaves them out."""
        return self._special_ids

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Return the token ids of `text`.

        `add_special_tokens` adds BOS and others as the model's files say. Raises InvalidRequest for
        text that is not valid Unicode (a lone surrogate).
        """
        special = add_special_tokens
        try:
            return self._backend.encode_batch_fast([text], add_special_tokens=special)[0].ids
        except (TypeError, UnicodeError) as error:
            raise InvalidRequest("the text is not valid Unicode", field="prompt") from error

    @cached_property
    def frame(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """The special tokens that `encode` adds before a text, and those behind it."""
        plain, whole = self.encode("a", add_special_tokens=False), self.encode("a")
        size = len(plain)
        for at in range(len(whole) - size + 1):
            if whole[at : at + size] == plain:
                return tuple(whole[:at]), tuple(whole[at + size :])
        return (), ()

    def encode_pair(self, first: str, second: str) -> tuple[list[int], int]:
        """Return the token ids of two texts in one prompt, special tokens added, and where the
        tokens of the second begin, as the post-processor counts them (type 1).

        Raises InvalidRequest for text that is not valid Unicode."""
        try:
            (found,) = self._backend.encode_batch([(first, second)])
        except (TypeError, UnicodeError) as error:
            raise InvalidRequest("the text is not valid Unicode", field="prompt") from error
        return found.ids, found.type_ids.index(1) if 1 in found.type_ids else len(found.ids)

    def encode_chat(self, text: str, salt: str = "") -> list[int]:
        """Return the ids of a rendered conversation, which holds its special tokens already.

        Pieces encoded before with the same `salt` are remembered, if `keep_bytes` was given and the
        tokenizer allows it (baton/text/pieces.py).
        """
        if self.pieces is None:
            return self.encode(text, add_special_tokens=False)
        return self.pieces.encode(text, salt)

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Return the text of all ids at once; ids outside the vocabulary decode to nothing."""
        skip = skip_special_tokens
        if len(ids) <= SHORT_TOKENS:
            return self._backend.decode(list(ids), skip_special_tokens=skip)
        return self._backend.decode_batch([list(ids)], skip_special_tokens=skip)[0]

    def _without(self, shown: tuple[str, ...]) -> frozenset[int]:
        """Return the special tokens that do not occur in the texts `shown`.

        The result is cached, because a router has few such texts.
        """
        found = self._skipped.get(shown)
        if found is None:
            texts = "\n".join(shown)
            named = {id_: self._backend.id_to_token(id_) or "" for id_ in self._special_ids}
            kept = {id_ for id_, token in named.items() if token and token in texts}
            found = self._skipped[shown] = self._special_ids - kept
        return found

    @cached_property
    def _longest(self) -> int | None:
        """The most characters of a text that one token stands for; None if there is no limit."""
        if self._bytes_of is None or not _drops_nothing(self._backend):
            return None
        vocabulary = self._backend.get_vocab(with_added_tokens=True)
        return max(len(self._bytes_of.of(token)) for token in vocabulary) * _MOST_COMPOSED

    def most_chars(self, num_tokens: int) -> int | None:
        """Return the most characters of a text of `num_tokens` tokens; None if there is no
        limit.
        """
        return None if self._longest is None else num_tokens * self._longest

    def token(self, token_id: int) -> str | None:
        """Return the vocabulary's own spelling of an id; None outside the vocabulary."""
        return self._backend.id_to_token(token_id)

    def token_bytes(self, token_id: int) -> bytes:
        """Return the bytes that a token adds to a text, which may be a part of a character.

        Return b"" for an id outside the vocabulary.
        """
        if self._bytes_of is not None:
            return self._bytes_of[token_id]
        token = self._backend.id_to_token(token_id)
        if token is None:
            return b""
        byte = _BYTE_TOKEN.fullmatch(token)
        if byte is not None:
            return bytes([int(byte[1], 16)])
        # Decoders strip the space before a first token, so a second copy of the token shows it.
        alone = self.decode([token_id], skip_special_tokens=False)
        twice = self.decode([token_id, token_id], skip_special_tokens=False)
        return (twice[len(alone) :] if twice.startswith(alone) else alone).encode()

    def stream(
        self, skip_special_tokens: bool = True, shown: Collection[str] = ()
    ) -> StreamDecoder:
        """Return a new decoder for one output.

        Special tokens that occur in the texts `shown` are not skipped.
        """
        skipped = self._special_ids if skip_special_tokens else frozenset[int]()
        if skipped and shown:
            skipped = self._without(tuple(shown))
        if self._bytes_of is not None:
            return _ByteStream(self._bytes_of, skipped)
        return _WindowStream(self._backend, skipped)


class _ByteStream:
    """Decoder for byte-level vocabularies (GPT-2, Llama 3, Qwen): tokens are bytes of UTF-8 text.

    It is exact for every sequence of ids, and needs one dictionary look-up per token.
    """

    def __init__(self, bytes_of: _ByteTable, skipped: frozenset[int]) -> None:
        self._bytes_of = bytes_of
        self._skipped = skipped
        self._utf8 = Utf8Decoder("replace")

    def push(self, token_id: int) -> str:
        if token_id in self._skipped:
            return ""
        return self._decoded(self._bytes_of[token_id])

    def push_all(self, token_ids: Sequence[int]) -> str:
        skipped, bytes_of = self._skipped, self._bytes_of
        shown = [bytes_of[token_id] for token_id in token_ids if token_id not in skipped]
        return self._decoded(b"".join(shown))

    def _decoded(self, data: bytes) -> str:
        if data.isascii() and not self._utf8.buffer:  # the decoder is Python code: not for these
            return data.decode("ascii")
        return self._utf8.decode(data)

    def flush(self) -> str:
        return self._utf8.decode(b"", final=True)


class _WindowStream:
    """Decoder for any vocabulary, over a window of ids.

    It shows new text once that text ends in a whole character.

    window:  [ shown last time | pending ]      text(window) minus text(shown last time) = new text
    The shown part stays in the window because the text of an id depends on its neighbours: a
    leading space is stripped only at the start, and several byte tokens join into one character.
    """

    def __init__(self, backend: tokenizers.Tokenizer, skipped: frozenset[int]) -> None:
        self._backend = backend
        self._skipped = skipped
        self._shown: list[int] = []
        self._shown_text = ""
        self._pending: list[int] = []

    def push(self, token_id: int) -> str:
        if token_id in self._skipped or self._backend.id_to_token(token_id) is None:
            return ""
        self._pending.append(token_id)
        text = self._new_text()
        if text == "" or (text.endswith(_REPLACEMENT) and len(self._pending) < _MAX_PENDING_TOKENS):
            return ""
        return self._show(text)

    def push_all(self, token_ids: Sequence[int]) -> str:
        return "".join(map(self.push, token_ids))

    def flush(self) -> str:
        return self._show(self._new_text()) if self._pending else ""

    def _new_text(self) -> str:
        text = self._decode([*self._shown, *self._pending])
        if text.startswith(self._shown_text):
            return text[len(self._shown_text) :]
        # An invalid byte made the decoder take back the bytes before it. Text that was shown stays.
        return self._decode(self._pending)

    def _show(self, text: str) -> str:
        self._shown, self._pending = self._pending, []
        self._shown_text = self._decode(self._shown)
        return text

    def _decode(self, ids: list[int]) -> str:
        return self._backend.decode(ids, skip_special_tokens=False)


def read_json(path: Path) -> dict[str, Any]:
    """Return the object in a JSON file, {} without the file; else raise ModelRefused."""
    content = _content(path) if path.is_file() else {}
    if not isinstance(content, dict):
        raise ModelRefused(f"{path} does not hold a JSON object")
    return cast("dict[str, Any]", content)


def read_json_list(path: Path) -> list[dict[str, Any]]:
    """Return the list of objects in a JSON file, [] without the file; else raise ModelRefused."""
    content = _content(path) if path.is_file() else []
    items = cast("list[object]", content) if isinstance(content, list) else [None]
    if not all(isinstance(item, dict) for item in items):
        raise ModelRefused(f"{path} does not hold a list of JSON objects")
    return cast("list[dict[str, Any]]", items)


def _content(path: Path) -> object:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ModelRefused(f"{path} cannot be read: {error}") from error


def read_special_tokens(directory: Path) -> dict[str, str]:
    """Return special tokens by name ("bos_token": "<s>").

    tokenizer_config.json overrides special_tokens_map.json.
    """
    found: dict[str, str] = {}
    for file in ("special_tokens_map.json", "tokenizer_config.json"):
        for name, value in read_json(directory / file).items():
            content = cast("object", value.get("content")) if isinstance(value, dict) else value
            if name.endswith("_token") and isinstance(content, str):
                found[name] = content
    return found


def _known(backend: tokenizers.Tokenizer, token: str) -> bool:
    return backend.token_to_id(token) is not None


def _lowering(normalizer: normalizers.Normalizer | None) -> normalizers.Normalizer:
    """Return a normalizer that writes everything in lower case first, as sentence-transformers does
    for `do_lower_case`."""
    lower = normalizers.Lowercase()
    return lower if normalizer is None else normalizers.Sequence([lower, normalizer])


def _is_byte_level(backend: tokenizers.Tokenizer) -> bool:
    return isinstance(cast("object", backend.decoder), decoders.ByteLevel)


def _drops_nothing(backend: tokenizers.Tokenizer) -> bool:
    normalizer = cast("object", backend.normalizer)
    return normalizer is None or isinstance(normalizer, normalizers.NFC)


class _ByteTable(dict[int, bytes]):
    """The bytes of ids of a byte-level vocabulary, of each id once it was asked for: a vocabulary
    of 150,000 would take most of a router's start. b"" for an id outside the vocabulary.

    If all characters of a token are in GPT-2's byte alphabet, the token stands for bytes. Any other
    token (an added token with a space, say) stands for its own UTF-8. Source: tokenizers,
    pre_tokenizers/byte_level.rs.
    """

    def __init__(self, backend: tokenizers.Tokenizer) -> None:
        super().__init__()
        self._backend = backend
        self._byte_of = _gpt2_alphabet()

    def __missing__(self, token_id: int) -> bytes:
        token = self._backend.id_to_token(token_id) if token_id >= 0 else None
        if token is None:
            return b""
        found = self[token_id] = self.of(token)
        return found

    def of(self, token: str) -> bytes:
        """Return the bytes of a token by its spelling."""
        try:
            return bytes([self._byte_of[char] for char in token])
        except KeyError:
            return token.encode("utf-8", "replace")


def _gpt2_alphabet() -> dict[str, int]:
    """Return character -> byte.

    Printable Latin-1 characters stand for themselves; characters from 256 on stand for other bytes.
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    alphabet = {chr(byte): byte for byte in printable}
    alphabet.update({chr(256 + index): byte for index, byte in enumerate(others)})
    return alphabet
