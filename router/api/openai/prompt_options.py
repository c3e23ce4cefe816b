"""Options of a prompt and its answer: cutting the prompt, bad words, numbers of log-probabilities.

The conventions are vLLM's. Pure, apart from calls of the tokenizer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Final, Literal, TypeVar

from baton.protocol.errors import InvalidRequest
from baton.protocol.sampling import SamplingParams
from baton.text.tokenizer import Tokenizer
from router.prompts.reader import Length, whole_length

MAX_BAD_WORD_CHARS: Final = 256
Ids = TypeVar("Ids", tuple[int, ...], list[int])


def truncated(
    ids: Ids,
    count: int | None,
    limit: int,
    side: Literal["left", "right"] = "left",
    frame: tuple[Ids, Ids] | None = None,
) -> Ids:
    """Return at most `count` of the ids; `side`: where ids are cut off. -1 = `limit`, None = all.
    `frame`: ids at the begin and at the end of `ids` that stay, if there is room for more.

    Raises InvalidRequest (`truncate_prompt_tokens`).
    """
    if count is None:
        return ids
    if count != -1 and not 1 <= count <= max(1, limit):
        message = f"truncate_prompt_tokens: -1, or 1 to {max(1, limit)}"
        raise InvalidRequest(message, field="truncate_prompt_tokens")
    kept = max(1, limit) if count == -1 else count
    if frame is None or len(ids) <= kept or kept <= len(frame[0]) + len(frame[1]):
        return ids[-kept:] if side == "left" else ids[:kept]
    before, behind = frame
    room = kept - len(before) - len(behind)
    own = ids[len(before) : len(ids) - len(behind)]
    return before + (own[-room:] if side == "left" else own[:room]) + behind


def useful_length(count: int | None, limit: int, side: Literal["left", "right"]) -> Length:
    """Return how long a prompt may be before it is cut or refused. `count`: as for `truncated`."""
    if count is None:
        return whole_length(limit)
    return Length(count if 1 <= count <= limit else limit, side)


def bad_word_ids(words: Sequence[str] | None, tokenizer: Tokenizer) -> tuple[tuple[int, ...], ...]:
    """Return the token ids of each word: as at the start of a text and, if they differ, after a
    space.
    The type of the body has checked how many words there are.

    Raises InvalidRequest. Source: vLLM, sampling_params.py, `update_from_tokenizer`.
    """
    found: list[tuple[int, ...]] = []
    for word in words or ():
        if not 0 < len(word.lstrip()) <= MAX_BAD_WORD_CHARS:
            message = f"bad_words: words of 1 to {MAX_BAD_WORD_CHARS} characters"
            raise InvalidRequest(message, field="bad_words")
        plain = tuple(tokenizer.encode(word.lstrip(), add_special_tokens=False))
        spaced = tuple(tokenizer.encode(" " + word.lstrip(), add_special_tokens=False))
        if plain:
            found.append(plain)
        if spaced and (not plain or (spaced[0] != plain[0] and len(spaced) == len(plain))):
            found.append(spaced)
    return tuple(found)


def logprobs_within(
    params: SamplingParams, most: int, vocab_size: int, field: str = "logprobs"
) -> SamplingParams:
    """Return the parameters, with -1 log-probabilities replaced by the size of the vocabulary.

    `most`: the most per token that are allowed, -1 = any number. `field`: the client's name of the
    answer's log-probabilities. Raises InvalidRequest, naming the field, for more.
    """
    limit = vocab_size if most < 0 else min(most, vocab_size)
    counts: list[int | None] = []
    for name, asked in ((field, params.logprobs), ("prompt_logprobs", params.prompt_logprobs)):
        count = vocab_size if asked == -1 else asked
        if count is not None and count > limit:
            message = f"{name} must be between 0 and {limit} (--max-logprobs), got {asked}"
            raise InvalidRequest(message, field=name)
        counts.append(count)
    if counts == [params.logprobs, params.prompt_logprobs]:
        return params
    return replace(params, logprobs=counts[0], prompt_logprobs=counts[1])
