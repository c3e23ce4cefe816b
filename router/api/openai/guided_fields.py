"""From the fields that say what form an answer must have: the GuidedDecoding, and the field that
errors name.

    response_format      OpenAI's: json_object, json_schema, structural_tag
    structured_outputs   vLLM's: json, regex, choice, grammar, json_object, structural_tag
    guided_*             vLLM's older spelling
    tools, tool_choice   calls that the model must make, or that must be valid if it makes them

A body may have only one of the first three. Pure: router/prompts/grammar_checks.py checks the
grammar itself, which takes time.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Final, cast

import orjson

from baton.guided.spec import BACKENDS, closed, format_of, lenient
from baton.parsers.grammar import forced, offered
from baton.parsers.message import MessageRules
from baton.parsers.parts import Room
from baton.parsers.reasoning import ReasoningFormat
from baton.parsers.registry import Formats
from baton.protocol.errors import InvalidRequest, UnsupportedFeature
from baton.protocol.sampling import GuidedDecoding
from router.api.openai.bodies import ChatBody, CompletionBody
from router.prompts.grammar_checks import Constraint

_KINDS: Final = ("json", "regex", "choice", "grammar", "json_object", "structural_tag")


def asked_of(body: CompletionBody | ChatBody) -> Constraint | None:
    """Return the constraint of a body's fields other than tools, or None if there is none.

    Raises InvalidRequest, naming the field."""
    found = [
        asked
        for asked in (
            _of_response_format(body.response_format),
            _of_structured_outputs(body.structured_outputs),
            *_of_guided(body),
        )
        if asked is not None
    ]
    backend = body.guided_decoding_backend
    if backend is not None and backend not in BACKENDS:
        message = f"guided_decoding_backend must be one of {', '.join(BACKENDS[1:])}"
        raise InvalidRequest(message, field="guided_decoding_backend")
    if len(found) > 1:
        message = f"{found[0].field} and {found[1].field} cannot be used together"
        raise InvalidRequest(message, field=found[1].field)
    if not found:
        return None
    asked = found[0]
    if backend is not None:
        asked = replace(asked, guided=replace(asked.guided, backend=backend))
    if body.guided_whitespace_pattern is not None:
        whitespace = body.guided_whitespace_pattern
        asked = replace(asked, guided=replace(asked.guided, whitespace=whitespace))
    return asked


def asked_of_chat(
    body: ChatBody, own: Constraint | None, formats: Formats, message: MessageRules | None
) -> Constraint | None:
    """Return the constraint of a chat, or None: from its tools and its `own` fields (asked_of).

    If the answer begins with reasoning, the grammar holds from the end of that reasoning on, or it
    is put into a grammar of the whole answer."""
    thought = None if message is None else message.reasoning
    asked = _asked_of_tools(body, formats, own)
    if asked is None and own is not None and thought is not None and thought.answer is not None:
        whole = _tagged(thought.answer(format_of(own.guided, own.field)), own.guided.backend)
        asked = replace(own, guided=replace(whole, whitespace=own.guided.whitespace))
    asked = asked or own
    opened = message is not None and message.opened
    if asked is not None and thought is not None and opened:
        asked = replace(asked, guided=replace(asked.guided, starts_after=thought.close[0]))
    return limited(asked, body.thinking_token_budget, thought, opened)


def limited(
    asked: Constraint | None, budget: int | None, thought: ReasoningFormat | None, opened: bool
) -> Constraint | None:
    """Return the constraint with `budget` as the most tokens of reasoning; unchanged without one.

    `thought`: the format of the reasoning. `opened`: the answer begins within reasoning.
    Raises UnsupportedFeature if this server cannot end the reasoning.
    """
    field = "thinking_token_budget"
    if budget is None or budget == -1:
        return asked
    if thought is None or not thought.can_end:
        message = f"{field} needs a server with a --reasoning-parser of tags"
        raise UnsupportedFeature(message, field=field)
    if asked is not None and not opened:
        return asked  # the grammar holds from the first token on, so there is no reasoning
    asked = asked or Constraint(GuidedDecoding("free", ""), field)
    start = "" if opened else thought.open[0]
    limit = {"starts_after": thought.close[0], "most_thought": budget, "thought_start": start}
    return replace(asked, guided=replace(asked.guided, **limit))


def limited_text(
    asked: Constraint | None, body: CompletionBody, prompt: str, thought: ReasoningFormat | None
) -> Constraint | None:
    """Like `limited`, for a completion, whose prompt may end within reasoning."""
    opened = thought is not None and thought.opened_by(prompt)
    return limited(asked, body.thinking_token_budget, thought, opened)


def forces_calls(body: ChatBody) -> bool:
    """Whether the model must answer with tool calls."""
    return body.tool_choice == "required" or isinstance(body.tool_choice, dict)


def room_for_content(body: ChatBody, own: Constraint | None) -> Room:
    """Return how much content a chat's grammar allows beside calls. `own`: the constraint of its
    own fields (asked_of)."""
    if forces_calls(body):
        return Room.NONE
    if own is None or not body.tools or body.tool_choice == "none":
        return Room.ANY
    is_json = own.guided.kind in ("json_object", "json_schema")
    return Room.JSON_INSTEAD if is_json else Room.INSTEAD


def check_forced(choice: str | dict[str, Any], tools: Sequence[Mapping[str, Any]]) -> None:
    """Raise InvalidRequest if `tools` cannot satisfy `choice`: `required` or a named function."""
    if not tools:
        raise InvalidRequest("tool_choice needs tools", field="tool_choice")
    if isinstance(choice, str):
        return
    function = cast("object", choice.get("function"))
    name = cast("dict[str, Any]", function).get("name") if isinstance(function, dict) else None
    if choice.get("type") != "function" or not isinstance(name, str):
        message = "tool_choice: a named choice is {type: function, function: {name: ...}}"
        raise InvalidRequest(message, field="tool_choice")
    named = [cast("Any", tool.get("function")) for tool in tools]
    if not any(isinstance(one, dict) and cast("Any", one).get("name") == name for one in named):
        message = f"tool_choice: there is no tool {name[:80]!r}"
        raise InvalidRequest(message, field="tool_choice.function.name")


def _asked_of_tools(
    body: ChatBody, formats: Formats, asked: Constraint | None
) -> Constraint | None:
    """Return the constraint of the tools combined with `asked`, the body's own constraint; None if
    the tools do not change that."""
    tools, choice = body.tools or [], body.tool_choice or "auto"
    if not tools or choice == "none":
        return None
    several = body.parallel_tool_calls is not False
    backend, form = body.guided_decoding_backend or "", formats.tools
    if isinstance(choice, dict):
        named = [tool for tool in tools if tool["function"]["name"] == choice["function"]["name"]]
        return Constraint(_tagged(forced(form, named[:1], several=False), backend), "tool_choice")
    if choice == "required":
        return Constraint(_tagged(forced(form, tools, several), backend), "tools")
    if asked is not None:
        # Either an answer in the form of `asked`, or calls.
        answer = format_of(asked.guided, "tools")
        if formats.reasoning is not None and formats.reasoning.answer is not None:
            answer = formats.reasoning.answer(answer)
        either = {"type": "or", "elements": [answer, forced(form, tools, several)]}
        combined = _tagged(either, backend)
        return Constraint(replace(combined, whitespace=asked.guided.whitespace), asked.field)
    if any(tool["function"].get("strict") is True for tool in tools):
        return Constraint(_tagged(offered(form, tools, several), backend), "tools")
    return None


def _tagged(form: Mapping[str, Any], backend: str) -> GuidedDecoding:
    tag = {"type": "structural_tag", "format": form}
    return GuidedDecoding("structural_tag", _text(tag, "tools"), backend)


def _text(value: object, field: str) -> str:
    """Return `value` as JSON text. Raises InvalidRequest if it is nested too deeply for orjson."""
    try:
        return orjson.dumps(value).decode()
    except orjson.JSONEncodeError as error:
        raise InvalidRequest(f"{field} is nested too deeply", field=field) from error


# ---- the fields ----


def _of_response_format(given: dict[str, Any] | None) -> Constraint | None:
    field = "response_format"
    if given is None or given.get("type") == "text":
        return None
    match given.get("type"):
        case "json_object":
            return Constraint(GuidedDecoding("json_object", ""), field)
        case "json_schema":
            where = f"{field}.json_schema"
            spec = given.get("json_schema")
            if not isinstance(spec, dict):
                raise InvalidRequest(f"{where} must be an object", field=where)
            named = cast("dict[str, Any]", spec)
            if not isinstance(named.get("name"), str | None):
                where = f"{where}.name"
                raise InvalidRequest(f"{where} must be a string", field=where)
            schema = named.get("schema", named.get("json_schema"))
            if named.get("strict") is not True and isinstance(schema, dict):
                schema = lenient(cast("dict[str, Any]", schema))
            return Constraint(_json(schema, f"{where}.schema"), f"{where}.schema")
        case "structural_tag":
            return Constraint(GuidedDecoding("structural_tag", _text(given, field)), field)
        case _:
            kinds = "text, json_object, json_schema or structural_tag"
            message = f"response_format.type must be one of {kinds}"
            raise InvalidRequest(message, field=f"{field}.type")


def _of_structured_outputs(given: dict[str, Any] | None) -> Constraint | None:
    if given is None:
        return None
    where = "structured_outputs"
    given = {name: value for name, value in given.items() if value is not None}
    if given.get("json_object") is False:
        del given["json_object"]
    kinds = [kind for kind in _KINDS if kind in given]
    if len(kinds) != 1:
        message = f"{where} takes exactly one of {', '.join(_KINDS)}"
        raise InvalidRequest(message, field=where)
    field = f"{where}.{kinds[0]}"
    value = given[kinds[0]]
    for flag in ("disable_any_whitespace", "disable_additional_properties"):
        if not isinstance(given.get(flag), bool | None):
            raise InvalidRequest(f"{where}.{flag} must be a boolean", field=f"{where}.{flag}")
    if kinds[0] == "json" and given.get("disable_additional_properties"):
        value = closed(_schema(value, field))
    guided = _guided(kinds[0], value, field)
    whitespace = given.get("whitespace_pattern")
    if whitespace is not None and not isinstance(whitespace, str):
        name = f"{where}.whitespace_pattern"
        raise InvalidRequest(f"{name} must be a string", field=name)
    if given.get("disable_any_whitespace"):
        whitespace = ""
    return Constraint(replace(guided, whitespace=whitespace), field)


def _of_guided(body: CompletionBody | ChatBody) -> Sequence[Constraint | None]:
    fields = (
        ("json", "guided_json", body.guided_json),
        ("regex", "guided_regex", body.guided_regex),
        ("choice", "guided_choice", body.guided_choice),
        ("grammar", "guided_grammar", body.guided_grammar),
    )
    return [
        None if value is None else Constraint(_guided(kind, value, field), field)
        for kind, field, value in fields
    ]


def _guided(kind: str, value: object, field: str) -> GuidedDecoding:
    match kind:
        case "json":
            return _json(value, field)
        case "json_object":
            if value is not True:
                raise InvalidRequest(f"{field} must be a boolean", field=field)
            return GuidedDecoding("json_object", "")
        case "choice":
            return GuidedDecoding("choice", _text(value, field))
        case "structural_tag":
            text = value if isinstance(value, str) else _text(value, field)
            return GuidedDecoding("structural_tag", text)
        case _:
            if not isinstance(value, str):
                raise InvalidRequest(f"{field} must be a string", field=field)
            return GuidedDecoding("regex" if kind == "regex" else "ebnf", value)


def _json(schema: object, field: str) -> GuidedDecoding:
    return GuidedDecoding("json_schema", _text(_schema(schema, field), field))


def _schema(value: object, field: str) -> dict[str, Any]:
    """Return a JSON schema that is given as an object or as JSON text. Raises InvalidRequest."""
    if isinstance(value, str):
        try:
            value = cast("object", orjson.loads(value))
        except orjson.JSONDecodeError as error:
            raise InvalidRequest(f"{field} is not valid JSON: {error}", field=field) from error
    if not isinstance(value, dict):
        raise InvalidRequest(f"{field} must be a JSON schema", field=field)
    return cast("dict[str, Any]", value)
