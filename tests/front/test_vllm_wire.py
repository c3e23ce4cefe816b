"""What vLLM's clients read and send beside OpenAI's fields: names, nulls, roles, echoes."""

from __future__ import annotations

from typing import Any

import orjson
import pytest

from baton.protocol.errors import ConfigError
from baton.protocol.sampling import GuidedDecoding
from baton.text.chat_template import ChatTemplate
from router.config import RouterConfig
from tests.front.fakes import MODEL, TOKENIZER, FakeDispatcher, FakeModel, FakeRegistry, Front
from tests.front.openai_sdk import sdk

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
USER = [{"role": "user", "content": "hi"}]


def chunks_of(body: bytes) -> list[dict[str, Any]]:
    """The objects of a stream that ended well."""
    *events, done = body.removesuffix(b"\n\n").split(b"\n\n")
    assert done == b"data: [DONE]"
    return [orjson.loads(event.removeprefix(b"data: ")) for event in events]


async def post(front: Front, path: str, body: dict[str, Any]) -> Any:
    async with front.client() as client:
        return await client.post(path, json=body)


# ---- token ids ----


async def test_every_chunk_of_a_completion_has_the_token_ids_that_it_adds() -> None:
    front = Front(dispatcher=FakeDispatcher("ab"))
    asked = {"return_token_ids": True, "return_tokens_as_token_ids": True}
    async with sdk(front) as client:
        stream = await client.completions.create(
            model=MODEL, prompt="x", stream=True, logprobs=1, extra_body=asked
        )
        choices: list[Any] = [chunk.choices[0] async for chunk in stream]
    ids = [*TOKENIZER.encode("ab", add_special_tokens=False), 1]
    assert [each.token_ids for each in choices] == [[token] for token in ids]
    assert [each.logprobs.tokens for each in choices] == [[f"token_id:{token}"] for token in ids]
    assert choices[0].prompt_token_ids == list(front.dispatcher.requests[0].prompt_ids)
    assert [each.prompt_token_ids for each in choices[1:]] == [None, None]
    assert [each.finish_reason for each in choices] == [None, None, "stop"]


async def test_the_last_chunk_of_a_completion_has_its_text_and_its_end() -> None:
    front = Front(dispatcher=FakeDispatcher("abcd", tokens_per_event=2))
    reply = await post(front, COMPLETIONS, {"prompt": "x", "stream": True, "max_tokens": 4})
    told = [chunk["choices"][0] for chunk in chunks_of(reply.content)]
    assert [(each["text"], each["finish_reason"]) for each in told] == [
        ("ab", None),
        ("cd", "length"),
    ]


async def test_log_probabilities_of_a_stream_are_lists_in_each_chunk() -> None:
    """Clients add them up without looking whether there are any."""
    front = Front(dispatcher=FakeDispatcher("a🙂", tokens_per_event=1))
    body = {"prompt": "x", "stream": True, "logprobs": 0, "echo": True}
    reply = await post(front, COMPLETIONS, body)
    told = [chunk["choices"][0]["logprobs"] for chunk in chunks_of(reply.content)]
    whole = await post(front, COMPLETIONS, {**body, "stream": False})
    joined = [token for each in told for token in each["tokens"]]
    assert joined == whole.json()["choices"][0]["logprobs"]["tokens"]


async def test_whole_answers_say_null_for_ids_and_reasoning_that_are_not_there() -> None:
    front = Front(dispatcher=FakeDispatcher("a"))
    async with sdk(front) as client:
        text: Any = await client.completions.create(model=MODEL, prompt="x")
        chat: Any = await client.chat.completions.create(
            model=MODEL, messages=[{"role": "user", "content": "x"}]
        )
    assert (text.choices[0].token_ids, text.choices[0].prompt_token_ids) == (None, None)
    assert (chat.choices[0].token_ids, chat.prompt_token_ids) == (None, None)
    assert (chat.choices[0].message.reasoning, chat.choices[0].logprobs) == (None, None)
    assert "tool_calls" not in chat.choices[0].message.model_dump(exclude_unset=True)


async def test_a_server_may_name_tokens_by_their_ids_for_all() -> None:
    front = Front(
        dispatcher=FakeDispatcher("a"), config=RouterConfig(return_tokens_as_token_ids=True)
    )
    body = {"prompt": "x", "logprobs": 0}
    for asked, first in ((None, "token_id:"), (False, "a"), (True, "token_id:")):
        reply = await post(front, COMPLETIONS, {**body, "return_tokens_as_token_ids": asked})
        assert reply.json()["choices"][0]["logprobs"]["tokens"][0].startswith(first)


# ---- log-probabilities ----


async def test_more_log_probabilities_than_the_server_allows() -> None:
    front = Front(config=RouterConfig(max_logprobs=30))
    vocabulary = TOKENIZER.vocab_size
    for body in ({"prompt": "x", "logprobs": 31}, {"prompt": "x", "prompt_logprobs": 31}):
        error = (await post(front, COMPLETIONS, body)).json()["error"]
        assert (error["param"], "30" in error["message"]) == ([*body][-1], True)
    refused = await post(front, COMPLETIONS, {"prompt": "x", "logprobs": -1})
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "logprobs")
    assert (await post(front, COMPLETIONS, {"prompt": "x", "logprobs": 30})).status_code == 200
    everything = Front(config=RouterConfig(max_logprobs=-1))
    chat = {"messages": USER, "logprobs": True, "top_logprobs": -1, "max_tokens": 1}
    assert (await post(everything, CHAT, chat)).status_code == 200
    assert everything.dispatcher.requests[-1].params.logprobs == vocabulary
    echoed = {"prompt": "xy", "logprobs": -1, "echo": True, "max_tokens": 0}
    assert (await post(everything, COMPLETIONS, echoed)).status_code == 200
    assert everything.dispatcher.requests[-1].params.prompt_logprobs == vocabulary


async def test_more_of_them_than_one_answer_may_hold() -> None:
    """Told at once they all lie in memory; streamed they do not."""
    model = FakeModel(vocab_size=150_000)
    front = Front(registry=FakeRegistry(model), config=RouterConfig(max_logprobs=-1))
    body: dict[str, Any] = {"prompt": "x", "logprobs": -1, "max_tokens": 8}
    refused = await post(front, COMPLETIONS, body)
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "logprobs")
    assert (await post(front, COMPLETIONS, {**body, "max_tokens": 6})).status_code == 200
    assert (await post(front, COMPLETIONS, {**body, "stream": True})).status_code == 200
    wide = {**body, "stream": True, "n": 8}
    assert (await post(front, COMPLETIONS, wide)).json()["error"]["param"] == "logprobs"


async def test_tokens_are_told_of_by_their_ids() -> None:
    front = Front()
    body = {"messages": USER, "logprobs": True, "logprob_token_ids": [5, 6, 5]}
    assert (await post(front, CHAT, body)).status_code == 200
    assert front.dispatcher.requests[0].params.logprob_token_ids == (5, 6, 5)
    assert front.dispatcher.requests[0].params.logprobs == 0


async def test_a_client_may_have_its_prompt_computed_anew() -> None:
    bodies: list[tuple[str, dict[str, Any]]] = [
        (COMPLETIONS, {"prompt": "x"}), (CHAT, {"messages": USER}),
        ("/v1/responses", {"input": "x"}), ("/v1/messages", {"messages": USER, "max_tokens": 3}),
    ]  # fmt: skip
    for path, body in bodies:
        front = Front()
        for asked in (body, {**body, "skip_reading_prefix_cache": True}):
            assert (await post(front, path, asked)).status_code == 200
        params = [request.params for request in front.dispatcher.requests]
        assert [each.skip_reading_prefix_cache for each in params] == [False, True]
        refused = await post(front, path, {**body, "skip_reading_prefix_cache": "yes"})
        assert refused.status_code == 400
        assert "skip_reading_prefix_cache" in refused.text


# ---- roles, echoes, documents, templates ----

CONTINUED: dict[str, Any] = {
    "messages": [*USER, {"role": "assistant", "content": "An apple"}],
    "continue_final_message": True,
    "add_generation_prompt": False,
}


async def test_an_echo_comes_before_an_answer_that_goes_on_with_it() -> None:
    front = Front(dispatcher=FakeDispatcher(" a day"))
    for echo, text in ((True, "An apple a day"), (False, " a day")):
        body = {**CONTINUED, "echo": echo, "n": 1}
        message = (await post(front, CHAT, body)).json()["choices"][0]["message"]
        assert (message["role"], message["content"]) == ("assistant", text)
        reply = await post(front, CHAT, {**body, "stream": True})
        deltas = [chunk["choices"][0]["delta"] for chunk in chunks_of(reply.content)]
        assert deltas[0] == {"role": "assistant", "content": ""}
        assert "".join(delta.get("content", "") for delta in deltas) == text
    new = {"messages": USER, "echo": True}
    message = (await post(front, CHAT, new)).json()["choices"][0]["message"]
    assert message["content"] == " a day", "a new message goes on with nobody's"


