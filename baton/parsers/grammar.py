"""What a format of tool calls is: how calls are read, and how one that must be made is written.

A format is a function that reads the answer (after any reasoning) to its end and tells the sink.
Rules that all formats share:
- A call is announced once its name is known and its arguments have begun. Before that it may turn
  out not to be one: then its text, markers too, is content.
- After that its arguments are passed on as they come, valid JSON or not, as OpenAI warns its own
  clients; an answer cut short leaves them cut short, and so does one that leaves a format whose
  arguments become JSON here.

Most formats are a Frame (baton/parsers/frames.py) around one of a few bodies; all of them are
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

# Tool name -> its parameters' JSON schema; only formats that spell values without types need it.
Schemas = Mapping[str, Mapping[str, Any]]
Grammar = Callable[[TextReader, Sink, Schemas], Steps[None]]
Form = dict[str, Any]  # a format of structural tags (baton/guided/structural_tags.py)
# A function without any takes none, says OpenAI.
_NO_PARAMETERS: Final = {"type": "object", "properties": {}, "additionalProperties": False}


@dataclass(frozen=True, slots=True)
class Tool:
    """A function that may be called, and what its arguments must be like."""

    name: str
    schema: Mapping[str, Any]


class Writer(Protocol):
    """The calls of a format as structural tags, for `tools`; `several`: more than one call."""

    def forced(self, tools: Sequence[Tool], several: bool) -> Form:
        """At least one call, and no text."""
        ...

    def offered(self, tools: Sequence[Tool], several: bool) -> Form:
        """Text or calls, as the model likes; a call is always a valid one."""
        ...


@dataclass(frozen=True, slots=True)
class ToolFormat:
    """A format by name. `markers`: texts that must reach the grammar also where special tokens are
    in them; `starts`: those that begin calls, () for a format whose calls begin an answer."""

    name: str
    grammar: Grammar
    writer: Writer
    markers: tuple[str, ...] = ()
    starts: tuple[str, ...] = ()
    short_ids: bool = False  # call ids of 9 letters and digits, as Mistral's templates demand


def forced(form: ToolFormat, tools: Sequence[Mapping[str, Any]], several: bool) -> Form:
    """Calls of `tools`, at least one, and no text: tool_choice required, or a function."""
    return form.writer.forced([_tool(tool) for tool in tools], several)


def offered(form: ToolFormat, tools: Sequence[Mapping[str, Any]], several: bool) -> Form:
    """Text or calls, each a valid one: tools that are strict, where the model may choose."""
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
    BROKEN = enum.auto()  # announced, then not JSON: what follows is passed on as it is
    CUT = enum.auto()  # announced, and its JSON made up to here: what follows is left out


@dataclass(frozen=True, slots=True)
class WrittenCall:
    """One call as a model writes it: the text up to its arguments, these, and the text after."""

    begin: str
    arguments: Form
    end: str


class Body(Protocol):
    """What stands between the marks of a call. `markers`: texts in it that may be, or hold, special
    tokens."""

    @property
    def markers(self) -> tuple[str, ...]: ...

    def read(self, reader: TextReader, sink: Sink, schemas: Schemas) -> Steps[CallEnd]:
        """Read one call. The caller's mark stays for NONE, and is gone once it is announced."""
        ...

    def written(self, tool: Tool) -> WrittenCall: ...


def announce(reader: TextReader, sink: Sink, name: str) -> None:
    """It is a call: nobody will go back before it."""
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
