"""ToolFormat: how the tool calls of a format are read, and how a forced call is written.

The grammar of a format is a generator that reads an answer (after any reasoning) to its end and
passes the parts to a sink. Rules that all formats share:
- A call is announced to the sink once its name is known and its arguments have begun. Text that
  turns out before that to be no call is content, markers included.
- After that the arguments are passed on as they come, even if they are not valid JSON (OpenAI warns
  its clients of that, too). If the answer is cut short, the arguments are cut short. They are also
  cut short if they are converted to JSON here and do not follow their format.

Most formats are a CallFrame (baton/parsers/frames.py) around one of a few bodies; all of them are
listed in baton/parsers/formats.py.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Protocol, cast

from baton.guided.spec import lenient
from baton.parsers.parts import Sink
from baton.parsers.reader import Steps, TextReader

# Tool name -> JSON schema of its parameters. Needed by formats whose values show no types.
Schemas = Mapping[str, Mapping[str, Any]]
Grammar = Callable[[TextReader, Sink, Schemas], Steps[None]]
Form = dict[str, Any]  # a format of structural tags (baton/guided/structural_tags.py)
# The schema of a function that declares no parameters: it takes none, as with OpenAI.
_NO_PARAMETERS: Final = {"type": "object", "properties": {}, "additionalProperties": False}


@dataclass(frozen=True, slots=True)
class Tool:
    """A function that may be called, and the JSON schema of its arguments."""

    name: str
    schema: Mapping[str, Any]


class Writer(Protocol):
    """Writes the calls of a format as structural tags. `several`: more than one call is allowed."""

    def forced(self, tools: Sequence[Tool], several: bool) -> Form:
        """Return the form of an answer with at least one call of `tools` and no text."""
        ...

    def offered(self, tools: Sequence[Tool], several: bool) -> Form:
        """Return the form of an answer with text or calls, as the model likes; calls are valid."""
        ...


@dataclass(frozen=True, slots=True)
class ToolFormat:
    """A format of tool calls.

    `markers`: texts that must reach the grammar even if they are, or contain, special tokens.
    `starts`: the marks that begin calls; () if calls begin an answer without a mark.
    """

    name: str
    grammar: Grammar
    writer: Writer
    markers: tuple[str, ...] = ()
    starts: tuple[str, ...] = ()
    short_ids: bool = False  # call ids of 9 letters and digits, as Mistral's templates demand


def forced(form: ToolFormat, tools: Sequence[Mapping[str, Any]], several: bool) -> Form:
    """Return the form of an answer with at least one call and no text.

    tool_choice `required` or a named function demands it.
    """
    return form.writer.forced([_tool(tool) for tool in tools], several)


def offered(form: ToolFormat, tools: Sequence[Mapping[str, Any]], several: bool) -> Form:
    """Return the form of an answer with text or valid calls.

    It is for strict tools between which the model may choose.
    """
    return form.writer.offered([_tool(tool) for tool in tools], several)


def _tool(tool: Mapping[str, Any]) -> Tool:
    function = cast("Mapping[str, Any]", tool["function"])
    given = cast("Mapping[str, Any] | None", function.get("parameters"))
    schema = dict(_NO_PARAMETERS) if given is None else {"type": "object", **given}
    if function.get("strict") is not True:
        schema = lenient(schema)
    return Tool(str(function["name"]), schema)


class CallEnd(enum.Enum):
    NONE = enum.auto()  # not a call: nothing was announced
    COMPLETE = enum.auto()
    BROKEN = enum.auto()  # announced, then not JSON: the text that follows is passed on unchanged
    CUT = enum.auto()  # announced, converted to JSON up to here: the text that follows is left out


@dataclass(frozen=True, slots=True)
class WrittenCall:
    """One call as a model writes it.

    `begin` is the text before the arguments, `arguments` their form, `end` the text after them.
    """

    begin: str
    arguments: Form
    end: str


class Body(Protocol):
    """The text between the marks of a call: name and arguments.

    `markers` are texts in it that may be, or contain, special tokens.
    """

    @property
    def markers(self) -> tuple[str, ...]: ...

    def read(self, reader: TextReader, sink: Sink, schemas: Schemas) -> Steps[CallEnd]:
        """Read one call.

        If it returns NONE, the reader's mark is still where the caller set it. An announced call
        has removed the mark.
        """
        ...

    def written(self, tool: Tool) -> WrittenCall: ...


def announce(reader: TextReader, sink: Sink, name: str) -> None:
    """Announce a call to the sink, and remove the reader's mark, because its text is no content."""
    reader.unmark()
    sink.call(name)


def json_form(schema: Mapping[str, Any]) -> Form:
    return {"type": "json_schema", "json_schema": schema}


def text_form(text: str) -> Form:
    return {"type": "const_string", "value": text}


def sequence(*elements: Form) -> Form:
    return {"type": "sequence", "elements": list(elements)}


def tag(begin: str, content: Form, end: str) -> Form:
    return {"type": "tag", "begin": begin, "content": content, "end": end}