async def test_any_role_goes_to_the_template_and_the_last_one_answers() -> None:
    template = ChatTemplate(
        "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}", TOKENIZER.special_tokens
    )
    front = Front(chat_template=template, config=RouterConfig(response_role="bot"))
    text = [{"role": "judge", "content": "so"}]
    parts = [{"role": "judge", "content": [{"type": "text", "text": "so"}]}]
    for messages in (text, parts):
        reply = await post(front, CHAT, {"messages": messages})
        assert reply.json()["choices"][0]["message"]["role"] == "bot"
        own = await post(front, CHAT, {"messages": messages, "add_generation_prompt": False})
        assert own.json()["choices"][0]["message"]["role"] == "judge"
    prompts = {TOKENIZER.decode(each.prompt_ids) for each in front.dispatcher.requests}
    assert prompts == {"<judge>so"}
    for role in ("", "x" * 300):
        reply = await post(front, CHAT, {"messages": [{"role": role, "content": "x"}]})
        assert reply.json()["error"]["param"] == "messages[0].role"


async def test_documents_go_to_a_template_that_reads_them() -> None:
    source = (
        "{% for d in documents %}[{{ d.title }}: {{ d.text }}]{% endfor %}{{ messages[0].content }}"
    )
    front = Front(chat_template=ChatTemplate(source, {}))
    documents = [{"title": "a", "text": "b"}, {"title": "c", "text": "d"}]
    reply = await post(front, CHAT, {"messages": USER, "documents": documents})
    assert reply.status_code == 200
    (request,) = front.dispatcher.requests
    assert TOKENIZER.decode(request.prompt_ids) == "[a: b][c: d]hi"
    refused = await post(Front(), CHAT, {"messages": USER, "documents": documents})
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "documents")
    assert (await post(Front(), CHAT, {"messages": USER, "documents": []})).status_code == 200


async def test_a_template_of_the_clients_own_only_where_that_is_trusted() -> None:
    body = {"messages": USER, "chat_template": "!{{ messages[0].content }}!"}
    refused = await post(Front(), CHAT, body)
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "chat_template")
    assert "--trust-request-chat-template" in refused.json()["error"]["message"]
    front = Front(config=RouterConfig(trust_request_chat_template=True), chat_template=None)
    assert (await post(front, CHAT, body)).status_code == 200
    assert TOKENIZER.decode(front.dispatcher.requests[0].prompt_ids) == "!hi!"
    told = (await post(front, "/tokenize", body)).json()
    assert told["tokens"] == list(front.dispatcher.requests[0].prompt_ids)
    for broken in ("{% for %}", "x" * (200 << 10)):
        reply = await post(front, CHAT, {**body, "chat_template": broken})
        assert (reply.status_code, reply.json()["error"]["param"]) == (400, "chat_template")


# ---- names ----


async def test_a_clients_template_that_takes_too_much_fails_alone() -> None:
    front = Front(config=RouterConfig(trust_request_chat_template=True))
    body = {"messages": USER, "chat_template": "{{ '%*d' % (10**9, 5) }}"}
    error = (await post(front, CHAT, body)).json()["error"]
    assert (error["param"], error["code"]) == ("messages", "invalid_request")
    assert "memory" in error["message"]
    assert (await post(front, CHAT, {"messages": USER})).status_code == 200


async def test_a_model_of_several_names() -> None:
    front = Front(config=RouterConfig(served_model_name=("first", "second")))
    async with front.client() as client:
        for name in ("first", "second", None):
            reply = await client.post(COMPLETIONS, json={"prompt": "x", "model": name})
            assert reply.json()["model"] == "first"
        cards = (await client.get("/v1/models")).json()["data"]
        one = await client.get("/v1/models/second")
        unknown = await client.post(COMPLETIONS, json={"prompt": "x", "model": MODEL})
    assert [(card["id"], card["root"], card["parent"]) for card in cards] == [
        ("first", MODEL, None),
        ("second", MODEL, None),
    ]
    assert one.json()["id"] == "second"
    assert unknown.status_code == 404
    assert unknown.json()["error"]["message"].endswith("there are: first, second")
    with pytest.raises(ConfigError) as caught:
        RouterConfig(served_model_name=("",)).check()
    assert caught.value.field == "served_model_name"


async def test_a_seed_of_more_than_64_bits_says_so() -> None:
    for path, more in ((COMPLETIONS, {"prompt": "x"}), (CHAT, {"messages": USER})):
        error = (await post(Front(), path, {**more, "seed": 2**70})).json()["error"]
        assert error["param"] == "seed"
        assert "64 bits" in error["message"]


