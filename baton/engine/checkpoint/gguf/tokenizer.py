"""Makes tokenizer.json and tokenizer_config.json of a GGUF file from its metadata. No torch.

    tokenizer.ggml.model  gpt2: bytes, merged in the file's order; `pre` names how text is split
                          llama: sentencepiece's merges, by the scores of the pieces
    token_type            3 control (special), 4 user defined (never split), 6 a byte

A file with an unknown way of splitting text is refused, because its tokens would be wrong.
Source: llama.cpp src/llama-vocab.cpp; transformers integrations/gguf/gguf_tokenizer_mapping.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, Final

from baton.engine.checkpoint.gguf.header import GgufFile
from baton.engine.checkpoint.sentencepiece_model import SPACE, pipeline_of
from baton.protocol.errors import ModelRefused

_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED = 1, 2, 3, 4
_BPE: Final = 2  # sentencepiece's TrainerSpec.ModelType
_GPT2_SPLIT: Final = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_LLAMA3_SPLIT: Final = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN2_SPLIT: Final = _LLAMA3_SPLIT.replace(r"\p{N}{1,3}", r"\p{N}")
_TEKKEN_SPLIT: Final = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


@dataclass(frozen=True, slots=True)
class _Split:
    """How a byte-level tokenizer splits a text. `whole`: a piece that is a token is taken as it is,
    without merges. `begins`: whether a text begins with BOS if the file does not state it."""

    patterns: tuple[str, ...]
    normalizer: str | None = None
    whole: bool = False
    begins: bool = False


_GPT2, _QWEN2 = _Split((_GPT2_SPLIT,)), _Split((_QWEN2_SPLIT,), "NFC")
_LLAMA3 = _Split((_LLAMA3_SPLIT,), None, whole=True, begins=True)
_SPLITS: Final = {
    "gpt-2": _GPT2, "phi-2": _GPT2, "llama3": _LLAMA3, "llama-v3": _LLAMA3, "llama-bpe": _LLAMA3,
    "qwen2": _QWEN2, "deepseek-r1-qwen": _QWEN2, "smollm": _Split((r"\p{N}", _GPT2_SPLIT)),
    "tekken": _Split((_TEKKEN_SPLIT,), None, whole=True, begins=True),
}  # fmt: skip
_NAMED: Final = {
    "bos_token": "bos_token_id", "eos_token": "eos_token_id", "unk_token": "unknown_token_id",
    "pad_token": "padding_token_id",
}  # fmt: skip
_ENDS: Final = ("eos_token_id", "eot_token_id", "eom_token_id")


@dataclass(frozen=True, slots=True)
class _Vocabulary:
    """Tokens and their types by id; `of` reads the other values, such as scores and merges."""

    file: GgufFile
    tokens: Sequence[str]
    types: Sequence[int]

    def of(self, key: str) -> Any:
        return self.file.metadata.get(f"tokenizer.ggml.{key}")

    def named(self, key: str) -> int | None:
        """Return the token id that `key` holds; None without the key, or if the id is out of
        range."""
        value = self.of(key)
        return value if isinstance(value, int) and 0 <= value < len(self.tokens) else None

    def refused(self, why: str) -> ModelRefused:
        return ModelRefused(f"{self.file.path}: {why}", field="model")


def gguf_tokenizer(file: GgufFile) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return (tokenizer.json, tokenizer_config.json). Raises ModelRefused for a tokenizer that is
    not supported."""
    vocabulary = _vocabulary(file)
    kind = vocabulary.of("model")
    if kind == "gpt2":
        parts, begins = _byte_level(vocabulary)
    elif kind == "llama":
        parts, begins = _sentencepiece(vocabulary), True
    else:
        raise vocabulary.refused(f"its tokenizer is of kind {str(kind)[:40]}, which is not read")
    said = vocabulary.of("add_bos_token")
    begins = said if isinstance(said, bool) else begins
    bos = vocabulary.named("bos_token_id")
    added = [
        {
            "id": id_, "content": token, "single_word": False, "lstrip": False, "rstrip": False,
            "normalized": False, "special": kind_ == _CONTROL,
        }
        for id_, (token, kind_) in enumerate(zip(vocabulary.tokens, vocabulary.types, strict=True))
        if kind_ in (_CONTROL, _USER_DEFINED) and token.strip(SPACE)
    ]  # fmt: skip
    whole = {
        "version": "1.0", "truncation": None, "padding": None, "added_tokens": added, **parts,
        "post_processor": _with_bos(vocabulary, bos) if begins and bos is not None else None,
    }  # fmt: skip
    config: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast", "add_bos_token": begins,
        "model_max_length": file.of("context_length"),
    }  # fmt: skip
    for name, key in _NAMED.items():
        id_ = vocabulary.named(key)
        if id_ is not None:
            config[name] = vocabulary.tokens[id_]
    template = file.metadata.get("tokenizer.chat_template")
    if isinstance(template, str):
        config["chat_template"] = template
    return whole, config


def gguf_generation(file: GgufFile) -> dict[str, Any]:
    """Return generation_config.json: the token ids that begin and end a text."""
    vocabulary = _vocabulary(file)
    ends = [vocabulary.named(key) for key in _ENDS]
    found: dict[str, Any] = {"eos_token_id": sorted({id_ for id_ in ends if id_ is not None})}
    bos = vocabulary.named("bos_token_id")
    return found if bos is None else found | {"bos_token_id": bos}


