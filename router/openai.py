"""The bodies of OpenAI's requests: strict structs, bounded numbers, errors that name the field.

Bytes -> orjson (refuses NaN, Infinity, lone surrogates, deep nesting) -> UNSERVED table -> msgspec
structs (strict types, unknown fields ignored) -> SamplingParams (baton.sampling.BOUNDS). Nothing
here knows tokens or the event loop; replies are in router/openai_replies.py.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Final, TypeVar, cast

import msgspec
import orjson

from baton.chat_template import RESERVED_NAMES
from baton.errors import InvalidRequest, UnsupportedFeature
from baton.sampling import SamplingParams, refuse_unserved

MAX_STOPS: Final = 16
MAX_STOP_CHARS: Final = 1024
MAX_PROMPTS: Final = 128
MAX_MESSAGES: Final = 4096
ROLES: Final = ("system", "developer", "user", "assistant", "tool", "function")
MAX_NAME_CHARS: Final = 256  # model names, cache salts
PRIORITY_LIMIT: Final = 2**31 - 1

# Valid elsewhere and not served here: field -> the values that ask for nothing. None never asks.
UNSERVED: Final[dict[str, tuple[Any, ...]]] = {
    "allowed_token_ids": ([],),
    "audio": (),
    "bad_words": ([],),
    "chat_template": (),
    "continue_final_message": (False,),
    "documents": ([],),
    "echo": (False,),
    "function_call": ("none", "auto"),
    "functions": ([],),
    "guided_choice": (),
    "guided_grammar": (),
    "guided_json": (),
    "guided_regex": (),
    "kv_transfer_params": (),
    "modalities": (["text"],),
    "prompt_embeds": (),
    "response_format": ({"type": "text"},),
    "structured_outputs": (),
    "suffix": ("",),
    "tool_choice": ("none", "auto"),
    "tools": ([],),
    "top_logprobs": (0,),
    "truncate_prompt_tokens": (),
    "use_beam_search": (False,),
    "web_search_options": (),
}


class StreamOptions(msgspec.Struct, kw_only=True):
    include_usage: bool | None = None


class SamplingFields(msgspec.Struct, kw_only=True):
    """What both APIs share; msgspec flattens it into both bodies. None = absent = the default."""

    model: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    max_tokens: int | None = None
    n: int | None = None
    best_of: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    min_tokens: int | None = None
    ignore_eos: bool | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    length_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    prompt_logprobs: int | None = None
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    add_special_tokens: bool | None = None
    priority: int | None = None
    cache_salt: str | None = None


class CompletionBody(SamplingFields, kw_only=True):
    """/v1/completions. `prompt` is text, texts, ids or lists of ids (see `prompts_of`)."""

    prompt: Any = None
    logprobs: int | None = None


class ChatMessage(msgspec.Struct, kw_only=True, omit_defaults=True):
    """One message; `content` is text, or text parts."""

    role: str
    content: Any = None
    name: str | None = None
    tool_call_id: str | None = None
    tool_calls: list[dict[str, Any]] | None = None
    reasoning_content: str | None = None


class ChatBody(SamplingFields, kw_only=True):
    """/v1/chat/completions."""

    messages: list[ChatMessage]
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    add_generation_prompt: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    reasoning_effort: str | None = None


class TokenizeBody(msgspec.Struct, kw_only=True):
    """/tokenize: `prompt`, or `messages` to be rendered first."""

    model: str | None = None
    prompt: str | None = None
    messages: list[ChatMessage] | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None
    return_token_strs: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None


class DetokenizeBody(msgspec.Struct, kw_only=True):
    model: str | None = None
    tokens: list[int]


Body = TypeVar("Body", CompletionBody, ChatBody, TokenizeBody, DetokenizeBody)


def parse(raw: bytes, kind: type[Body]) -> Body:
    """Read a body. Raises InvalidRequest with the field's path, like `messages[0].role`."""
    try:
        content: object = orjson.loads(raw)
    except orjson.JSONDecodeError as error:
        raise InvalidRequest(f"the body is not valid JSON: {error}") from error
    if not isinstance(content, dict):
        raise InvalidRequest("the body must be a JSON object")
    _refuse(cast("dict[str, Any]", content))
    try:
        return msgspec.convert(content, kind, strict=True)
    except msgspec.ValidationError as error:
        field = _field_of(str(error))
        text = str(error).split(" - at ")[0]
        message = f"{field}: {text}" if field else text
        raise InvalidRequest(message, field=field) from error


