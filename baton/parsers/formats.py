"""The formats of tool calls, each described by the marks that models write.

Both the reading of calls and the grammar of a forced call follow from these descriptions. Sources:
the chat templates and model cards of the named models. Names are those of vLLM's
--tool-call-parser.
"""

from __future__ import annotations

from typing import Final

from baton.guided.xml_parameters import QWEN, ParameterMarks
from baton.parsers import harmony
from baton.parsers.frames import CallFrame, framed
from baton.parsers.grammar import ToolFormat
from baton.parsers.json_calls import Either, JsonObject, KeyedObject, Named
from baton.parsers.literals import Literals
from baton.parsers.nested import Nested
from baton.parsers.tagged import Tagged

# ---- a JSON object with name and arguments ----

_OBJECT: Final = JsonObject()
_TOOL_CALL: Final = CallFrame("<tool_call>\n", "\n</tool_call>", "\n")
_LISTED: Final = CallFrame(
    opening="<tool_calls>", closing="</tool_calls>", separator=", ", array=True
)

HERMES: Final = framed("hermes", _TOOL_CALL, _OBJECT)
LONGCAT: Final = framed(
    "longcat", CallFrame("<longcat_tool_call>\n", "\n</longcat_tool_call>", "\n"), _OBJECT
)
LLAMA3_JSON: Final = framed(
    "llama3_json",
    CallFrame(separator="; ", bare="{", also=(("<|python_tag|>", ""),)),
    JsonObject("parameters"),
)
GRANITE: Final = framed(
    "granite",
    CallFrame(opening="<|tool_call|>", separator=", ", array=True,
          also=(("<tool_call>", "</tool_call>"),)),
    _OBJECT,
)  # fmt: skip
GRANITE_20B_FC: Final = framed("granite-20b-fc", CallFrame("<function_call> "), _OBJECT)
HUNYUAN_A13B: Final = framed("hunyuan_a13b", _LISTED, _OBJECT)
JAMBA: Final = framed("jamba", _LISTED, _OBJECT)
MINIMAX: Final = framed(
    "minimax",
    CallFrame(opening="<tool_calls>\n", separator="\n", closing="\n</tool_calls>"),
    _OBJECT,
)
NEMOTRON_JSON: Final = framed(
    "nemotron_json",
    CallFrame(opening="<TOOLCALL>", closing="</TOOLCALL>", separator=", ", array=True),
    _OBJECT,
)
PHI4_MINI_JSON: Final = framed(
    "phi4_mini_json",
    CallFrame(opening="functools", separator=", ", array=True,
          also=(("<|tool_call|>", "<|/tool_call|>"),)),
    _OBJECT,
)  # fmt: skip
PHI4_MINI: Final = framed(
    "phi4_mini_json",
    CallFrame(opening="<|tool_call|>", closing="<|/tool_call|>", separator=", ", array=True,
          also=(("functools", ""),)),
    _OBJECT,
)  # fmt: skip
XLAM: Final = framed(
    "xlam",
    CallFrame(separator=", ", array=True, bare="[", also=(
        ("<tool_call>", "</tool_call>"), ("[TOOL_CALLS]", ""), ("```json", "```"),
    )),
    _OBJECT,
)  # fmt: skip
INTERNLM: Final = framed(
    "internlm",
    CallFrame("<|action_start|><|plugin|>\n", "<|action_end|>", "\n"),
    JsonObject("parameters"),
)
COHERE: Final = framed(
    "cohere_command3",
    CallFrame(opening="<|START_ACTION|>", closing="<|END_ACTION|>", separator=", ", array=True),
    JsonObject("parameters", "tool_name", '"tool_call_id": "ID", '),
)
GIGACHAT3: Final = framed(
    "gigachat3",
    CallFrame("function call<|role_sep|>\n", also=(("<|function_call|>", "<|message_sep|>"),)),
    _OBJECT,
)
APERTUS: Final = framed(
    "apertus",
    CallFrame(opening="<|tools_prefix|>", closing="<|tools_suffix|>", separator=", ", array=True),
    KeyedObject(),
)

# ---- a name, then the arguments as JSON ----

