"""docs/request_fields.md: every request field of vLLM's and OpenAI's, and what becomes of it here.

    python -m tests.front.request_fields      writes the page anew

Each field is sent, with a value that asks for something and with values that are none of its type:

    refused     the first is a 400, `unsupported_feature`, that names the field
    yes         it is taken, and nonsense is a 400 that names the field: it is read
    ignored     even nonsense changes nothing

Source: vLLM's request models (chat_completion, completion, responses, pooling and tokenize
protocol.py) and OpenAI's published schema, autumn 2026.
"""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any, Final

import httpx

from baton.text.chat_template import ChatTemplate
from router.config import RouterConfig
from tests.front.fakes import MODEL, TOKENIZER, FakeDispatcher, Front
from tests.front.tokenizers_built import TEMPLATE

PAGE: Final = Path(__file__).parents[2] / "docs" / "request_fields.md"
_SAMPLING: Final = """
    model frequency_penalty logit_bias logprobs max_tokens n presence_penalty response_format seed
    stop stream stream_options temperature top_p thinking_token_budget user use_beam_search top_k
    min_p repetition_penalty watermarking length_penalty stop_token_ids include_stop_str_in_output
    ignore_eos min_tokens skip_special_tokens spaces_between_special_tokens truncate_prompt_tokens
    truncation_side prompt_logprobs logprob_token_ids allowed_token_ids bad_words echo
    add_special_tokens structured_outputs priority request_id session_id return_tokens_as_token_ids
    return_token_ids routed_experts_prompt_start return_token_offsets return_mm_kwargs cache_salt
    kv_transfer_params ec_transfer_params vllm_xargs repetition_detection stream_interval
"""
_VLLM: Final[dict[str, str]] = {
    "chat": f"""{_SAMPLING}
        messages top_logprobs max_completion_tokens tools tool_choice reasoning_effort
        include_reasoning parallel_tool_calls add_generation_prompt continue_final_message documents
        chat_template chat_template_kwargs media_io_kwargs mm_processor_kwargs return_prompt_text
    """,
    "completions": f"{_SAMPLING} prompt suffix prompt_embeds",
    "responses": """
        background include input instructions max_output_tokens max_tool_calls metadata model
        logit_bias parallel_tool_calls previous_response_id prompt reasoning include_reasoning
        service_tier store stream temperature text tool_choice tools top_logprobs top_p top_k
        truncation user skip_special_tokens include_stop_str_in_output presence_penalty
        frequency_penalty prompt_cache_key watermarking request_id session_id media_io_kwargs
        mm_processor_kwargs priority cache_salt enable_response_messages previous_input_messages
        structured_outputs repetition_penalty seed stop ignore_eos vllm_xargs kv_transfer_params
        ec_transfer_params chat_template_kwargs
    """,
    "embeddings": """
        model user truncate_prompt_tokens padding truncation_side request_id priority
        mm_processor_kwargs cache_salt input add_special_tokens encoding_format embed_dtype
        endianness dimensions use_activation messages add_generation_prompt continue_final_message
        chat_template chat_template_kwargs media_io_kwargs
    """,
    "tokenize": """
        model prompt add_special_tokens return_token_strs messages add_generation_prompt
        continue_final_message chat_template chat_template_kwargs media_io_kwargs
        mm_processor_kwargs tools
    """,
}
_OPENAI: Final[dict[str, str]] = {
    "chat": """
        messages model audio frequency_penalty function_call functions logit_bias logprobs
        max_completion_tokens max_tokens metadata modalities n parallel_tool_calls prediction
        presence_penalty prompt_cache_key prompt_cache_retention reasoning_effort response_format
        safety_identifier seed service_tier stop store stream stream_options temperature tool_choice
        tools top_logprobs top_p user verbosity web_search_options
    """,
    "completions": """
        model prompt best_of echo frequency_penalty logit_bias logprobs max_tokens n
        presence_penalty seed stop stream stream_options suffix temperature top_p user
    """,
    "responses": """
        background conversation include input instructions max_output_tokens max_tool_calls metadata
        model parallel_tool_calls previous_response_id prompt prompt_cache_key
        prompt_cache_retention reasoning safety_identifier service_tier store stream stream_options
        temperature text tool_choice tools top_logprobs top_p truncation user
    """,
    "embeddings": "input model dimensions encoding_format user",
    "tokenize": "",
}
APIS: Final = tuple(_VLLM)
FIELDS: Final = {api: sorted({*_VLLM[api].split(), *_OPENAI[api].split()}) for api in APIS}
MESSAGES: Final = [{"role": "user", "content": "hi"}]
CALLS: Final[dict[str, tuple[str, dict[str, Any]]]] = {
    "chat": ("/v1/chat/completions", {"messages": MESSAGES}),
    "completions": ("/v1/completions", {"prompt": "hi"}),
    "responses": ("/v1/responses", {"input": "hi"}),
    "embeddings": ("/v1/embeddings", {"input": "hi"}),
    "tokenize": ("/tokenize", {"messages": MESSAGES}),
}
_TOOL: Final = {"name": "f", "parameters": {"type": "object", "properties": {}}}
_ASSISTANT: Final = {"messages": [*MESSAGES, {"role": "assistant", "content": "a"}]}
# A value of each field that asks for something. Per API where they differ: "api.field".
VALUES: Final[dict[str, Any]] = {
    "add_generation_prompt": False, "add_special_tokens": True, "allowed_token_ids": [5],
    "audio": {"voice": "a"}, "background": True, "bad_words": ["x"], "best_of": 1,
    "cache_salt": "salt", "chat_template": "{{ messages[0].content }}",
    "chat_template_kwargs": {"enable_thinking": True}, "continue_final_message": True,
    "conversation": "conv_1", "dimensions": 2, "documents": [{"title": "a", "text": "b"}],
    "ec_transfer_params": {"do_remote": True}, "echo": True, "embed_dtype": "float16",
    "enable_response_messages": True, "encoding_format": "base64", "endianness": "big",
    "frequency_penalty": 0.5, "function_call": {"name": "f"}, "functions": [_TOOL],
    "ignore_eos": True, "include": ["message.output_text.logprobs"], "include_reasoning": False,
    "include_stop_str_in_output": True, "input": "ho", "instructions": "be brief",
    "kv_transfer_params": {"do_remote_decode": True}, "length_penalty": 1.5,
    "logit_bias": {"5": 1.0}, "chat.logprobs": True, "completions.logprobs": 1,
    "logprob_token_ids": [3], "max_completion_tokens": 3, "max_output_tokens": 3, "max_tokens": 3,
    "max_tool_calls": 3, "media_io_kwargs": {"image": {"a": 1}}, "messages": MESSAGES,
    "metadata": {"a": "b"}, "min_p": 0.1, "min_tokens": 1, "mm_processor_kwargs": {"a": 1},
    "modalities": ["text", "audio"], "model": MODEL, "n": 1, "padding": "max_length",
    "parallel_tool_calls": False, "prediction": {"type": "content", "content": "a"},
    "presence_penalty": 0.5, "previous_input_messages": [{"role": "user"}],
    "previous_response_id": "resp_1", "priority": 1, "prompt": "ho",
    "responses.prompt": {"id": "p"}, "prompt_cache_key": "k", "prompt_cache_retention": "24h",
    "prompt_embeds": "AAAA", "prompt_logprobs": 1, "reasoning": {"effort": "low"},
    "reasoning_effort": "low", "repetition_detection": {"max_pattern_size": 3},
    "repetition_penalty": 1.1, "request_id": "r1", "response_format": {"type": "text"},
    "return_mm_kwargs": False, "return_prompt_text": True, "return_token_ids": True,
    "return_token_offsets": True, "return_token_strs": True, "return_tokens_as_token_ids": True,
    "routed_experts_prompt_start": 2, "safety_identifier": "s", "seed": 7, "service_tier": "flex",
    "session_id": "s", "skip_special_tokens": False, "spaces_between_special_tokens": False,
    "stop": ["x"], "stop_token_ids": [3], "store": True, "stream": True, "stream_interval": 4,
    "stream_options": {"include_usage": True},
    "responses.stream_options": {"include_obfuscation": True},
    "structured_outputs": {"choice": ["a"]}, "suffix": "end", "temperature": 0.5,
    "text": {"verbosity": "low"}, "thinking_token_budget": 5, "tool_choice": "none",
    "tools": [{"type": "function", "function": _TOOL}],
    "responses.tools": [{"type": "function", **_TOOL}], "top_k": 3, "top_logprobs": 1,
    "top_p": 0.5, "truncate_prompt_tokens": 4, "truncation": "auto", "truncation_side": "left",
    "use_activation": False, "use_beam_search": False, "user": "u", "verbosity": "low",
    "vllm_xargs": {"a": 1}, "watermarking": True, "web_search_options": {},
}  # fmt: skip
# What else a body must have for a field to mean something.
BESIDE: Final[dict[str, dict[str, Any]]] = {
    "chat.continue_final_message": {**_ASSISTANT, "add_generation_prompt": False},
    "tokenize.continue_final_message": {**_ASSISTANT, "add_generation_prompt": False},
    "chat.logprob_token_ids": {"logprobs": True}, "completions.logprob_token_ids": {"logprobs": 1},
    "chat.top_logprobs": {"logprobs": True},
    "responses.top_logprobs": {"include": ["message.output_text.logprobs"]},
    "chat.stream_options": {"stream": True}, "completions.stream_options": {"stream": True},
    "responses.stream_options": {"stream": True},
    "tokenize.prompt": {"messages": None, "prompt": "hi"},
}  # fmt: skip
STORED: Final = ("previous_response_id",)  # the name of something that is not there
NONSENSE: Final[tuple[Any, ...]] = ({"?": [{}]}, [["?", {}]], -1234567.5, "?\u0000", True)
NOTES: Final[dict[str, str]] = {
    "model": "also the name of a LoRA adapter",
    "prompt": "of Responses: a stored template",
    "cache_salt": "nothing of embeddings is cached",
    "allowed_token_ids": "at most 4096; nothing else is drawn, so list the end-of-sequence if the"
    " answer may end by itself; not together with a grammar",
    "truncate_prompt_tokens": "-1 = what leaves room for the answer; the last tokens are kept, of"
    " embeddings the first, unless `truncation_side` says `right` or `left`",
    "user": "names a session, after `prompt_cache_key` and `session_id`",
    "session_id": "as the header `x-session-id`",
    "request_id": "as the header `x-request-id`, which goes first",
    "echo": "of a chat: the last message, if the answer goes on with it",
    "reasoning_effort": "goes to the template; `none` switches thinking off, others on",
    "chat_template_kwargs": "of embeddings: there are no messages",
    "chat_template": "with `--trust-request-chat-template`, else refused",
    "documents": "where the chat template reads them, else refused",
    "thinking_token_budget": "with `--reasoning-parser`; -1 = no limit",
    "logprob_token_ids": "with `logprobs`; at most 128",
    "spaces_between_special_tokens": "the tokenizer says where spaces are: none is added",
    "return_prompt_text": "`return_token_ids` tells the prompt's ids",
    "vllm_xargs": "there are no extensions that would read them",
    "kv_transfer_params": "the router arranges transfers itself",
    "ec_transfer_params": "the router arranges transfers itself",
    "max_tool_calls": "told back; there are no tools here that would be counted",
    "service_tier": "there is one tier",
    "embed_dtype": "float32", "endianness": "little-endian", "padding": "none",
    "media_io_kwargs": "images are read as the model's files say; audio is refused where it stands",
    "mm_processor_kwargs": "images are read as the model's files say; `detail: low` makes them"
    " smaller",
    "stream_interval": "a chunk has what a step of the engine yields: more tokens under load",
    "routed_experts_prompt_start": "routed experts are not told",
    "return_token_offsets": "of vLLM's render endpoints, there as well",
    "return_mm_kwargs": "of vLLM's render endpoints, there as well",
    "functions": "say `tools`", "function_call": "say `tool_choice`",
    "prediction": "it changes no answer", "prompt_cache_retention": "how long is the server's",
}  # fmt: skip
_HEAD: Final = """# Request fields

Every field of vLLM's and OpenAI's request bodies, and what becomes of it here: what came back when
it was sent (`tests/front/request_fields.py` writes this page; a test fails if it is not what the
code does).

- **yes**: it is read; a value that is none of its type is a 400 that names it.
- **refused**: a 400 that names it, unless its value asks for nothing (its default, an empty list).
- **ignored**: it could not change this answer; any value is passed over. Fields that are in no such
  table are ignored, too, unless `--strict-fields` refuses them.
- A dash: not a field of that API. V: vLLM has it there or in another of these, O: OpenAI does.

| field | of | chat | completions | responses | embeddings | tokenize | |
|---|---|---|---|---|---|---|---|
"""