@pytest.mark.parametrize(
    ("body", "field"),
    [
        ({"documents": [{"title": "a"}]}, "documents"),
        ({"documents": [{"title": 1}]}, "documents[0][...]"),
        ({"logprob_token_ids": [3]}, "logprob_token_ids"),
        ({"logprobs": True, "logprob_token_ids": [10**6]}, "logprob_token_ids"),
        ({"logprobs": True, "logprob_token_ids": [3] * 129}, "logprob_token_ids"),
        (
            {"logprobs": True, "logprob_token_ids": [3], "use_beam_search": True, "n": 2},
            "logprob_token_ids",
        ),
        ({"thinking_token_budget": 5}, "thinking_token_budget"),
        ({"logprobs": True, "top_logprobs": -2}, "top_logprobs"),
        ({"prompt_logprobs": 21}, "prompt_logprobs"),
        ({"vllm_xargs": {"a": 1}}, "vllm_xargs"),
    ],
)
async def test_what_cannot_be_had_is_a_400_that_names_the_field(
    body: dict[str, Any], field: str
) -> None:
    front = Front()
    reply = await post(front, CHAT, {"messages": USER, **body})
    assert (reply.status_code, reply.json()["error"]["param"]) == (400, field), reply.text
    assert front.dispatcher.requests == []


# ---- thoughts ----


@pytest.mark.parametrize(
    ("path", "body", "start"),
    [
        (CHAT, {"messages": USER}, ""),
        (CHAT, {"messages": USER, "chat_template_kwargs": {"enable_thinking": False}}, "<think>"),
        (COMPLETIONS, {"prompt": "x<think>y"}, ""),
        (COMPLETIONS, {"prompt": "x"}, "<think>"),
        (COMPLETIONS, {"prompt": TOKENIZER.encode("<think>a</think>")}, "<think>"),
        (COMPLETIONS, {"prompt": TOKENIZER.encode("x<think>a")}, ""),
    ],
)
async def test_a_limit_of_thoughts_is_a_constraint(
    path: str, body: dict[str, Any], start: str
) -> None:
    front = Front(config=RouterConfig(reasoning_parser="qwen3"))
    assert (await post(front, path, {**body, "thinking_token_budget": 7})).status_code == 200
    assert front.dispatcher.requests[0].params.guided == GuidedDecoding(
        "free", "", starts_after="</think>", most_thought=7, thought_start=start
    )
    assert (await post(front, path, {**body, "thinking_token_budget": -1})).status_code == 200
    assert front.dispatcher.requests[1].params.guided is None
    for wrong in (-2, 2**40):
        reply = await post(front, path, {**body, "thinking_token_budget": wrong})
        assert reply.json()["error"]["param"] == "thinking_token_budget"


async def test_a_limit_of_thoughts_is_written_in_the_models_tags() -> None:
    body = {"messages": USER, "thinking_token_budget": 7}
    front = Front(config=RouterConfig(reasoning_parser="seed_oss"))
    assert (await post(front, CHAT, body)).status_code == 200
    guided = front.dispatcher.requests[0].params.guided
    assert guided is not None
    assert (guided.thought_start, guided.starts_after) == ("<seed:think>", "</seed:think>")
    whole = Front(config=RouterConfig(reasoning_parser="openai_gptoss"))
    error = (await post(whole, CHAT, body)).json()["error"]
    assert (error["param"], error["code"]) == ("thinking_token_budget", "unsupported_feature")


async def test_a_limit_of_thoughts_goes_with_a_grammar() -> None:
    front = Front(config=RouterConfig(reasoning_parser="qwen3"))
    body = {"messages": USER, "thinking_token_budget": 7, "guided_regex": "a+"}
    assert (await post(front, CHAT, body)).status_code == 200
    guided = front.dispatcher.requests[0].params.guided
    assert guided is not None
    assert (guided.kind, guided.most_thought, guided.thought_start) == ("regex", 7, "")
    off = {**body, "chat_template_kwargs": {"enable_thinking": False}}
    assert (await post(front, CHAT, off)).status_code == 200
    guided = front.dispatcher.requests[1].params.guided
    assert guided is not None
    assert guided.most_thought is None, "its grammar leaves no room for a thought"


async def test_anthropics_budget_limits_thoughts_where_they_are_known() -> None:
    body = {"messages": USER, "max_tokens": 9, "thinking": {"type": "enabled", "budget_tokens": 5}}
    front = Front(config=RouterConfig(reasoning_parser="qwen3"))
    assert (await post(front, "/v1/messages", body)).status_code == 200
    guided = front.dispatcher.requests[0].params.guided
    assert guided is not None
    assert guided.most_thought == 5
    plain = Front()
    assert (await post(plain, "/v1/messages", body)).status_code == 200
    assert plain.dispatcher.requests[0].params.guided is None
    wrong = {**body, "thinking": {"type": "enabled", "budget_tokens": -5}}
    reply = await post(front, "/v1/messages", wrong)
    assert "thinking.budget_tokens" in reply.json()["error"]["message"]
