"""Which formats a router reads: by name, by the chat template's marks, by the special tokens."""

from __future__ import annotations

import json
import logging
import re
from pathlib import Path

import pytest

from baton.parsers import formats
from baton.parsers.formats import TOOL_FORMATS
from baton.parsers.message import MessageRules
from baton.parsers.reasoning import REASONING_FORMATS
from baton.parsers.registry import (
    REASONING_MARKS,
    REASONING_PARSERS,
    TOOL_MARKS,
    TOOL_PARSERS,
    Choice,
    Formats,
    formats_of,
)
from baton.text.chat_template import ChatTemplate
from baton.text.tokenizer import Tokenizer
from router.config import RouterConfig
from tests.front.dialects import front
from tests.front.fakes import TOKENIZER
from tests.front.parsers.folded import parse
from tests.front.parsers.spelled import PARAMETERS, SPELLED
from tests.front.tokenizers_built import byte_level

ASK = [{"role": "user", "content": "weather?"}]
CALLS = [("get_weather", {"text": "Oslo"}), ("f", {})]
# What templates tell models, where calls themselves show no mark.
TOLD = {
    "llama3_json": '{"name": function name, "parameters": dictionary of arguments}',
    "pythonic": "[func_name1(name1=value1), func_name2(name2=value2)]",
    "llama4_pythonic": "<|header_start|>[func_name1(name1=value1)]",
    "granite": "<|start_of_role|>",
    "xlam": "make calls in a single JSON array",
    "jamba": "<|bom|>",
    "minimax": "<beginning_of_sentence>",
    "gigachat3": "role='function call' <|role_sep|>",
    "phi4_mini_json": "<|tool|>[]<|/tool|>",
    "hy_v3": "<tool_sep>",
}


def auto(template: str | None, *specials: str) -> Formats:
    return formats_of(Choice("auto", "auto"), template, specials)


@pytest.mark.parametrize("name", sorted({name for name, _ in TOOL_MARKS if name}))
def test_a_template_that_shows_calls_names_their_format(name: str) -> None:
    template = TOLD.get(name, "") + SPELLED[name](CALLS)
    assert auto(template).tools.name == TOOL_FORMATS[name].name
    assert auto(template).looked_for
    off = formats_of(Choice("auto", calls=False), template, ())
    assert not off.looked_for
    assert off.tools.name == TOOL_FORMATS[name].name


@pytest.mark.parametrize("name", sorted({name for name, _ in REASONING_MARKS}))
def test_a_template_that_shows_thoughts_names_their_format(name: str) -> None:
    marks = next(marks for row, marks in REASONING_MARKS if row == name)
    found = auto("{{ x }}".join(marks)).reasoning
    assert found is not None
    assert found.name == name
    assert found.begins({}) is False  # an answer without any tag is never taken for a thought


def test_rows_name_what_there_is() -> None:
    assert {name for name, _ in TOOL_MARKS if name} <= TOOL_FORMATS.keys()
    assert {name for name, _ in REASONING_MARKS} <= REASONING_FORMATS.keys()
    assert TOOL_PARSERS[0] == REASONING_PARSERS[0] == "auto"
    for parser in TOOL_PARSERS:
        RouterConfig(model="x", enable_auto_tool_choice=True, tool_call_parser=parser).check()


async def test_what_fits_no_format_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    config = RouterConfig(
        enable_auto_tool_choice=True, tool_call_parser="auto", reasoning_parser="auto",
        request_timeout_s=20.0,
    )  # fmt: skip
    of = front("hello", config)
    of.chat_template = ChatTemplate("{% for m in messages %}{{ m.content }}{% endfor %}", {})
    tool = {"type": "function", "function": {"name": "f"}}
    with caplog.at_level(logging.INFO, "baton.parsers"):
        async with of.client() as client:
            plain = {"messages": ASK}
            for _ in range(2):
                reply = await client.post("/v1/chat/completions", json=plain)
                assert reply.json()["choices"][0]["message"]["content"] == "hello"
            refused = await client.post("/v1/chat/completions", json={**plain, "tools": [tool]})
    assert refused.status_code == 400
    assert "--tool-call-parser" in refused.json()["error"]["message"]
    assert [record.levelname for record in caplog.records] == ["WARNING", "WARNING"]
    assert "no marks of a known format" in caplog.text


