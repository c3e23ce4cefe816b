"""Makes tokenizer.json for a sentencepiece model from the model itself.

transformers chooses by the tokenizer's class how text is split, and the class may not fit the
model: T5's reads merges as probabilities, Llama's does the reverse, Gemma's drops the space in
front of a text. So `baton convert` takes special tokens and what stands around a text from
transformers, and the rest from the model:

    normalizer   table of characters, extra whitespace, the space in front, spaces as U+2581
    model        unigram (the likeliest pieces) or BPE (the best merge first), bytes as fallback
    decoder      turns tokens back into text

`pipeline_of` returns None for models that split into words or characters, for classes that change
ids, and for models with user-defined pieces that hold spaces. For these transformers' parts stay.
Source: sentencepiece_model.proto, normalizer.cc, bpe_model.cc, unigram_model.cc of
github.com/google/sentencepiece.
"""

from __future__ import annotations

import base64
from collections.abc import Mapping
from typing import Any, Final

from baton.protocol.errors import ModelRefused

SPACE: Final = "\u2581"
_UNIGRAM, _BPE = 1, 2  # TrainerSpec.ModelType
_NORMAL, _USER_DEFINED = 1, 4  # ModelProto.SentencePiece.Type
# If a text contains a byte's name such as <0x41>, the unigram model of `tokenizers` would read it
# as that byte, sentencepiece does not. So the text is cut within the name. (A learned piece that
# crosses the cut is then not found.)
_UNSPELL: Final[dict[str, Any]] = {
    "type": "Split", "pattern": {"Regex": "<0(?=x[0-9A-F]{2}>)"}, "behavior": "MergedWithPrevious",
    "invert": False,
}  # fmt: skip
MODEL_NAMES: Final = {_UNIGRAM: "Unigram", _BPE: "BPE"}


def pipeline_of(proto: Any, converted: Mapping[str, Any], legacy: bool) -> dict[str, Any] | None:
    """Return the parts of tokenizer.json that the model decides; None if transformers' parts are to
    be kept.

    `converted`: tokenizer.json as transformers made it. `legacy`: a text after a special token also
    gets a space in front, as in sentencepiece itself (tokenizer_config.json may turn this off).
    Raises ModelRefused if transformers' parts cannot be right either.
    """
    kind = proto.trainer_spec.model_type
    if kind not in MODEL_NAMES:
        return None
    if _moved(proto, converted) or _spaces_defined(proto):
        if converted["model"]["type"] != MODEL_NAMES[kind]:
            raise ModelRefused(
                f"the tokenizer's class splits text as {converted['model']['type']}, its "
                f"sentencepiece model is {MODEL_NAMES[kind]}; is tokenizer_class right?"
            )
        return None
    prefix = proto.normalizer_spec.add_dummy_prefix
    splits: list[dict[str, Any]] = []
    if prefix and not legacy:
        normalizer = _normalizer(proto, prefix=False, spaces=False)
        splits.append(
            {
                "type": "Metaspace", "replacement": SPACE, "prepend_scheme": "first",
                "split": False,
            }
        )  # fmt: skip
    else:
        normalizer = _normalizer(proto, prefix)
    if kind == _UNIGRAM and proto.trainer_spec.byte_fallback:
        splits.append(_UNSPELL)
    front: dict[str, Any] = {
        "normalizer": normalizer,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": splits} if splits else None,
    }
    return front | {"model": _model(proto, converted), "decoder": _decoder(proto)}


def _moved(proto: Any, converted: Mapping[str, Any]) -> bool:
    """Whether transformers' tokenizer class gives pieces other ids than the model does."""
    ids = _ids(converted)
    return any(ids.get(p.piece) != i for i, p in enumerate(proto.pieces) if p.type == _NORMAL)


def _ids(converted: Mapping[str, Any]) -> dict[str, int]:
    vocab = converted["model"]["vocab"]
    if isinstance(vocab, dict):
        return vocab
    return {entry[0]: i for i, entry in enumerate(vocab)}


def _spaces_defined(proto: Any) -> bool:
    """Whether any user-defined piece holds a space. Such pieces match before text is split, which
    added tokens of tokenizer.json cannot express."""
    return any(p.type == _USER_DEFINED and SPACE in p.piece for p in proto.pieces)


def _normalizer(proto: Any, prefix: bool, spaces: bool = True) -> dict[str, Any] | None:
    spec = proto.normalizer_spec
    steps: list[dict[str, Any]] = []
    if spec.precompiled_charsmap:
        table = base64.b64encode(spec.precompiled_charsmap).decode()
        steps.append({"type": "Precompiled", "precompiled_charsmap": table})
    if spec.remove_extra_whitespaces:
        steps.append({"type": "Strip", "strip_left": True, "strip_right": True})
        steps.append({"type": "Replace", "pattern": {"Regex": " {2,}"}, "content": " "})
    if prefix:
        steps.append({"type": "Prepend", "prepend": SPACE})
    if spaces:
        steps.append({"type": "Replace", "pattern": {"String": " "}, "content": SPACE})
    return {"type": "Sequence", "normalizers": steps} if steps else None


def _model(proto: Any, converted: Mapping[str, Any]) -> dict[str, Any]:
    """Return the model part. The vocabulary is the model's own pieces, then the further tokens of
    transformers' vocabulary."""
    spec = proto.trainer_spec
    pieces = [(p.piece, p.score) for p in proto.pieces]
    own = {piece for piece, _ in pieces}
    extra = sorted((i, token) for token, i in _ids(converted).items() if token not in own)
    pieces += [(token, 0.0) for i, token in extra if i >= len(own)]
    if spec.model_type == _UNIGRAM:
        return {
            "type": "Unigram", "unk_id": spec.unk_id, "byte_fallback": spec.byte_fallback,
            "vocab": [list(pair) for pair in pieces],
        }  # fmt: skip
    ids = {piece: i for i, (piece, _) in enumerate(pieces)}
    return {
        "type": "BPE", "dropout": None, "unk_token": pieces[spec.unk_id][0],
        "continuing_subword_prefix": None, "end_of_word_suffix": None, "fuse_unk": True,
        "byte_fallback": spec.byte_fallback, "ignore_merges": False, "vocab": ids,
        "merges": _merges(proto, ids),
    }  # fmt: skip


def _merges(proto: Any, ids: Mapping[str, int]) -> list[list[str]]:
    """Return every pair of pieces that make another piece, the pairs of the best piece first."""
    mergeable = {p.piece for p in proto.pieces if p.type in (_NORMAL, _USER_DEFINED)}
    found: list[tuple[float, int, int, int]] = []
    for index, piece in enumerate(proto.pieces):
        if piece.type != _NORMAL:
            continue
        text = piece.piece
        for at in range(1, len(text)):
            left, right = text[:at], text[at:]
            if left in mergeable and right in mergeable:
                found.append((-piece.score, index, ids[left], ids[right]))
    by_id = [p.piece for p in proto.pieces]
    return [[by_id[left], by_id[right]] for *_, left, right in sorted(found)]


def _decoder(proto: Any) -> dict[str, Any]:
    steps: list[dict[str, Any]] = [
        {"type": "Replace", "pattern": {"String": SPACE}, "content": " "}
    ]
    if proto.trainer_spec.byte_fallback:
        steps.append({"type": "ByteFallback"})
    steps.append({"type": "Fuse"})
    if proto.normalizer_spec.add_dummy_prefix:
        steps.append({"type": "Strip", "content": " ", "start": 1, "stop": 0})
    return {"type": "Sequence", "decoders": steps}
