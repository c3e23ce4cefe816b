"""`baton convert` of sentencepiece models: text is split as sentencepiece splits it.

The package is not needed here: models are written as its protobuf, and sentencepiece_models.py
states its two algorithms plainly.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from transformers.convert_slow_tokenizer import import_protobuf
from transformers.utils.import_utils import is_sentencepiece_available

from baton.engine.checkpoint import convert as converter
from baton.engine.checkpoint.convert import convert
from baton.protocol.errors import ModelRefused
from baton.text.tokenizer import Tokenizer
from tests.engine.sentencepiece_models import Kind, PieceModel, train
from tests.tiny_models import make_tiny_model


@pytest.mark.skipif(is_sentencepiece_available(), reason="the package is there")
def test_sentencepiece_needs_its_package(tmp_path: Path) -> None:
    folder = make_tiny_model("llama", tmp_path / "model")
    (folder / "tokenizer.json").unlink()
    (folder / "tokenizer.model").write_bytes(b"")
    with pytest.raises(ModelRefused, match="pip install sentencepiece"):
        convert(folder)


@pytest.fixture
def sentencepiece(monkeypatch: pytest.MonkeyPatch) -> None:
    """Step over the check for the package: transformers then reads models by protobuf alone."""
    monkeypatch.setattr(converter, "is_sentencepiece_available", lambda: True)
    # The module by name: as an attribute of transformers it is a function.
    module = sys.modules[import_protobuf.__module__]
    monkeypatch.setattr(module, "requires_backends", lambda *_: None)


def sentencepiece_checkpoint(folder: Path, tokenizer_class: str) -> Path:
    """A llama with tokenizer.model: BPE with byte fallback and a few words."""
    words = ["\u2581" + word for word in ("t", "the", "", "he", "hell", "hello")]
    words += ["he", *"thelo", "ll"]
    messages: Any = import_protobuf()
    proto = messages.ModelProto()
    kinds = [("<unk>", 2), ("<s>", 3), ("</s>", 3), *((f"<0x{b:02X}>", 6) for b in range(256))]
    for rank, (piece, kind) in enumerate([*kinds, *((word, 1) for word in words)]):
        proto.pieces.add(piece=piece, type=kind, score=-float(rank))
    proto.trainer_spec.model_type = 2
    proto.trainer_spec.byte_fallback = True
    make_tiny_model("llama", folder)
    (folder / "tokenizer.json").unlink()
    (folder / "tokenizer.model").write_bytes(proto.SerializeToString())
    config = {"tokenizer_class": tokenizer_class, "bos_token": "<s>", "unk_token": "<unk>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


@pytest.mark.usefixtures("sentencepiece")
@pytest.mark.parametrize("named", ["LlamaTokenizer", "GPT2Tokenizer"])
def test_a_sentencepiece_model_becomes_tokenizer_json(named: str, tmp_path: Path) -> None:
    folder = sentencepiece_checkpoint(tmp_path / "model", named)
    assert [each.path.name for each in convert(folder)] == ["tokenizer.json"]
    tokenizer = Tokenizer.load(folder)
    ids = tokenizer.encode("hello the \u00e9", add_special_tokens=False)
    tokens = ["\u2581hello", "\u2581the", "\u2581", "<0xC3>", "<0xA9>"]
    assert [tokenizer.token(token_id) for token_id in ids] == tokens
    assert tokenizer.decode(ids) == "hello the \u00e9"


TEXT = (Path(__file__).parents[2] / "LICENSE").read_text().splitlines()  # it never changes
HARD = (
    " leading", "trailing  ", "  two  spaces", "h\u00e9llo \u4f60\u597d \U0001f642\tand\ttabs",
    "a\nb\n\nc", "x" * 60, "", " ", "1234567890", "the <0x41> the", "\u2581already",
)  # fmt: skip


@pytest.fixture(scope="module")
def trained() -> dict[Kind, PieceModel]:
    """A BPE and a unigram model, learned from the license's lines but for every seventh."""
    seen = [line for i, line in enumerate(TEXT) if i % 7]
    return {"bpe": train("bpe", seen), "unigram": train("unigram", seen)}


def trained_checkpoint(
    folder: Path, model: PieceModel, tokenizer_class: str | None, **config: Any
) -> Path:
    """A llama with a trained tokenizer.model."""
    make_tiny_model("llama", folder)
    (folder / "tokenizer.json").unlink()
    (folder / "tokenizer.model").write_bytes(model.serialized())
    told = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", **config}
    if tokenizer_class is not None:
        told["tokenizer_class"] = tokenizer_class
    (folder / "tokenizer_config.json").write_text(json.dumps(told))
    return folder


@pytest.mark.usefixtures("sentencepiece")
@pytest.mark.parametrize("kind", ["bpe", "unigram"])
@pytest.mark.parametrize("named", ["LlamaTokenizer", "T5Tokenizer", "GemmaTokenizer", None])
def test_trained_models_split_as_sentencepiece_does(
    kind: Kind, named: str | None, trained: dict[Kind, PieceModel], tmp_path: Path
) -> None:
    """Whatever class the config names, transformers' own conversion of it would differ."""
    model = trained[kind]
    folder = trained_checkpoint(tmp_path / "model", model, named)
    convert(folder)
    tokenizer = Tokenizer.load(folder)
    lengths: list[int] = []
    for text in (*HARD, *TEXT[::7]):
        ids = list(tokenizer.encode(text, add_special_tokens=False))
        assert_split(model, ids, text)
        assert tokenizer.decode(ids) == model.decode(ids) == text.replace("\u2581", " ")
        lengths.append(len(ids) - len(text.encode()))
    assert sum(lengths) < 0, "pieces were used, not only bytes"


