"""The bodies of OpenAI's requests as strict structs; errors name the field.

A body goes through orjson (which refuses NaN, Infinity, lone surrogates, deep nesting), then
router/api/unserved.py, then msgspec (strict types with bounds; unknown fields are ignored), and
becomes SamplingParams. The types with bounds are in router/api/openai/fields.py, messages and tools
in router/api/openai/chat.py, replies in router/api/openai/replies.py. Nothing here uses a tokenizer
or the event loop.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import fields
from operator import attrgetter
from typing import Any, Final, Literal, TypeVar, cast

import msgspec
import orjson

from baton.protocol.errors import InvalidRequest
from baton.protocol.sampling import SamplingParams
from router.api.openai.breaches import fault_of, refusal
from router.api.openai.chat import Effort, Messages, Tools
from router.api.openai.fields import (
    BIASED_TOKEN,
    MAX_TOKEN_ID,
    PRIORITY_LIMIT,
    AllowedTokenIds,
    BadWords,
    BestOf,
    Choices,
    EarlyStopping,
    FrequencyPenalty,
    GuidedBackend,
    LengthPenalty,
    LogitBias,
    LogprobTokenIds,
    MaxNewTokens,
    MaxTokens,
    MinP,
    MinTokens,
    Name,
    NotEmpty,
    NumLogprobs,
    NumSamples,
    PresencePenalty,
    Priority,
    RepetitionPenalty,
    RequestId,
    Seed,
    Session,
    Stops,
    StopText,
    StopTokenIds,
    Temperature,
    Template,
    Text,
    ThinkingBudget,
    TokenId,
    TopK,
    TopP,
    Truncation,
)
from router.api.unserved import COMPLETIONS, GENERATING, refuse

MAX_PROMPTS: Final = 128
_OF_COMPLETIONS: Final = {**GENERATING, **COMPLETIONS}
_BIASED_TOKEN: Final = re.compile(BIASED_TOKEN)


class StreamOptions(msgspec.Struct, kw_only=True):
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None  # vLLM's; no effect without include_usage


class SamplingFields(msgspec.Struct, kw_only=True):
    """The fields that chats and completions share. None: the field is absent."""

    model: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    max_tokens: MaxTokens | None = None
    n: NumSamples | None = None
    best_of: BestOf | None = None
    use_beam_search: bool | None = None
    early_stopping: EarlyStopping | None = None
    temperature: Temperature | None = None
    top_p: TopP | None = None
    top_k: TopK | None = None
    min_p: MinP | None = None
    seed: Seed | None = None
    stop: StopText | Stops | None = None
    stop_token_ids: StopTokenIds | None = None
    min_tokens: MinTokens | None = None
    ignore_eos: bool | None = None
    skip_reading_prefix_cache: bool | None = None
    presence_penalty: PresencePenalty | None = None
    frequency_penalty: FrequencyPenalty | None = None
    repetition_penalty: RepetitionPenalty | None = None
    length_penalty: LengthPenalty | None = None
    logit_bias: LogitBias | None = None
    prompt_logprobs: NumLogprobs | None = None
    logprob_token_ids: LogprobTokenIds | None = None
    thinking_token_budget: ThinkingBudget | None = None
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    add_special_tokens: bool | None = None
    priority: Priority | None = None
    cache_salt: Name | None = None
    truncate_prompt_tokens: Truncation | None = None
    truncation_side: Literal["left", "right"] | None = None
    allowed_token_ids: AllowedTokenIds | None = None
    bad_words: BadWords | None = None
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None  # log-probabilities name tokens `token_id:42`
    request_id: RequestId | None = None  # used without a header (router/request/request_ids.py)
    # Each of the next three can name the client session (router/request/terms.py).
    session_id: Session | None = None
    prompt_cache_key: Session | None = None
    user: Session | None = None
    baton_timing: bool | None = None  # whether the answer has a receipt
    # The fields from here on say what form the answer must have (guided_fields.py).
    response_format: dict[str, Any] | None = None
    structured_outputs: dict[str, Any] | None = None
    guided_json: str | dict[str, Any] | None = None
    guided_regex: NotEmpty | None = None
    guided_choice: Choices | None = None
    guided_grammar: NotEmpty | None = None
    guided_decoding_backend: GuidedBackend | None = None
    guided_whitespace_pattern: str | None = None


class CompletionBody(SamplingFields, kw_only=True):
    """The body of /v1/completions. `prompt` is text, texts, token ids or lists of token ids."""

    prompt: Any = None
    logprobs: NumLogprobs | None = None
    echo: bool | None = None

    @property
    def only_echo(self) -> bool:
        """Whether the client wants only the prompt back, with its log-probabilities if it asks."""
        return bool(self.echo) and self.max_tokens == 0


class ChatBody(SamplingFields, kw_only=True):
    """The body of /v1/chat/completions."""

    messages: Messages
    max_completion_tokens: MaxNewTokens | None = None
    logprobs: bool | None = None
    top_logprobs: NumLogprobs | None = None
    tools: Tools | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    include_reasoning: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    chat_template: Template | None = None
    documents: list[dict[str, str]] | None = None
    reasoning_effort: Effort | None = None
    echo: bool | None = None  # send the last message before the answer, if the answer continues it


class TokenizeBody(msgspec.Struct, kw_only=True):
    """The body of /tokenize: either `prompt`, or `messages`, which are rendered first."""

    model: str | None = None
    prompt: Text | None = None
    messages: Messages | None = None
    tools: Tools | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    return_token_strs: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    chat_template: str | None = None
    documents: list[dict[str, str]] | None = None


class DetokenizeBody(msgspec.Struct, kw_only=True):
    model: str | None = None
    tokens: list[TokenId]


Body = TypeVar("Body", CompletionBody, ChatBody, TokenizeBody, DetokenizeBody)
S = TypeVar("S", bound=msgspec.Struct)


def parse(raw: bytes, kind: type[Body]) -> Body:
    """Parse and check a body.

    Raises InvalidRequest with the field's path, like `messages[0].role`."""
    return checked(object_of(raw), kind)


