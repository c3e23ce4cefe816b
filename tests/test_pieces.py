"""Pieces of a text encoded one by one are the text encoded as a whole, whatever was kept."""

from __future__ import annotations

import re
from concurrent.futures import ThreadPoolExecutor

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, trainers

from baton.protocol.errors import InvalidRequest
from baton.text.pieces import PieceEncoder, longest_of, separators_of
from baton.text.tokenizer import Tokenizer
from deploy.plan import DEMO_MODEL
from router.metrics.router import RouterMetrics, watch_pieces

CORPUS = ["the quick brown fox", "  jumps over   the lazy dog\n\n", "tokens and blocks, 12 345 µ é"]
SPECIAL = ["<s>", "<|im_start|>", "<|im_start|>user", "<|im_end|>", "<unused1>", "<unused12>"]
ROOM = 1 << 20


def trained(
    pre: pre_tokenizers.PreTokenizer | None,
    normalizer: normalizers.Normalizer | None = None,
    **how: bool,
) -> tokenizers.Tokenizer:
    """A small BPE with byte fallback, its special tokens, and `fox` as an added token of text."""
    built = tokenizers.Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>"))
    if pre is not None:
        built.pre_tokenizer = pre
    if normalizer is not None:
        built.normalizer = normalizer
    built.decoder = decoders.ByteFallback()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=["<unk>", *(f"<0x{byte:02X}>" for byte in range(256))],
        show_progress=False,
    )
    built.train_from_iterator(CORPUS * 20, trainer)
    built.add_special_tokens([AddedToken(token, **how) for token in SPECIAL])
    built.add_tokens([AddedToken("fox", normalized=True), AddedToken("lazy", normalized=False)])
    return built


BACKENDS = {
    "byte-level": trained(pre_tokenizers.ByteLevel(add_prefix_space=False)),
    "byte-level, a space before": trained(pre_tokenizers.ByteLevel(add_prefix_space=True)),
    "metaspace": trained(pre_tokenizers.Metaspace(prepend_scheme="always")),
    "metaspace, never": trained(pre_tokenizers.Metaspace(prepend_scheme="never")),
    "llama 2": trained(
        None,
        normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]),
    ),
    "lower case": trained(
        pre_tokenizers.Sequence([pre_tokenizers.Whitespace(), pre_tokenizers.Digits()]),
        normalizers.Sequence([normalizers.NFKC(), normalizers.Lowercase(), normalizers.Strip()]),
    ),
}
TEXTS = st.lists(
    st.one_of(
        st.sampled_from(
            [*SPECIAL, "<|im_", "start|>", "<unused", "1>", "fox", "FOX", "lazy", "la"]
        ),
        st.sampled_from([" ", "\n", "  ", "the", "quick", " brown", "\u00a0", "é", "ﬁ", "12"]),
        st.text(max_size=5),
    ),
    max_size=25,
).map("".join)


def pieces_of(backend: tokenizers.Tokenizer, max_bytes: int = ROOM) -> PieceEncoder | None:
    return PieceEncoder.of(backend, lambda text: whole(backend, text), max_bytes)


def whole(backend: tokenizers.Tokenizer, text: str) -> list[int]:
    return backend.encode(text, add_special_tokens=False).ids


ENCODERS = {name: pieces_of(backend) for name, backend in BACKENDS.items()}


@settings(max_examples=150, deadline=None)
@given(st.sampled_from(sorted(BACKENDS)), TEXTS)
def test_the_ids_of_its_pieces_are_those_of_the_text(name: str, text: str) -> None:
    """The encoder is one for all examples: most pieces are kept ones."""
    encoder = ENCODERS[name]
    assert encoder is not None
    assert encoder.encode(text) == whole(BACKENDS[name], text)


def test_the_demo_models_chats() -> None:
    kept, plain = Tokenizer.load(DEMO_MODEL, ROOM), Tokenizer.load(DEMO_MODEL)
    text = "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHello<|im_end|>\n"
    for asked in (text, text + "<|im_start|>assistant\nHi!<|im_end|>\n", text):
        assert kept.encode_chat(asked) == plain.encode_chat(asked) == plain.encode(asked, False)
    assert kept.pieces is not None
    assert kept.pieces.stats.kept > kept.pieces.stats.asked / 2
    assert plain.pieces is None


