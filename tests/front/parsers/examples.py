"""Answers of models in each format: the text, and the content and calls that it means."""

from __future__ import annotations

DS_CALLS, DS_END = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"  # noqa: RUF001
DS_CALL, DS_CALL_END = "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>"  # noqa: RUF001
DS_SEP = "<｜tool▁sep｜>"  # noqa: RUF001

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
        '<tool_call>{"name": "f", "arguments": "{\\"a\\":  \\"\\\\u00e9\\"}"}</tool_call>',
        "",
        [["f", '{"a":  "\\u00e9"}']],
    ),
    (
        "hermes",
        '<tool_call>{"arguments": "{}", "name": "f"}</tool_call>',
        "",
        [["f", "{}"]],
    ),
    *(
        ("hermes", f'<tool_call>{{"name": "f", "arguments": {text}', "", [["f", text]])
        for text in ('"Oslo"', '"[1]"', '"{\\"a\\": 1', '"{\\"a\\"}"', '"{\\"a\\": \\"\\ud800\\"}"')
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
    coder("object", "['a', 1, {'b': None}]", '["a", 1, {"b": null}]'),
    coder("object", "['a', b]", "\"['a', b]\""),
    coder("mixed", "['a', 1]", "\"['a', 1]\""),
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

OSLO = ["get_weather", '{"city": "Oslo"}']
PARIS = ["get_weather", '{"city": "Paris"}']
OSLO_JSON = '{"name": "get_weather", "arguments": {"city": "Oslo"}}'
KIMI = "<|tool_call_begin|>functions.get_weather:{}<|tool_call_argument_begin|>{}<|tool_call_end|>"
KIMI_BOTH = KIMI.format(0, OSLO[1]) + KIMI.format(1, PARIS[1])
GLM = "<tool_call>get_weather\n<arg_key>city</arg_key>\n<arg_value>Oslo</arg_value>\n</tool_call>"
INVOKE = '<invoke name="get_weather">\n<parameter name="city">Oslo</parameter>\n</invoke>'
DSML = "｜DSML｜"  # noqa: RUF001
EVENT = [
    "Calendar.create_event",
    '{"title": "demo", "who": ["Al\\"", "Bo"], "meta": {"priority": 1.5, "x": null, "y": true}}',
]

# As model cards and the guides beside them show the calls; and what models make of that at times.
_PUBLISHED: list[Example] = [
    ("kimi_k2", f"<|tool_calls_section_begin|>{KIMI_BOTH}<|tool_calls_section_end|>", "",
     [OSLO, PARIS]),
    ("kimi_k2", f"I look.<|tool_calls_section_begin|> {KIMI.format(7, OSLO[1])}", "I look.",
     [OSLO]),
    ("kimi_k2", KIMI.format(0, OSLO[1]), "", [OSLO]),
    same("kimi_k2", "<|tool_calls_section_begin|> none"),
    same("kimi_k2", "<|tool_call_begin|>functions.f:0"),
    ("glm45", f"\n{GLM}\n<tool_call>now\n</tool_call>", "", [OSLO, ["now", "{}"]]),
    ("glm47", ("So.<tool_call>now</tool_call><tool_call>f<arg_key>a</arg_key><arg_value>1\n"
     "</arg_value></tool_call>"), "So.", [["now", "{}"], ["f", '{"a": "1\\n"}']]),
    ("glm47", GLM, "", [OSLO]),
    ("glm47", "<tool_call>f<arg_key>count</arg_key><arg_value> 3 </arg_value></tool_call> ok",
     " ok", [["f", '{"count": 3}']]),
    ("glm47", "<tool_call>f<arg_key>text</arg_key><arg_value>ab</arg_val", "",
     [["f", '{"text": "ab']]),
    same("glm45", "Use <tool_call> tags, or <tool_call>f(1)"),
    ("minimax_m2", f"<minimax:tool_call>\n{INVOKE}\n{INVOKE}\n</minimax:tool_call>", "",
     [OSLO, OSLO]),
    ("minimax_m2", f"Hm.\n\n<minimax:tool_call>{INVOKE}</minimax:tool_call>\nok", "Hm.\nok",
     [OSLO]),
    ("minimax_m2", '<invoke name="f"><parameter name="items">["a", "\\"b\\""]</parameter></invoke>',
     "", [["f", '{"items": ["a", "\\"b\\""]}']]),
    same("minimax_m2", "<minimax:tool_call>\nnothing"),
    ("deepseek_v32", (f'<{DSML}function_calls>\n<{DSML}invoke name="f">\n'
     f'<{DSML}parameter name="a" string="true">5</{DSML}parameter>\n'
     f'<{DSML}parameter name="b" string="false">5</{DSML}parameter>\n'
     f'<{DSML}parameter name="text">6</{DSML}parameter>\n</{DSML}invoke>\n</{DSML}function_calls>'),
     "", [["f", '{"a": "5", "b": 5, "text": 6}']]),
    ("deepseek_v32", f'<{DSML}invoke name="f">\n</{DSML}invoke>', "", [["f", "{}"]]),
    ("seed_oss", ("<seed:tool_call>\n<function=f>\n<parameter=text>a\nb</parameter>\n</function>\n"
     "</seed:tool_call>"), "", [["f", '{"text": "a\\nb"}']]),
    ("step3", ("<｜tool_calls_begin｜>\n<｜tool_call_begin｜>function<｜tool_sep｜>"  # noqa: RUF001
     '<steptml:invoke name="f"><steptml:parameter name="count">3</steptml:parameter>'
     "</steptml:invoke><｜tool_call_end｜>\n<｜tool_calls_end｜>"), "",  # noqa: RUF001
     [["f", '{"count": 3}']]),
    ("minicpm5", ('<function name="f"><param name="text"><![CDATA[a < b</param>]]></param>'
     '<param name="count">3</param></function>'), "",
     [["f", '{"text": "a < b</param>", "count": 3}']]),
    ("llama4_pythonic", ('<|python_start|>[get_weather(city="Oslo"), get_weather(city=\'Paris\')]'
     "<|python_end|>"), "", [OSLO, PARIS]),
    ("llama4_pythonic", "[get_weather(city='Oslo'),\n now()]\nDone.", "\nDone.",
     [OSLO, ["now", "{}"]]),
    ("lfm2", ('<|tool_call_start|>[Calendar.create_event(title="demo", who=["Al\\"", \'Bo\'], '
     'meta={"priority": 1.5, \'x\': None, "y": true})]<|tool_call_end|>Ok'), "Ok", [EVENT]),
    ("pythonic", "[f(a=-1_000, b=.5, c=0x1F, d=(1, (2,)), e=[], f={}, g='\\x41\\u00e9\\n\\q')]", "",
     [["f", ('{"a": -1000, "b": 0.5, "c": "0x1F", "d": [1, [2]], "e": [], "f": {}, '
       '"g": "\\u0041\\u00e9\\n\\\\q"}')]]),
    ("pythonic", "```tool_code\n[now()]\n```", "", [["now", "{}"]]),
    ("pythonic", "[f(a=[1, 2", "", [["f", '{"a": [1, ']]),
    ("pythonic", "[f(a=1 b=2)]", "", [["f", '{"a": "1 b=2"}']]),
    same("pythonic", "[so](http://x.y) it is"),
    same("pythonic", "[f(x)] is not a call"),
    same("pythonic", " [1, 2]"),
    ("olmo3", "I look.<function_calls>get_weather(city='Oslo')\nnow()</function_calls>", "I look.",
     [OSLO, ["now", "{}"]]),
    ("gemma4", '<|tool_call>call:get_weather{city:<|"|>Oslo<|"|>}<tool_call|>', "", [OSLO]),
    ("gemma4", ('So<|tool_call>call:f{a:{<|"|>k<|"|>:[1,<|"|>x, "y"}<|"|>],n:null},b:None,c:True}'
     "<tool_call|>"), "So",
     [["f", '{"a": {"k": [1, "x, \\"y\\"}"], "n": null}, "b": null, "c": true}']]),
    ("functiongemma", ("<start_function_call>call:get_weather{city:<escape>Oslo<escape>}"
     "<end_function_call><start_function_call>call:f{unit:celsius,n:3}<end_function_call>"), "",
     [OSLO, ["f", '{"unit": "celsius", "n": 3}']]),
    same("gemma4", "<|tool_call>nothing"),
    ("granite", f"<|tool_call|>[{OSLO_JSON}, {OSLO_JSON}]", "", [OSLO, OSLO]),
    ("granite", f"<tool_call> [{OSLO_JSON}]", "", [OSLO]),
    ("granite-20b-fc", f"<function_call> {OSLO_JSON} <function_call> {OSLO_JSON}", "",
     [OSLO, OSLO]),
    ("phi4_mini_json", f"functools[{OSLO_JSON}]", "", [OSLO]),
    ("phi4_mini_json", f"<|tool_call|>[{OSLO_JSON}]<|/tool_call|>", "", [OSLO]),
    ("xlam", f"[{OSLO_JSON}, {OSLO_JSON}]", "", [OSLO, OSLO]),
    ("xlam", f"I look.\n```json\n[{OSLO_JSON}]\n```", "I look.", [OSLO]),
    ("xlam", f"<tool_call>[{OSLO_JSON}]</tool_call>", "", [OSLO]),
    ("xlam", f"[TOOL_CALLS][{OSLO_JSON}]", "", [OSLO]),
    same("xlam", '[{"city": "Oslo"}]'),
    ("hunyuan_a13b", f"<tool_calls>[{OSLO_JSON}]</tool_calls>", "", [OSLO]),
    ("jamba", f"<tool_calls>[\n    {OSLO_JSON},\n    {OSLO_JSON}\n]</tool_calls>", "",
     [OSLO, OSLO]),
    ("nemotron_json", f"<TOOLCALL>[{OSLO_JSON}]</TOOLCALL>", "", [OSLO]),
    ("internlm", f"Ok<|action_start|><|plugin|>\n{OSLO_JSON}<|action_end|>\n", "Ok", [OSLO]),
    ("cohere_command3", ('<|START_ACTION|>[\n    {"tool_call_id": "0", "tool_name": "get_weather", '
     '"parameters": {"city": "Oslo"}}\n]<|END_ACTION|>'), "", [OSLO]),
    ("apertus", '<|tools_prefix|>[{"get_weather": {"city": "Oslo"}}]<|tools_suffix|>', "", [OSLO]),
    same("apertus", '<|tools_prefix|>[{"get_weather": 3}]<|tools_suffix|>'),
    ("gigachat3", f"function call<|role_sep|>\n{OSLO_JSON}", "", [OSLO]),
    ("gigachat3", f"<|function_call|>{OSLO_JSON}<|message_sep|>", "", [OSLO]),
    ("longcat", f"<longcat_tool_call>{OSLO_JSON}</longcat_tool_call>", "", [OSLO]),
    ("minimax", f"<tool_calls>\n{OSLO_JSON}\n{OSLO_JSON}\n</tool_calls>", "", [OSLO, OSLO]),
]  # fmt: skip

EXAMPLES = [*_HERMES, *_QWEN3_CODER, *_LLAMA3, *_MISTRAL, *_DEEPSEEK, *_PUBLISHED]