async def test_auto_reads_what_the_template_shows(caplog: pytest.LogCaptureFixture) -> None:
    config = RouterConfig(
        enable_auto_tool_choice=True, tool_call_parser="auto", reasoning_parser="auto",
        request_timeout_s=20.0,
    )  # fmt: skip
    answer = (
        "<think>hm</think><tool_call>get_time\n<arg_key>zone</arg_key>\n<arg_value>7</arg_value>"
    )
    of = front(answer + "\n</tool_call>", config)
    source = "{{ messages[0].content }}{# <think> <arg_key>a</arg_key>\n<arg_value> #}"
    of.chat_template = ChatTemplate(source, TOKENIZER.special_tokens)
    schema = {"type": "object", "properties": {"zone": {"type": "string"}}}
    tool = {"type": "function", "function": {"name": "get_time", "parameters": schema}}
    with caplog.at_level(logging.INFO, "baton.parsers"):
        async with of.client() as client:
            reply = await client.post(
                "/v1/chat/completions", json={"messages": ASK, "tools": [tool]}
            )
    message = reply.json()["choices"][0]["message"]
    assert message["reasoning"] == "hm"
    assert message["tool_calls"][0]["function"] == {
        "name": "get_time", "arguments": '{"zone": "7"}'
    }  # fmt: skip
    assert "glm45, by the chat template" in caplog.text


def test_one_format_for_calls_and_thoughts_is_chosen_as_one() -> None:
    harmony = formats_of(Choice("openai"), None, ())
    assert harmony.reasoning is REASONING_FORMATS["openai_gptoss"]
    # Calls that must be made are written so, too, where only thoughts were asked for.
    thoughts = formats_of(Choice(None, "openai_gptoss"), None, ())
    assert thoughts.tools is TOOL_FORMATS["openai"]
    assert not thoughts.looked_for
    assert formats_of(Choice(), None, ()) == Formats()


def test_special_tokens_tell_a_familys_spellings_apart() -> None:
    assert formats_of(Choice("mistral"), "", ["[ARGS]"]).tools is formats.MISTRAL_V11
    assert formats_of(Choice("phi4_mini_json"), "", ["<|tool_call|>"]).tools is formats.PHI4_MINI
    given = formats_of(Choice("phi4_mini_json"), "functools[...]", ["<|tool_call|>"])
    assert given.tools is formats.PHI4_MINI_JSON
    suffixed = formats_of(
        Choice("hy_v3", "hy_v3"), "", ["<tool_calls:opensource>", "<think:opensource>"]
    )
    text = SPELLED["hy_v3"](CALLS).replace(">", ":opensource>")
    rules = MessageRules(suffixed.reasoning, tools=suffixed.tools, schemas={"f": PARAMETERS})
    found = parse(rules, f"<think:opensource>hm</think:opensource>{text}")
    assert found.reasoning == "hm"
    assert [name for name, _ in found.calls] == ["get_weather", "f"]


SPECIAL = re.compile(r'<[|｜][^<>]*?[|｜]>|</?[^<>\s"=]+>|\[[A-Z_]{3,}\]')  # noqa: RUF001


@pytest.mark.parametrize("name", sorted(SPELLED))
def test_marks_that_are_special_tokens_reach_the_parser(name: str) -> None:
    text = SPELLED[name](CALLS)
    within = {mark for mark in ("｜DSML｜", "]<]minimax[>[") if mark in text}  # noqa: RUF001
    specials = within or set(SPECIAL.findall(text))
    backend = byte_level()
    backend.add_special_tokens(sorted(specials | {"<|eot|>"}))
    tokenizer = Tokenizer(backend, {})
    ids = tokenizer.encode(text + "<|eot|>", add_special_tokens=False)
    rules = MessageRules(tools=TOOL_FORMATS[name], schemas={"f": PARAMETERS})
    stream = tokenizer.stream(shown=rules.markers)
    pieces = [stream.push(token) for token in ids] + [stream.flush()]
    assert "<|eot|>" not in "".join(pieces)
    found = parse(rules, *pieces)
    assert [(called, json.loads(given)) for called, given in found.calls] == CALLS


NAMES = re.compile(r"`([a-z0-9][a-z0-9_-]*)`")


def test_the_documentation_lists_every_name() -> None:
    page = (Path(__file__).parents[3] / "docs" / "parsers.md").read_text("utf-8")
    rows = [row.split(" | ")[0] for row in page.splitlines() if row.startswith(("| `", "| *"))]
    start = next(at for at, row in enumerate(rows) if "--reasoning-parser" in row)
    for found, known in ((rows[:start], TOOL_FORMATS), (rows[start:], REASONING_FORMATS)):
        assert {name for row in found for name in NAMES.findall(row)} == known.keys()