def object_of(raw: bytes) -> dict[str, Any]:
    """Parse a body as a JSON object. Raises InvalidRequest."""
    try:
        content: object = orjson.loads(raw)
    except orjson.JSONDecodeError as error:
        fault = fault_of(raw)
        if fault is not None and fault[0]:
            raise InvalidRequest(f"{fault[0]} {fault[1]}", field=fault[0]) from error
        raise InvalidRequest(f"the body is not valid JSON: {error}") from error
    if not isinstance(content, dict):
        raise InvalidRequest("the body must be a JSON object")
    return cast("dict[str, Any]", content)


def checked(content: dict[str, Any], kind: type[Body]) -> Body:
    """Check the fields of a body and return its struct. Raises the same exceptions as `parse`."""
    unserved = _OF_COMPLETIONS if kind is CompletionBody else GENERATING
    if not unserved.keys().isdisjoint(content):
        refuse(content, unserved)
    return struct_of(content, kind)


def struct_of(content: Mapping[str, Any], kind: type[S]) -> S:
    """Convert a JSON object to a struct. Raises InvalidRequest with the field's path."""
    try:
        return msgspec.convert(content, kind, strict=True)
    except msgspec.ValidationError as error:
        raise refusal(error, kind, content) from error


def sampling_params(
    body: CompletionBody | ChatBody, defaults: Mapping[str, int | float]
) -> SamplingParams:
    """Return the SamplingParams of a body. `defaults`: values of absent fields; it has at least
    max_tokens.

    Raises InvalidRequest, naming the client's own field, for values out of bounds, and
    UnsupportedFeature for those that no engine serves yet.
    """
    chat = isinstance(body, ChatBody)
    max_tokens, logprobs, prompt_logprobs = _of_chat(body) if chat else _of_completion(body)
    values: dict[str, Any] = dict(defaults)
    for name, value in zip(_SAME_NAMES, _same(body), strict=True):
        if value is not None:
            values[name] = tuple(value) if type(value) is list else value
    if body.best_of is not None or body.use_beam_search or body.early_stopping is not None:
        values |= fan_out(body)
    if max_tokens is not None:
        values["max_tokens"] = max_tokens
    if body.seed is not None:
        values["seed"] = body.seed % 2**64  # OpenAI's clients count 64 bits as signed
    values["logprobs"] = logprobs
    values["prompt_logprobs"] = prompt_logprobs
    if body.logit_bias:
        values["logit_bias"] = _logit_bias(body.logit_bias)
    try:
        return SamplingParams(**values)
    except InvalidRequest as error:
        field = error.field or ""
        own = name_in(body, field)
        if own == field:
            raise
        raise type(error)(error.message.replace(field, own), field=own) from error


