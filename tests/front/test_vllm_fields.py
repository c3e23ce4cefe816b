"""Every field of vLLM's bodies is taken, refused by name, or ignored for a reason, and the table of
docs/http_api.md says which: here it is held against the code.

Source: vLLM's request models (chat_completion/protocol.py, completion/protocol.py,
responses/protocol.py, pooling/base/protocol.py, tokenize/protocol.py), autumn 2026.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, Final

import msgspec
import pytest

from router.dialect import SAME
from router.openai import ChatBody, CompletionBody, DetokenizeBody, TokenizeBody
from router.pooling.embeddings import EmbeddingBody
from router.responses.body import ResponsesBody
from router.unserved import RERANKING
from tests.front.fakes import Front

PAGE = Path(__file__).parents[2] / "docs" / "http_api.md"
_GENERATING: Final = """
    model frequency_penalty logit_bias logprobs max_tokens n presence_penalty response_format seed
    stop stream stream_options temperature top_p thinking_token_budget user use_beam_search top_k
    min_p repetition_penalty watermarking length_penalty stop_token_ids include_stop_str_in_output
    ignore_eos min_tokens skip_special_tokens spaces_between_special_tokens truncate_prompt_tokens
    truncation_side prompt_logprobs logprob_token_ids allowed_token_ids bad_words echo
    add_special_tokens structured_outputs priority request_id session_id return_tokens_as_token_ids
    return_token_ids routed_experts_prompt_start return_token_offsets return_mm_kwargs cache_salt
    kv_transfer_params ec_transfer_params vllm_xargs repetition_detection stream_interval
