"""The parts of an answer (reasoning, content, calls), and the sink that collects them."""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import Final

from baton.parsers.reader import begun


@dataclass(frozen=True, slots=True)
class Reasoning:
    """More text of the model's reasoning."""

    text: str


@dataclass(frozen=True, slots=True)
class Content:
    """More text of the answer itself."""

    text: str


@dataclass(frozen=True, slots=True)
class CallStart:
    """The beginning of tool call number `index`; its arguments follow."""

    index: int
    name: str


@dataclass(frozen=True, slots=True)
class CallArguments:
    """More text of the arguments of call `index`, as JSON."""

    index: int
    text: str


Part = Reasoning | Content | CallStart | CallArguments
_BEGINS_JSON: Final = frozenset('[{"-0123456789tfn')


class Room(enum.Enum):
    """Whether the form that an answer must have allows content.

    If it does not, text that is not read as a call is the markup of a call that was cut short. Such
    text is left out.
    """

    ANY = enum.auto()  # text and calls as the model likes
    INSTEAD = enum.auto()  # either content or calls
    JSON_INSTEAD = enum.auto()  # either JSON content or calls; JSON does not begin like a marker
    NONE = enum.auto()  # calls only


class Sink:
    """Collects the parts of one answer. `thinking` is true between the tags of reasoning.

    If there may be calls, white space before a call and after the last call is layout and left out.
    So white space is held back until it is clear what follows. All other text is kept. Text after a
    call within reasoning is reasoning until the reasoning is closed: see interrupted().
    """

    def __init__(
        self,
        may_call: bool,
        room: Room = Room.ANY,
        marker: str = "",
        around: tuple[str, ...] = (),
    ) -> None:
        """Make a sink for one answer.

        `marker` is the text with which calls begin. `around` are tags around content; they are left
        out together with the white space beside them.
        """
        self.num_calls = 0
        self.may_call = may_call
        self.thinking = False
        self._parts: list[Part] = []
        self._room = room
        self._marker = marker
        self._around = around
        self._space = ""
        self._after_call = False
        self._after_tag = False
        self._close: tuple[str, ...] = ()  # the tags of which one closes an interrupted reasoning
        self._held = ""  # text that may be the beginning of a tag

    def take(self) -> tuple[Part, ...]:
        """Return and forget the parts since the last call; neighbours of one kind are joined."""
        parts, self._parts = self._parts, []
        return tuple(parts)

    def reasoning(self, text: str) -> None:
        last = self._parts[-1] if self._parts else None
        if isinstance(last, Reasoning):
            self._parts[-1] = Reasoning(last.text + text)
        else:
            self._parts.append(Reasoning(text))

    def interrupted(self, close: tuple[str, ...]) -> None:
        """Note that a call may follow although the reasoning is not closed.

        From now on content counts as reasoning, until one of the tags `close`, which is left out.
        """
        self.thinking = False
        self._close = close

    def content(self, text: str) -> None:
        if self._close:
            thought, close, text = self._parted(text, self._close)
            self._think(thought)
            if not close:
                return
            self._closed()
        while self._around:
            before, tag, text = self._parted(text, self._around)
            self._say(before)
            if not tag:
                return
            self._space, self._after_tag = "", True
        self._say(text)

    def call(self, name: str) -> None:
        self._flush()
        self._space = ""
        self._after_call = True
        if not self._close and self._room is not Room.ANY:
            self._room = Room.NONE  # not for a call within reasoning: the form comes after it
        self.thinking = False
        self._parts.append(CallStart(self.num_calls, name))
        self.num_calls += 1

    def arguments(self, text: str) -> None:
        """Add text to the arguments of the call that began last."""
        if not text:
            return
        index = self.num_calls - 1
        last = self._parts[-1] if self._parts else None
        if isinstance(last, CallArguments) and last.index == index:
            self._parts[-1] = CallArguments(index, last.text + text)
        else:
            self._parts.append(CallArguments(index, text))

    def end(self) -> None:
        """End the answer. White space that was held back is content, unless it follows a call."""
        self._flush()
        if self._close:
            self._closed()
        if self._space and not self._after_call:
            self._append(self._space)
        self._space = ""

    def _think(self, text: str) -> None:
        """Add text after a call within reasoning as reasoning."""
        text = self._space + text
        shown = text.rstrip()
        self._space = text[len(shown) :]
        if shown:
            self._after_call = False
            self.thinking = True
            self.reasoning(shown)

    def _parted(self, text: str, tags: tuple[str, ...]) -> tuple[str, str, str]:
        """Divide the text (with what was held back) at the first of `tags`.

        Returns the text before the tag, the tag, and the text after it. Without a tag, the last two
        are "", and an end of the text that may begin a tag is held back.
        """
        text, self._held = self._held + text, ""
        found = [(at, tag) for tag in tags if (at := text.find(tag)) >= 0]
        if found:
            at, tag = min(found)
            return text[:at], tag, text[at + len(tag) :]
        num_shown = len(text) - begun(text, tags)
        self._held = text[num_shown:]
        return text[:num_shown], "", ""

    def _say(self, text: str) -> None:
        """Add content; hold white space at its end back if it may be layout."""
        if self._after_tag:
            text = text.lstrip()
            self._after_tag = not text
        text = self._space + text
        shown = text.rstrip() if self.may_call or self._around else text
        self._space = text[len(shown) :]
        if shown:
            self._after_call = False
            self._append(shown)

    def _flush(self) -> None:
        """Add the text that was held back: it has not become a tag."""
        held, self._held = self._held, ""
        if held and self._close:
            self._think(held)
        elif held:
            self._say(held)

    def _closed(self) -> None:
        """End the interrupted reasoning."""
        if not self._after_call and self._space:
            self.reasoning(self._space)
        self._close, self._space, self.thinking = (), "", False

    def _append(self, text: str) -> None:
        if self._room is Room.JSON_INSTEAD:
            self._room = Room.NONE if self._begins_call(text.lstrip()) else Room.INSTEAD
        if self._room is Room.NONE:
            return
        last = self._parts[-1] if self._parts else None
        if isinstance(last, Content):
            self._parts[-1] = Content(last.text + text)
        else:
            self._parts.append(Content(text))

    def _begins_call(self, text: str) -> bool:
        """Whether the first content begins like the marker of a call, as JSON does not: with its
        first character, or with two where JSON may begin with that one. No more of them are surely
        in the first piece. One alone that may begin either counts as content.
        """
        if not self._marker:
            return False
        return text.startswith(self._marker[: 1 + (self._marker[0] in _BEGINS_JSON)])
