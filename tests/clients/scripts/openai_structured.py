"""The openai SDK, structured outputs: pydantic models parsed, tools that must be called."""

from __future__ import annotations

import sys
from typing import Literal

import openai
from pydantic import BaseModel

URL, MODEL, KEY = sys.argv[1:]
QUESTION = "What is the weather in Oslo?"


class Weather(BaseModel):
    """Every value is one of a few: whatever the model is, it ends."""

    city: Literal["Oslo", "Bergen"]
    wet: bool
    wind: Literal["none", "some", "much"]


PARAMETERS = Weather.model_json_schema()
GREEDY = {"model": MODEL, "temperature": 0}
client = openai.OpenAI(base_url=f"{URL}/v1", api_key=KEY, max_retries=0)

messages = [{"role": "user", "content": QUESTION}]
chat = client.chat.completions.parse(messages=messages, response_format=Weather, **GREEDY)
assert isinstance(chat.choices[0].message.parsed, Weather), chat
with client.chat.completions.stream(messages=messages, response_format=Weather, **GREEDY) as stream:
    kinds = {event.type for event in stream}
    streamed = stream.get_final_completion()
assert {"content.delta", "content.done"} <= kinds, kinds
assert streamed.choices[0].message.parsed == chat.choices[0].message.parsed, streamed
response = client.responses.parse(input=QUESTION, text_format=Weather, **GREEDY)
assert isinstance(response.output_parsed, Weather), response
with client.responses.stream(input=QUESTION, text_format=Weather, **GREEDY) as stream:
    assert stream.get_final_response().output_parsed == response.output_parsed

tool = {"type": "function", "name": "weather", "parameters": PARAMETERS, "strict": True}
for choice in ("required", {"type": "function", "name": "weather"}):
    made = client.responses.create(input=QUESTION, tools=[tool], tool_choice=choice, **GREEDY)
    call = next(item for item in made.output if item.type == "function_call")
    assert call.name == "weather"
    Weather.model_validate_json(call.arguments)
print("ok", openai.__version__)
