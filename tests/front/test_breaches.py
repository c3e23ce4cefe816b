"""A bound that msgspec refuses by is told in words: which field, which bounds, what was given."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from baton.protocol.errors import InvalidRequest
from baton.protocol.sampling import BOUNDS
from router.api.anthropic.body import MessagesBody
from router.api.openai.bodies import ChatBody, CompletionBody, struct_of
from router.api.openapi.document import document
from router.api.pooling.rerank import RerankBody
from router.api.responses.body import ResponsesBody

USER = [{"role": "user", "content": "x"}]
CHAT = (ChatBody, {"messages": USER})
MESSAGES = (MessagesBody, {"messages": USER, "max_tokens": 4})
RESPONSES = (ResponsesBody, {"input": "x"})
RERANK = (RerankBody, {"query": "q", "documents": ["x"]})
Kind = tuple[type[msgspec.Struct], dict[str, Any]]
# Body, what breaks it, the field at fault, what is said.
BREACHES: list[tuple[Kind, dict[str, Any], str, str]] = [
    (CHAT, {"n": 0}, "n", "n must be between 1 and 128, got 0"),
    (CHAT, {"n": 129}, "n", "n must be between 1 and 128, got 129"),
    (CHAT, {"temperature": 100.5}, "temperature",
     "temperature must be between 0.0 and 100.0, got 100.5"),
    (CHAT, {"repetition_penalty": 0}, "repetition_penalty",
     "repetition_penalty must be between 1e-06 and 100.0, got 0"),
    (CHAT, {"top_p": 0}, "top_p", "top_p must be above 0.0 and at most 1.0, got 0"),
    (CHAT, {"max_completion_tokens": 0}, "max_completion_tokens",
     "max_completion_tokens must be between 1 and 2147483647, got 0"),
    (CHAT, {"stop": ""}, "stop", "stop: 1 to 1024 characters"),
    (CHAT, {"stop": ["x", ""]}, "stop", "stop[1]: 1 to 1024 characters"),
    (CHAT, {"stop": ["x"] * 17}, "stop", "stop: at most 16 items"),
    (CHAT, {"stop_token_ids": [1, -1]}, "stop_token_ids",
     "stop_token_ids[1] must be between 0 and 2147483647, got -1"),
    (CHAT, {"logit_bias": {"1": 101}}, "logit_bias",
     "logit_bias[...] must be between -100 and 100"),
    (CHAT, {"messages": []}, "messages", "messages must not be empty"),
    (CHAT, {"messages": USER * 4097}, "messages", "messages: at most 4096 items"),
    (CHAT, {"messages": [*USER, {"role": ""}]}, "messages[1].role",
     "messages[1].role: 1 to 256 characters"),
    (CHAT, {"reasoning_effort": "odd"}, "reasoning_effort",
     "reasoning_effort must be one of none, minimal, low, medium, high, xhigh, max"),
    (CHAT, {"n": "1"}, "n", "n: Expected `int | null`, got `str`"),
    (CHAT, {"n": 1e19}, "n", "n: a number of more than 64 bits"),
    (CHAT, {"messages": [{"content": "x"}]}, "messages[0].role",
     "messages[0].role: Object missing required field `role`"),
    (CHAT, {"truncation_side": "a - at `$.b`"}, "truncation_side",
     "truncation_side must be one of left, right"),
    (MESSAGES, {"max_tokens": 0}, "max_tokens", "max_tokens must be at least 1, got 0"),
    (MESSAGES, {"output_config": {"effort": "odd"}}, "output_config.effort",
     "output_config.effort must be one of none, minimal, low, medium, high, xhigh, max"),
    (RESPONSES, {"metadata": {"x" * 65: ""}}, "metadata",
     "a key of metadata: at most 64 characters"),
    (RESPONSES, {"metadata": {"x": "y" * 513}}, "metadata",
     "metadata[...]: at most 512 characters"),
    (RESPONSES, {"metadata": {str(i): "" for i in range(17)}}, "metadata",
     "metadata: at most 16 pairs"),
    (RERANK, {"documents": []}, "documents", "documents: 1 to 2048 items"),
    (RERANK, {"top_n": -1}, "top_n", "top_n must be at least 0, got -1"),
]  # fmt: skip


@pytest.mark.parametrize(("kind", "wrong", "field", "said"), BREACHES)
def test_a_breach_is_told_in_words(
    kind: Kind, wrong: dict[str, Any], field: str, said: str
) -> None:
    struct, body = kind
    struct_of(body, struct)
    with pytest.raises(InvalidRequest) as refused:
        struct_of({**body, **wrong}, struct)
    assert (refused.value.field, refused.value.message) == (field, said)


@pytest.mark.parametrize("kind", [ChatBody, CompletionBody])
def test_what_is_described_are_the_bounds_of_sampling(kind: type[msgspec.Struct]) -> None:
    """Seeds come signed, too, and how many log-probabilities there may be, an option says."""
    properties = document()["components"]["schemas"][kind.__name__]["properties"]
    apart = {"seed", "logprobs", "prompt_logprobs", "beam_width"}
    for name in BOUNDS.keys() - apart:
        told = properties[name]["anyOf"][0]
        least = "exclusiveMinimum" if name == "top_p" else "minimum"
        assert (told[least], told["maximum"]) == BOUNDS[name], name


def test_what_hangs_on_another_field_or_on_the_server_is_not_refused_here() -> None:
    struct_of({"prompt": "x", "echo": True, "max_tokens": 0, "logprobs": -1}, CompletionBody)
    struct_of({"messages": USER, "max_tokens": 2**40, "top_logprobs": 21}, ChatBody)