_MISTRAL_NAMED: Final = Named("[ARGS]", id_after="[CALL_ID]")
MISTRAL: Final = framed(
    "mistral", CallFrame(opening="[TOOL_CALLS]", separator=", ", array=True),
    Either(_OBJECT, _MISTRAL_NAMED), short_ids=True,
)  # fmt: skip
MISTRAL_V11: Final = framed(
    "mistral", CallFrame("[TOOL_CALLS]"), Either(_MISTRAL_NAMED, _OBJECT), short_ids=True
)  # fmt: skip
KIMI_K2: Final = framed(
    "kimi_k2",
    CallFrame("<|tool_call_begin|>", "<|tool_call_end|>",
          opening="<|tool_calls_section_begin|>", closing="<|tool_calls_section_end|>"),
    Named("<|tool_call_argument_begin|>", before="functions.", id_after=":",
          id_pattern="[0-9]{1,3}"),
)  # fmt: skip
_DEEPSEEK: Final = CallFrame(
    "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>",  # noqa: RUF001  the model's own bars
    opening="<｜tool▁calls▁begin｜>", closing="<｜tool▁calls▁end｜>",  # noqa: RUF001
)  # fmt: skip
_DEEPSEEK_SEPARATOR: Final = "<｜tool▁sep｜>"  # noqa: RUF001
DEEPSEEK_V3: Final = framed(
    "deepseek_v3", _DEEPSEEK,
    Named("\n```json\n", "\n```", before=f"function{_DEEPSEEK_SEPARATOR}"),
)  # fmt: skip
DEEPSEEK_V31: Final = framed("deepseek_v31", _DEEPSEEK, Named(_DEEPSEEK_SEPARATOR))
SOLAR_OPEN: Final = framed(
    "solar_open",
    CallFrame("<|tool_call:begin|>", "<|tool_call:end|>", opening="<|tool_calls|>",
          closing="<|calls|>"),
    Named("<|tool_call:args|>", id_before="<|tool_call:name|>", id_pattern="[a-z0-9]{10}"),
)  # fmt: skip

# ---- parameters between tags ----

_INLINE: Final = ParameterMarks("<parameter=", ">", "</parameter>\n")
_NAMED: Final = ParameterMarks('<parameter name="', '">', "</parameter>\n")
_INVOKE: Final = '<invoke name="'


def _function(parameters: ParameterMarks) -> Tagged:
    return Tagged("<function=", ">\n", parameters, "</function>")


QWEN3_CODER: Final = framed(
    "qwen3_coder", CallFrame("<tool_call>\n", "\n</tool_call>", "\n", lone="<function="),
    _function(QWEN),
)  # fmt: skip
MIMO: Final = framed(
    "mimo",
    CallFrame("<tool_call>\n", "\n</tool_call>", "\n", lone="<function="),
    _function(_INLINE),
)
SEED_OSS: Final = framed(
    "seed_oss", CallFrame("<seed:tool_call>\n", "\n</seed:tool_call>", "\n", lone="<function="),
    _function(_INLINE),
)  # fmt: skip
MINIMAX_M2: Final = framed(
    "minimax_m2",
    CallFrame(opening="<minimax:tool_call>\n", closing="</minimax:tool_call>", lone=_INVOKE),
    Tagged(_INVOKE, '">\n', _NAMED, "</invoke>\n"),
)  # fmt: skip
DOTS: Final = framed(
    "dots",
    CallFrame(opening="<dots_function_call>\n", closing="</dots_function_call>"),
    Tagged(_INVOKE, '">\n', _NAMED, "</invoke>\n"),
)
MINICPM5: Final = framed(
    "minicpm5",
    CallFrame(lone='<function name="'),
    Tagged(
        '<function name="', '">', ParameterMarks('<param name="', '">', "</param>"), "</function>",
        quote=("<![CDATA[", "]]>"),
    ),
)  # fmt: skip
_ARGS: Final = ParameterMarks("<arg_key>", "</arg_key>\n", "</arg_value>\n", "<arg_value>")
_ARGS_INLINE: Final = ParameterMarks("<arg_key>", "</arg_key>", "</arg_value>", "<arg_value>")
GLM45: Final = framed(
    "glm45", CallFrame("<tool_call>", separator="\n"), Tagged("", "\n", _ARGS, "</tool_call>")
)
GLM47: Final = framed(
    "glm47", CallFrame("<tool_call>"), Tagged("", "", _ARGS_INLINE, "</tool_call>")
)
IQUEST_Q1: Final = framed(
    "iquest_q1",
    CallFrame("<iquest_tool_call>"),
    Tagged("", "", _ARGS_INLINE, "</iquest_tool_call>"),
)


def hy_v3(suffix: str = "") -> ToolFormat:
    """Return the format of Hunyuan 3, whose tokenizers add `suffix` to each tag."""
    marks = ParameterMarks(
        f"<arg_key{suffix}>", f"</arg_key{suffix}>\n", f"</arg_value{suffix}>\n",
        f"<arg_value{suffix}>",
    )  # fmt: skip
    frame = CallFrame(
        f"<tool_call{suffix}>",
        opening=f"<tool_calls{suffix}>\n", closing=f"</tool_calls{suffix}>",
    )  # fmt: skip
    sep, end = f"<tool_sep{suffix}>\n", f"</tool_call{suffix}>\n"
    return framed("hy_v3", frame, Tagged("", sep, marks, end))