"""
_NAMES: Final[dict[str, str]] = {
    "chat": f"""{_GENERATING}
        messages top_logprobs max_completion_tokens tools tool_choice reasoning_effort
        include_reasoning parallel_tool_calls add_generation_prompt continue_final_message documents
        chat_template chat_template_kwargs media_io_kwargs mm_processor_kwargs return_prompt_text
    """,
    "completions": f"{_GENERATING} prompt suffix prompt_embeds",
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
FIELDS: Final = {api: names.split() for api, names in _NAMES.items()}
KINDS: Final[dict[str, type[msgspec.Struct]]] = {
    "chat": ChatBody,
    "completions": CompletionBody,
    "responses": ResponsesBody,
    "embeddings": EmbeddingBody,
    "tokenize": TokenizeBody,
}
MESSAGES: Final = [{"role": "user", "content": "hi"}]
CALLS: Final[dict[str, tuple[str, dict[str, Any]]]] = {
    "chat": ("/v1/chat/completions", {"messages": MESSAGES}),
    "completions": ("/v1/completions", {"prompt": "hi"}),
    "responses": ("/v1/responses", {"input": "hi"}),
    "embeddings": ("/v1/embeddings", {"input": "hi"}),
    "tokenize": ("/tokenize", {"prompt": "hi"}),
}
# A value that asks for something, of each field that is refused or ignored somewhere.
VALUES: Final[dict[str, Any]] = {
    "add_generation_prompt": True,
    "background": True,
    "cache_salt": "salt",
    "chat_template": "{{ messages }}",
    "chat_template_kwargs": {"enable_thinking": True},
    "continue_final_message": True,
    "documents": [{"title": "a", "text": "b"}],
    "ec_transfer_params": {"do_remote": True},
    "echo": True,
    "embed_dtype": "float16",
    "enable_response_messages": True,
    "endianness": "big",
    "kv_transfer_params": {"do_remote_decode": True},
    "logprob_token_ids": [3],
    "max_tool_calls": 3,
    "media_io_kwargs": {"image": {"a": 1}},
    "messages": MESSAGES,
    "mm_processor_kwargs": {"a": 1},
    "padding": "max_length",
    "previous_input_messages": [{"role": "user"}],
    "previous_response_id": "resp_1",
    "prompt": {"id": "p"},
    "prompt_embeds": "AAAA",
    "repetition_detection": {"max_pattern_size": 3},
    "return_mm_kwargs": False,
    "return_prompt_text": True,
    "return_token_offsets": True,
    "routed_experts_prompt_start": 2,
    "service_tier": "flex",
    "spaces_between_special_tokens": False,
    "stream_interval": 4,
    "suffix": "end",
    "thinking_token_budget": 0,
    "truncation": "auto",
    "vllm_xargs": {"a": 1},
    "watermarking": True,
}


def table() -> dict[str, dict[str, str]]:
    """API -> field -> what the page says of it."""
    section = PAGE.read_text().split("## Fields, one by one")[1].split("\n## ")[0]
    head, _, *rows = [line for line in section.splitlines() if line.startswith("|")]
    apis = [cell.strip() for cell in head.split("|")[2:-2]]
    found: dict[str, dict[str, str]] = {api: {} for api in apis}
    for row in rows:
        names, *cells = [cell.strip() for cell in row.split("|")[1:-2]]
        for name in re.findall(r"`(\w+)`", names):
            for api, cell in zip(apis, cells, strict=True):
                if cell != "-":
                    assert name not in found[api], f"{name} of {api} is told twice"
                    found[api][name] = cell
    return found


TABLE: Final = table()


def told(api: str, verdict: str) -> list[str]:
    return [name for name, cell in TABLE[api].items() if cell == verdict]


@pytest.mark.parametrize("api", FIELDS)
def test_the_table_has_every_field_of_vllms_and_no_other(api: str) -> None:
    assert sorted(TABLE[api]) == sorted(FIELDS[api])
    assert set(TABLE[api].values()) <= {"taken", "refused", "ignored"}


@pytest.mark.parametrize("api", FIELDS)
def test_what_is_taken_is_a_field_of_the_body(api: str) -> None:
    known = {field.name for field in msgspec.structs.fields(KINDS[api])}
    if api == "responses":
        known |= set(SAME)
    assert set(told(api, "taken")) <= known


@pytest.mark.parametrize("api", FIELDS)
async def test_what_is_refused_is_a_400_that_names_it(api: str) -> None:
    path, body = CALLS[api]
    async with Front().client() as client:
        for name in told(api, "refused"):
            reply = await client.post(path, json={**body, name: VALUES[name]})
            assert reply.status_code == 400, name
            error = reply.json()["error"]
            assert (error["param"], error["code"]) == (name, "unsupported_feature"), error
            assert f"{name} is not supported" in error["message"]


@pytest.mark.parametrize("path", ["/v1/rerank", "/v1/score"])
async def test_a_question_of_a_reranker_cannot_be_changed(path: str) -> None:
    values = {"max_tokens_per_doc": 9, "max_tokens_per_query": 9, "truncate_prompt_tokens": 5}
    values |= {"use_activation": False}
    body = {"query": "a", "documents": ["b"], "text_1": "a", "text_2": "b"}
    async with Front().client() as client:
        for name in RERANKING:
            asked = {**body, name: (VALUES | values)[name]}
            reply = await client.post(path, json=asked)
            assert (reply.status_code, reply.json()["error"]["param"]) == (400, name)


@pytest.mark.parametrize("api", FIELDS)
async def test_what_is_ignored_changes_nothing(api: str) -> None:
    """Embeddings have no node to be computed on here: they get as far as without the field."""
    path, body = CALLS[api]
    async with Front().client() as client:
        plain = await client.post(path, json=body)
        for name in told(api, "ignored"):
            reply = await client.post(path, json={**body, name: VALUES[name]})
            assert reply.status_code == plain.status_code != 400, (name, reply.text)
            assert reply.json().get("choices") == plain.json().get("choices")


def test_detokenize_takes_vllms_two_fields() -> None:
    assert {field.name for field in msgspec.structs.fields(DetokenizeBody)} == {"model", "tokens"}
