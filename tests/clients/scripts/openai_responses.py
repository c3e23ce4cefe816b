"""The openai SDK, client.responses: whole, streamed, thoughts, a loop of tools, errors, asyncio."""

from __future__ import annotations

import asyncio
import sys

import openai

URL, MODEL, KEY = sys.argv[1:]
QUESTION = "What is the weather in Oslo?"
PARAMETERS = {
    "type": "object",
    "properties": {"city": {"type": "string"}},
    "required": ["city"],
    "additionalProperties": False,
}
TOOLS = [
    {"type": "function", "name": "get_weather", "parameters": PARAMETERS, "strict": True},
]

client = openai.OpenAI(base_url=f"{URL}/v1", api_key=KEY, max_retries=0)

# Plain.
plain = client.responses.create(
    model=MODEL, input=QUESTION, temperature=0, metadata={"run": "1"}, store=True
)
assert plain.status == "completed"
assert plain.output_text.strip() == "I cannot see the weather.", plain
assert [item.type for item in plain.output] == ["reasoning", "message"]
assert plain.output[0].content[0].text == "\nI have no tools.\n"
assert plain.metadata == {"run": "1"}
assert plain.usage.output_tokens_details.reasoning_tokens > 0
assert plain.usage.total_tokens == plain.usage.input_tokens + plain.usage.output_tokens
again = client.responses.create(model=MODEL, input=QUESTION, temperature=0)
assert again.output_text == plain.output_text

# Without thoughts.
quiet = client.responses.create(
    model=MODEL, input=QUESTION, temperature=0, reasoning={"effort": "none"}
)
assert quiet.output_text == "I cannot see the weather.", quiet
assert [item.type for item in quiet.output] == ["message"]

# A loop of tools; the SDK's own items are sent back as they are.
conversation = [{"role": "user", "content": QUESTION}]
first = client.responses.create(model=MODEL, input=conversation, tools=TOOLS, temperature=0)
calls = [item for item in first.output if item.type == "function_call"]
assert [(call.name, call.arguments) for call in calls] == [("get_weather", '{"city": "Oslo"}')]
conversation += first.output
conversation.append(
    {"type": "function_call_output", "call_id": calls[0].call_id, "output": "7 degrees"}
)
second = client.responses.create(model=MODEL, input=conversation, tools=TOOLS, temperature=0)
assert second.output_text.strip() == "It is 7 degrees in Oslo.", second

# Streamed: raw events, then put together by the SDK.
events = list(
    client.responses.create(model=MODEL, input=QUESTION, tools=TOOLS, temperature=0, stream=True)
)
assert [event.sequence_number for event in events] == list(range(len(events)))
kinds = [event.type for event in events]
assert kinds[:2] == ["response.created", "response.in_progress"]
assert kinds[-1] == "response.completed"
for kind in ("reasoning_text.delta", "reasoning_text.done", "function_call_arguments.delta",
             "function_call_arguments.done"):  # fmt: skip
    assert f"response.{kind}" in kinds, kind
with client.responses.stream(model=MODEL, input=QUESTION, tools=TOOLS, temperature=0) as stream:
    final = stream.until_done().get_final_response()
assert final.output[-1].parsed_arguments == {"city": "Oslo"}
with client.responses.stream(model=MODEL, input=QUESTION, temperature=0) as stream:
    text = "".join(e.delta for e in stream if e.type == "response.output_text.delta")
    assert stream.get_final_response().output_text == text == plain.output_text
summed = client.responses.create(
    model=MODEL, input=QUESTION, temperature=0, reasoning={"summary": "auto"}
)
assert summed.output[0].summary[0].text == "\nI have no tools.\n"

# Limits and log-probabilities.
short = client.responses.create(model=MODEL, input=QUESTION, temperature=0, max_output_tokens=3)
assert (short.status, short.incomplete_details.reason) == ("incomplete", "max_output_tokens")
likely = client.responses.create(
    model=MODEL, input=QUESTION, temperature=0, top_logprobs=2, reasoning={"effort": "none"},
    include=["message.output_text.logprobs"],
)  # fmt: skip
entries = likely.output[0].content[0].logprobs
assert entries
assert all(entry.top_logprobs[0].token == entry.token for entry in entries)

for wrong, expected in (
    ({"model": "nope"}, openai.NotFoundError),
    ({"temperature": -1}, openai.BadRequestError),
    ({"previous_response_id": "resp_1"}, openai.BadRequestError),
    ({"tools": [{"type": "web_search"}]}, openai.BadRequestError),
):
    try:
        client.responses.create(**{"model": MODEL, "input": QUESTION, **wrong})
    except expected:
        continue
    raise AssertionError(wrong)


async def at_once() -> None:
    async with openai.AsyncOpenAI(base_url=f"{URL}/v1", api_key=KEY, max_retries=0) as many:

        async def one() -> str:
            stream = await many.responses.create(
                model=MODEL, input=QUESTION, temperature=0, stream=True
            )
            deltas = [e.delta async for e in stream if e.type == "response.output_text.delta"]
            return "".join(deltas)

        assert await asyncio.gather(*(one() for _ in range(8))) == [plain.output_text] * 8


asyncio.run(at_once())
print("ok", openai.__version__)
