"""MessageParser: divides the text of one answer into parts, piece by piece. Without I/O.

push(piece)* -> finish(). The parts of all pieces, joined, do not depend on how the text was cut
into pieces.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from baton.parsers import reasoning
from baton.parsers.grammar import Schemas, ToolFormat
from baton.parsers.parts import CallArguments, CallStart, Content, Part, Reasoning, Room, Sink
from baton.parsers.reader import Steps, TextReader
from baton.parsers.reasoning import ReasoningFormat


@dataclass(frozen=True, slots=True)
class MessageRules:
    """What to look for in an answer.

    `reasoning` None: reasoning is not looked for. `opened`: the answer starts within reasoning.
    `tools` None: calls are not looked for. `show_reasoning` False: reasoning is left out.
    `one_call`: all calls but the first are left out. `room`: whether the form that the answer must
    have allows content.
    """

    reasoning: ReasoningFormat | None = None
    opened: bool = False
    tools: ToolFormat | None = None
    schemas: Schemas = field(default_factory=dict)
    show_reasoning: bool = True
    one_call: bool = False
    room: Room = Room.ANY

    @property
    def markers(self) -> tuple[str, ...]:
        """Texts that the tokenizer must show even if they are special tokens."""
        thought = self.reasoning.markers if self.reasoning is not None else ()
        return thought + (self.tools.markers if self.tools is not None else ())


class MessageParser:
    """The state machine of one answer."""

    def __init__(self, rules: MessageRules) -> None:
        self._reader = TextReader()
        marker = rules.tools.starts[0] if rules.tools is not None and rules.tools.starts else ""
        around = () if rules.reasoning is None else rules.reasoning.around
        self._sink = Sink(rules.tools is not None, rules.room, marker, around)
        self._grammar = _read(self._reader, self._sink, rules)
        self._rules = rules
        self._running = True
        self._step()

    @property
    def thinking(self) -> bool:
        """Whether the text so far ends within reasoning."""
        return self._sink.thinking

    @property
    def num_calls(self) -> int:
        return self._sink.num_calls

    def push(self, piece: str) -> tuple[Part, ...]:
        """Take more text; return the parts that have become certain."""
        if piece:
            self._reader.feed(piece)
            self._step()
        return self._take()

    def finish(self) -> tuple[Part, ...]:
        """End the text; return the parts that were held back."""
        self._reader.end()
        self._step()
        assert not self._running, "a grammar ends with its text"
        self._sink.end()
        return self._take()

    def _take(self) -> tuple[Part, ...]:
        return tuple(part for part in self._sink.take() if self._wanted(part))

    def _wanted(self, part: Part) -> bool:
        match part:
            case Reasoning():
                return self._rules.show_reasoning
            case CallStart() | CallArguments():
                return part.index == 0 or not self._rules.one_call
            case Content():
                return True

    def _step(self) -> None:
        """Run the grammar until it needs more text or has ended."""
        if self._running:
            self._running = next(self._grammar, True) is None


def _read(reader: TextReader, sink: Sink, rules: MessageRules) -> Steps[None]:
    thought, tools = rules.reasoning, rules.tools
    if thought is not None and thought.whole is not None:
        yield from thought.whole(reader, sink, rules.schemas)
        return
    if thought is not None:
        calls = tools.starts if thought.calls and tools is not None else ()
        yield from reasoning.read(reader, sink, thought, rules.opened, calls)
    if tools is not None:
        yield from tools.grammar(reader, sink, rules.schemas)
    else:
        yield from reader.until((), sink.content)
