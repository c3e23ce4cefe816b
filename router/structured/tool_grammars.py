"""Grammars of tool calls: what a model must write so that this router's parsers read a valid call.

Each format of router/parsers has a style here: the texts around a call's name and arguments, as the
model's own chat template writes them. They become structural tags, which both backends follow:

    forced      one call, or several, and nothing else          tool_choice required, or a function
    offered     free text; whatever begins a call must be one   auto, with tools that are strict
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final, cast

from baton.grammars import lenient
from router.parsers import deepseek, hermes, mistral

Format = dict[str, Any]

# A function without any takes none, says OpenAI.
_NO_PARAMETERS: Final = {"type": "object", "properties": {}, "additionalProperties": False}
_NO_CALL: Final = r"([^{\s](.|\n)*)?"  # text that no reader takes for a call without a marker


@dataclass(frozen=True, slots=True)
class Style:
    """`begin` holds NAME where the function's name goes. `opening` and `closing` stand around all
    calls together. `trigger`: what begins a call in free text, "" = only the answer's start."""

    begin: str
    end: str
    separator: str
    trigger: str
    opening: str = ""
    closing: str = ""
    arguments: str = "json_schema"


_QWEN_CODER: Final = Style(
    f"{hermes.START}\n<function=NAME>\n", f"</function>\n{hermes.END}", "\n", hermes.START,
    arguments="qwen_xml_parameter",
)  # fmt: skip
_LLAMA: Final = Style('{"name": "NAME", "parameters": ', "}", "; ", "")
_DEEPSEEK: Final = Style(
    "", "", "", deepseek.CALLS, opening=deepseek.CALLS, closing=deepseek.CALLS_END
)
STYLES: Final[dict[str, Style]] = {
    "hermes": Style(
        f'{hermes.START}\n{{"name": "NAME", "arguments": ', f"}}\n{hermes.END}", "\n", hermes.START
    ),
    "qwen3_coder": _QWEN_CODER,
    "qwen3_xml": _QWEN_CODER,
    "llama3_json": _LLAMA,
    "llama4_json": _LLAMA,
    "mistral": Style(
        '{"name": "NAME", "arguments": ', "}", ", ", mistral.START,
        opening=f"{mistral.START}[", closing="]",
    ),
    "deepseek_v3": replace(
        _DEEPSEEK,
        begin=f"{deepseek.CALL}function{deepseek.SEPARATOR}NAME\n{deepseek.FENCE}json\n",
        end=f"\n{deepseek.FENCE}{deepseek.CALL_END}",
        separator="\n",
    ),
    "deepseek_v31": replace(
        _DEEPSEEK, begin=f"{deepseek.CALL}NAME{deepseek.SEPARATOR}", end=deepseek.CALL_END
    ),
}  # fmt: skip
_MISTRAL_V11: Final = Style(f"{mistral.START}NAME{mistral.ARGS}", "", "", mistral.START)


def style_of(parser: str, specials: Collection[str]) -> Style:
    """The style of a parser. Mistral's newer tokenizers are known by a token of theirs."""
    if parser == "mistral" and mistral.ARGS in specials:
        return _MISTRAL_V11
    return STYLES[parser]


def forced(style: Style, tools: Sequence[Mapping[str, Any]], several: bool) -> Format:
    """Calls of `tools`, at least one, and no text."""
    calls = {
        "type": "tags_with_separator",
        "tags": [_tag(style, index, tool) for index, tool in enumerate(tools)],
        "separator": style.separator,
        "at_least_one": True,
        "stop_after_first": not several,
    }
    if not style.opening:
        return calls
    return {"type": "tag", "begin": style.opening, "content": calls, "end": style.closing}


def offered(style: Style, tools: Sequence[Mapping[str, Any]], several: bool) -> Format:
    """Text or calls, as the model likes; a call is always a valid one."""
    if not style.trigger:
        text = {"type": "regex", "pattern": _NO_CALL}
        return {"type": "or", "elements": [forced(style, tools, several), text]}
    calls = forced(style, tools, several)
    tags = [calls] if style.opening else calls["tags"]
    return {
        "type": "triggered_tags",
        "triggers": [style.trigger],
        "tags": tags,
        "at_least_one": False,
        "stop_after_first": not several,
    }


def _tag(style: Style, index: int, tool: Mapping[str, Any]) -> Format:
    function = cast("Mapping[str, Any]", tool["function"])
    name = str(function["name"])
    given = cast("Mapping[str, Any] | None", function.get("parameters"))
    schema = dict(_NO_PARAMETERS) if given is None else {"type": "object", **given}
    if function.get("strict") is not True:
        schema = lenient(schema)
    return {
        "type": "tag",
        "begin": style.begin.replace("NAME", name),
        "content": {"type": style.arguments, "json_schema": schema},
        "end": style.end,
    }
