"""Real sentencepiece models without the package: trained, written as its protobuf, and read by a
plain statement of its two algorithms, for the tests of `baton convert`.

Source: github.com/google/sentencepiece: bpe_model.cc (best merge first, the leftmost of equals),
unigram_model.cc (Viterbi; an unknown character costs 10 below the least score), byte fallback and
whitespace as in doc/special_symbols.md and normalizer.cc.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal

from tokenizers import AddedToken, Tokenizer, models, normalizers, pre_tokenizers, trainers
from transformers.convert_slow_tokenizer import import_protobuf

SPACE: Final = "\u2581"
UNKNOWN_PENALTY: Final = 10.0
NORMAL, UNKNOWN, CONTROL, BYTE = 1, 2, 3, 6  # ModelProto.SentencePiece.Type
Kind = Literal["bpe", "unigram"]


@dataclass(frozen=True)
class PieceModel:
    """Pieces by id: <unk>, <s>, </s>, 256 bytes, then what was learned, with its score."""

    kind: Kind
    pieces: tuple[tuple[str, float], ...]

    @property
    def num_reserved(self) -> int:
        """Ids that no text spells."""
        return 3 + 256

    def serialized(self, **normalizer: bool) -> bytes:
        """As tokenizer.model holds it; `normalizer`: other values of its NormalizerSpec."""
        messages: Any = import_protobuf()
        proto = messages.ModelProto()
        kinds = [UNKNOWN, CONTROL, CONTROL, *[BYTE] * 256]
        kinds += [NORMAL] * (len(self.pieces) - len(kinds))
        for (piece, score), kind in zip(self.pieces, kinds, strict=True):
            proto.pieces.add(piece=piece, type=kind, score=score)
        proto.trainer_spec.model_type = 2 if self.kind == "bpe" else 1
        proto.trainer_spec.byte_fallback = True
        proto.trainer_spec.unk_id, proto.trainer_spec.unk_piece = 0, "<unk>"
        proto.normalizer_spec.name = "identity"
        proto.normalizer_spec.add_dummy_prefix = True
        proto.normalizer_spec.remove_extra_whitespaces = False
        for name, value in normalizer.items():
            setattr(proto.normalizer_spec, name, value)
        return proto.SerializeToString()

    def encode(self, text: str) -> list[int]:
        """Ids of `text` as sentencepiece gives them (no <s>)."""
        if not text:
            return []
        marked = SPACE + text.replace(" ", SPACE)
        known = {p: i for i, (p, _) in enumerate(self.pieces) if i >= self.num_reserved}
        ids: list[int] = []
        for piece in self.split(marked):
            if piece in known:
                ids.append(known[piece])
            else:
                ids.extend(3 + byte for byte in piece.encode())
        return ids

    def split(self, text: str) -> list[str]:
        """Pieces, and characters that are none, of a text whose spaces are marked."""
        known = {p: i for i, (p, _) in enumerate(self.pieces) if i >= self.num_reserved}
        return (self._merged if self.kind == "bpe" else self._likeliest)(text, known)

    def decode(self, ids: Sequence[int]) -> str:
        """The text of ids; bytes that make no character become U+FFFD."""
        parts: list[bytes] = []
        for token in ids:
            piece = self.pieces[token][0]
            parts.append(bytes([token - 3]) if 3 <= token < 259 else piece.encode())
        return b"".join(parts).decode(errors="replace").replace(SPACE, " ").removeprefix(" ")

    def _merged(self, text: str, known: dict[str, int]) -> list[str]:
        symbols = list(text)
        while True:
            best, at = -math.inf, -1
            for i in range(len(symbols) - 1):
                token = known.get(symbols[i] + symbols[i + 1])
                if token is not None and self.pieces[token][1] > best:
                    best, at = self.pieces[token][1], i
            if at < 0:
                return symbols
            symbols[at : at + 2] = [symbols[at] + symbols[at + 1]]

    def _likeliest(self, text: str, known: dict[str, int]) -> list[str]:
        scores = {piece: self.pieces[token][1] for piece, token in known.items()}
        unknown = min(scores.values()) - UNKNOWN_PENALTY
        longest = max(map(len, scores))
        best: list[tuple[float, int]] = [(0.0, 0)]  # score of each prefix, where its last starts
        for end in range(1, len(text) + 1):
            candidates: list[tuple[float, int]] = []
            for start in range(max(0, end - longest), end):
                score = scores.get(text[start:end], unknown if start == end - 1 else -math.inf)
                candidates.append((best[start][0] + score, start))
            best.append(max(candidates, key=lambda c: c[0]))
        pieces: list[str] = []
        end = len(text)
        while end:
            start = best[end][1]
            pieces.append(text[start:end])
            end = start
        return pieces[::-1]


def train(kind: Kind, texts: Iterable[str], vocab_size: int = 700) -> PieceModel:
    """Learn pieces from `texts` by the trainers of `tokenizers`, which follow sentencepiece's;
    single characters come on top of `vocab_size`."""
    reserved = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    if kind == "bpe":
        tokenizer = Tokenizer(models.BPE(unk_token="<unk>"))
        trainer: Any = trainers.BpeTrainer(vocab_size=vocab_size, show_progress=False)
    else:
        tokenizer = Tokenizer(models.Unigram())
        trainer = trainers.UnigramTrainer(
            vocab_size=vocab_size, show_progress=False, unk_token="<unk>",
            special_tokens=[AddedToken("<unk>")],
        )  # fmt: skip
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.Prepend(SPACE), normalizers.Replace(" ", SPACE)]
    )
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="never")
    tokenizer.train_from_iterator(texts, trainer)
    learned = _learned(kind, tokenizer)
    return PieceModel(kind, (*((piece, 0.0) for piece in reserved), *learned))


def _learned(kind: Kind, tokenizer: Tokenizer) -> list[tuple[str, float]]:
    """Pieces with their scores: minus the rank of the merge, or log probabilities."""
    model = json.loads(tokenizer.to_str())["model"]
    if kind == "unigram":
        return [(piece, score) for piece, score in model["vocab"] if piece != "<unk>"]
    merged = ["".join(pair) for pair in model["merges"]]
    letters = [piece for piece in model["vocab"] if len(piece) == 1]
    # As sentencepiece writes them: merges first, single characters last.
    ordered = dict.fromkeys([*merged, *letters])
    return [(piece, -float(rank)) for rank, piece in enumerate(ordered)]
