"""openai-agents: an agent runs its own loop of tools, over responses and chats, streamed too."""

from __future__ import annotations

import asyncio
import sys
from importlib.metadata import version

from agents import (
    Agent,
    ModelSettings,
    OpenAIChatCompletionsModel,
    OpenAIResponsesModel,
    Runner,
    function_tool,
    set_tracing_disabled,
)
from openai import AsyncOpenAI

URL, MODEL, KEY = sys.argv[1:]
QUESTION = "What is the weather in Oslo?"
set_tracing_disabled(True)


@function_tool
def get_weather(city: str) -> str:
    """The weather of a city."""
    assert city == "Oslo"
    return "7 degrees"


async def main() -> None:
    async with AsyncOpenAI(base_url=f"{URL}/v1", api_key=KEY, max_retries=0) as client:
        for kind in (OpenAIResponsesModel, OpenAIChatCompletionsModel):
            agent = Agent(
                name="weather",
                model=kind(model=MODEL, openai_client=client),
                model_settings=ModelSettings(temperature=0),
                tools=[get_weather],
            )
            result = await Runner.run(agent, QUESTION)
            assert result.final_output.strip() == "It is 7 degrees in Oslo.", result
            streamed = Runner.run_streamed(agent, QUESTION)
            kinds = {event.type async for event in streamed.stream_events()}
            assert {"raw_response_event", "run_item_stream_event"} <= kinds, kinds
            assert streamed.final_output == result.final_output
            if (
                kind is OpenAIResponsesModel
            ):  # each turn says what is new, and goes on from the last
                stored = await Runner.run(agent, QUESTION, auto_previous_response_id=True)
                assert stored.final_output == result.final_output
                before = stored.raw_responses[0].response_id
                last = await client.responses.retrieve(stored.last_response_id)
                assert last.previous_response_id == before, last


asyncio.run(main())
print("ok", version("openai-agents"))
