"""langchain: ChatOpenAI (chats and responses) and ChatAnthropic; streams and a loop of tools."""

from __future__ import annotations

import sys
from importlib.metadata import version

from langchain_anthropic import ChatAnthropic
from langchain_core.messages import HumanMessage, ToolMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI

URL, MODEL, KEY = sys.argv[1:]
QUESTION = "What is the weather in Oslo?"


@tool
def get_weather(city: str) -> str:
    """The weather of a city."""
    assert city == "Oslo"
    return "7 degrees"


def openai_model(by_responses: bool) -> ChatOpenAI:
    return ChatOpenAI(
        base_url=f"{URL}/v1", api_key=KEY, model=MODEL, temperature=0, max_retries=0,
        use_responses_api=by_responses,
    )  # fmt: skip


anthropic_model = ChatAnthropic(
    base_url=URL, api_key=KEY, model=MODEL, max_tokens=200, max_retries=0,
    model_kwargs={"extra_body": {"temperature": 0}},
)  # fmt: skip
for model in (openai_model(False), openai_model(True), anthropic_model):
    said = model.invoke(QUESTION)
    assert said.text.strip() == "I cannot see the weather.", said
    assert said.usage_metadata["output_tokens"] > 0
    streamed = "".join(chunk.text for chunk in model.stream(QUESTION))
    assert streamed == said.text, streamed
    able = model.bind_tools([get_weather])
    conversation = [HumanMessage(QUESTION)]
    first = able.invoke(conversation)
    assert [call["args"] for call in first.tool_calls] == [{"city": "Oslo"}], first
    conversation += [first, get_weather.invoke(first.tool_calls[0])]
    assert isinstance(conversation[-1], ToolMessage)
    assert able.invoke(conversation).text.strip() == "It is 7 degrees in Oslo."
    whole = None
    for chunk in able.stream(QUESTION):
        whole = chunk if whole is None else whole + chunk
    assert [call["args"] for call in whole.tool_calls] == [{"city": "Oslo"}], whole
print("ok", version("langchain-openai"), version("langchain-anthropic"))