def name_in(body: CompletionBody | ChatBody, field: str) -> str:
    """Return the body's name of a field of SamplingParams."""
    if field == "beam_width":
        return "n"
    if isinstance(body, ChatBody):
        if field == "logprobs":
            return "top_logprobs"
        if field == "max_tokens" and body.max_completion_tokens is not None:
            return "max_completion_tokens"
    return field


def fan_out(body: CompletionBody | ChatBody) -> dict[str, Any]:
    """Check the fields for several answers; return SamplingParams' fields for a beam search, {} if
    there is none.

    As in vLLM, `use_beam_search` makes n (or best_of, if that is larger) the width of the search;
    the n best beams are the answers. Raises InvalidRequest, naming the field, for fields that
    contradict each other or cannot be streamed.
    """
    count, best_of = body.n or 1, body.best_of
    if best_of is not None and best_of < count:
        message = f"best_of ({best_of}) must not be below n ({count})"
        raise InvalidRequest(message, field="best_of")
    if body.use_beam_search:
        if body.stream:
            message = "use_beam_search: which beams are best is known at their end: no stream"
            raise InvalidRequest(message, field="use_beam_search")
        return {
            "beam_width": max(count, best_of or 1),
            "best_of": None,
            "early_stopping": _early_stopping(body.early_stopping),
        }
    if body.early_stopping is not None:
        message = "early_stopping is only allowed with use_beam_search"
        raise InvalidRequest(message, field="early_stopping")
    if best_of is not None and best_of > count and body.stream:
        message = "best_of: which samples are best is known at their end: no stream"
        raise InvalidRequest(message, field="best_of")
    return {}


def _early_stopping(given: bool | str | None) -> str:
    if given in (None, True, False, "never"):
        return given if isinstance(given, str) else str(bool(given)).lower()
    raise InvalidRequest('early_stopping must be true, false or "never"', field="early_stopping")


# A field with the same name in the bodies and in SamplingParams is copied, but not those of
# _OWN_WAY. sampling_params converts these, fan_out does (early_stopping), or intake.py does
# (bad_words and stop).
_OWN_WAY: Final = {
    "max_tokens", "seed", "logprobs", "prompt_logprobs", "logit_bias", "early_stopping",
    "bad_words", "stop", "include_stop_str_in_output", "skip_special_tokens",
}  # fmt: skip
_SAME_NAMES: Final = tuple(
    spec.name
    for spec in fields(SamplingParams)
    if spec.name in SamplingFields.__struct_fields__ and spec.name not in _OWN_WAY
)
_same: Final = attrgetter(*_SAME_NAMES)
_TOKEN_IDS: Final = tuple(name for name in _SAME_NAMES if name.endswith("_token_ids"))


def _of_chat(body: ChatBody) -> tuple[int | None, int | None, int | None]:
    """Return max_tokens, logprobs and prompt_logprobs of a chat, under its own field names."""
    if body.top_logprobs and not body.logprobs:
        message = "top_logprobs is only allowed when logprobs is true"
        raise InvalidRequest(message, field="top_logprobs")
    newer = body.max_completion_tokens
    logprobs = (body.top_logprobs or 0) if body.logprobs else None
    return body.max_tokens if newer is None else newer, logprobs, body.prompt_logprobs


def _of_completion(body: CompletionBody) -> tuple[int | None, int | None, int | None]:
    """Return max_tokens, logprobs and prompt_logprobs of a completion. With `echo`, `logprobs` also
    asks for the prompt's log-probabilities."""
    told = [body.prompt_logprobs, body.logprobs if body.echo else None]
    counts = [count for count in told if count is not None]
    prompt_logprobs = -1 if -1 in counts else max(counts, default=None)  # -1 = all
    max_tokens = 1 if body.only_echo else body.max_tokens  # an engine computes at least one token
    return max_tokens, body.logprobs, prompt_logprobs