def front() -> Front:
    """A front door with everything switched on that a field may need."""
    config = RouterConfig(
        request_timeout_s=20.0,
        trust_request_chat_template=True,
        enable_auto_tool_choice=True,
        tool_call_parser="hermes",
        reasoning_parser="qwen3",
        matryoshka_dimensions=(2,),
    )
    template = ChatTemplate(
        TEMPLATE + "{% if documents %}{{ documents[0].text }}{% endif %}", TOKENIZER.special_tokens
    )
    return Front(FakeDispatcher(samples=("a",)), config=config, chat_template=template)


async def verdict(client: httpx.AsyncClient, api: str, name: str) -> str:
    """What becomes of a field. Raises AssertionError if its value is not even taken."""
    path, body = CALLS[api]
    body = {**body, **BESIDE.get(f"{api}.{name}", {})}
    value = VALUES[f"{api}.{name}"] if f"{api}.{name}" in VALUES else VALUES[name]
    plain = await client.post(path, json=body)
    reply = await client.post(path, json={**body, name: value})
    if reply.status_code == 400 and name not in STORED:
        error = reply.json()["error"]
        assert (error["param"], error["code"]) == (name, "unsupported_feature"), (api, name, error)
        return "refused"
    if reply.status_code != 400:  # 503: what it asks for has no store, or no node, behind this door
        assert reply.status_code in (plain.status_code, 503), (api, name, reply.text)
    for nonsense in NONSENSE:
        reply = await client.post(path, json={**body, name: nonsense})
        told = reply.json()["error"]["param"] or "" if reply.status_code in (400, 404) else ""
        if told == name or told.startswith((f"{name}.", f"{name}[")):
            return "yes"
    return "ignored"


async def page() -> str:
    """The page as the code has it."""
    rows: list[str] = []
    async with front().client() as client:
        for name in sorted({name for names in FIELDS.values() for name in names}):
            cells = [
                await verdict(client, api, name) if name in FIELDS[api] else "-" for api in APIS
            ]
            of = "".join(
                letter
                for letter, table in (("V", _VLLM), ("O", _OPENAI))
                if any(name in names.split() for names in table.values())
            )
            cells = [f"`{name}`", of, *cells, NOTES.get(name, "")]
            rows.append(f"| {' | '.join(cells)} |".replace("|  |", "| |"))
    return _HEAD + "\n".join(rows) + "\n"


if __name__ == "__main__":
    PAGE.write_text(asyncio.run(page()))
