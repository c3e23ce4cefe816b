"""Chat messages to prompt text, through the model's own Jinja template in a sandbox.

The template comes from the model directory: chat_template.jinja, else tokenizer_config.json's
`chat_template` (one string, or a list of named ones), else chat_template.json. It sees only plain
JSON values and the functions that transformers offers to templates.

Jinja's sandbox stops a template from running code, but not from using time and memory. So there are
two places where a template is rendered:

    at once     in this process, if the template is harmless (baton/text/template_rules.py) and the
                conversation is not large, within limits that a thread can keep
                (baton/text/template_limits.py)
    else        in a child process that can be killed (baton/text/rendering.py) and calls `render`
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from functools import cached_property
from pathlib import Path
from typing import Any, Final, cast

import jinja2
from jinja2 import nodes
from jinja2.defaults import DEFAULT_NAMESPACE
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from baton.protocol.errors import InvalidRequest, ModelRefused
from baton.text.chat_history import rewrites_of, tools_in_system, wants_tools_in_system
from baton.text.template_limits import BoundedEnvironment, OverBudget
from baton.text.template_rules import is_harmless
from baton.text.tokenizer import read_json, read_special_tokens

MAX_CHARS: Final = 16 << 20  # of a prompt: more than any context holds
MAX_SOURCE_CHARS: Final = 1 << 20
# Names that a client's keyword arguments must not take.
RESERVED_NAMES: Final = frozenset(
    {"self", "messages", "add_generation_prompt", "tools", "documents"}
)
# Jinja's own names, and those that this file gives to a template.
OWN_NAMES: Final = frozenset(
    {
        "caller",
        "kwargs",
        "loop",
        "raise_exception",
        "strftime_now",
        "super",
        "varargs",
        *DEFAULT_NAMESPACE,
    }
)
# Appended to a message that is to be continued. The prompt is cut where the template puts it.
_CONTINUES: Final = "CONTINUE_FINAL_MESSAGE_TAG "


@dataclass(frozen=True, slots=True)
class Chat:
    """What a template renders: JSON values.

    `continue_final_message`: the prompt ends within the last message, after its content. `kwargs`:
    further values; those that the template does not read change nothing.
    """

    messages: Sequence[Mapping[str, Any]]
    tools: Sequence[Mapping[str, Any]] = ()
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    documents: Sequence[Mapping[str, str]] = ()
    kwargs: Mapping[str, Any] = field(default_factory=dict[str, Any])


class ChatTemplate:
    """A compiled template; `present` is False if the model has none. Any thread may use it."""

    def __init__(self, source: str | None, special_tokens: Mapping[str, str]) -> None:
        """Raises ModelRefused for a source that is no template."""
        self.source = source
        self.special_tokens = dict(special_tokens)
        self._rewrites = rewrites_of(source or "")
        self._harmless = False
        read: set[str] = set()
        if source is not None:
            tree = _parsed(source)
            read = {name.name for name in tree.find_all(nodes.Name) if name.ctx == "load"}
            self._harmless = is_harmless(source, tree)
        own = RESERVED_NAMES | OWN_NAMES | self.special_tokens.keys()
        self.parameters = frozenset(read) - own
        """The other names that this template reads; a client may set only these."""
        self._reads_documents = "documents" in read

    @classmethod
    def load(cls, model_dir: str | Path, file: str | Path | None = None) -> ChatTemplate:
        """Compile the operator's `file`, or without one the model directory's own template.

        Raises ModelRefused for a broken template.
        """
        directory = Path(model_dir)
        source = _find_source(directory) if file is None else _read_text(Path(file))
        return cls(source, read_special_tokens(directory))

    @property
    def present(self) -> bool:
        return self.source is not None

    @property
    def harmless(self) -> bool:
        """Whether `render_at_once` may be called for this template."""
        return self._quick is not None

    @cached_property
    def _quick(self) -> tuple[BoundedEnvironment, jinja2.Template] | None:
        return _bounded(self.source) if self.source is not None and self._harmless else None

    def render(self, chat: Chat) -> str:
        """Return the prompt text of a conversation; it begins with BOS if the template writes one.

        It may take any time and memory, and the first call compiles the template, so call it in
        processes with limits. Raises InvalidRequest (field `messages`, `documents`) if there is no
        template, or if it refuses the values or cannot render them.
        """
        if self._template is None:
            raise InvalidRequest(
                "this model has no chat template; use /v1/completions", field="messages"
            )
        return self._rendered(self._template, chat)

    @cached_property
    def _template(self) -> jinja2.Template | None:
        """The compiled template; None if there is none. Raises ModelRefused.

        Compiling evaluates constants, so only processes with limits may use this.
        """
        if self.source is None:
            return None
        try:
            return _environment().from_string(self.source)
        except (jinja2.TemplateError, RecursionError, SyntaxError) as error:
            raise ModelRefused(f"the chat template does not compile: {error}") from error

    def render_at_once(self, seconds: float, chat: Chat) -> str:
        """Render a small conversation with a harmless template.

        It may take `seconds` of this thread's CPU time. Raises the errors of `render`, and
        OverBudget.
        """
        assert self._quick is not None, "it is harmless"
        environment, template = self._quick
        environment.start(seconds)
        return self._rendered(template, chat)

    def _rendered(self, template: jinja2.Template, chat: Chat) -> str:
        values = self._values(chat)
        parts: list[str] = []
        length = 0
        try:
            for part in template.generate(values):
                parts.append(part)
                length += len(part)
                if length > MAX_CHARS:
                    raise InvalidRequest("the rendered chat is too long", field="messages")
        except (InvalidRequest, OverBudget, MemoryError):
            raise
        except jinja2.TemplateError as error:
            message = f"the chat template refuses these messages: {error.message}"
            raise InvalidRequest(message, field="messages") from error
        # A template is foreign code. With unexpected messages it may fail in any way (a missing
        # key, a number that is None, endless recursion). Each such failure is the fault of the
        # messages.
        except Exception as error:
            message = "the chat template cannot render these messages"
            raise InvalidRequest(message, field="messages") from error
        text = "".join(parts)
        return _cut_at_tag(text) if chat.continue_final_message else text

    def _values(self, chat: Chat) -> dict[str, Any]:
        clash = RESERVED_NAMES.intersection(chat.kwargs)
        if clash:
            raise InvalidRequest(f"{min(clash)} cannot be set here", field="chat_template_kwargs")
        if chat.documents and not self._reads_documents:
            message = "documents: the chat template reads none; put them into the messages"
            raise InvalidRequest(message, field="documents")
        plain = [dict(message) for message in chat.messages]
        for rewrite in self._rewrites:
            plain = rewrite(plain)
        if chat.tools and wants_tools_in_system(self.source or ""):
            plain = tools_in_system(plain, chat.tools)
        if chat.continue_final_message:
            plain[-1]["content"] = str(plain[-1].get("content") or "") + _CONTINUES
        return {
            **self.special_tokens,
            "tools": [dict(tool) for tool in chat.tools] if chat.tools else None,
            "documents": [dict(document) for document in chat.documents] or None,
            **{name: value for name, value in chat.kwargs.items() if name in self.parameters},
            "messages": plain,
            "add_generation_prompt": chat.add_generation_prompt,
        }


def _cut_at_tag(text: str) -> str:
    """Return the prompt up to the tag. Source: transformers, render_jinja_template."""
    at = text.rfind(_CONTINUES.strip())
    if at < 0:
        message = "the chat template leaves the final message out: it cannot be continued"
        raise InvalidRequest(message, field="continue_final_message")
    # If the template has trimmed the tag's space, it trims messages. Without the tag it would have
    # trimmed the text before it.
    return text[:at] if text.startswith(_CONTINUES, at) else text[:at].rstrip()


def _find_source(directory: Path) -> str | None:
    file = directory / "chat_template.jinja"
    if file.is_file():
        return _read_text(file)
    for name in ("tokenizer_config.json", "chat_template.json"):
        found: object = read_json(directory / name).get("chat_template")
        if isinstance(found, str):
            return found
        if isinstance(found, list):
            return _default_of(cast("list[object]", found), directory / name)
        if found is not None:
            raise ModelRefused(f"{directory / name}: chat_template is neither a string nor a list")
    return None


def _read_text(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except (OSError, UnicodeError) as error:
        raise ModelRefused(f"{file} cannot be read: {error}") from error


def _default_of(entries: list[object], file: Path) -> str:
    """Return the template named "default" among {"name", "template"} entries, or the only one."""
    named: dict[object, object] = {}
    for entry in entries:
        if not isinstance(entry, dict):
            raise ModelRefused(
                f"{file}: chat_template holds something that is not a named template"
            )
        item = cast("dict[str, object]", entry)
        named[item.get("name")] = item.get("template")
    chosen = next(iter(named.values())) if len(named) == 1 else named.get("default")
    if not isinstance(chosen, str):
        raise ModelRefused(f"{file}: none of the chat templates {list(named)} is named default")
    return chosen


def _parsed(source: str) -> nodes.Template:
    """Return the template as a syntax tree. Raises ModelRefused."""
    if len(source) > MAX_SOURCE_CHARS:
        raise ModelRefused(f"the chat template has more than {MAX_SOURCE_CHARS} characters")
    try:
        return _environment().parse(source)
    except (jinja2.TemplateError, RecursionError) as error:
        raise ModelRefused(f"the chat template does not compile: {error}") from error


def _environment() -> ImmutableSandboxedEnvironment:
    """Return an environment with everything that transformers offers to templates."""
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=_extensions()
    )
    environment.filters["tojson"] = _tojson  # Jinja's own escapes HTML
    environment.globals.update(_GLOBALS)
    return environment


def _bounded(source: str) -> tuple[BoundedEnvironment, jinja2.Template] | None:
    """Return a limited environment and the template compiled in it.

    Return None if the template's constants alone exceed the limits.
    """
    environment = BoundedEnvironment(
        {"tojson": _tojson}, trim_blocks=True, lstrip_blocks=True, extensions=_extensions()
    )
    environment.globals.update(_GLOBALS)
    try:
        template = environment.from_string(environment.bounded(environment.parse(source)))
    except (jinja2.TemplateError, OverBudget, RecursionError, SyntaxError):
        return None
    # Every rendering copies these globals, which is slow from a ChainMap.
    template.globals = dict(template.globals)
    return environment, template


def _extensions() -> list[type[Extension]]:
    return [loopcontrols, _GenerationTag]


class _GenerationTag(Extension):
    """`{% generation %}...{% endgeneration %}` marks training targets; only its content is
    rendered.
    """

    tags = frozenset({"generation"})  # type: ignore[assignment]

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _strftime_now(pattern: str) -> str:
    return datetime.now().astimezone().strftime(pattern)


def _tojson(  # the signature is that of transformers
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


_GLOBALS: Final[dict[str, Any]] = {
    "raise_exception": _raise_exception,
    "strftime_now": _strftime_now,
}