def stops_of(body: CompletionBody | ChatBody) -> tuple[str, ...]:
    """Return the stop strings without duplicates."""
    stops = [body.stop] if isinstance(body.stop, str) else body.stop or []
    return tuple(dict.fromkeys(stops))


def check_common(body: CompletionBody | ChatBody) -> None:
    """Raise InvalidRequest for fields that are allowed only with a stream, or only without."""
    if body.stream_options is not None and not body.stream:
        message = "stream_options is only allowed when stream is true"
        raise InvalidRequest(message, field="stream_options")
    if body.prompt_logprobs is not None and body.stream:
        message = "prompt_logprobs are not available when stream is true"
        raise InvalidRequest(message, field="prompt_logprobs")


def check_priority(priority: int | None) -> None:
    """Raise InvalidRequest for a priority out of bounds. For gRPC: its messages have no bounds."""
    if priority is not None and abs(priority) > PRIORITY_LIMIT:
        raise InvalidRequest(f"priority: at most {PRIORITY_LIMIT} from 0", field="priority")


def prompts_of(body: CompletionBody) -> list[str | tuple[int, ...]]:
    """Return the prompts of a completion, each as text or token ids, none empty.

    Raises InvalidRequest."""
    prompt: object = body.prompt
    if isinstance(prompt, str):
        return [_text_prompt(prompt, "prompt")]
    if not isinstance(prompt, list):
        message = (
            "prompt must be a string, a list of strings, token ids or a list of token id lists"
        )
        raise InvalidRequest(message, field="prompt")
    items = cast("list[object]", prompt)
    if not items:
        raise InvalidRequest("prompt must not be empty", field="prompt")
    if isinstance(items[0], int):
        return [_token_ids(items, "prompt")]
    if len(items) > MAX_PROMPTS:
        raise InvalidRequest(f"prompt: at most {MAX_PROMPTS} prompts in one call", field="prompt")
    return [_one_prompt(item, f"prompt[{index}]") for index, item in enumerate(items)]


def token_ids_below(ids: tuple[int, ...], vocab_size: int, field: str) -> tuple[int, ...]:
    """Return the ids. Raises InvalidRequest, naming `field`, for one beyond the vocabulary."""
    if ids and max(ids) >= vocab_size:
        message = f"{field}: token ids must be below the vocabulary's size, {vocab_size}"
        raise InvalidRequest(message, field=field)
    return ids


def check_token_ids(params: SamplingParams, vocab_size: int) -> None:
    """Raise InvalidRequest, naming the field, for ids that the vocabulary does not have."""
    for name in _TOKEN_IDS:
        ids = getattr(params, name)
        if ids:
            token_ids_below(ids, vocab_size, name)
    if params.logit_bias:
        token_ids_below(tuple(dict(params.logit_bias)), vocab_size, "logit_bias")
    for word in params.bad_words:
        token_ids_below(word, vocab_size, "bad_words")


def _text_prompt(text: str, field: str) -> str:
    if not text:
        raise InvalidRequest(f"{field} must not be empty", field=field)
    return text


def _one_prompt(item: object, field: str) -> str | tuple[int, ...]:
    if isinstance(item, str):
        return _text_prompt(item, field)
    if isinstance(item, list):
        return _token_ids(cast("list[object]", item), field)
    raise InvalidRequest(f"{field} must be a string or a list of token ids", field=field)


def _token_ids(items: list[Any], field: str) -> tuple[int, ...]:
    """Check a prompt's token ids: at least one, all of them integers from 0 on.

    Raises InvalidRequest, naming `field`."""
    if not items:
        raise InvalidRequest(f"{field} must not be empty", field=field)
    for item in items:
        # type() and not isinstance: in Python a bool is an int, but JSON's `true` is no token id.
        if type(item) is not int or not 0 <= item <= MAX_TOKEN_ID:
            raise InvalidRequest(f"{field}: token ids are integers from 0 on", field=field)
    return tuple(items)


def _logit_bias(given: Mapping[str, float]) -> tuple[tuple[int, float], ...]:
    pairs: list[tuple[int, float]] = []
    for key, bias in given.items():
        if _BIASED_TOKEN.fullmatch(key) is None:
            message = "logit_bias maps token ids to numbers from -100 to 100"
            raise InvalidRequest(message, field="logit_bias")
        pairs.append((int(key), bias))
    return tuple(pairs)
