"""The anthropic SDK: messages whole and streamed, thoughts, tools in a loop, counting, errors."""

from __future__ import annotations

import asyncio
import sys

import anthropic

URL, MODEL, KEY = sys.argv[1:]
QUESTION = [{"role": "user", "content": "What is the weather in Oslo?"}]
TOOLS = [
    {
        "name": "get_weather",
        "description": "The weather of a city.",
        "input_schema": {"type": "object", "properties": {"city": {"type": "string"}}},
    }
]
THINK = {"type": "enabled", "budget_tokens": 1024}
GREEDY = {"model": MODEL, "max_tokens": 200, "extra_body": {"temperature": 0}}

client = anthropic.Anthropic(base_url=URL, api_key=KEY, max_retries=0)

# Plain: no thoughts unless asked for.
plain = client.messages.create(messages=QUESTION, **GREEDY)
assert plain.content[0].text == "I cannot see the weather.", plain
assert (plain.stop_reason, plain.role, plain.model) == ("end_turn", "assistant", MODEL)
assert plain.usage.output_tokens > 0
assert plain._request_id

# Thoughts.
thought = client.messages.create(messages=QUESTION, thinking=THINK, **GREEDY)
assert [block.type for block in thought.content] == ["thinking", "text"]
assert thought.content[0].thinking == "\nI have no tools.\n"
assert thought.content[1].text.strip() == plain.content[0].text

# A loop of tools; the SDK's own blocks are sent back as they are.
for thinking in ({"type": "disabled"}, THINK):
    first = client.messages.create(messages=QUESTION, tools=TOOLS, thinking=thinking, **GREEDY)
    assert first.stop_reason == "tool_use", first
    use = first.content[-1]
    assert (use.type, use.name, use.input) == ("tool_use", "get_weather", {"city": "Oslo"})
    result = {"type": "tool_result", "tool_use_id": use.id, "content": "7 degrees"}
    conversation = [
        *QUESTION,
        {"role": "assistant", "content": first.content},
        {"role": "user", "content": [result]},
    ]
    second = client.messages.create(messages=conversation, tools=TOOLS, thinking=thinking, **GREEDY)
    assert second.stop_reason == "end_turn"
    assert second.content[-1].text.strip() == "It is 7 degrees in Oslo.", second

# Streamed, put together by the SDK.
with client.messages.stream(messages=QUESTION, **GREEDY) as stream:
    text = "".join(stream.text_stream)
    assert stream.get_final_text() == text == plain.content[0].text
with client.messages.stream(messages=QUESTION, tools=TOOLS, thinking=THINK, **GREEDY) as stream:
    kinds = {event.type for event in stream}
    final = stream.get_final_message()
assert {"thinking", "input_json", "content_block_stop", "message_stop"} <= kinds, kinds
assert [block.type for block in final.content] == ["thinking", "tool_use"], final
assert final.content[1].input == {"city": "Oslo"}
assert final.stop_reason == "tool_use"
raw = [event.type for event in client.messages.create(messages=QUESTION, stream=True, **GREEDY)]
assert (raw[0], raw[-2], raw[-1]) == ("message_start", "message_delta", "message_stop")

# Limits, stop sequences, a begun answer.
short = client.messages.create(messages=QUESTION, **{**GREEDY, "max_tokens": 2})
assert (short.stop_reason, short.usage.output_tokens) == ("max_tokens", 2)
stopped = client.messages.create(messages=QUESTION, stop_sequences=[" the"], **GREEDY)
assert (stopped.stop_reason, stopped.stop_sequence) == ("stop_sequence", " the")
assert stopped.content[0].text == "I cannot see"
huge = client.messages.create(
    messages=QUESTION, model=MODEL, max_tokens=20_000, timeout=60, extra_body={"temperature": 0}
)
assert huge.stop_reason == "end_turn"

# Counting, and what the count is of.
counted = client.messages.count_tokens(model=MODEL, messages=QUESTION, system="Be kind.")
asked = client.messages.create(messages=QUESTION, system="Be kind.", **GREEDY)
usage = asked.usage
assert counted.input_tokens == usage.input_tokens + usage.cache_read_input_tokens

picture = {"type": "base64", "media_type": "image/png", "data": "AA=="}
for wrong, expected in (
    ({"model": "nope"}, anthropic.NotFoundError),
    ({"max_tokens": 0}, anthropic.BadRequestError),
    ({"messages": [{"role": "user", "content": [{"type": "image", "source": picture}]}]},
     anthropic.BadRequestError),
    ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]},
     anthropic.BadRequestError),
):  # fmt: skip
    try:
        client.messages.create(**{**GREEDY, "messages": QUESTION, **wrong})
    except expected as error:
        assert error.body["type"] == "error"
        assert error.request_id
        continue
    raise AssertionError(wrong)
try:
    client.with_options(api_key="wrong").messages.create(messages=QUESTION, **GREEDY)
    raise AssertionError("a wrong key was taken")
except anthropic.AuthenticationError:
    pass


async def at_once() -> None:
    async with anthropic.AsyncAnthropic(base_url=URL, api_key=KEY, max_retries=0) as many:

        async def one() -> str:
            async with many.messages.stream(messages=QUESTION, **GREEDY) as stream:
                return await stream.get_final_text()

        assert await asyncio.gather(*(one() for _ in range(8))) == [plain.content[0].text] * 8


asyncio.run(at_once())
print("ok", anthropic.__version__)
