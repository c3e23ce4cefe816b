"""Answers of models in each format: the text, and the content and calls that it means."""

from __future__ import annotations

from router.parsers.deepseek import CALL as DS_CALL
from router.parsers.deepseek import CALL_END as DS_CALL_END
from router.parsers.deepseek import CALLS as DS_CALLS
from router.parsers.deepseek import CALLS_END as DS_END
from router.parsers.deepseek import SEPARATOR as DS_SEP

Example = tuple[str, str, str, list[list[str]]]  # format, text, content, [name, arguments]*

HERMES = '<tool_call>\n{"name": "f", "arguments": {"a":  1}}\n</tool_call>'
A1 = ["f", '{"a":  1}']
G = ["g", "{}"]
F_JSON = '{"name": "f", "arguments": {"a":  1}}'
G_JSON = '{"name": "g", "arguments": {}}'
F_LLAMA = '{"name": "f", "parameters": {"a":  1}}'


def same(form: str, text: str) -> Example:
    """Text that only looks like a call."""
    return form, text, text, []


_HERMES: list[Example] = [
    ("hermes", HERMES, "", [A1]),
    ("hermes", f"I will look.\n\n{HERMES}\n{HERMES}\n", "I will look.", [A1, A1]),
    ("hermes", f"{HERMES}\nDone. ", "\nDone. ", [A1]),
    ("hermes", '<tool_call>{"arguments": {"a":  1}, "name": "f"}</tool_call>', "", [A1]),
    ("hermes", f"<tool_call>{F_JSON}", "", [A1]),
    ("hermes", f"<tool_call>{F_JSON}{HERMES}", "", [A1, A1]),
    (
        "hermes",
        '<tool_call>{"name": "f", "arguments": {"a": "}</tool_call>"}}</tool_call>',
        "",
        [["f", '{"a": "}</tool_call>"}']],
    ),
    (
        "hermes",
        '<tool_call>{"name": "f", "arguments": "{\\"a\\": 1}"}</tool_call>',
        "",
        [["f", '"{\\"a\\": 1}"']],
    ),
    ("hermes", '<tool_call>{"name": "f", "arguments": {"a": [1', "", [["f", '{"a": [1']]),
    (
        "hermes",
        '<tool_call>{"name": "f", "arguments": {"a": [1}}</tool_call>.',
        ".",
        [["f", '{"a": [1}}']],
    ),
    ("hermes", f"<tool_call> no {HERMES}", "<tool_call> no", [A1]),
    same("hermes", "  plain\n"),
    same("hermes", '<tool_call>{"name": "f"}</tool_call>'),
    same("hermes", '<tool_call>{"name": "f", "argum'),
    same("hermes", '<tool_call>{"name": "f", "arguments": '),
    same("hermes", '<tool_call>{"name": "", "arguments": {}}'),
    same("hermes", '<tool_call>{"arguments": {}}</tool_call>'),
    same("hermes", '<tool_call>{"name" "f"}</tool_call>'),
    same("hermes", "<tool_call"),
]


def coder(name: str, value: str, json_text: str) -> Example:
    """A call of Qwen3-Coder's with one parameter, and what its value is as JSON."""
    text = f"<tool_call>\n<function=f>\n<parameter={name}>\n{value}\n</parameter>\n"
    return (
        "qwen3_coder",
        text + "</function>\n</tool_call>",
        "",
        [["f", f'{{"{name}": {json_text}}}']],
    )


