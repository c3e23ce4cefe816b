"""An answer as a client puts it together from deltas."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from baton.parsers.message import MessageParser, MessageRules
from baton.parsers.parts import CallArguments, CallStart, Content, Part, Reasoning


@dataclass
class Folded:
    """An answer as a client assembles it from deltas."""

    content: str = ""
    reasoning: str = ""
    calls: list[list[str]] = field(default_factory=list[list[str]])

    def take(self, parts: Sequence[Part]) -> None:
        for part in parts:
            match part:
                case Content(text):
                    self.content += text
                case Reasoning(text):
                    self.reasoning += text
                case CallStart(index, name):
                    assert index == len(self.calls)
                    self.calls.append([name, ""])
                case CallArguments(index, text):
                    assert text
                    assert index == len(self.calls) - 1
                    self.calls[index][1] += text


def parse(rules: MessageRules, *pieces: str) -> Folded:
    parser, folded = MessageParser(rules), Folded()
    for piece in pieces:
        folded.take(parser.push(piece))
    folded.take(parser.finish())
    assert parser.num_calls == len(folded.calls)
    return folded


def cut(text: str, places: Sequence[int]) -> list[str]:
    borders = [0, *sorted(place % (len(text) + 1) for place in places), len(text)]
    return [text[a:b] for a, b in pairwise(borders)]