def _dsml(name: str, calls: str) -> ToolFormat:
    """Return the format of DeepSeek V3.2 and later: each parameter says whether it is text."""
    mark = "｜DSML｜"  # noqa: RUF001
    marks = ParameterMarks(
        f'<{mark}parameter name="', '" string="true">', f"</{mark}parameter>\n",
        json_key_end='" string="false">',
    )  # fmt: skip
    frame = CallFrame(
        opening=f"<{mark}{calls}>\n", closing=f"</{mark}{calls}>",
        lone=f'<{mark}invoke name="',
    )  # fmt: skip
    return framed(name, frame, Tagged(frame.lone, '">\n', marks, f"</{mark}invoke>\n"))


DEEPSEEK_V32: Final = _dsml("deepseek_v32", "function_calls")
DEEPSEEK_V4: Final = _dsml("deepseek_v4", "tool_calls")
STEP3: Final = framed(
    "step3",
    CallFrame(
        "<｜tool_call_begin｜>function<｜tool_sep｜>", "<｜tool_call_end｜>",  # noqa: RUF001
        opening="<｜tool_calls_begin｜>", closing="<｜tool_calls_end｜>",  # noqa: RUF001
    ),
    Tagged(
        '<steptml:invoke name="', '">',
        ParameterMarks('<steptml:parameter name="', '">', "</steptml:parameter>"),
        "</steptml:invoke>",
    ),
)  # fmt: skip

_M3: Final = "]<]minimax[>["
MINIMAX_M3: Final = framed(
    "minimax_m3",
    CallFrame(opening=f"{_M3}<tool_call>\n", closing=f"{_M3}</tool_call>"),
    Nested(_M3, f'{_M3}<invoke name="', '">', f"{_M3}</invoke>\n"),
)

# ---- pairs of name and value ----

PYTHONIC: Final = framed(
    "pythonic",
    CallFrame(separator=", ", array=True, bare="[", also=(("```tool_code", "```"),)),
    Literals(),
)
LLAMA4_PYTHONIC: Final = framed(
    "llama4_pythonic",
    CallFrame(separator=", ", array=True, bare="[", also=(("<|python_start|>", "<|python_end|>"),)),
    Literals(),
)
LFM2: Final = framed(
    "lfm2",
    CallFrame(
        opening="<|tool_call_start|>", closing="<|tool_call_end|>", separator=", ", array=True
    ),
    Literals(),
)
OLMO3: Final = framed(
    "olmo3",
    CallFrame(opening="<function_calls>\n", separator="\n", closing="\n</function_calls>"),
    Literals(),
)
FUNCTIONGEMMA: Final = framed(
    "functiongemma",
    CallFrame("<start_function_call>", "<end_function_call>"),
    Literals("call:", "{", "}", ":", ",", ("<escape>",)),
)
GEMMA4: Final = framed(
    "gemma4",
    CallFrame("<|tool_call>", "<tool_call|>"),
    Literals("call:", "{", "}", ":", ",", ('<|"|>',)),
)

# The formats by the names that an operator may give; several model families share a format.
TOOL_FORMATS: Final[dict[str, ToolFormat]] = {
    **{
        form.name: form
        for form in (
            HERMES, QWEN3_CODER, LLAMA3_JSON, MISTRAL, DEEPSEEK_V3, DEEPSEEK_V31, DEEPSEEK_V32,
            DEEPSEEK_V4, MINIMAX_M3, KIMI_K2, GLM45, GLM47, MINIMAX_M2, MINIMAX, GRANITE,
            GRANITE_20B_FC, PHI4_MINI_JSON, XLAM, PYTHONIC, LLAMA4_PYTHONIC, OLMO3, LFM2, GEMMA4,
            FUNCTIONGEMMA, SEED_OSS, MIMO, STEP3, HUNYUAN_A13B, hy_v3(), JAMBA, INTERNLM, LONGCAT,
            APERTUS, COHERE, GIGACHAT3, NEMOTRON_JSON, SOLAR_OPEN, DOTS, MINICPM5, IQUEST_Q1,
            harmony.FORMAT,
        )
    },
    "qwen3_json": HERMES, "granite4": HERMES, "ernie45": HERMES,
    "qwen3_xml": QWEN3_CODER, "step3p5": QWEN3_CODER, "step5": QWEN3_CODER,
    "llama4_json": LLAMA3_JSON, "poolside_v1": GLM47, "ling3": GLM45, "cohere_command4": COHERE,
}  # fmt: skip
