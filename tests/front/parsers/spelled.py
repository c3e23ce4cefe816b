"""How models of each format write calls: the same ones, for every format."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from tests.front.parsers.examples import (
    DS_CALL,
    DS_CALL_END,
    DS_CALLS,
    DS_END,
    DS_SEP,
)

Call = tuple[str, Mapping[str, Any]]
Spell = Callable[[Sequence[Call]], str]

# The parameters of `f` and `g`: what formats without types of their own go by.
PARAMETERS: dict[str, Any] = {
    "type": "object",
    "properties": {
        "text": {"type": "string"},
        "count": {"type": "integer"},
        "flag": {"type": "boolean"},
        "any": {"type": ["string", "null"]},
        "items": {"type": "array"},
        "object": {"type": "object"},
    },
}


def plain(value: object) -> str:
    """A value as it stands between tags: text as it is, all else as JSON."""
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def objects(key: str, before: str, joint: str, after: str, name: str = "name") -> Spell:
    def spell(calls: Sequence[Call]) -> str:
        each = (f'{{"{name}": "{called}", "{key}": {json.dumps(a)}}}' for called, a in calls)
        return before + joint.join(each) + after

    return spell


def named(call: str, between: str, end: str, before: str = "", after: str = "") -> Spell:
    """`call` and `end` stand around each; N in `call` is its number."""

    def spell(calls: Sequence[Call]) -> str:
        each = (
            f"{call}{called}{between.replace('N', str(at))}{json.dumps(arguments)}{end}"
            for at, (called, arguments) in enumerate(calls)
        )
        return before + "".join(each) + after

    return spell


def tagged(
    call: str, key: str, key_end: str, value_end: str, end: str, around: tuple[str, str] = ("", "")
) -> Spell:
    """`call` holds NAME."""

    def spell(calls: Sequence[Call]) -> str:
        texts: list[str] = []
        for called, arguments in calls:
            pairs = (f"{key}{n}{key_end}{plain(v)}{value_end}" for n, v in arguments.items())
            texts.append(call.replace("NAME", called) + "".join(pairs) + end)
        return around[0] + "\n".join(texts) + around[1]

    return spell


def dsml(wrapper: str) -> Spell:
    mark = "｜DSML｜"  # noqa: RUF001

    def spell(calls: Sequence[Call]) -> str:
        texts: list[str] = []
        for called, arguments in calls:
            pairs = "".join(
                f'<{mark}parameter name="{n}" string="{"true" if isinstance(v, str) else "false"}">'
                f"{plain(v)}</{mark}parameter>\n"
                for n, v in arguments.items()
            )
            texts.append(f'<{mark}invoke name="{called}">\n{pairs}</{mark}invoke>')
        return f"<{mark}{wrapper}>\n" + "\n".join(texts) + f"\n</{mark}{wrapper}>"

    return spell


def pythonic(before: str, joint: str, after: str) -> Spell:
    def spell(calls: Sequence[Call]) -> str:
        each = (f"{n}({', '.join(f'{k}={v!r}' for k, v in a.items())})" for n, a in calls)
        return before + joint.join(each) + after

    return spell


def gemma(before: str, quote: str, after: str) -> Spell:
    def value(given: object) -> str:
        match given:
            case str():
                return f"{quote}{given}{quote}"
            case dict():
                return "{" + pairs(given) + "}"
            case list():
                return "[" + ",".join(map(value, given)) + "]"
            case _:
                return json.dumps(given)

    def pairs(given: Mapping[str, Any]) -> str:
        return ",".join(f"{key}:{value(each)}" for key, each in given.items())

    def spell(calls: Sequence[Call]) -> str:
        return "".join(f"{before}call:{name}{{{pairs(a)}}}{after}" for name, a in calls)

    return spell


def minimax_m3(calls: Sequence[Call]) -> str:
    mark = "]<]minimax[>["

    def value(given: object) -> str:
        match given:
            case dict():
                return "".join(f"{mark}<{k}>{value(v)}{mark}</{k}>" for k, v in given.items())
            case list():
                return "".join(f"{mark}<item>{value(v)}{mark}</item>" for v in given)
            case _:
                return plain(given)

    each = (f'{mark}<invoke name="{n}">{value(dict(a))}{mark}</invoke>\n' for n, a in calls)
    return f"{mark}<tool_call>\n" + "".join(each) + f"{mark}</tool_call>"


def harmony(calls: Sequence[Call]) -> str:
    return "<|start|>assistant".join(
        f"<|channel|>commentary to=functions.{name} <|constrain|>json<|message|>"
        f"{json.dumps(arguments)}<|call|>"
        for name, arguments in calls
    )


def apertus(calls: Sequence[Call]) -> str:
    each = ", ".join(f'{{"{name}": {json.dumps(arguments)}}}' for name, arguments in calls)
    return f"<|tools_prefix|>[{each}]<|tools_suffix|>"


_HERMES = objects("arguments", "<tool_call>\n", "\n</tool_call>\n<tool_call>\n", "\n</tool_call>")
_LISTED = objects("arguments", "<tool_calls>[", ", ", "]</tool_calls>")
_CODER = tagged(
    "<tool_call>\n<function=NAME>\n", "<parameter=", ">\n", "\n</parameter>\n",
    "</function>\n</tool_call>",
)  # fmt: skip
_GLM45 = tagged(
    "<tool_call>NAME\n", "<arg_key>", "</arg_key>\n<arg_value>", "</arg_value>\n", "</tool_call>"
)
_GLM47 = tagged(
    "<tool_call>NAME", "<arg_key>", "</arg_key><arg_value>", "</arg_value>", "</tool_call>"
)
_COHERE = objects(
    "parameters", "<|START_ACTION|>[\n    ", ",\n    ", "\n]<|END_ACTION|>", "tool_name"
)
_STEP3 = "<｜tool_{}｜>"  # noqa: RUF001

SPELLED: dict[str, Spell] = {
    "hermes": _HERMES, "qwen3_json": _HERMES, "granite4": _HERMES, "ernie45": _HERMES,
    "longcat": objects("arguments", "<longcat_tool_call>\n",
                       "\n</longcat_tool_call>\n<longcat_tool_call>\n", "\n</longcat_tool_call>"),
    "llama3_json": objects("parameters", "", "; ", ""),
    "llama4_json": objects("parameters", "", "; ", ""),
    "granite": objects("arguments", "<|tool_call|>[", ", ", "]"),
    "granite-20b-fc": objects("arguments", "<function_call> ", " <function_call> ", ""),
    "hunyuan_a13b": _LISTED, "jamba": _LISTED,
    "minimax": objects("arguments", "<tool_calls>\n", "\n", "\n</tool_calls>"),
    "nemotron_json": objects("arguments", "<TOOLCALL>[", ", ", "]</TOOLCALL>"),
    "phi4_mini_json": objects("arguments", "functools[", ", ", "]"),
    "xlam": objects("arguments", "[", ", ", "]"),
    "internlm": objects("parameters", "<|action_start|><|plugin|>\n",
                        "<|action_end|>\n<|action_start|><|plugin|>\n", "<|action_end|>\n"),
    "cohere_command3": _COHERE, "cohere_command4": _COHERE,
    "gigachat3": objects("arguments", "function call<|role_sep|>\n",
                         "function call<|role_sep|>\n", ""),
    "apertus": apertus,
    "mistral": objects("arguments", "[TOOL_CALLS][", ", ", "]"),
    "kimi_k2": named("<|tool_call_begin|>functions.", ":N<|tool_call_argument_begin|>",
                     "<|tool_call_end|>", "<|tool_calls_section_begin|>",
                     "<|tool_calls_section_end|>"),
    "deepseek_v3": named(f"{DS_CALL}function{DS_SEP}", "\n```json\n", f"\n```{DS_CALL_END}",
                         DS_CALLS, DS_END),
    "deepseek_v31": named(DS_CALL, DS_SEP, DS_CALL_END, DS_CALLS, DS_END),
    "solar_open": named("<|tool_call:begin|>a1b2c3d4e5<|tool_call:name|>", "<|tool_call:args|>",
                        "<|tool_call:end|>", "<|tool_calls|>", "<|calls|>"),
    "qwen3_coder": _CODER, "qwen3_xml": _CODER, "step3p5": _CODER, "step5": _CODER,
    "mimo": tagged("<tool_call>\n<function=NAME>\n", "<parameter=", ">", "</parameter>\n",
                   "</function>\n</tool_call>"),
    "seed_oss": tagged("<seed:tool_call>\n<function=NAME>\n", "<parameter=", ">",
                       "</parameter>\n", "</function>\n</seed:tool_call>"),
    "minimax_m2": tagged('<invoke name="NAME">\n', '<parameter name="', '">', "</parameter>\n",
                         "</invoke>", ("<minimax:tool_call>\n", "\n</minimax:tool_call>")),
    "minimax_m3": minimax_m3,
    "dots": tagged('<invoke name="NAME">\n', '<parameter name="', '">', "</parameter>\n",
                   "</invoke>", ("<dots_function_call>\n", "\n</dots_function_call>")),
    "minicpm5": tagged('<function name="NAME">', '<param name="', '">', "</param>", "</function>"),
    "glm45": _GLM45, "ling3": _GLM45, "glm47": _GLM47, "poolside_v1": _GLM47,
    "iquest_q1": tagged("<iquest_tool_call>NAME", "<arg_key>", "</arg_key><arg_value>",
                        "</arg_value>", "</iquest_tool_call>"),
    "hy_v3": tagged("<tool_call>NAME<tool_sep>\n", "<arg_key>", "</arg_key>\n<arg_value>",
                    "</arg_value>\n", "</tool_call>", ("<tool_calls>\n", "\n</tool_calls>")),
    "deepseek_v32": dsml("function_calls"), "deepseek_v4": dsml("tool_calls"),
    "step3": tagged(
        _STEP3.format("call_begin") + "function" + _STEP3.format("sep")
        + '<steptml:invoke name="NAME">',
        '<steptml:parameter name="', '">', "</steptml:parameter>",
        "</steptml:invoke>" + _STEP3.format("call_end"),
        (_STEP3.format("calls_begin"), _STEP3.format("calls_end")),
    ),
    "pythonic": pythonic("[", ", ", "]"), "llama4_pythonic": pythonic("[", ", ", "]"),
    "lfm2": pythonic("<|tool_call_start|>[", ", ", "]<|tool_call_end|>"),
    "olmo3": pythonic("<function_calls>\n", "\n", "\n</function_calls>"),
    "gemma4": gemma("<|tool_call>", '<|"|>', "<tool_call|>"),
    "functiongemma": gemma("<start_function_call>", "<escape>", "<end_function_call>"),
    "openai": harmony,
}  # fmt: skip

_CALL = "<|action_start|><|plugin|>\n"


def python(before: str, joint: str, after: str) -> Spell:
    """Calls as Python has them, with JSON's values."""

    def spell(calls: Sequence[Call]) -> str:
        texts = (
            f"{name}({', '.join(f'{key}={json.dumps(value)}' for key, value in given.items())})"
            for name, given in calls
        )
        return before + joint.join(texts) + after

    return spell


