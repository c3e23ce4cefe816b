"""The openai SDK, chats and completions: whole, streamed, a loop of tools, errors."""

from __future__ import annotations

import sys

import openai

URL, MODEL, KEY = sys.argv[1:]
QUESTION = [{"role": "user", "content": "What is the weather in Oslo?"}]
PARAMETERS = {
    "type": "object",
    "properties": {"city": {"type": "string"}},
    "required": ["city"],
    "additionalProperties": False,
}
TOOLS = [{"type": "function", "function": {"name": "get_weather", "parameters": PARAMETERS}}]

client = openai.OpenAI(base_url=f"{URL}/v1", api_key=KEY, max_retries=0)
assert [model.id for model in client.models.list()] == [MODEL]

# A loop of tools, whole.
first = client.chat.completions.create(model=MODEL, messages=QUESTION, tools=TOOLS, temperature=0)
choice = first.choices[0]
assert choice.finish_reason == "tool_calls", first
call = choice.message.tool_calls[0]
assert (call.function.name, call.function.arguments) == ("get_weather", '{"city": "Oslo"}')
assert choice.message.reasoning == "\nI have to look.\n"
told = {"role": "tool", "tool_call_id": call.id, "content": "7 degrees"}
second = client.chat.completions.create(
    model=MODEL, messages=[*QUESTION, choice.message, told], tools=TOOLS, temperature=0
)
assert second.choices[0].message.content.strip() == "It is 7 degrees in Oslo.", second
assert second.usage.completion_tokens_details.reasoning_tokens > 0

# The same, streamed, put together by the SDK.
with client.chat.completions.stream(
    model=MODEL, messages=QUESTION, tools=TOOLS, temperature=0
) as stream:
    kinds = {event.type for event in stream}
    final = stream.get_final_completion()
assert "tool_calls.function.arguments.delta" in kinds
assert final.choices[0].message.tool_calls[0].function.arguments == call.function.arguments

# A plain chat, streamed: text, then a last chunk with the usage alone.
plain = {"model": MODEL, "messages": QUESTION, "temperature": 0}
whole = client.chat.completions.create(**plain)
*chunks, last = client.chat.completions.create(
    **plain, stream=True, stream_options={"include_usage": True}
)
text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
assert text == whole.choices[0].message.content, text
assert text.strip() == "I cannot see the weather.", text
assert chunks[-1].choices[0].finish_reason == "stop", chunks[-1]
assert all(chunk.usage is None for chunk in chunks)
assert not last.choices
assert last.usage.completion_tokens == whole.usage.completion_tokens, last

# Plain completions, log-probabilities.
whole = client.completions.create(
    model=MODEL, prompt="What is", max_tokens=8, logprobs=2, temperature=0
)
pieces = client.completions.create(
    model=MODEL, prompt="What is", max_tokens=8, temperature=0, stream=True
)
assert "".join(chunk.choices[0].text for chunk in pieces) == whole.choices[0].text
assert len(whole.choices[0].logprobs.token_logprobs) == whole.usage.completion_tokens

for wrong, expected in (
    ({"model": "nope"}, openai.NotFoundError),
    ({"temperature": -1}, openai.BadRequestError),
):
    try:
        client.chat.completions.create(**{"model": MODEL, "messages": QUESTION, **wrong})
    except expected:
        continue
    raise AssertionError(wrong)
try:
    client.with_options(api_key="wrong").models.list()
except openai.AuthenticationError:
    print("ok", openai.__version__)
