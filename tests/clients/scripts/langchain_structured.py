"""langchain, structured outputs: `with_structured_output` over chats and over responses."""

from __future__ import annotations

import sys
from importlib.metadata import version
from typing import Literal

from langchain_openai import ChatOpenAI
from pydantic import BaseModel

URL, MODEL, KEY = sys.argv[1:]


class Weather(BaseModel):
    """Every value is one of a few: whatever the model is, it ends."""

    city: Literal["Oslo", "Bergen"]
    wet: bool


for by_responses in (False, True):
    model = ChatOpenAI(
        base_url=f"{URL}/v1", api_key=KEY, model=MODEL, temperature=0, max_retries=0,
        use_responses_api=by_responses,
    )  # fmt: skip
    for method in ("json_schema", "function_calling"):
        able = model.with_structured_output(Weather, method=method)
        assert isinstance(able.invoke("What is the weather in Oslo?"), Weather), method
print("ok", version("langchain-openai"))
