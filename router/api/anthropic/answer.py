"""The answer to a call of /v1/messages: a completion's deltas -> the events of a message."""

from __future__ import annotations

from typing import Any

from baton.protocol.adapters import adapter_name
from baton.protocol.errors import BatonError, Unavailable
from baton.protocol.request import FinishReason
from router.api.anthropic.errors import error_body
from router.api.anthropic.events import MessageEvents
from router.api.dialect import Event
from router.api.http.web_errors import error_object
from router.api.openai.message import DrawId
from router.request.completion import Completion, Delta


class MessageAnswer:
    """The DialectAnswer (router/api/dialect.py) of one completion. `fitted`: the client's
    max_tokens was larger than the room in the context, and was lowered."""

    def __init__(
        self, id_: str, completion: Completion, draw_id: DrawId, fitted: bool = False
    ) -> None:
        self._completion = completion
        self._fitted = fitted
        model = adapter_name(completion.request.adapter) or completion.model
        head = {"id": id_, "type": "message", "role": "assistant", "model": model}
        self._events = MessageEvents(head, draw_id)
        self._begun = False

    def take(self, delta: Delta) -> list[Event]:
        if delta.finish_reason is FinishReason.ABORT:
            raise Unavailable("the request was aborted")
        completion = self._completion
        events: list[Event] = []
        if not self._begun:
            self._begun = True
            events += self._events.begin(message_usage(completion))
        for part in completion.parts_of(delta):
            events += self._events.part(part)
        if delta.finish_reason is not None:
            reason, sequence = self._stop(delta)
            events += self._events.end(reason, sequence, message_usage(completion))
        return events

    async def last(self) -> list[Event]:
        return []

    def broken(self, error: BatonError) -> list[Event]:
        message = error_object(error)["error"]["message"]
        return self._events.fail(error_body(error.http_status, message))

    def whole(self) -> dict[str, Any]:
        return self._events.message

    def _stop(self, delta: Delta) -> tuple[str, str | None]:
        """Return Anthropic's stop_reason, and the client's stop sequence that ended the message, or
        None."""
        if delta.finish_reason is FinishReason.LENGTH:
            return "model_context_window_exceeded" if self._fitted else "max_tokens", None
        if isinstance(delta.stop_reason, str):
            return "stop_sequence", delta.stop_reason
        return "tool_use" if delta.num_calls else "end_turn", None


def message_usage(completion: Completion) -> dict[str, Any]:
    """Return the `usage` so far. In Anthropic's API `input_tokens` leaves out cached tokens."""
    cached = min(completion.cached_tokens, completion.prompt_tokens)
    return {
        "input_tokens": completion.prompt_tokens - cached,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": cached,
        "output_tokens": completion.completion_tokens,
        "output_tokens_details": {"thinking_tokens": completion.reasoning_tokens},
        "service_tier": "standard",
    }
