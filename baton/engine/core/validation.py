"""What an engine refuses before it costs anything: fields that it cannot serve, lengths that can
never fit. Pure functions of the request and the engine's bounds.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from baton.engine.state.interface import Task
from baton.protocol.errors import ContextLengthExceeded, InvalidRequest, UnsupportedFeature
from baton.protocol.request import Request
from baton.protocol.sampling import SamplingParams


@dataclass(frozen=True, slots=True)
class EngineBounds:
    """The bounds of an engine.

    `local_len`: most tokens of a request that decodes here. `model_len`: of one that decodes
    elsewhere. `max_num_seqs`: sequences at once.
    """

    local_len: int
    model_len: int
    vocab_size: int
    max_num_seqs: int
    num_blocks: int
    block_size: int
    adapters: Collection[str] = ()
    num_groups: int = 1  # layer groups; each takes blocks of its own for the same tokens
    generates: bool = True
    sees: bool = False  # the model reads images

    def limit(self, task: Task) -> int:
        """Return the most tokens, prompt and output; a PREFILL task's output lies in
        another pool.
        """
        return self.local_len if task is Task.LOCAL else self.model_len

    def blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size) * self.num_groups


def validate(request: Request, task: Task, bounds: EngineBounds) -> None:
    """Refuse a request that does not fit the bounds.

    Raises InvalidRequest (the field is named), UnsupportedFeature, or ContextLengthExceeded for a
    request that can never fit the model or, with a LOCAL task's output, the pool.
    """
    if request.adapter and request.adapter not in bounds.adapters:
        raise UnsupportedFeature(f"no adapter {request.adapter!r} here", field="adapter")
    if not bounds.generates:
        raise UnsupportedFeature(
            "this model is a classifier or an encoder: it writes no text", field="model"
        )
    if request.images and not bounds.sees:
        raise UnsupportedFeature("this model reads no images", field="images")
    if not request.prompt_ids:
        raise InvalidRequest("the prompt is empty", field="prompt")
    known = [*request.prompt_ids, *(token for ids in request.output_ids for token in ids)]
    if min(known) < 0 or max(known) >= bounds.vocab_size:
        raise InvalidRequest(
            f"token ids must be at least 0 and below {bounds.vocab_size}", field="prompt"
        )
    for name, ids in (
        ("logit_bias", [token for token, _ in request.params.logit_bias]),
        ("allowed_token_ids", request.params.allowed_token_ids),
        ("logprob_token_ids", request.params.logprob_token_ids),
        ("bad_words", [token for word in request.params.bad_words for token in word]),
    ):
        if ids and not 0 <= min(ids) <= max(ids) < bounds.vocab_size:
            raise InvalidRequest(
                f"{name}: token ids must be at least 0 and below {bounds.vocab_size}", field=name
            )
    if not request.live_samples:
        raise InvalidRequest("all samples have ended", field="ended")
    _check_samples(request.params, bounds, task)
    if request.params.seed is None and not request.params.greedy and not request.params.beam_width:
        raise InvalidRequest("sampling needs a seed by now", field="seed")
    _check_length(request, task, bounds)


def _check_samples(params: SamplingParams, bounds: EngineBounds, task: Task) -> None:
    if params.best_of is not None and params.best_of < params.n:
        raise InvalidRequest(
            f"best_of ({params.best_of}) must not be below n ({params.n})", field="best_of"
        )
    if params.beam_width and max(params.n, params.best_of or 1) > params.beam_width:
        raise InvalidRequest(
            f"n and best_of must not exceed beam_width ({params.beam_width})", field="n"
        )
    width = params.width
    if width > bounds.max_num_seqs and task is Task.LOCAL:  # else they run elsewhere
        raise InvalidRequest(
            f"{width} sequences of one request exceed max_num_seqs ({bounds.max_num_seqs})",
            field="beam_width" if params.beam_width else "n",
        )


def _check_length(request: Request, task: Task, bounds: EngineBounds) -> None:
    prompt, output = len(request.prompt_ids), request.params.max_tokens
    limit = bounds.limit(task)
    if prompt + 1 > limit:
        raise ContextLengthExceeded(
            f"the prompt has {prompt} tokens; with one token of output the limit is {limit}",
            field="prompt",
        )
    if prompt + output > limit:
        raise ContextLengthExceeded(
            f"prompt ({prompt} tokens) and max_tokens ({output}) together exceed {limit}",
            field="max_tokens",
        )
    known = len(request.known_ids)
    if bounds.blocks_for(known) > bounds.num_blocks:
        raise ContextLengthExceeded(
            f"{known} tokens need {bounds.blocks_for(known)} KV blocks, "
            f"the pool has {bounds.num_blocks}",
            field="prompt",
        )
    width = request.params.width if task is Task.LOCAL else 1
    if width > 1 and most_blocks(request, bounds) > bounds.num_blocks:
        raise ContextLengthExceeded(
            f"{width} sequences of up to {prompt + output} tokens may need "
            f"{most_blocks(request, bounds)} KV blocks, the pool has {bounds.num_blocks}",
            field="max_tokens",
        )


def most_blocks(request: Request, bounds: EngineBounds) -> int:
    """Return the number of blocks with which a request of several sequences always reaches its end.

    Whole prompt blocks are shared. Nothing else need be, and each sequence may hold one more block,
    which it is about to free.
    """
    params = request.params
    shared = (len(request.prompt_ids) - 1) // bounds.block_size * bounds.num_groups
    longest = bounds.blocks_for(len(request.prompt_ids) + params.max_tokens)
    return shared + params.width * (longest - shared + bounds.num_groups)
