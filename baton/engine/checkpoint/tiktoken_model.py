"""tokenizer.json out of a tiktoken model (`tiktoken.model`), without the checkpoint's own code.

    file            a line for each token: its bytes in base64, its rank, which is its id
    split pattern   only in the checkpoint's Python code, which is never run; known by family
    specials        tokenizer_config.json (`added_tokens_decoder`), by id; Kimi's code names all
                    other ids behind the vocabulary `<|reserved_token_ID|>`

Byte-pair merges follow from the ranks: tiktoken joins the neighbours whose joint token has the
lowest rank, and so does the converted tokenizer.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from tokenizers import AddedToken, Regex, Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE
from transformers.convert_slow_tokenizer import bytes_to_unicode

from baton.protocol.errors import ModelRefused
from baton.text.tokenizer import read_json

FILE: Final = "tiktoken.model"
# Source: tokenization_kimi.py of moonshotai/Kimi-K2-Instruct (TikTokenTokenizer.pat_str), with the
# intersections of its Unicode classes written as look-aheads.
_HAN: Final = r"[\p{Han}]+"
_UPPER: Final = r"(?:(?!\p{Han})[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}])"
_LOWER: Final = r"(?:(?!\p{Han})[\p{Ll}\p{Lm}\p{Lo}\p{M}])"
_SHORT: Final = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
KIMI: Final = "|".join(
    (
        _HAN,
        rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+{_SHORT}",
        rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*{_SHORT}",
        r"\p{N}{1,3}",
        r" ?[^\s\p{L}\p{N}]+[\r\n]*",
        r"\s*[\r\n]+",
        r"\s+(?!\S)",
        r"\s+",
    )
)
_PATTERNS: Final = {"tokenization_kimi": KIMI}  # by the module of code that reads the file
_RESERVED: Final = 256  # ids of specials behind the vocabulary, in Kimi's code


def is_tiktoken(source: Path) -> bool:
    """Whether a tiktoken model is the only tokenizer that `source` has."""
    return (source / FILE).is_file() and not (source / "vocab.json").is_file()


def tiktoken_tokenizer(source: Path) -> Tokenizer:
    """Return the tokenizer of the tiktoken model in `source`.

    Raises ModelRefused for a file that is none, and for a checkpoint whose code splits text in a
    way that is not known here.
    """
    ranks = _ranks(source / FILE)
    config = read_json(source / "tokenizer_config.json")
    pattern = _pattern(source, config)
    letters = bytes_to_unicode()
    names = {token: "".join(letters[byte] for byte in token) for token in ranks}
    vocabulary = {names[token]: rank for token, rank in ranks.items()}
    merges = [(names[left], names[right]) for left, right in _merges(ranks)]
    tokenizer = Tokenizer(BPE(vocabulary, merges, ignore_merges=True))
    split = pre_tokenizers.Split(Regex(pattern), behavior="isolated")
    to_letters = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, to_letters])
    tokenizer.decoder = decoders.ByteLevel()
    for token in _specials(source, config, len(ranks)):
        tokenizer.add_tokens([token])
    return tokenizer


def _ranks(path: Path) -> dict[bytes, int]:
    """Read the ranks of tokens, which are 0, 1, 2 and so on. Raises ModelRefused."""
    try:
        lines = (line.split() for line in path.read_bytes().splitlines() if line)
        ranks = {base64.b64decode(token, validate=True): int(rank) for token, rank in lines}
    except (ValueError, binascii.Error) as error:
        raise ModelRefused(f"{path} is not a tiktoken model: {error}", field="model") from error
    if sorted(ranks.values()) != list(range(len(ranks))):
        raise ModelRefused(f"{path}: its ranks are not 0 to {len(ranks) - 1}", field="model")
    missing = [byte for byte in range(256) if bytes([byte]) not in ranks]
    if missing:
        raise ModelRefused(f"{path} has no token of the byte {missing[0]}", field="model")
    return ranks


def _pattern(source: Path, config: Mapping[str, Any]) -> str:
    """Return how text is split. Raises ModelRefused if that is not known."""
    classes = (config.get("auto_map") or {}).get("AutoTokenizer") or ()
    named = [classes] if isinstance(classes, str) else [each for each in classes if each]
    for each in named:
        module = str(each).rpartition("--")[2].partition(".")[0]
        if module in _PATTERNS:
            return _PATTERNS[module]
    said = f"by its own code ({', '.join(map(str, named))})" if named else "in no known way"
    raise ModelRefused(
        f"{source / FILE} cannot be converted: the checkpoint splits text {said}, which is not"
        " run; put a tokenizer.json of the same model beside it",
        field="model",
    )


def _merges(ranks: Mapping[bytes, int]) -> list[tuple[bytes, bytes]]:
    """Return all pairs of tokens that make a token, those of lower ranks first."""
    found: list[tuple[int, int, int, bytes, bytes]] = []
    for token, rank in ranks.items():
        for at in range(1, len(token)):
            left, right = token[:at], token[at:]
            if left in ranks and right in ranks:
                found.append((rank, ranks[left], ranks[right], left, right))
    return [(left, right) for *_, left, right in sorted(found)]


def _specials(source: Path, config: Mapping[str, Any], first: int) -> list[AddedToken]:
    """Return the tokens behind the vocabulary, by id. Raises ModelRefused for an id within it."""
    given: dict[int, Mapping[str, Any]] = {
        int(token_id): token
        for token_id, token in (config.get("added_tokens_decoder") or {}).items()
    }
    within = [token_id for token_id in given if token_id < first]
    if within:
        raise ModelRefused(
            f"{source}: tokenizer_config.json has a special token of id {within[0]}, which is a"
            f" token of {FILE}",
            field="model",
        )
    last = max([first + _RESERVED - 1, *given])
    return [
        AddedToken(
            str(given[i]["content"]) if i in given else f"<|reserved_token_{i}|>",
            special=bool(given[i].get("special", True)) if i in given else True,
            normalized=False,
        )
        for i in range(first, last + 1)
    ]