@pytest.mark.parametrize(
    "backend",
    [
        trained(pre_tokenizers.Metaspace(prepend_scheme="first")),
        trained(
            pre_tokenizers.Sequence(
                [pre_tokenizers.Digits(), pre_tokenizers.Metaspace(prepend_scheme="first")]
            )
        ),
        trained(pre_tokenizers.ByteLevel(), rstrip=True),
        trained(pre_tokenizers.ByteLevel(), lstrip=True),
        trained(pre_tokenizers.ByteLevel(), single_word=True),
    ],
)
def test_pieces_that_depend_on_each_other_are_not_cut(backend: tokenizers.Tokenizer) -> None:
    assert separators_of(backend) == {}
    assert pieces_of(backend) is None


class Counting:
    """An encoder of characters that counts what it is asked."""

    def __init__(self, max_bytes: int = ROOM) -> None:
        self.asked: list[str] = []
        self.pieces = PieceEncoder(self.encode, {"|": 0}, max_bytes)

    def encode(self, text: str) -> list[int]:
        self.asked.append(text)
        return [ord(char) for char in text]


def test_what_is_kept_is_not_encoded_again() -> None:
    it = Counting()
    assert it.pieces.encode("ab|c||ab|") == [97, 98, 0, 99, 0, 0, 97, 98, 0]
    assert it.asked == ["ab", "c"]
    assert it.pieces.encode("c|d") == [99, 0, 100]
    assert it.asked == ["ab", "c", "d"]
    assert (it.pieces.stats.asked, it.pieces.stats.kept) == (7, 3)


def test_other_salts_share_nothing() -> None:
    it = Counting()
    for salt in ("", "one", "two", "one"):
        it.pieces.encode("ab", salt)
    assert it.asked == ["ab", "ab", "ab"]
    assert it.pieces.stats.kept == 2


def test_what_was_used_last_stays_within_the_room() -> None:
    it = Counting(max_bytes=4 * 400)
    for text in ("a", "b", "c", "a", "d", "e", "a", "b"):
        it.pieces.encode(text)
    assert it.asked == ["a", "b", "c", "d", "e", "b"]
    it.asked.clear()
    for _ in range(2):
        it.pieces.encode("x" * 200)  # more than its share
    assert it.asked == ["x" * 200] * 2


def test_nothing_is_kept_of_a_text_that_is_refused() -> None:
    tokenizer = Tokenizer.load(DEMO_MODEL, ROOM)
    for _ in range(2):
        with pytest.raises(InvalidRequest, match="valid Unicode"):
            tokenizer.encode_chat("<|im_start|>a\ud800")
    assert tokenizer.pieces is not None
    assert tokenizer.pieces.stats.kept == 0


def test_several_threads() -> None:
    it = Counting(max_bytes=20 * 400)
    texts = ["|".join(f"{i % n}" for i in range(50)) for n in range(1, 40)] * 20

    def right(text: str) -> bool:
        return it.pieces.encode(text) == [0 if char == "|" else ord(char) for char in text]

    with ThreadPoolExecutor(4) as threads:
        assert all(threads.map(right, texts))


@given(st.lists(st.text("abc", min_size=1, max_size=4), min_size=1), st.text("abc", max_size=20))
def test_the_pattern_takes_the_longest(words: list[str], text: str) -> None:
    by_length = "|".join(sorted(map(re.escape, words), key=len, reverse=True))
    assert re.findall(longest_of(words), text) == re.findall(by_length, text)


def test_thousands_of_added_tokens_are_one_tree() -> None:
    words = [f"<unused{i}>" for i in range(6000)]
    found = re.compile(longest_of(words)).findall("a <unused17><unused5999><unused6000> <b>" * 50)
    assert found == ["<unused17>", "<unused5999>"] * 50


def test_what_was_kept_is_told_at_a_scrape() -> None:
    it, metrics = Counting(), RouterMetrics()
    watch_pieces(metrics.registry, [it.pieces.stats])
    it.pieces.encode("abc|d|abc")
    lines = metrics.render().decode().splitlines()
    assert "baton_tokenizer_cache_queries_total 7.0" in lines
    assert "baton_tokenizer_cache_hits_total 3.0" in lines