_QWEN3_CODER: list[Example] = [
    *(
        coder(name, "12345", '"12345"')
        for name in ("zip", "any", "one", "ref", "empty", "described", "deep")
    ),
    coder("mixed", "12345", "12345"),
    coder("mixed", "1.5", '"1.5"'),
    coder("mixed", "None", '"None"'),
    coder("zip", "null", "null"),
    coder("zip", "true", '"true"'),
    coder("zip", '"996"', '"996"'),
    coder("zip", '{"a": [1]}', '"{\\"a\\": [1]}"'),
    coder("zip", '"so" he said', '"\\"so\\" he said"'),
    coder("one", "1", '"1"'),
    coder("one", '"1"', '"1"'),
    coder("empty", '"996"', '"\\"996\\""'),
    coder("unknown", "12", "12"),
    coder("object", '{"s": "</parameter>"}', '{"s": "</parameter>"}'),
    coder("object", ' [{\n"s": "a\\"</parameter>\\"b"}]\n', '[{\n"s": "a\\"</parameter>\\"b"}]'),
    coder("zip", '"\\n</parameter>"', '"\\n</parameter>"'),
    coder("tag", '"</parameter>"', '"</parameter>"'),
    coder("tag", "no", '"no"'),
    coder("object", '{"s": "open', '"{\\"s\\": \\"open"'),
    coder("object", "{a: 1} ", '"{a: 1} "'),
    coder("object", "['a', 1]", "\"['a', 1]\""),
    coder("zip", "[so](there) {", '"[so](there) {"'),
    coder("zip", '"so', '"\\"so"'),
    coder("zip", '"', '"\\""'),
    (
        "qwen3_coder",
        (
            'Hm.\n<tool_call>\n<function=f>\n<parameter=text>\nline "1"\nline 2\n</parameter>\n'
            "<parameter=count>\n 3\n</parameter>\n</function>\n</tool_call>"
        ),
        "Hm.",
        [["f", '{"text": "line \\"1\\"\\nline 2", "count": 3}']],
    ),
    ("qwen3_coder", "<tool_call>\n<function=f>\n</function>\n</tool_call>", "", [["f", "{}"]]),
    (
        "qwen3_xml",
        (
            "<function=f>\n<parameter=flag>True</parameter>\n<parameter=items>[1, {}]</parameter>"
            "<parameter=any>None</parameter><parameter=new>7</parameter></function>"
        ),
        "",
        [["f", '{"flag": true, "items": [1, {}], "any": null, "new": "7"}']],
    ),
    (
        "qwen3_coder",
        "<tool_call><function=f><parameter=count>three</parameter></function></tool_call>",
        "",
        [["f", '{"count": "three"}']],
    ),
    (
        "qwen3_coder",
        "<tool_call><function=f><parameter=items>[NaN]</parameter></function></tool_call>",
        "",
        [["f", '{"items": "[NaN]"}']],
    ),
    (
        "qwen3_coder",
        "<tool_call>\n<function=f>\n<parameter=text>\nab",
        "",
        [["f", '{"text": "ab']],
    ),
    same("qwen3_coder", "<tool_call>{}"),
    same("qwen3_coder", "<function=>"),
]

_LLAMA3: list[Example] = [
    ("llama3_json", F_LLAMA, "", [A1]),
    (
        "llama3_json",
        '\n{"type": "function", "name": "f", "parameters": {"a":  1}} ; ' + G_JSON + "\n",
        "",
        [A1, G],
    ),
    ("llama3_json", f"<|python_tag|>{F_LLAMA}", "", [A1]),
    ("llama4_json", f"So: <|python_tag|>{F_LLAMA}", "So:", [A1]),
    ("llama3_json", f"{F_LLAMA}; and so on", "; and so on", [A1]),
    ("llama3_json", F_LLAMA + '; {"b": 2}', '; {"b": 2}', [A1]),
    same("llama3_json", ' {"answer": 42}'),
    same("llama3_json", '{"name": "f"}'),
    same("llama3_json", f"It is {F_LLAMA}"),
    same("llama3_json", "<|python_tag|>print(1)"),
]

_MISTRAL: list[Example] = [
    ("mistral", f"[TOOL_CALLS] [{F_JSON}, {G_JSON}]", "", [A1, G]),
    (
        "mistral",
        '[TOOL_CALLS][{"name": "f", "arguments": {"a":  1}, "id": "abcdefghi"}]',
        "",
        [A1],
    ),
    ("mistral", 'Yes.[TOOL_CALLS]f{"a":  1}[TOOL_CALLS]g[ARGS]{}', "Yes.", [A1, G]),
    ("mistral", '[TOOL_CALLS]f[CALL_ID]abc123def[ARGS]{"a":  1}', "", [A1]),
    ("mistral", f"[TOOL_CALLS][{F_JSON}, 3]", ", 3]", [A1]),
    same("mistral", "[TOOL_CALLS] nothing"),
    same("mistral", "[TOOL_CALLS][3]"),
]

_DEEPSEEK: list[Example] = [
    (
        "deepseek_v3",
        (
            f'Hm.{DS_CALLS}{DS_CALL}function{DS_SEP}f\n```json\n{{"a":  1}}\n```{DS_CALL_END}\n'
            f"{DS_CALL}function{DS_SEP}g\n```json\n{{}}\n```{DS_CALL_END}{DS_END}"
        ),
        "Hm.",
        [A1, G],
    ),
    (
        "deepseek_v31",
        (
            f'{DS_CALLS}{DS_CALL}f{DS_SEP}{{"a":  1}}{DS_CALL_END}'
            f"{DS_CALL}g{DS_SEP}{{}}{DS_CALL_END}{DS_END}"
        ),
        "",
        [A1, G],
    ),
    same("deepseek_v3", f"{DS_CALLS} none"),
    same("deepseek_v3", f"{DS_CALLS}{DS_CALL}function{DS_SEP}f\n"),
]

EXAMPLES = [*_HERMES, *_QWEN3_CODER, *_LLAMA3, *_MISTRAL, *_DEEPSEEK]