def sampling_params(
    body: CompletionBody | ChatBody, defaults: Mapping[str, int | float]
) -> SamplingParams:
    """SamplingParams of a body; `defaults` (max_tokens at least) where the client names none.

    Raises InvalidRequest, naming the client's own field, for values out of bounds, and
    UnsupportedFeature for those that no engine serves yet.
    """
    own_name = "max_tokens"
    given = body.max_tokens
    logprobs = body.logprobs
    if isinstance(body, ChatBody):
        if body.max_completion_tokens is not None:
            own_name, given = "max_completion_tokens", body.max_completion_tokens
        logprobs = 0 if body.logprobs else None
    values: dict[str, Any] = dict(defaults)
    values |= {
        name: getattr(body, name) for name in _PLAIN_FIELDS if getattr(body, name) is not None
    }
    if given is not None:
        values["max_tokens"] = given
    if body.seed is not None:
        values["seed"] = _seed(body.seed)
    values["logprobs"] = logprobs
    values["stop_token_ids"] = _token_ids(body.stop_token_ids or [], "stop_token_ids")
    values["logit_bias"] = _logit_bias(body.logit_bias or {})
    try:
        params = SamplingParams(**values)
        refuse_unserved(params)
    except InvalidRequest as error:
        if error.field == "max_tokens" and own_name != "max_tokens":
            message = error.message.replace("max_tokens", own_name)
            raise type(error)(message, field=own_name) from error
        raise
    return params


# Copied from the body by name when present.
_PLAIN_FIELDS: Final = (
    "n", "best_of", "temperature", "top_p", "top_k", "min_p", "min_tokens", "ignore_eos",
    "presence_penalty", "frequency_penalty", "repetition_penalty", "length_penalty",
    "prompt_logprobs",
)  # fmt: skip


def stops_of(body: CompletionBody | ChatBody) -> tuple[str, ...]:
    """The stop strings. Raises InvalidRequest for too many, too long or empty ones."""
    stops = [body.stop] if isinstance(body.stop, str) else body.stop or []
    if len(stops) > MAX_STOPS:
        raise InvalidRequest(f"stop: at most {MAX_STOPS} strings", field="stop")
    if not all(0 < len(stop) <= MAX_STOP_CHARS for stop in stops):
        raise InvalidRequest(f"stop: strings of 1 to {MAX_STOP_CHARS} characters", field="stop")
    return tuple(dict.fromkeys(stops))


def check_common(body: CompletionBody | ChatBody) -> None:
    """Bounds that SamplingParams does not know: stream options, priority, names."""
    if body.stream_options is not None and not body.stream:
        message = "stream_options is only allowed when stream is true"
        raise InvalidRequest(message, field="stream_options")
    if body.priority is not None and abs(body.priority) > PRIORITY_LIMIT:
        raise InvalidRequest(f"priority: at most {PRIORITY_LIMIT} from 0", field="priority")
    if body.cache_salt is not None and not 0 < len(body.cache_salt) <= MAX_NAME_CHARS:
        raise InvalidRequest(f"cache_salt: 1 to {MAX_NAME_CHARS} characters", field="cache_salt")


def prompts_of(body: CompletionBody) -> list[str | tuple[int, ...]]:
    """The prompts of a completion, each as text or ids, none empty. Raises InvalidRequest."""
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


def messages_of(messages: list[ChatMessage]) -> list[dict[str, Any]]:
    """Messages as the template sees them: plain dicts, text parts joined into one string.

    Raises InvalidRequest, naming the field, for an unknown role, for a message without content and
    for parts that are not text.
    """
    if not messages:
        raise InvalidRequest("messages must not be empty", field="messages")
    if len(messages) > MAX_MESSAGES:
        raise InvalidRequest(f"at most {MAX_MESSAGES} messages", field="messages")
    plain: list[dict[str, Any]] = []
    for index, message in enumerate(messages):
        item = cast("dict[str, Any]", msgspec.to_builtins(message))
        _check_message(message, f"messages[{index}]")
        item["content"] = _content(message.content, f"messages[{index}].content")
        plain.append(item)
    return plain


