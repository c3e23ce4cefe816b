"""The tokenizer: BOS as the files say, refusals by name, streams against a decode at once."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import processors

from baton.protocol.errors import InvalidRequest, ModelRefused
from baton.text.tokenizer import SHORT_TOKENS, Tokenizer
from deploy.plan import DEMO_MODEL
from tests.front.tokenizers_built import byte_fallback, byte_level, save

BYTE_LEVEL_BACKEND = byte_level()
BYTE_LEVEL = Tokenizer(BYTE_LEVEL_BACKEND, {})
FALLBACK_BACKEND = byte_fallback()
BYTE_FALLBACK = Tokenizer(FALLBACK_BACKEND, {})
BACKENDS = {BYTE_LEVEL: BYTE_LEVEL_BACKEND, BYTE_FALLBACK: FALLBACK_BACKEND}
DEMO = Tokenizer.load(DEMO_MODEL)
SCALARS = st.characters(exclude_categories=["Cs"])
TEXT = st.text(SCALARS, max_size=40)


def streamed(tokenizer: Tokenizer, ids: list[int], skip_special_tokens: bool = True) -> str:
    stream = tokenizer.stream(skip_special_tokens)
    return "".join([*(stream.push(token_id) for token_id in ids), stream.flush()])


@given(TEXT)
def test_byte_level_stream_of_a_text_is_the_text(text: str) -> None:
    assert streamed(BYTE_LEVEL, BYTE_LEVEL.encode(text)) == text


@given(st.lists(st.integers(0, BYTE_LEVEL.vocab_size + 5), max_size=60), st.booleans())
def test_byte_level_stream_of_any_ids_is_their_decode(ids: list[int], skip: bool) -> None:
    assert streamed(BYTE_LEVEL, ids, skip) == BYTE_LEVEL.decode(ids, skip)


@given(TEXT)
def test_byte_fallback_stream_of_a_text_is_its_decode(text: str) -> None:
    ids = BYTE_FALLBACK.encode(text)
    assert streamed(BYTE_FALLBACK, ids) == BYTE_FALLBACK.decode(ids)


@settings(max_examples=300)
@given(st.lists(st.integers(0, BYTE_FALLBACK.vocab_size + 5), max_size=40))
def test_byte_fallback_stream_of_any_ids_never_fails_and_equals_a_clean_decode(
    ids: list[int],
) -> None:
    whole = BYTE_FALLBACK.decode(ids)
    text = streamed(BYTE_FALLBACK, ids)
    if "\N{REPLACEMENT CHARACTER}" not in whole:
        assert text == whole
    else:
        assert "\N{REPLACEMENT CHARACTER}" in text


@pytest.mark.parametrize("tokenizer", [BYTE_LEVEL, BYTE_FALLBACK])
@given(st.lists(st.lists(st.integers(0, 300), max_size=12), max_size=6), st.booleans())
def test_tokens_pushed_together_are_shown_as_one_by_one(
    tokenizer: Tokenizer, runs: list[list[int]], skip: bool
) -> None:
    together, singly = tokenizer.stream(skip), tokenizer.stream(skip)
    for run in runs:
        assert together.push_all(run) == "".join(map(singly.push, run))
    assert together.flush() == singly.flush()


@pytest.mark.parametrize("tokenizer", [BYTE_LEVEL, BYTE_FALLBACK])
def test_a_character_over_several_tokens_appears_whole_or_not_at_all(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("🙃")
    stream = tokenizer.stream()
    pieces = [stream.push(token_id) for token_id in ids]
    assert len(ids) >= 3
    assert pieces == [""] * (len(ids) - 1) + ["🙃"]
    assert stream.flush() == ""


@pytest.mark.parametrize("tokenizer", [BYTE_LEVEL, BYTE_FALLBACK])
def test_an_unfinished_character_is_flushed_once(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("🙃")[:-1]
    stream = tokenizer.stream()
    assert "".join(stream.push(token_id) for token_id in ids) == ""
    assert set(stream.flush()) == {"\N{REPLACEMENT CHARACTER}"}
    assert stream.flush() == ""


def test_what_was_shown_stays_when_an_invalid_byte_follows() -> None:
    byte = FALLBACK_BACKEND.token_to_id
    stream = BYTE_FALLBACK.stream()
    shown = [stream.push(byte(t)) for t in ("<0xC3>", "<0xA9>", "<0xFF>", "a")]  # type: ignore[arg-type]
    assert shown == ["", "é", "", "\N{REPLACEMENT CHARACTER}a"]


def test_endless_invalid_bytes_are_shown_in_bounded_time() -> None:
    bad = FALLBACK_BACKEND.token_to_id("<0xFF>")
    assert bad is not None
    stream = BYTE_FALLBACK.stream()
    text = "".join(stream.push(bad) for _ in range(60))
    assert len(text) >= 50


def test_special_tokens_are_skipped_or_shown() -> None:
    ids = [0, *BYTE_LEVEL.encode("hi"), 1]
    assert streamed(BYTE_LEVEL, ids) == "hi"
    assert streamed(BYTE_LEVEL, ids, skip_special_tokens=False) == "<s>hi</s>"


def test_special_tokens_that_somebody_reads_are_shown_all_the_same() -> None:
    ids = [0, *BYTE_LEVEL.encode("hi"), 2, 1]
    for tokenizer in (BYTE_LEVEL, BYTE_FALLBACK):
        special = tokenizer.encode("<|user|>", add_special_tokens=False)
        # A mark may be a token, or several, or text with a token in it.
        for marks in (("<|user|>", "not a token"), ("", "<|user|>name"), ("<call><|user|>\n",)):
            stream = tokenizer.stream(shown=marks)
            shown = [stream.push(token) for token in (*special, *tokenizer.encode("</s>", False))]
            assert shown == ["<|user|>", ""]
        unread = tokenizer.stream(shown=("<|use",))
        assert [unread.push(token) for token in special] == [""]
    assert streamed(BYTE_LEVEL, ids) == "hi"


@given(TEXT)
def test_the_bytes_of_tokens_are_those_of_their_text(text: str) -> None:
    ids = BYTE_LEVEL.encode(text)
    assert b"".join(map(BYTE_LEVEL.token_bytes, ids)) == text.encode()
    for outside in (BYTE_LEVEL.vocab_size + 5, -1):
        assert BYTE_LEVEL.token_bytes(outside) == b""


def test_the_bytes_of_byte_fallback_tokens() -> None:
    ids = BYTE_FALLBACK.encode("hello aé🙂 a", add_special_tokens=False)
    assert b"".join(map(BYTE_FALLBACK.token_bytes, ids)) == " hello aé🙂 a".encode()
    assert BYTE_FALLBACK.token_bytes(10**6) == b""
    (special,) = BYTE_FALLBACK.encode("</s>", add_special_tokens=False)
    assert BYTE_FALLBACK.token_bytes(special) == b"</s>"


BUILDERS: list[Callable[[], tokenizers.Tokenizer]] = [byte_level, byte_fallback]


@pytest.mark.parametrize("build", BUILDERS)
@pytest.mark.parametrize(
    "config", [{}, {"add_bos_token": True}, {"add_bos_token": False}, {"add_eos_token": True}]
)
def test_ids_equal_those_of_transformers(
    tmp_path: Path, build: Callable[[], tokenizers.Tokenizer], config: dict[str, Any]
) -> None:
    transformers = pytest.importorskip("transformers")
    directory = save(build(), tmp_path / "m", **config)
    theirs = transformers.AutoTokenizer.from_pretrained(directory)
    ours = Tokenizer.load(directory)
    for text in ("hello world", " a  b", "🙂 <|user|> é", ""):
        for special in (True, False):
            expected = theirs.encode(text, add_special_tokens=special)
            assert ours.encode(text, add_special_tokens=special) == expected


def test_bos_comes_from_the_post_processor(tmp_path: Path) -> None:
    backend = byte_level()
    backend.post_processor = processors.TemplateProcessing(  # type: ignore[assignment]
        single=["<s>", "$A"], special_tokens=[("<s>", 0)]
    )
    tokenizer = Tokenizer.load(save(backend, tmp_path, add_bos_token=False))
    assert tokenizer.encode("a")[0] == 0
    assert tokenizer.encode("a", add_special_tokens=False)[0] != 0


def test_a_token_that_only_the_config_calls_special_is_not_shown(tmp_path: Path) -> None:
    backend = byte_level()
    backend.add_tokens(["<end>"])
    directory = save(backend, tmp_path, eos_token="<end>")
    tokenizer = Tokenizer.load(directory)
    ids = [*tokenizer.encode("hi"), *tokenizer.encode("<end>")]
    assert streamed(tokenizer, ids) == tokenizer.decode(ids) == "hi"


@pytest.mark.parametrize("added", ["two words", "注意"])
def test_an_added_token_outside_the_byte_alphabet_is_its_own_text(added: str) -> None:
    backend = byte_level()
    backend.add_tokens([added])
    tokenizer = Tokenizer(backend, {})
    ids = tokenizer.encode(f"a{added}b")
    assert backend.token_to_id(added) in ids
    assert streamed(tokenizer, ids) == tokenizer.decode(ids) == f"a{added}b"


def test_a_directory_without_tokenizer_json_is_refused_with_the_way_out(tmp_path: Path) -> None:
    with pytest.raises(ModelRefused, match=f"baton convert {tmp_path}"):
        Tokenizer.load(tmp_path)


def test_a_broken_tokenizer_json_is_refused_by_name(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(ModelRefused, match=r"tokenizer\.json cannot be read"):
        Tokenizer.load(tmp_path)


@pytest.mark.parametrize(
    ("content", "reason"),
    [("{", "cannot be read"), ("\udcff", "cannot be read"), ("[1]", "does not hold a JSON object")],
)
def test_a_broken_config_is_refused_by_name(tmp_path: Path, content: str, reason: str) -> None:
    directory = save(byte_level(), tmp_path)
    file = directory / "tokenizer_config.json"
    file.write_bytes(content.encode("utf-8", "surrogateescape"))
    with pytest.raises(ModelRefused, match=rf"tokenizer_config\.json {reason}"):
        Tokenizer.load(directory)


def test_truncation_saved_in_the_file_is_switched_off(tmp_path: Path) -> None:
    tokenizer = byte_level()
    tokenizer.enable_truncation(4)
    loaded = Tokenizer.load(save(tokenizer, tmp_path))
    assert len(loaded.encode("z" * 50)) == 50


def test_lone_surrogates_are_the_clients_fault() -> None:
    with pytest.raises(InvalidRequest):
        BYTE_LEVEL.encode("\ud800")


@settings(max_examples=40, deadline=None)
@given(st.sampled_from([BYTE_LEVEL, BYTE_FALLBACK]), st.text(SCALARS, min_size=1, max_size=50))
def test_long_texts_are_encoded_and_decoded_as_short_ones(tokenizer: Tokenizer, text: str) -> None:
    long = text * (SHORT_TOKENS // len(text) + 1)
    ids = tokenizer.encode(long)
    backend = BACKENDS[tokenizer]
    assert ids == backend.encode(long).ids
    many = ids * (SHORT_TOKENS // len(ids) + 1)
    assert tokenizer.decode(many) == backend.decode(many)
    assert tokenizer.decode(many, False) == backend.decode(many, skip_special_tokens=False)
    with pytest.raises(InvalidRequest, match="valid Unicode"):
        tokenizer.encode(long + "\ud800")


def test_others_run_while_a_long_text_is_encoded() -> None:
    """The library's call for one text keeps the GIL: every stream of a router would stand still."""
    text = " ".join(f"{number} and so on" for number in range(40_000))
    ids: list[int] = []
    for work in (lambda: ids.extend(DEMO.encode(text)), lambda: DEMO.decode(ids * 4)):
        thread = threading.Thread(target=work)
        thread.start()
        turns = 0
        while thread.is_alive():
            time.sleep(0.001)
            turns += 1
        assert turns > 20, "of a hundred or more"


@given(TEXT)
def test_no_text_of_more_characters_has_so_few_tokens(text: str) -> None:
    for tokenizer in (BYTE_LEVEL, DEMO):
        most = tokenizer.most_chars(len(tokenizer.encode(text)))
        assert most is not None
        assert len(text) <= most
    assert BYTE_FALLBACK.most_chars(5) is None, "<unk> stands for any number of characters"