def _vocabulary(file: GgufFile) -> _Vocabulary:
    """Read tokens and token types. Raises ModelRefused for lists that are missing or do not fit
    each other."""
    tokens, types = (file.metadata.get(f"tokenizer.ggml.{key}") for key in ("tokens", "token_type"))
    if not isinstance(tokens, list) or not tokens or not all(isinstance(t, str) for t in tokens):
        raise ModelRefused(f"{file.path}: it has no tokenizer.ggml.tokens", field="model")
    types = [_NORMAL] * len(tokens) if types is None else types
    if not isinstance(types, list) or len(types) != len(tokens):
        raise ModelRefused(f"{file.path}: its token types are not as many as its tokens")
    if len(set(tokens)) != len(tokens):
        raise ModelRefused(f"{file.path}: two of its tokens are the same", field="model")
    return _Vocabulary(file, tokens, types)


def _with_bos(vocabulary: _Vocabulary, bos: int) -> dict[str, Any]:
    token = vocabulary.tokens[bos]
    first = {"SpecialToken": {"id": token, "type_id": 0}}
    text, second = ({"Sequence": {"id": name, "type_id": 0}} for name in ("A", "B"))
    return {
        "type": "TemplateProcessing", "single": [first, text], "pair": [first, text, second],
        "special_tokens": {token: {"id": token, "ids": [bos], "tokens": [token]}},
    }  # fmt: skip


def _byte_level(vocabulary: _Vocabulary) -> tuple[dict[str, Any], bool]:
    """Return a byte-level tokenizer's parts of tokenizer.json, and whether a text begins with BOS
    if the file does not state it."""
    pre = vocabulary.of("pre")
    split = _SPLITS.get(pre) if isinstance(pre, str) else None
    if split is None:
        raise vocabulary.refused(
            f"its tokenizer splits text as {str(pre)[:40]!r}, which is not known (only "
            f"{', '.join(_SPLITS)}); serve the checkpoint that it was made from"
        )
    pairs = vocabulary.of("merges")
    if not isinstance(pairs, list):
        raise vocabulary.refused("it has no tokenizer.ggml.merges")
    merges = [str(pair).split(" ") for pair in pairs]
    if any(len(pair) != 2 for pair in merges):
        raise vocabulary.refused("one of its merges is no pair")
    ids = {token: id_ for id_, token in enumerate(vocabulary.tokens)}
    if any(a not in ids or b not in ids or a + b not in ids for a, b in merges):
        raise vocabulary.refused("one of its merges is of tokens that it does not have")
    steps: list[dict[str, Any]] = [
        {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}
        for pattern in split.patterns
    ]
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False}
    steps.append(byte_level | {"use_regex": False})
    parts: dict[str, Any] = {
        "normalizer": None if split.normalizer is None else {"type": split.normalizer},
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": steps},
        "model": {
            "type": "BPE", "dropout": None, "unk_token": None, "continuing_subword_prefix": None,
            "end_of_word_suffix": None, "fuse_unk": False, "byte_fallback": False,
            "ignore_merges": split.whole, "vocab": ids, "merges": merges,
        },
        "decoder": byte_level | {"use_regex": False},
    }  # fmt: skip
    return parts, split.begins


def _sentencepiece(vocabulary: _Vocabulary) -> dict[str, Any]:
    """Return the parts of tokenizer.json that the sentencepiece model would give from which the
    file was made."""
    scores = vocabulary.of("scores")
    if not isinstance(scores, list) or len(scores) != len(vocabulary.tokens):
        raise vocabulary.refused("its scores are not as many as its tokens")
    tokens: Sequence[str] = vocabulary.tokens
    if vocabulary.file.architecture.startswith("gemma"):
        # Runs of spaces are pieces; a Gemma's scores are not in the order of its merges, ids are.
        tokens = [SPACE * len(t) if t and not t.strip(" ") else t for t in tokens]
        scores = [-float(id_) for id_ in range(len(tokens))]
    unknown = vocabulary.named("unknown_token_id") or 0
    pieces = [
        SimpleNamespace(
            piece=token, score=score, type=_NORMAL if kind == _USER_DEFINED else kind
        )
        for token, score, kind in zip(tokens, scores, vocabulary.types, strict=True)
    ]  # fmt: skip
    said = vocabulary.of("add_space_prefix")
    model = SimpleNamespace(
        pieces=pieces,
        trainer_spec=SimpleNamespace(model_type=_BPE, byte_fallback=True, unk_id=unknown),
        normalizer_spec=SimpleNamespace(
            add_dummy_prefix=said if isinstance(said, bool) else True,
            precompiled_charsmap=b"", remove_extra_whitespaces=False,
        ),
    )  # fmt: skip
    ids = {token: id_ for id_, token in enumerate(tokens)}
    parts = pipeline_of(model, {"model": {"type": "BPE", "vocab": ids}}, legacy=True)
    if parts is None:
        raise vocabulary.refused("its sentencepiece model is of a kind that is not read")
    return parts
