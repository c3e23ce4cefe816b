"""The openai SDK, client.responses: whole, streamed, thoughts, a loop of tools, stored, in the
background, errors, asyncio."""

from __future__ import annotations

import asyncio
import sys
import time

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

# Stored: the next one goes on from it.
first = client.responses.create(model=MODEL, input=QUESTION, tools=TOOLS, temperature=0)
[call] = [item for item in first.output if item.type == "function_call"]
result = {"type": "function_call_output", "call_id": call.call_id, "output": "7 degrees"}
second = client.responses.create(
    model=MODEL, input=[result], previous_response_id=first.id, tools=TOOLS, temperature=0
)
assert second.output_text.strip() == "It is 7 degrees in Oslo.", second
again = client.responses.retrieve(second.id)
assert (again.output_text, again.previous_response_id) == (second.output_text, first.id)
items = [item.type for item in client.responses.input_items.list(second.id, order="asc", limit=2)]
assert items == ["message", "reasoning", "function_call", "function_call_output"], items
referred = [{"role": "user", "content": QUESTION}, {"type": "item_reference", "id": call.id}]
third = client.responses.create(
    model=MODEL, input=[*referred, result], tools=TOOLS, temperature=0, store=False
)
assert third.output_text == second.output_text, third
client.responses.delete(second.id)
for gone in (second.id, third.id):
    try:
        client.responses.retrieve(gone)
    except openai.NotFoundError:
        continue
    raise AssertionError(gone)

# In the background: asked for until it has ended, or read as it comes and read on.
begun = client.responses.create(model=MODEL, input=QUESTION, temperature=0, background=True)
while begun.status in ("queued", "in_progress"):
    time.sleep(0.05)
    begun = client.responses.retrieve(begun.id)
assert (begun.status, begun.output_text) == ("completed", plain.output_text), begun
assert client.responses.cancel(begun.id).status == "completed"
stream = client.responses.create(
    model=MODEL, input=QUESTION, temperature=0, background=True, stream=True
)
seen = [event for event, _ in zip(stream, range(5), strict=False)]
stream.close()
rest = client.responses.retrieve(
    seen[0].response.id, stream=True, starting_after=seen[-1].sequence_number
)
events = [*seen, *rest]
assert [event.sequence_number for event in events] == list(range(len(events)))
assert events[-1].response.output_text == plain.output_text, events[-1]

# Tools of other kinds; OpenAI's own are left out, and the answer says so.
search = client.responses.create(
    model=MODEL, input=QUESTION, tools=[{"type": "web_search"}], temperature=0
)
assert search.output_text == plain.output_text, search
assert "web_search" in search.model_extra["baton_notes"][0]

for wrong, expected in (
    ({"model": "nope"}, openai.NotFoundError),
    ({"temperature": -1}, openai.BadRequestError),
    ({"previous_response_id": "resp_1"}, openai.BadRequestError),
    ({"conversation": "conv_1"}, openai.BadRequestError),
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
