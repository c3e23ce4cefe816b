"""Whole answers of current models, thoughts and calls, as their cards and templates show them: the
formats are chosen by what each template says, and an answer is the same streamed, cut or whole."""

from __future__ import annotations

import codecs
import json
from dataclasses import dataclass
from typing import Any

import pytest

from baton.parsers.formats import TOOL_FORMATS
from baton.parsers.message import MessageRules
from baton.parsers.reasoning import REASONING_FORMATS
from baton.parsers.registry import Choice, formats_of
from baton.text.chat_template import ChatTemplate
from router.config import RouterConfig
from tests.front.dialects import front
from tests.front.fakes import TOKENIZER, Front
from tests.front.parsers.folded import Folded, parse
from tests.front.parsers.spelled import PARAMETERS, SPELLED, Call
from tests.guided_sweep import ask

WEATHER: dict[str, Any] = {
    "type": "object",
    "properties": {
        "city": {"type": "string"},
        "days": {"type": ["integer", "null"]},
        "unit": {"type": ["string", "null"]},
        "at": {"type": "object"},
    },
}
SCHEMAS = {"get_weather": WEATHER, "now": {}}
TOOLS = [
    {"type": "function", "function": {"name": name, "parameters": schema}}
    for name, schema in SCHEMAS.items()
]
ZURICH = {"city": "Zürich", "days": None, "at": {"hours": [6, 18], "zone": None}}
Z = json.dumps(ZURICH, ensure_ascii=False)
AT = json.dumps(ZURICH["at"])
BOTH = [("get_weather", ZURICH), ("now", {})]
D = "｜"  # noqa: RUF001  DeepSeek's bar
KIMI = (
    "<|tool_calls_section_begin|>"
    f"<|tool_call_begin|>functions.get_weather:0<|tool_call_argument_begin|>{Z}<|tool_call_end|>"
    "<|tool_call_begin|>functions.now:1<|tool_call_argument_begin|>{}<|tool_call_end|>"
    "<|tool_calls_section_end|>"
)
LISTED = f'[{{"name": "get_weather", "arguments": {Z}}}, {{"name": "now", "arguments": {{}}}}]'
CODER = (
    "<tool_call>\n<function=get_weather>\n<parameter=city>\nZürich\n</parameter>\n"
    f"<parameter=days>\nnull\n</parameter>\n<parameter=at>\n{AT}\n</parameter>\n</function>\n"
    "</tool_call>\n<tool_call>\n<function=now>\n</function>\n</tool_call>"
)
PYTHONIC = "[get_weather(city='Zürich', days=None, at={'hours': [6, 18], 'zone': None}), now()]"


@dataclass(frozen=True)
class Family:
    """`shown`: what its template says that tells the formats; `end`: with what its prompt ends."""

    shown: str
    end: str
    answer: str
    tools: str
    reasoning: str = ""
    thought: str = ""
    content: str = ""


def kimi(answer: str, content: str, thought: str) -> Family:
    shown = "<think></think><|tool_calls_section_begin|><|tool_call_begin|>"
    return Family(shown, "<|im_middle|>", answer, "kimi_k2", "think_tags", thought, content)


def deepseek(end: str, answer: str, thought: str) -> Family:
    shown = f"<think></think><{D}tool▁calls▁begin{D}><{D}tool▁call▁begin{D}>"
    reasoning = "think_tags"
    return Family(shown, end, answer, "deepseek_v31", reasoning, thought, "I look.")


DEEPSEEK_CALLS = (
    f"<{D}tool▁calls▁begin{D}><{D}tool▁call▁begin{D}>get_weather<{D}tool▁sep{D}>{Z}"
    f"<{D}tool▁call▁end{D}><{D}tool▁call▁begin{D}>now<{D}tool▁sep{D}>{{}}<{D}tool▁call▁end{D}>"
    f"<{D}tool▁calls▁end{D}>"
)

