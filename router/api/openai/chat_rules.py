"""Read a chat's body: what to render, and how to parse the answer. Pure."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Final, cast

from baton.parsers.grammar import ToolFormat
from baton.parsers.message import MessageRules
from baton.parsers.reasoning import ReasoningFormat
from baton.parsers.registry import Formats
from baton.protocol.errors import InvalidRequest, UnsupportedFeature
from baton.text.chat_template import Chat
from router.api.openai.bodies import ChatBody, TokenizeBody
from router.api.openai.chat import messages_of, schemas_of, template_kwargs, text_of, tools_of
from router.api.openai.guided_fields import check_forced, forces_calls, room_for_content
from router.images.parts import ImagePart
from router.prompts.grammar_checks import Constraint

ALLOWED: Final = "allowed_tools"  # OpenAI's tool_choice that offers only some of the tools
ALLOWED_FIELD: Final = "tool_choice.allowed_tools"
_MODES: Final = ("auto", "required")
_AUTO_IS_OFF: Final = (
    '"auto" tool choice requires --enable-auto-tool-choice and --tool-call-parser to be set'
    " (as auto: a parser that it has found in the model's chat template)"
)


def conversation_of(body: ChatBody | TokenizeBody) -> tuple[Chat, tuple[ImagePart, ...]]:
    """Return the input of the chat template, and the images of its messages. Raises InvalidRequest,
    naming the field."""
    continues = bool(body.continue_final_message)
    if continues and body.add_generation_prompt:
        message = "continue_final_message and add_generation_prompt exclude each other"
        raise InvalidRequest(message, field="continue_final_message")
    kwargs, effort = body.chat_template_kwargs or {}, None
    messages, images = messages_of(body.messages or [])
    if continues and isinstance(messages[-1]["content"], list):
        message = "continue_final_message: the last message holds an image"
        raise InvalidRequest(message, field="continue_final_message")
    tools = tools_of(body.tools) if body.tools else ()
    if isinstance(body, ChatBody):
        effort = body.reasoning_effort
    if kwargs or effort is not None:
        kwargs = template_kwargs(kwargs, effort)
    chat = Chat(
        messages=messages,
        tools=tools,
        add_generation_prompt=body.add_generation_prompt is not False and not continues,
        continue_final_message=continues,
        kwargs=kwargs,
        documents=body.documents or (),
    )
    return chat, images


def said_first(body: ChatBody, answers: str) -> tuple[str, str]:
    """Return the role of the answer, and the text to send before it.

    The role is `answers`, or that of the last message if the answer continues it. The text is, with
    `echo`, the last message if it has the same role, else ""."""
    last = body.messages[-1]
    prompted = body.add_generation_prompt is not False and not body.continue_final_message
    role = answers if prompted else last.role
    return role, text_of(last, "messages") if body.echo and last.role == role else ""


def apply_allowed(body: ChatBody) -> None:
    """Reduce the tools of a body with an `allowed_tools` choice to the allowed ones. Mutates
    `tools` and `tool_choice` of such a body; any other body stays as it is.

        {"type": "allowed_tools", "allowed_tools": {"mode": "auto" | "required", "tools": [
            {"type": "function", "function": {"name": "get_weather"}}]}}

    The other tools are not shown to the model, so it cannot call them. `tool_choice` becomes
    `mode`. Raises InvalidRequest, naming the field.
    """
    choice = body.tool_choice
    if not isinstance(choice, dict) or choice.get("type") != ALLOWED:
        return
    allowed = choice.get(ALLOWED)
    if not isinstance(allowed, dict):
        raise InvalidRequest(f"{ALLOWED_FIELD} must be an object", field=ALLOWED_FIELD)
    mode, given = (cast("dict[str, Any]", allowed).get(name) for name in ("mode", "tools"))
    if mode not in _MODES:
        raise InvalidRequest(
            f"{ALLOWED_FIELD}.mode must be auto or required", field=f"{ALLOWED_FIELD}.mode"
        )
    if not isinstance(given, list) or not given:
        message = f"{ALLOWED_FIELD}.tools must be a list of functions, not empty"
        raise InvalidRequest(message, field=f"{ALLOWED_FIELD}.tools")
    offered = {_name_of(tool): tool for tool in body.tools or ()}
    names: set[str] = set()
    for index, tool in enumerate(cast("list[object]", given)):
        name = _name_of(tool)
        if name is None or name not in offered:
            field = f"{ALLOWED_FIELD}.tools[{index}]"
            message = f"{field} must be {{type: function, function: {{name: ...}}}} of one of tools"
            raise InvalidRequest(message, field=field)
        names.add(name)
    body.tools = [tool for name, tool in offered.items() if name in names]
    body.tool_choice = mode


def _name_of(tool: object) -> str | None:
    """Return the name of a tool, or None if it is no function with a name."""
    found = cast("dict[str, Any]", tool) if isinstance(tool, dict) else {}
    function = found.get("function")
    name = cast("dict[str, Any]", function).get("name") if isinstance(function, dict) else None
    return name if found.get("type") == "function" and isinstance(name, str) else None


def tool_format(body: ChatBody, formats: Formats) -> ToolFormat | None:
    """Return how to find tool calls in the answer, or None if the answer can have none.

    Raises InvalidRequest if the chosen tool is not there, and for `auto` (also as the default) if
    this router has no tool parser. Calls that must be made need no parser of the model: a grammar
    enforces their format (guided_fields.py).
    """
    choice = body.tool_choice if body.tool_choice is not None else "auto"
    if choice == "none" or (choice == "auto" and not body.tools):
        return None
    if choice == "required" or isinstance(choice, dict):
        check_forced(choice, body.tools or [])
        return formats.tools
    if choice != "auto":
        message = "tool_choice must be none, auto, required or a named function"
        raise InvalidRequest(message, field="tool_choice")
    if not formats.looked_for:
        raise UnsupportedFeature(_AUTO_IS_OFF, field="tool_choice" if body.tool_choice else "tools")
    return formats.tools


def message_rules(
    body: ChatBody,
    chat: Chat,
    prompt: str,
    tools: ToolFormat | None,
    thinks: ReasoningFormat | None,
    own: Constraint | None,
) -> MessageRules | None:
    """Return how to split the answer to `prompt` into content, reasoning and calls; None if all of
    it is content. `tools`: how to find calls (tool_format). `thinks`: how to find reasoning. `own`:
    the constraint of the body's own fields (asked_of)."""
    if tools is None and thinks is None:
        return None
    opened = False
    if thinks is not None and chat.continue_final_message and chat.messages[-1]["content"]:
        opened = thinks.opened_by(chat.messages[-1]["content"])
    elif thinks is not None:
        opened = thinks.opened(prompt, chat.kwargs)
    if thinks is not None and forces_calls(body):
        thinks = replace(thinks, calls=False)  # the grammar begins where the thought ends
    return MessageRules(
        reasoning=thinks,
        opened=opened,
        tools=tools,
        schemas=schemas_of(tuple(dict(tool) for tool in chat.tools)),
        show_reasoning=body.include_reasoning is not False,
        one_call=body.parallel_tool_calls is False,
        room=room_for_content(body, own),
    )
