"""What the dialects /v1/responses and /v1/messages share.

A dialect translates its body into the body of a chat (`chat_body`), so rendering, tools, guided
decoding and sampling are those of /v1/chat/completions. It answers with a `DialectAnswer`, which
turns each delta of the completion into events, without I/O. A streaming answer sends the events as
they come; a non-streaming answer is the state after the last event.
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
# SAME: the fields of a chat that every dialect takes under the same name. These are the fields that
# chats and completions share, without _OTHERWISE, and three fields of chats alone.
# _OTHERWISE: fields that a dialect names in another way, or does not have.
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
    """The answer to one completion, as events. Only `last` does I/O.

    `take`: the events of a delta; called for every delta in order. `last`: the events after the
    last delta; it first does what must be done before they are sent, such as storing the response.
    `broken`: the events that end a stream after a failure, instead of `last`. `whole`: the reply as
    one object, after `last`.
    """

    def take(self, delta: Delta) -> list[Event]: ...
    async def last(self) -> list[Event]: ...
    def broken(self, error: BatonError) -> list[Event]: ...
    def whole(self) -> dict[str, Any]: ...


def chat_body(given: Mapping[str, Any], translated: Mapping[str, Any]) -> ChatBody:
    """Return the body of the chat that a dialect's body asks for.

    `given`: the dialect's body, of which the fields SAME are copied. `translated`: the chat's
    fields that the dialect spells differently. Raises InvalidRequest, naming the chat's field.
    """
    same = {name: given[name] for name in (*SAME, *GENERATING) if name in given}
    said = {name: value for name, value in translated.items() if value is not None}
    return checked({**same, **said}, ChatBody)


@contextmanager
def in_own_names(names: Mapping[str, str]) -> Iterator[None]:
    """Make errors in the `with` block name the client's field instead of the chat's field.

    `names`: the chat's field -> the client's field."""
    try:
        yield
    except InvalidRequest as error:
        theirs = error.field or ""
        own = own_name(names, theirs)
        if own == theirs:
            raise
        raise type(error)(error.message.replace(theirs, own), field=own) from error


def own_name(names: Mapping[str, str], field: str) -> str:
    """Return the client's name of a chat's field. In a dialect, the fields of a tool stand in the
    tool itself, not in its `function`."""
    field = _IN_FUNCTION.sub(r"\1.", field)
    head = next((name for name in names if _within(field, name)), None)
    return field if head is None else names[head] + field[len(head) :]


def _within(field: str, head: str) -> bool:
    return field == head or field.startswith((f"{head}.", f"{head}["))


@dataclass(frozen=True, slots=True)
class DialectExchange:
    """The Exchange (router/api/exchange.py) of one completion in a dialect. `after`: a stream
    leaves out the events up to this `sequence_number`; -1: it has all events."""

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
    """The Frames (router/api/exchange.py) of a dialect's answer. The first frame waits for the
    first delta: only then is it known how much of the prompt was cached."""

    def __init__(self, answer: DialectAnswer, after: int) -> None:
        self._answer = answer
        self._after = after

    def opening(self) -> bytes:
        return b""

    def delta(self, delta: Delta) -> bytes:
        return frames_of(self._answer.take(delta), self._after)


def frames_of(events: Iterable[Event], after: int) -> bytes:
    """Return events as server-sent events, named by their `type`, without those whose
    `sequence_number` is at most `after`."""
    return b"".join(
        b"event: " + event["type"].encode() + b"\ndata: " + orjson.dumps(event) + b"\n\n"
        for event in events
        if after < 0 or event["sequence_number"] > after
    )
