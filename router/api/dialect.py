"""What the dialects beside OpenAI's chats and completions share: /v1/responses and /v1/messages.

A dialect says what it wants as a chat's body (`chat_body`), so that rendering, tools, guided
decoding and sampling are one and the same everywhere, and answers with a `DialectAnswer`: events
without I/O, each made of a delta. Streamed, they go out as they come; whole, the last state is the
reply.
"""

from __future__ import annotations

import re
from collections.abc import Awaitable, Iterable, Iterator, Mapping
from contextlib import aclosing, contextmanager
from dataclasses import dataclass
from typing import Any, Final, Protocol

import orjson
from starlette.types import Receive, Scope, Send

from baton.protocol.errors import BatonError, InvalidRequest
from router.api.exchange import respond
from router.api.openai.bodies import ChatBody, SamplingFields, checked
from router.api.unserved import GENERATING
from router.request.completion import CallRunner, Completion, Delta

Event = dict[str, Any]
# Fields of a chat that every dialect takes under the same name: what chats and completions share,
# but for what a dialect says in another way or not at all; and of a chat's own.
_OTHERWISE: Final = {
    "stream_options", "max_tokens", "n", "best_of", "use_beam_search", "early_stopping", "stop",
    "length_penalty", "prompt_logprobs", "add_special_tokens", "truncate_prompt_tokens",
    "truncation_side", "return_token_ids", "return_tokens_as_token_ids", "response_format",
}  # fmt: skip
SAME: Final = (
    *(name for name in SamplingFields.__struct_fields__ if name not in _OTHERWISE),
    "include_reasoning", "chat_template", "documents",
)  # fmt: skip
_IN_FUNCTION: Final = re.compile(r"^(tools\[\d+\])\.function\.")


class DialectAnswer(Protocol):
    """One completion's answer. `take` each delta in order: the one that ends it ends it.

    `last`: what is told then; all that must be done before that is done there, the rest is sans
    I/O. `broken` ends it instead, where events went out already; `whole` is for after the end.
    """

    def take(self, delta: Delta) -> list[Event]: ...
    async def last(self) -> list[Event]: ...
    def broken(self, error: BatonError) -> list[Event]: ...
    def whole(self) -> dict[str, Any]: ...


def chat_body(given: Mapping[str, Any], translated: Mapping[str, Any]) -> ChatBody:
    """The chat that a dialect's body asks for: its own fields translated, the others as they are.

    Raises InvalidRequest, naming the chat's field.
    """
    same = {name: given[name] for name in (*SAME, *GENERATING) if name in given}
    said = {name: value for name, value in translated.items() if value is not None}
    return checked({**same, **said}, ChatBody)


@contextmanager
def in_own_names(names: Mapping[str, str]) -> Iterator[None]:
    """Errors about a chat's field name the client's own instead: chat's name -> the client's."""
    try:
        yield
    except InvalidRequest as error:
        theirs = error.field or ""
        own = own_name(names, theirs)
        if own == theirs:
            raise
        raise type(error)(error.message.replace(theirs, own), field=own) from error


def own_name(names: Mapping[str, str], field: str) -> str:
    """A chat's field as the client knows it; the dialects' tools have no `function` in between."""
    field = _IN_FUNCTION.sub(r"\1.", field)
    head = next((name for name in names if _within(field, name)), None)
    return field if head is None else names[head] + field[len(head) :]


def _within(field: str, head: str) -> bool:
    return field == head or field.startswith((f"{head}.", f"{head}["))


@dataclass(frozen=True, slots=True)
class DialectExchange:
    """One completion and the answer to it (router/api/exchange.py). `after`: a stream begins after
    the event of that `sequence_number`."""

    completion: Completion
    answer: DialectAnswer
    runner: CallRunner
    stream: bool
    timeout_s: float
    after: int = -1

    def __call__(self, scope: Scope, receive: Receive, send: Send) -> Awaitable[None]:
        return respond(self, self.runner, scope, receive, send)

    @property
    def completions(self) -> tuple[Completion, ...]:
        return (self.completion,)

    def frames(self, prompt: int) -> list[EventFrames]:
        return [EventFrames(self.answer, self.after)]

    async def tail(self) -> bytes:
        return frames_of(await self.answer.last(), self.after)

    def broken(self, error: BatonError) -> bytes:
        return frames_of(self.answer.broken(error), self.after)

    async def whole(self, runner: CallRunner) -> bytes:
        async with aclosing(self.completion.deltas(runner)) as deltas:
            async for delta in deltas:
                self.answer.take(delta)
        await self.answer.last()
        return orjson.dumps(self.answer.whole())


class EventFrames:
    """Frames of one answer (exchange.Frames). It opens with the first delta, not before:
    only then is it known how much of the prompt was cached."""

    def __init__(self, answer: DialectAnswer, after: int) -> None:
        self._answer = answer
        self._after = after

    def opening(self) -> bytes:
        return b""

    def delta(self, delta: Delta) -> bytes:
        return frames_of(self._answer.take(delta), self._after)


def frames_of(events: Iterable[Event], after: int) -> bytes:
    """Named server-sent events; each event's `type` is its name. Without those that `after` and
    what is before it have told."""
    return b"".join(
        b"event: " + event["type"].encode() + b"\ndata: " + orjson.dumps(event) + b"\n\n"
        for event in events
        if after < 0 or event["sequence_number"] > after
    )
