"""What an answer consists of, in the order in which it arrives; and the sink that grammars fill."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Reasoning:
    """More of what the model thought aloud."""

    text: str


@dataclass(frozen=True, slots=True)
class Content:
    """More of the answer itself."""

    text: str


@dataclass(frozen=True, slots=True)
class CallStart:
    """The next tool call begins; its arguments follow."""

    index: int
    name: str


@dataclass(frozen=True, slots=True)
class CallArguments:
    """More of call `index`'s arguments, as the model wrote them."""

    index: int
    text: str


Part = Reasoning | Content | CallStart | CallArguments


class Sink:
    """Collects the parts of one answer. `thinking` is true between the tags of reasoning.

    Where there may be calls, white space before one or after the last is layout and left out, so it
    is held back until it is clear what follows. All else that a grammar writes is kept.
    """

    def __init__(self, may_call: bool) -> None:
        self.num_calls = 0
        self.may_call = may_call
        self.thinking = False
        self._parts: list[Part] = []
        self._space = ""
        self._after_call = False

    def take(self) -> tuple[Part, ...]:
        """The parts since the last time, neighbours of one kind joined."""
        parts, self._parts = self._parts, []
        return tuple(parts)

    def reasoning(self, text: str) -> None:
        last = self._parts[-1] if self._parts else None
        if isinstance(last, Reasoning):
            self._parts[-1] = Reasoning(last.text + text)
        else:
            self._parts.append(Reasoning(text))

    def content(self, text: str) -> None:
        text = self._space + text
        shown = text.rstrip() if self.may_call else text
        self._space = text[len(shown) :]
        if shown:
            self._after_call = False
            self._append(shown)

    def call(self, name: str) -> None:
        self._space = ""
        self._after_call = True
        self._parts.append(CallStart(self.num_calls, name))
        self.num_calls += 1

    def arguments(self, text: str) -> None:
        """Of the call begun last."""
        index = self.num_calls - 1
        last = self._parts[-1] if self._parts else None
        if isinstance(last, CallArguments) and last.index == index:
            self._parts[-1] = CallArguments(index, last.text + text)
        else:
            self._parts.append(CallArguments(index, text))

    def end(self) -> None:
        """No more comes: white space is content, unless a call stands before it."""
        if self._space and not self._after_call:
            self._append(self._space)
        self._space = ""

    def _append(self, text: str) -> None:
        last = self._parts[-1] if self._parts else None
        if isinstance(last, Content):
            self._parts[-1] = Content(last.text + text)
        else:
            self._parts.append(Content(text))
