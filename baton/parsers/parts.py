"""What an answer consists of, in the order in which it arrives; and the sink that grammars fill."""

from __future__ import annotations

import enum
from dataclasses import dataclass

from baton.parsers.reader import begun


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


class Room(enum.Enum):
    """What an answer's grammar leaves to content. What it has no room for, and is not read as a
    call, is the markup of a call that was cut short: it is left out."""

    ANY = enum.auto()  # text and calls as the model likes
    INSTEAD = enum.auto()  # either content or calls
    JSON_INSTEAD = enum.auto()  # and content is JSON, which begins otherwise than a marker
    NONE = enum.auto()  # calls only


class Sink:
    """Collects the parts of one answer. `thinking` is true between the tags of reasoning.

    Where there may be calls, white space before one or after the last is layout and left out, so it
    is held back until it is clear what follows. All else that a grammar writes is kept. What comes
    after a call within reasoning is reasoning until that is closed: see interrupted().
    """

    def __init__(
        self,
        may_call: bool,
        room: Room = Room.ANY,
        marker: str = "",
        around: tuple[str, ...] = (),
    ) -> None:
        """`marker`: what calls begin with. `around`: tags around content that are none of it, nor
        is the white space beside them."""
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
        self._close: tuple[str, ...] = ()  # one of these tags still has to come
        self._held = ""  # what a tag may have begun with

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

    def interrupted(self, close: tuple[str, ...]) -> None:
        """What follows may be a call although the reasoning is not closed: what is content by
        itself is reasoning up to one of `close`, which is left out."""
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
            self._room = Room.NONE  # a call within reasoning is not the grammar's
        self.thinking = False
        self._parts.append(CallStart(self.num_calls, name))
        self.num_calls += 1

    def arguments(self, text: str) -> None:
        """Of the call begun last."""
        if not text:
            return
        index = self.num_calls - 1
        last = self._parts[-1] if self._parts else None
        if isinstance(last, CallArguments) and last.index == index:
            self._parts[-1] = CallArguments(index, last.text + text)
        else:
            self._parts.append(CallArguments(index, text))

    def end(self) -> None:
        """No more comes: white space is content, unless a call stands before it."""
        self._flush()
        if self._close:
            self._closed()
        if self._space and not self._after_call:
            self._append(self._space)
        self._space = ""

    def _think(self, text: str) -> None:
        """More of the reasoning after a call in it."""
        text = self._space + text
        shown = text.rstrip()
        self._space = text[len(shown) :]
        if shown:
            self._after_call = False
            self.thinking = True
            self.reasoning(shown)

    def _parted(self, text: str, tags: tuple[str, ...]) -> tuple[str, str, str]:
        """Text (with what was held back) before the first of `tags`, the tag, the text after it;
        without one, its beginning is held back."""
        text, self._held = self._held + text, ""
        found = [(at, tag) for tag in tags if (at := text.find(tag)) >= 0]
        if found:
            at, tag = min(found)
            return text[:at], tag, text[at + len(tag) :]
        num_shown = len(text) - begun(text, tags)
        self._held = text[num_shown:]
        return text[:num_shown], "", ""

    def _say(self, text: str) -> None:
        """Content."""
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
        """What was held back has not become a tag."""
        held, self._held = self._held, ""
        if held and self._close:
            self._think(held)
        elif held:
            self._say(held)

    def _closed(self) -> None:
        """The interrupted reasoning is over."""
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
        """Whether the first content is a call's: its marker, or as much of it as came. A lone
        bracket may be either, and is content."""
        if not self._marker:
            return False
        return text.startswith(self._marker) or (text != "[" and self._marker.startswith(text))
