"""The anthropic SDK, structured outputs: a pydantic model parsed, tools that must be called."""

from __future__ import annotations

import sys
from typing import Literal

import anthropic
from pydantic import BaseModel

URL, MODEL, KEY = sys.argv[1:]
QUESTION = [{"role": "user", "content": "What is the weather in Oslo?"}]


class Weather(BaseModel):
    """Every value is one of a few: whatever the model is, it ends."""

    city: Literal["Oslo", "Bergen"]
    wet: bool


GREEDY = {"model": MODEL, "max_tokens": 200, "extra_body": {"temperature": 0}}
client = anthropic.Anthropic(base_url=URL, api_key=KEY, max_retries=0)
parsed = client.messages.parse(messages=QUESTION, output_format=Weather, **GREEDY)
assert isinstance(parsed.parsed_output, Weather), parsed
tool = {"name": "weather", "input_schema": Weather.model_json_schema()}
for choice in ({"type": "any"}, {"type": "tool", "name": "weather"}):
    made = client.messages.create(messages=QUESTION, tools=[tool], tool_choice=choice, **GREEDY)
    assert made.stop_reason == "tool_use", made
    Weather.model_validate(made.content[-1].input)
print("ok", anthropic.__version__)
