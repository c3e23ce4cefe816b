"""`baton chat` against a front door: thoughts are shown, dimmed, and are not part of the answer."""

from __future__ import annotations

import asyncio
import io
from typing import Any

import pytest
from rich.console import Console

from deploy.chat import Answer, ChatClient, ChatSettings, ask_and_show, thought_of
from router.config import RouterConfig
from tests.front.fakes import FakeDispatcher, Front, serving

CONFIG = RouterConfig(request_timeout_s=20.0, reasoning_parser="deepseek_r1")


async def asked(answer: str) -> tuple[Answer, str]:
    """What was returned, and what was printed."""
    out = io.StringIO()
    console = Console(file=out, width=200)
    messages = [{"role": "user", "content": "hi"}]

    def ask(port: int) -> Answer:
        with ChatClient(f"http://127.0.0.1:{port}") as client:
            return ask_and_show(client, messages, ChatSettings(max_tokens=60), console)

    async with serving(Front(dispatcher=FakeDispatcher(answer), config=CONFIG)) as port:
        return await asyncio.to_thread(ask, port), out.getvalue()


async def test_a_thought_comes_before_the_answer_and_is_no_part_of_it() -> None:
    answer, shown = await asked("hm hm</think>yes")
    assert answer.text == "yes"
    thought, _, rest = shown.partition("\n\n")
    assert thought == "hm hm"
    assert rest.startswith("yes\n")
    assert answer.num_tokens is not None
    assert answer.first_token_s <= answer.total_s


async def test_a_thought_alone_is_shown() -> None:
    answer, shown = await asked("hm hm")
    assert answer.text == ""
    assert shown.startswith("hm hm\n")


@pytest.mark.parametrize(
    ("chunk", "thought"),
    [
        ({}, ""),
        ({"choices": []}, ""),
        ({"choices": [{"text": "x"}]}, ""),
        ({"choices": [{"delta": {"content": "x"}}]}, ""),
        ({"choices": [{"delta": {"reasoning_content": "y"}}]}, "y"),
        ({"choices": [{"delta": {"reasoning": "y", "reasoning_content": "y"}}]}, "y"),
    ],
)
def test_thoughts_have_two_names(chunk: dict[str, Any], thought: str) -> None:
    assert thought_of(chunk) == thought
