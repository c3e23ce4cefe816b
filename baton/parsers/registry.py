"""Chooses the formats of a model's answers: by the operator's option, or by the chat template.

With `auto` the chat template's text decides: the first row below whose marks all occur in the text
names the format. Pure, except for a line in the log.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Collection
from dataclasses import dataclass, replace
from typing import Final

from baton.parsers import formats, harmony, reasoning
from baton.parsers.formats import TOOL_FORMATS
from baton.parsers.grammar import ToolFormat
from baton.parsers.reasoning import REASONING_FORMATS, ReasoningFormat
from baton.runtime.config import AUTO

log = logging.getLogger(__name__)

TOOL_PARSERS: Final = (AUTO, *TOOL_FORMATS)
REASONING_PARSERS: Final = (AUTO, *REASONING_FORMATS)
_Row = tuple[str, tuple[str, ...]]
_HARMONY: Final = (harmony.CHANNEL, harmony.MESSAGE)
# Marks that only one model family has come before marks that several families share.
TOOL_MARKS: Final[tuple[_Row, ...]] = (
    ("", ("<rfl:parameter",)),  # messages as in harmony, but other arguments: not supported
    ("openai", _HARMONY),
    ("gemma4", ("<|tool_call>",)),
    ("functiongemma", ("<start_function_call>",)),
    ("kimi_k2", ("<|tool_calls_section_begin|>",)),
    ("minimax_m2", ("<minimax:tool_call>",)),
    ("minimax_m3", ("]<]minimax[>[",)),
    ("deepseek_v32", ("｜DSML｜", "function_calls>")),  # noqa: RUF001
    ("deepseek_v4", ("｜DSML｜", "tool_calls>")),  # noqa: RUF001
    ("deepseek_v3", ("<｜tool▁calls▁begin｜>", "```json")),  # noqa: RUF001
    ("deepseek_v31", ("<｜tool▁calls▁begin｜>",)),  # noqa: RUF001
    ("step3", ("<steptml:invoke",)),
    ("seed_oss", ("<seed:tool_call>",)),
    ("hy_v3", ("<tool_sep", "<arg_key")),
    ("iquest_q1", ("<iquest_tool_call>",)),
    ("glm45", ("<arg_key>", "</arg_key>\n")),
    ("glm45", ("<arg_key>", "</arg_key>\\n")),
    ("glm45", ("<arg_key>", "\\n<arg_value>")),
    ("glm47", ("<arg_key>",)),
    ("dots", ("<dots_function_call>",)),
    ("minicpm5", ("<function name=",)),
    ("qwen3_coder", ("<function=", "<parameter=")),
    ("longcat", ("<longcat_tool_call>",)),
    ("apertus", ("<|tools_prefix|>",)),
    ("cohere_command3", ("<|START_ACTION|>",)),
    ("solar_open", ("<|tool_call:begin|>",)),
    ("nemotron_json", ("<TOOLCALL>",)),
    ("olmo3", ("<function_calls>",)),
    ("internlm", ("<|plugin|>",)),
    ("lfm2", ("<|tool_call_start|>",)),
    ("gigachat3", ("'function call'", "role_sep")),
    ("gigachat3", ("<|function_call|>",)),
    ("llama4_pythonic", ("func_name1(", "<|header_start|>")),
    ("pythonic", ("func_name1(",)),
    ("granite", ("<|tool_call|>", "<|start_of_role|>")),
    ("xlam", ("calls in a single JSON array",)),
    ("phi4_mini_json", ("functools[",)),
    ("phi4_mini_json", ("<|tool|>", "<|/tool|>")),
    ("jamba", ("<tool_calls>", "<|bom|>")),
    ("minimax", ("<tool_calls>", "<beginning_of_sentence>")),
    ("hunyuan_a13b", ("<tool_calls>",)),
    ("mistral", ("[TOOL_CALLS]",)),
    ("llama3_json", ('"parameters": dictionary',)),
    ("hermes", ("<tool_call>",)),
)
REASONING_MARKS: Final[tuple[_Row, ...]] = (
    ("openai_gptoss", _HARMONY),
    ("gemma4", ("<|channel>",)),
    ("mistral", ("[THINK]",)),
    ("seed_oss", ("<seed:think>",)),
    ("cohere_command3", ("<|START_THINKING|>",)),
    ("apertus", ("<|inner_prefix|>",)),
    ("solar_open", ("<|think|>", "<|begin|>")),
    ("kimi_vl", ("◁think▷",)),
    ("minimax_m3", ("<mm:think>",)),
    ("hy_v3", ("<think{}>",)),
    ("granite", ("Here is my thought process",)),
    ("granite", ("<think></think>", "<response></response>")),
    ("hunyuan_a13b", ("<answer>", "<think>")),
    ("think_tags", ("<think>",)),
    ("think_tags", ("</think>",)),
)


@dataclass(frozen=True, slots=True)
class Choice:
    """The operator's options: names of parsers, AUTO, or None for no parser.

    `calls`: whether calls are looked for that the model makes by itself, not forced by tool_choice.
    """

    tool_parser: str | None = None
    reasoning_parser: str | None = None
    calls: bool = True


@dataclass(frozen=True, slots=True)
class Formats:
    """The formats of one model's answers.

    `tools`: the format of calls; it is always set, because forced calls need it. `looked_for`:
    calls that the model makes by itself are read, too. `reasoning` None: reasoning is not looked
    for.
    """

    tools: ToolFormat = formats.HERMES
    reasoning: ReasoningFormat | None = None
    looked_for: bool = False


def formats_of(choice: Choice, template: str | None, specials: Collection[str]) -> Formats:
    """Return the formats that the options choose. Logs what `auto` has found.

    `template`: the chat template's text. `specials`: the texts of the special tokens.
    """
    text, parser = template or "", choice.tool_parser
    if parser == AUTO:
        parser = _found("tool-call", TOOL_MARKS, text)
    thought = choice.reasoning_parser
    if thought == AUTO:
        thought = _found("reasoning", REASONING_MARKS, text)
    tools = None if parser is None else _spelled(parser, text, specials)
    if tools is harmony.FORMAT:  # a format of calls and of reasoning at once
        thought = "openai_gptoss"
    reads = None if thought is None else REASONING_FORMATS[thought]
    if thought == "hy_v3":
        suffix = _suffix("think", specials)
        reads = replace(reasoning.HY_V3, open=(f"<think{suffix}>",), close=(f"</think{suffix}>",))
    default = harmony.FORMAT if thought == "openai_gptoss" else formats.HERMES
    return Formats(tools or default, reads, choice.calls and tools is not None)


def _found(kind: str, rows: tuple[_Row, ...], template: str) -> str | None:
    """Return the name in the first row that fits the template; None if no row does. Logs both."""
    name = next((name for name, marks in rows if all(mark in template for mark in marks)), "")
    if name:
        log.info("%s parser: %s, by the chat template", kind, name)
        return name
    log.warning("%s parser: the chat template has no marks of a known format; none is used", kind)
    return None


def _spelled(name: str, template: str, specials: Collection[str]) -> ToolFormat:
    """Return the variant of a format that this model writes: some families changed their marks."""
    if name == "mistral" and "[ARGS]" in specials:
        return formats.MISTRAL_V11
    if name == "phi4_mini_json" and "functools" not in template and "<|tool_call|>" in specials:
        return formats.PHI4_MINI
    if name == "hy_v3":
        return formats.hy_v3(_suffix("tool_calls", specials))
    return TOOL_FORMATS[name]


def _suffix(tag: str, specials: Collection[str]) -> str:
    """Return the suffix that a tokenizer adds to the tag's name, "" if it adds none."""
    found = (re.fullmatch(rf"<{tag}(:[^>]+)>", special) for special in specials)
    return next((match[1] for match in found if match), "")