FAMILIES = {
    "gpt-oss": Family(
        "<|start|>assistant<|channel|>analysis<|message|>", "<|start|>assistant",
        "<|channel|>analysis<|message|>Look it up.<|end|><|start|>assistant<|channel|>commentary"
        "<|message|>I look.<|end|><|start|>assistant<|channel|>commentary "
        f"to=functions.get_weather <|constrain|>json<|message|>{Z}<|call|><|start|>assistant "
        "to=functions.now<|channel|>commentary json<|message|>{}<|call|>",
        "openai", "openai_gptoss", "Look it up.", "I look.",
    ),
    "GLM-4.6": Family(
        "/nothink <think></think> <tool_call>{name}\n<arg_key>{k}</arg_key>\n<arg_value>",
        "<|assistant|>",
        "\n<think>Look it up.</think>\nI look.\n<tool_call>get_weather\n<arg_key>city</arg_key>\n"
        "<arg_value>Zürich</arg_value>\n<arg_key>days</arg_key>\n<arg_value>null</arg_value>\n"
        f"<arg_key>at</arg_key>\n<arg_value>{AT}</arg_value>\n</tool_call>\n<tool_call>now\n"
        "</tool_call>",
        "glm45", "think_tags", "Look it up.", "I look.",
    ),
    "GLM-4.7": Family(
        "<think></think> <tool_call>{name}<arg_key>{k}</arg_key><arg_value>",
        "<|assistant|><think>",
        "Look it up.</think>I look.<tool_call>get_weather<arg_key>city</arg_key><arg_value>Zürich"
        "</arg_value><arg_key>days</arg_key><arg_value>null</arg_value><arg_key>at</arg_key>"
        f"<arg_value>{AT}</arg_value></tool_call><tool_call>now</tool_call>",
        "glm47", "think_tags", "Look it up.", "I look.",
    ),
    "Kimi K2": kimi(f"<think>Look it up.</think>I look.{KIMI}", "I look.", "Look it up."),
    "Kimi K2, in mid-thought": kimi(f"<think>Look it up.{KIMI}", "", "Look it up."),
    "MiniMax M2": Family(
        '<minimax:tool_call>\n<invoke name="tool-name-1">\n</minimax:tool_call> </think>',
        "]~b]ai\n<think>\n",
        "Look it up.\n</think>\n\nI look.\n<minimax:tool_call>\n"
        '<invoke name="get_weather">\n<parameter name="city">Zürich</parameter>\n'
        f'<parameter name="days">null</parameter>\n<parameter name="at">{AT}</parameter>\n'
        '</invoke>\n<invoke name="now">\n</invoke>\n</minimax:tool_call>',
        "minimax_m2", "think_tags", "Look it up.\n", "I look.",
    ),
    "DeepSeek V3.1": deepseek(f"<{D}Assistant{D}></think>", f"I look.{DEEPSEEK_CALLS}", ""),
    "DeepSeek V3.1, thinking": deepseek(
        f"<{D}Assistant{D}><think>", f"Look it up.</think>I look.{DEEPSEEK_CALLS}", "Look it up."
    ),
    "DeepSeek V3.2": Family(
        f"{D}DSML{D} <think></think> <function_calls>", f"<{D}Assistant{D}><think>",
        f"Look it up.</think>I look.\n\n<{D}DSML{D}function_calls>\n"
        f'<{D}DSML{D}invoke name="get_weather">\n'
        f'<{D}DSML{D}parameter name="city" string="true">Zürich</{D}DSML{D}parameter>\n'
        f'<{D}DSML{D}parameter name="days" string="false">null</{D}DSML{D}parameter>\n'
        f'<{D}DSML{D}parameter name="at" string="false">{AT}</{D}DSML{D}parameter>\n'
        f'</{D}DSML{D}invoke>\n<{D}DSML{D}invoke name="now">\n\n</{D}DSML{D}invoke>\n'
        f"</{D}DSML{D}function_calls>",
        "deepseek_v32", "think_tags", "Look it up.", "I look.",
    ),
    "Llama 4": Family(
        "<|header_start|>[func_name1(params_name1=params_value1)]", "<|header_end|>\n\n",
        f"<|python_start|>{PYTHONIC}<|python_end|>", "llama4_pythonic",
    ),
    "Gemma 3": Family("[func_name1(params_name1=params_value1)]", "model\n", PYTHONIC, "pythonic"),
    "Gemma 4": Family(
        "<|tool_call>call:f <|channel>thought", "<|turn>model\n",
        "<|channel>thought\nLook it up.\n<channel|>I look.<|tool_call>call:get_weather"
        '{at:{hours:[6,18],zone:null},city:<|"|>Zürich<|"|>,days:null}<tool_call|>'
        "<|tool_call>call:now{}<tool_call|>",
        "gemma4", "gemma4", "Look it up.\n", "I look.",
    ),
    "Granite 3.2": Family(
        "<|start_of_role|><|tool_call|> 'Here is my thought process:' 'Here is my response:'",
        "<|end_of_role|>",
        f"Here is my thought process: Look it up.\n\nHere is my response: <|tool_call|>{LISTED}",
        "granite", "granite", " Look it up.\n\n",
    ),
    "Granite 3.3": Family(
        "<|start_of_role|><|tool_call|> <think></think> <response></response>", "<|end_of_role|>",
        f"<think>Look it up.</think><response>I look.</response><|tool_call|>{LISTED}",
        "granite", "granite", "Look it up.", "I look.",
    ),
    "Granite 4": Family(
        "<|start_of_role|><tool_call></tool_call>", "<|end_of_role|>",
        f'<tool_call>\n{{"name": "get_weather", "arguments": {Z}}}\n</tool_call>\n'
        '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>',
        "hermes",
    ),
    "Phi-4-mini": Family(
        "<|tool|>[]<|/tool|>", "<|assistant|>", f"functools{LISTED}", "phi4_mini_json"
    ),
    "xLAM 2": Family(
        "When using tools, make calls in a single JSON array", "assistant\n", LISTED, "xlam"
    ),
    "Qwen3.5": Family(
        "<think></think> <tool_call>\n<function=f>\n<parameter=k>\n", "assistant\n<think>\n",
        f"Look it up.\n</think>\n\nI look.\n\n{CODER}",
        "qwen3_coder", "think_tags", "Look it up.\n", "I look.",
    ),
    "Hunyuan A13B": Family(
        "<think></think> <answer></answer> <tool_calls></tool_calls>", "<|extra_0|>",
        f"<think>\nLook it up.\n</think>\n<answer>\nI look.\n<tool_calls>{LISTED}</tool_calls>\n"
        "</answer>",
        "hunyuan_a13b", "hunyuan_a13b", "\nLook it up.\n", "I look.",
    ),
    "Nemotron Nano 2": Family(
        "<think></think> <TOOLCALL>[]</TOOLCALL>", "Assistant\n<think>\n\n",
        f"Look it up.\n</think>\n\n<TOOLCALL>{LISTED}</TOOLCALL>",
        "nemotron_json", "think_tags", "Look it up.\n",
    ),
    "Nemotron 3": Family(
        "<think></think> <tool_call>\n<function=f>\n<parameter=k>\n", "assistant\n<think>\n",
        f"Look it up.\n</think>\n{CODER}", "qwen3_coder", "think_tags", "Look it up.\n",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", FAMILIES)
def test_a_familys_answer_is_read_by_the_formats_that_its_template_names(name: str) -> None:
    family = FAMILIES[name]
    found = formats_of(Choice("auto", "auto"), family.shown, ())
    assert found.tools is TOOL_FORMATS[family.tools]
    reasoning = found.reasoning
    if family.reasoning:
        assert reasoning is REASONING_FORMATS[family.reasoning]
    opened = reasoning is not None and reasoning.opened(f"hi{family.end}", {})
    rules = MessageRules(reasoning, opened=opened, tools=found.tools, schemas=SCHEMAS)
    whole = parse(rules, family.answer)
    assert (whole.reasoning.strip("\n"), whole.content.strip()) == (
        family.thought.strip("\n"), family.content
    )  # fmt: skip
    assert [(name, json.loads(arguments)) for name, arguments in whole.calls] == BOTH
    for place in range(1, len(family.answer)):
        assert parse(rules, family.answer[:place], family.answer[place:]) == whole, place
    decoder = codecs.getincrementaldecoder("utf-8")()
    every_byte = (decoder.decode(bytes([byte])) for byte in family.answer.encode())
    assert parse(rules, *every_byte) == whole
    if reasoning is not None and reasoning.close[0] in family.answer:
        cut_short = parse(rules, family.answer.split(family.thought)[0] + family.thought)
        assert cut_short == Folded("", cut_short.reasoning)
        assert cut_short.reasoning.strip() == family.thought.strip()


def serving(answer: str, template: str, **options: Any) -> Front:
    config = RouterConfig(enable_auto_tool_choice=True, request_timeout_s=60.0, **options)
    of = front(answer, config, step=3)
    of.chat_template = ChatTemplate(template, TOKENIZER.special_tokens)
    return of


def said(told: dict[str, Any]) -> tuple[str, str, list[tuple[str, str]]]:
    calls = [call["function"] for call in told["tool_calls"]]
    names = [(call["name"], call["arguments"]) for call in calls]
    return told["finish_reason"], told["content"] or "", names


@pytest.mark.parametrize("name", FAMILIES)
async def test_a_familys_answer_streamed_is_the_whole_one(name: str) -> None:
    family = FAMILIES[name]
    template = "{{ messages[0].content }}{{ " + json.dumps(family.end) + " }}{# "
    of = serving(
        family.answer, template + family.shown.replace("#", "") + " #}",
        tool_call_parser="auto", reasoning_parser="auto",
    )  # fmt: skip
    async with of.client() as client:
        whole, streamed = [await ask(client, stream, tools=TOOLS) for stream in (False, True)]
    assert said(streamed) == said(whole)
    finish, content, calls = said(whole)
    assert (finish, content.strip()) == ("tool_calls", family.content)
    assert [(name, json.loads(arguments)) for name, arguments in calls] == BOTH
    assert (whole.get("reasoning") or "").strip() == family.thought.strip()


CALLS: list[Call] = [("f", {"text": "Zoë\n", "count": 3, "any": None, "items": ["a"]}), ("g", {})]
FUNCTIONS = [
    {"type": "function", "function": {"name": name, "parameters": PARAMETERS}} for name in "fg"
]


@pytest.mark.parametrize("form", sorted(set(SPELLED)))
async def test_calls_of_every_format_streamed_are_the_whole_ones(form: str) -> None:
    of = serving(SPELLED[form](CALLS), "{{ messages[0].content }}", tool_call_parser=form)
    async with of.client() as client:
        whole, streamed = [await ask(client, stream, tools=FUNCTIONS) for stream in (False, True)]
    assert said(streamed) == said(whole)
    finish, content, calls = said(whole)
    assert (finish, content.strip()) == ("tool_calls", "")
    assert [(name, json.loads(arguments)) for name, arguments in calls] == CALLS