def _check_message(message: ChatMessage, where: str) -> None:
    if message.role not in ROLES:
        field = f"{where}.role"
        raise InvalidRequest(f"{field} must be one of {', '.join(ROLES)}", field=field)
    calls_tools = message.role == "assistant" and message.tool_calls
    if message.content is None and not calls_tools:
        field = f"{where}.content"
        raise InvalidRequest(f"{field} is missing", field=field)


def template_kwargs(body: ChatBody | TokenizeBody) -> dict[str, Any]:
    """What a client may tell its template: plain scalars under plain names."""
    given = dict(body.chat_template_kwargs or {})
    for name, value in given.items():
        field = f"chat_template_kwargs.{name}"
        plain = name.isidentifier() and not name.startswith("_") and len(name) <= MAX_NAME_CHARS
        if not plain or name in RESERVED_NAMES:
            raise InvalidRequest("chat_template_kwargs: a name cannot be set", field=field)
        if value is not None and not isinstance(value, bool | int | float | str):
            raise InvalidRequest(f"{field} must be a plain value", field=field)
    if isinstance(body, ChatBody) and body.reasoning_effort is not None:
        given.setdefault("reasoning_effort", body.reasoning_effort)
    return given


def token_ids_below(ids: tuple[int, ...], vocab_size: int, field: str) -> tuple[int, ...]:
    """The ids, all within the vocabulary. Raises InvalidRequest."""
    if ids and max(ids) >= vocab_size:
        message = f"{field}: token ids must be below the vocabulary's size, {vocab_size}"
        raise InvalidRequest(message, field=field)
    return ids


def _refuse(content: Mapping[str, Any]) -> None:
    for name, harmless in UNSERVED.items():
        value = content.get(name)
        if value is not None and value not in harmless:
            raise UnsupportedFeature(f"{name} is not supported by this server", field=name)


def _field_of(message: str) -> str | None:
    """`$.messages[0].role` and "missing required field `messages`" -> the path a client knows."""
    path = re.search(r"- at `\$\.?([^`]*)`$", message)
    missing = re.search(r"missing required field `([^`]+)`", message)
    parts = [match.group(1) for match in (path, missing) if match is not None and match.group(1)]
    return ".".join(parts) or None


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
    """Ids are integers from 0 on, no booleans; only a prompt must have some."""
    if not items and field.startswith("prompt"):
        raise InvalidRequest(f"{field} must not be empty", field=field)
    for item in items:
        # type() and not isinstance: true is an int to Python, never to a client.
        if type(item) is not int or not 0 <= item < 2**31:
            raise InvalidRequest(f"{field}: token ids are integers from 0 on", field=field)
    return tuple(items)


def _seed(given: int) -> int:
    """A seed as 64 bits: OpenAI's clients count them as signed, so -1 is 2**64 - 1."""
    if not -(2**63) <= given < 2**64:
        raise InvalidRequest("seed must be between -2**63 and 2**64 - 1", field="seed")
    return given % 2**64


def _logit_bias(given: Mapping[str, float]) -> tuple[tuple[int, float], ...]:
    pairs: list[tuple[int, float]] = []
    for key, bias in given.items():
        if not (key.isascii() and key.isdigit() and len(key) < 10) or not -100.0 <= bias <= 100.0:
            message = "logit_bias maps token ids to numbers from -100 to 100"
            raise InvalidRequest(message, field="logit_bias")
        pairs.append((int(key), bias))
    return tuple(pairs)


def _content(content: object, field: str) -> str:
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise InvalidRequest(f"{field} must be a string or a list of parts", field=field)
    texts: list[str] = []
    for index, part in enumerate(cast("list[object]", content)):
        item = cast("dict[str, object]", part) if isinstance(part, dict) else {}
        text = item.get("text")
        if item.get("type") not in ("text", "input_text") or not isinstance(text, str):
            where = f"{field}[{index}]"
            raise UnsupportedFeature(f"{where}: only text parts are supported", field=where)
        texts.append(text)
    return "\n".join(texts)