# Where a forced call is spelled otherwise than models are seen to write it, in layout or values.
FORCED: dict[str, Spell] = {
    **SPELLED,
    "internlm": objects("parameters", _CALL, f"<|action_end|>\n{_CALL}", "<|action_end|>"),
    "granite-20b-fc": objects("arguments", "<function_call> ", "<function_call> ", ""),
    "cohere_command3": lambda calls: (
        "<|START_ACTION|>[" + ", ".join(
            f'{{"tool_call_id": "{at}", "tool_name": "{name}", "parameters": {json.dumps(given)}}}'
            for at, (name, given) in enumerate(calls)
        ) + "]<|END_ACTION|>"
    ),
    "pythonic": python("[", ", ", "]"), "llama4_pythonic": python("[", ", ", "]"),
    "lfm2": python("<|tool_call_start|>[", ", ", "]<|tool_call_end|>"),
    "olmo3": python("<function_calls>\n", "\n", "\n</function_calls>"),
    "openai": lambda calls: SPELLED["openai"](calls).removesuffix("<|call|>"),
    "minicpm5": lambda calls: SPELLED["minicpm5"](calls).replace("</function>\n", "</function>"),
    "glm47": lambda calls: SPELLED["glm47"](calls).replace("</tool_call>\n", "</tool_call>"),
    "iquest_q1": lambda calls: SPELLED["iquest_q1"](calls).replace("call>\n", "call>"),
    "step3": lambda calls: SPELLED["step3"](calls).replace(
        _STEP3.format("call_end") + "\n", _STEP3.format("call_end")
    ),
}  # fmt: skip