@pytest.fixture(scope="module")
def converted(
    trained: dict[Kind, PieceModel], tmp_path_factory: pytest.TempPathFactory
) -> dict[Kind, Tokenizer]:
    found: dict[Kind, Tokenizer] = {}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(converter, "is_sentencepiece_available", lambda: True)
        module = sys.modules[import_protobuf.__module__]
        patch.setattr(module, "requires_backends", lambda *_: None)
        for kind, model in trained.items():
            folder = trained_checkpoint(tmp_path_factory.mktemp(kind), model, "LlamaTokenizer")
            convert(folder)
            found[kind] = Tokenizer.load(folder)
    return found


@settings(deadline=None, max_examples=150, suppress_health_check=[HealthCheck.too_slow])
@given(
    text=st.lists(
        st.one_of(
            st.sampled_from(["the", " ", "  ", "token", "KV", "\n", ",", "prefill", "er", "ing"]),
            st.text(st.characters(exclude_categories=["Cs"]), max_size=4),
        ),
        max_size=12,
    ).map("".join)
)
@pytest.mark.parametrize("kind", ["bpe", "unigram"])
def test_any_text_is_split_as_sentencepiece_does(
    kind: Kind, text: str, trained: dict[Kind, PieceModel], converted: dict[Kind, Tokenizer]
) -> None:
    model, tokenizer = trained[kind], converted[kind]
    if any(special in text for special in ("<s>", "</s>", "<unk>")):
        return  # the server's tokenizer reads special tokens out of text, by its own rule
    ids = list(tokenizer.encode(text, add_special_tokens=False))
    assert_split(model, ids, text)
    assert tokenizer.decode(ids) == text.replace("\u2581", " ")


def assert_split(model: PieceModel, ids: Sequence[int], text: str) -> None:
    """BPE: the same pieces. Unigram: as likely ones, since pieces in another order are a tie."""
    expected = model.encode(text)
    if model.kind == "bpe":
        assert ids == expected, text
    else:
        assert score(model, ids) == pytest.approx(score(model, expected), abs=1e-6), text


def score(model: PieceModel, ids: Sequence[int]) -> float:
    return sum(model.pieces[token][1] for token in ids)


@pytest.mark.usefixtures("sentencepiece")
def test_a_config_that_is_not_legacy_puts_a_space_in_front_of_the_first_text_only(
    trained: dict[Kind, PieceModel], tmp_path: Path
) -> None:
    model = trained["bpe"]
    found: dict[bool, list[str | None]] = {}
    for legacy in (True, False):
        folder = trained_checkpoint(
            tmp_path / str(legacy), model, "LlamaTokenizer", legacy=legacy, add_bos_token=False
        )
        convert(folder)
        tokenizer = Tokenizer.load(folder)
        ids = tokenizer.encode("and</s>and", add_special_tokens=False)
        found[legacy] = [tokenizer.token(token) for token in ids]
    assert found[True] == ["\u2581and", "</s>", "\u2581and"]
    assert found[False] == ["\u2581and", "</s>", *model.split("and")]


@pytest.mark.usefixtures("sentencepiece")
def test_what_the_model_says_of_whitespace_counts(
    trained: dict[Kind, PieceModel], tmp_path: Path
) -> None:
    model = trained["unigram"]
    folder = trained_checkpoint(tmp_path / "model", model, "LlamaTokenizer")
    tidy = model.serialized(remove_extra_whitespaces=True)
    (folder / "tokenizer.model").write_bytes(tidy)
    convert(folder)
    ids = Tokenizer.load(folder).encode("  the   cache ", add_special_tokens=False)
    assert list(ids) == model.encode("the cache")


@pytest.mark.usefixtures("sentencepiece")
def test_models_of_which_transformers_knows_better(
    trained: dict[Kind, PieceModel], tmp_path: Path
) -> None:
    """Pieces of spaces that match first: its class' own way, if it fits the kind of model."""
    messages: Any = import_protobuf()
    kinds: tuple[tuple[Kind, bool], ...] = (("bpe", True), ("unigram", False))
    for kind, fits in kinds:
        folder = trained_checkpoint(tmp_path / kind, trained[kind], "LlamaTokenizer")
        proto = messages.ModelProto()
        proto.ParseFromString(trained[kind].serialized())
        proto.pieces.add(piece="\u2581\u2581", type=4, score=0.0)
        (folder / "tokenizer.model").write_bytes(proto.SerializeToString())
        if fits:
            convert(folder)
            assert Tokenizer.load(folder).encode("the cache", add_special_tokens=False)
        else:
            with pytest.raises(ModelRefused, match=r"as BPE, its sentencepiece model is Unigram"):
                convert(folder)


@pytest.mark.usefixtures("sentencepiece")
def test_a_sentencepiece_model_that_would_read_wrongly(tmp_path: Path) -> None:
    folder = sentencepiece_checkpoint(tmp_path / "model", "GPT2Tokenizer")
    messages: Any = import_protobuf()
    proto = messages.ModelProto()
    proto.ParseFromString((folder / "tokenizer.model").read_bytes())
    proto.pieces.add(piece="\u2581\u2581", type=4, score=0.0)  # so the class decides
    (folder / "tokenizer.model").write_bytes(proto.SerializeToString())
    with pytest.raises(ModelRefused, match="would turn 't the he hell hello' into"):
        convert(folder)
    (folder / "tokenizer.model").write_bytes(b"\xff\xff\xff")
    with pytest.raises(ModelRefused, match="is not a sentencepiece model"):
        convert(folder)
