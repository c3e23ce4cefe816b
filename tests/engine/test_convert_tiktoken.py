"""tiktoken.model of Kimi K2's kind: the converted tokenizer beside `tiktoken` itself."""

from __future__ import annotations

import base64
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer as Backend
from tokenizers import models, pre_tokenizers, trainers
from transformers.convert_slow_tokenizer import bytes_to_unicode

from baton.engine.checkpoint.convert import convert
from baton.engine.checkpoint.tiktoken_model import FILE
from baton.protocol.errors import ModelRefused
from baton.text.tokenizer import Tokenizer
from tests.tiny_models import make_tiny_model

tiktoken: Any = pytest.importorskip("tiktoken")

# As published, intersections of classes and all (tokenization_kimi.py, pat_str).
PUBLISHED = "|".join(
    [
        r"[\p{Han}]+",
        r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]*[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?",
        r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]+[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?",
        r"\p{N}{1,3}",
        r" ?[^\s\p{L}\p{N}]+[\r\n]*",
        r"\s*[\r\n]+",
        r"\s+(?!\S)",
        r"\s+",
    ]
)  # fmt: skip
ROOT = Path(__file__).resolve().parents[2]
SIZE = 1200
NAMED = {0: "[BOS]", 1: "[EOS]", 4: "<|im_end|>", 7: "<|tool_calls_section_begin|>", 254: "[UNK]"}
TEXTS = (
    "Hello world, it's 1234567 o'clock!",
    "\u4e2d\u6587English\u6df7\u5408 \u5317\u4eac\u5e02 Pascal",
    "def f(x):\r\n\treturn x  # \U0001f600\n\n\n  end ",
    "McDONALD'S IPhone \u00c9t\u00e9 \u0627\u0644\u0639\u0631\u0628 \u0e20\u0e32\u0e29",
    "[BOS]a<|im_end|> b<|tool_calls_section_begin|>[EOS]",
)  # fmt: skip


def ranks() -> dict[bytes, int]:
    """All bytes, and joint tokens in the order in which they were learned."""
    backend = Backend(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    trainer = trainers.BpeTrainer(
        vocab_size=SIZE, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    corpus = [ROOT / "LICENSE", ROOT / "README.md", *(ROOT / "tools" / "demo_corpus").glob("*.md")]
    backend.train_from_iterator([path.read_text(encoding="utf-8") for path in corpus], trainer)
    letters = {letter: byte for byte, letter in bytes_to_unicode().items()}
    return {
        bytes(letters[letter] for letter in token): rank
        for token, rank in backend.get_vocab().items()
    }


def write(folder: Path, code: str = "tokenization_kimi.TikTokenTokenizer") -> dict[bytes, int]:
    """Replace the tokenizer of a checkpoint; return the ranks."""
    found = ranks()
    lines = (b"%s %d\n" % (base64.b64encode(token), found[token]) for token in found)
    (folder / FILE).write_bytes(b"".join(lines))
    (folder / "tokenizer.json").unlink()
    config = {
        "tokenizer_class": "TikTokenTokenizer", "auto_map": {"AutoTokenizer": [code, None]},
        "bos_token": "[BOS]", "eos_token": "[EOS]", "unk_token": "[UNK]",
        "added_tokens_decoder": {
            str(SIZE + at): {"content": text, "special": "tool" not in text}
            for at, text in NAMED.items()
        },
    }  # fmt: skip
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return found


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Tokenizer, Any]:
    """(the converted tokenizer, tiktoken's encoding as Kimi's code makes it)."""
    folder = make_tiny_model("llama", tmp_path_factory.mktemp("kimi") / "m")
    mergeable = write(folder)
    (written,) = convert(folder)
    assert written.path.name == "tokenizer.json"
    specials = {NAMED.get(at, f"<|reserved_token_{SIZE + at}|>"): SIZE + at for at in range(256)}
    encoding = tiktoken.Encoding(
        "kimi", pat_str=PUBLISHED, mergeable_ranks=mergeable, special_tokens=specials
    )
    return Tokenizer.load(folder), encoding


@pytest.mark.parametrize("text", TEXTS)
def test_a_text_has_tiktokens_ids(text: str, pair: tuple[Tokenizer, Any]) -> None:
    ours, theirs = pair
    ids = theirs.encode(text, allowed_special="all")
    assert ours.encode(text) == ids
    assert ours.decode(ids, skip_special_tokens=False) == text


@settings(max_examples=400, deadline=None)
@given(st.text(st.characters(exclude_categories=("Cs",)), max_size=60))
def test_any_text_has_tiktokens_ids(pair: tuple[Tokenizer, Any], text: str) -> None:
    ours, theirs = pair
    ids = theirs.encode(text, allowed_special="all")
    assert ours.encode(text) == ids
    assert ours.decode(ids, skip_special_tokens=False) == theirs.decode(ids)


def test_the_corpus_too(pair: tuple[Tokenizer, Any]) -> None:
    ours, theirs = pair
    for path in sorted((ROOT / "docs").glob("*.md"))[:12]:
        text = path.read_text(encoding="utf-8")
        assert ours.encode(text) == theirs.encode(text, allowed_special="all"), path.name


def test_specials_keep_their_ids_and_kind(pair: tuple[Tokenizer, Any]) -> None:
    ours, theirs = pair
    assert ours.vocab_size == theirs.n_vocab == SIZE + 256
    shown = SIZE + 7  # a parser of tool calls reads it
    assert ours.special_ids == {SIZE + at for at in range(256)} - {shown}
    assert ours.special_tokens["bos_token"] == "[BOS]"


def test_unknown_code_is_refused_with_the_way_out(tmp_path: Path) -> None:
    folder = make_tiny_model("llama", tmp_path / "m")
    write(folder, "tokenization_other.Other")
    with pytest.raises(
        ModelRefused, match=r"own code \(tokenization_other.Other\).*tokenizer.json"
    ):
        convert(folder)
    assert not (folder / "tokenizer.json").exists()


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"not base64 at all\n", "is not a tiktoken model"),
        (base64.b64encode(b"a") + b" 5\n", "its ranks are not 0 to 0"),
        (base64.b64encode(b"a") + b" 0\n", "has no token of the byte 0"),
    ],
)
def test_broken_files_are_refused(content: bytes, reason: str, tmp_path: Path) -> None:
    folder = make_tiny_model("llama", tmp_path / "m")
    write(folder)
    (folder / FILE).write_bytes(content)
    with pytest.raises(ModelRefused, match=reason):
        convert(folder)
