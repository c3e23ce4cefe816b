"""Chat messages -> prompt text, through the model's own Jinja template in a sandbox.

The template comes from the model directory only, never from a request: chat_template.jinja, else
tokenizer_config.json's `chat_template` (one string, or a list of named ones), else
chat_template.json. It sees plain JSON values and what transformers offers a template, no more.
Rendering is synchronous; its time and the size of all that it makes are bounded
(baton/template_limits.py).
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, Final, cast

import jinja2
from jinja2 import meta, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser

from baton.errors import InvalidRequest, ModelRefused
from baton.template_limits import MAX_CHARS, BoundedEnvironment, OverBudget
from baton.tokenizer import read_json, read_special_tokens

RENDER_S: Final = 2.0  # of the rendering thread's own time; long histories take milliseconds
# Names that a client's keyword arguments must not take.
RESERVED_NAMES: Final = frozenset(
    {"self", "messages", "add_generation_prompt", "tools", "documents"}
)
# Written after a message that is to be continued: the prompt ends where the template puts it.
_CONTINUES: Final = "CONTINUE_FINAL_MESSAGE_TAG "


class ChatTemplate:
    """A compiled template, or the knowledge that there is none. Safe in several threads."""

    def __init__(self, source: str | None, special_tokens: Mapping[str, str]) -> None:
        self.source = source
        self._special_tokens = dict(special_tokens)
        self._template: jinja2.Template | None = None
        self._environment = _environment()
        read: set[str] = set()
        if source is not None:
            self._template, read = _compile(self._environment, source)
        self.parameters = frozenset(read) - RESERVED_NAMES - self._special_tokens.keys()
        """The names that this template reads besides: all that a client may set."""
        self.reads_documents = "documents" in read

    @classmethod
    def load(cls, model_dir: str | Path, file: str | Path | None = None) -> ChatTemplate:
        """Compile the operator's `file`, else the model directory's own template.

        Raises ModelRefused for a broken one.
        """
        directory = Path(model_dir)
        source = _find_source(directory) if file is None else _read_text(Path(file))
        return cls(source, read_special_tokens(directory))

    @property
    def present(self) -> bool:
        return self._template is not None

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        add_generation_prompt: bool = True,
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        continue_final_message: bool = False,
        **kwargs: Any,
    ) -> str:
        """Prompt text of a conversation; it holds BOS already if the template writes one.

        `continue_final_message` ends it within the last message, after its content. `kwargs` that
        the template does not read change nothing; `documents` may be among them. Raises
        InvalidRequest (field `messages`) if there is no template, it refuses them or takes too much
        over them.
        """
        try:
            return self.render_within(
                RENDER_S,
                messages,
                add_generation_prompt,
                tools=tools,
                continue_final_message=continue_final_message,
                **kwargs,
            )
        except OverBudget as error:
            message = f"the chat template is given up over these messages: {error}"
            raise InvalidRequest(message, field="messages") from error

    def render_within(
        self,
        seconds: float,
        /,
        messages: Sequence[Mapping[str, Any]],
        add_generation_prompt: bool = True,
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        continue_final_message: bool = False,
        **kwargs: Any,
    ) -> str:
        """`render` in so many seconds of this thread's own time. Raises OverBudget, too."""
        if self._template is None:
            raise InvalidRequest(
                "this model has no chat template; use /v1/completions", field="messages"
            )
        read = self.parameters | {"documents"}
        values: dict[str, Any] = {
            **self._special_tokens,
            "tools": [dict(tool) for tool in tools] if tools else None,
            "documents": None,
            **{name: value for name, value in kwargs.items() if name in read},
        }
        plain = [dict(message) for message in messages]
        if continue_final_message:
            plain[-1]["content"] = str(plain[-1].get("content") or "") + _CONTINUES
        values["messages"] = plain
        values["add_generation_prompt"] = add_generation_prompt
        parts: list[str] = []
        length = 0
        self._environment.start(seconds)
        try:
            for part in self._template.generate(values):
                parts.append(part)
                length += len(part)
                if length > MAX_CHARS:
                    raise InvalidRequest("the rendered chat is too long", field="messages")
        except (InvalidRequest, OverBudget):
            raise
        except jinja2.TemplateError as error:
            message = f"the chat template refuses these messages: {error.message}"
            raise InvalidRequest(message, field="messages") from error
        # A template is foreign code: with unexpected messages it fails in any way (a missing key, a
        # number that is None, endless recursion), each of which is about the messages.
        except Exception as error:
            message = "the chat template cannot render these messages"
            raise InvalidRequest(message, field="messages") from error
        text = "".join(parts)
        return _cut_at_tag(text) if continue_final_message else text


def _cut_at_tag(text: str) -> str:
    """The prompt up to the tag. Source: transformers, render_jinja_template."""
    at = text.rfind(_CONTINUES.strip())
    if at < 0:
        message = "the chat template leaves the final message out: it cannot be continued"
        raise InvalidRequest(message, field="continue_final_message")
    # A template that trims messages has trimmed the tag's space, and would have trimmed before it.
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
    """The template named "default" among {"name", "template"} entries, or the only one."""
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


def _environment() -> BoundedEnvironment:
    """What transformers offers a template, within limits."""
    environment = BoundedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, _GenerationTag]
    )
    environment.filters["tojson"] = _tojson  # Jinja's own escapes HTML
    environment.bound_filters()
    extras: dict[str, Any] = {"raise_exception": _raise_exception, "strftime_now": _strftime_now}
    environment.globals.update(extras)
    return environment


def _compile(environment: BoundedEnvironment, source: str) -> tuple[jinja2.Template, set[str]]:
    """The template, and the names that it looks up."""
    try:
        tree = environment.parse(source)
        read = meta.find_undeclared_variables(tree) - environment.globals.keys()
        template = environment.from_string(environment.bounded(tree))
        template.globals = dict(template.globals)  # every rendering copies them, out of a ChainMap
        return template, read
    except (jinja2.TemplateError, OverBudget, RecursionError) as error:
        raise ModelRefused(f"the chat template does not compile: {error}") from error


class _GenerationTag(Extension):
    """`{% generation %}...{% endgeneration %}` marks training targets; we render what is inside."""

    tags = frozenset({"generation"})  # type: ignore[assignment]

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _strftime_now(pattern: str) -> str:
    return datetime.now().astimezone().strftime(pattern)


def _tojson(  # the signature is transformers'
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )
