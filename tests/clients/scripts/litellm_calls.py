"""litellm: completions and responses OpenAI's way, completions Anthropic's; streams and tools."""

from __future__ import annotations

import sys
from importlib.metadata import version

import litellm

URL, MODEL, KEY = sys.argv[1:]
QUESTION = [{"role": "user", "content": "What is the weather in Oslo?"}]
PARAMETERS = {"type": "object", "properties": {"city": {"type": "string"}}}
TOOLS = [{"type": "function", "function": {"name": "get_weather", "parameters": PARAMETERS}}]
OPENAI = {"model": f"openai/{MODEL}", "api_base": f"{URL}/v1", "api_key": KEY, "temperature": 0}
ANTHROPIC = {
    "model": f"anthropic/{MODEL}", "api_base": URL, "api_key": KEY, "temperature": 0,
    "max_tokens": 200,
}  # fmt: skip

for way in (OPENAI, ANTHROPIC):
    said = litellm.completion(messages=QUESTION, **way).choices[0].message.content
    assert said.strip() == "I cannot see the weather.", said
    chunks = litellm.completion(messages=QUESTION, stream=True, **way)
    streamed = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
    assert streamed == said, streamed
    first = litellm.completion(messages=QUESTION, tools=TOOLS, **way)
    assert first.choices[0].finish_reason == "tool_calls", first
    call = first.choices[0].message.tool_calls[0]
    assert call.function.name == "get_weather"
    told = {"role": "tool", "tool_call_id": call.id, "content": "7 degrees"}
    conversation = [*QUESTION, first.choices[0].message, told]
    second = litellm.completion(messages=conversation, tools=TOOLS, **way)
    assert second.choices[0].message.content.strip() == "It is 7 degrees in Oslo.", second

response = litellm.responses(input=QUESTION[0]["content"], **OPENAI)
assert response.status == "completed"
assert response.output[-1].content[0].text.strip() == "I cannot see the weather.", response
events = list(litellm.responses(input=QUESTION[0]["content"], stream=True, **OPENAI))
assert events[-1].type == "response.completed", events[-1]
try:
    litellm.completion(messages=QUESTION, **{**OPENAI, "model": "openai/nope"})
    raise AssertionError("an unknown model was taken")
except litellm.NotFoundError:
    print("ok", version("litellm"))
