"""The answer to a call of /v1/responses: a completion's deltas -> the events of a response."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from baton.parsers.parts import Content
from baton.protocol.errors import BatonError, Unavailable
from baton.protocol.request import FinishReason
from router.api.dialect import Event
from router.api.http.web_errors import error_object
from router.api.openai.logprobs import chat_logprobs
from router.api.openai.message import DrawId
from router.api.responses.body import ResponsesCall
from router.api.responses.events import Logprobs, ResponseEvents
from router.api.responses.items import kept
from router.api.responses.keeper import Stored
from router.request.completion import Completion, Delta

Keep = Callable[[Stored], Awaitable[bool]]


class ResponseAnswer:
    """The DialectAnswer (router/api/dialect.py) of one completion. `head`: from response_head.
    `keep`: stores the response before its last event is sent; None: do not store it."""

    def __init__(
        self,
        head: Mapping[str, Any],
        call: ResponsesCall,
        completion: Completion,
        draw_id: DrawId,
        keep: Keep | None = None,
    ) -> None:
        self._completion = completion
        chat = call.chat
        self._logprobs = (chat.top_logprobs or 0) if chat.logprobs else None
        self._keep = keep
        self._items = call.items
        fields = {**head, "store": keep is not None}
        self._events = ResponseEvents(fields, draw_id, call.summarized, call.tools.known)
        self._told: Logprobs = []  # log-probabilities of tokens whose text has not come yet
        self._begun = False

    def take(self, delta: Delta) -> list[Event]:
        if delta.finish_reason is FinishReason.ABORT:
            raise Unavailable("the request was aborted")
        events: list[Event] = []
        if not self._begun:
            self._begun = True
            events += self._events.begin()
        completion = self._completion
        if self._logprobs is not None:
            rows, tokenizer = delta.logprobs, completion.tokenizer
            self._told += chat_logprobs(rows, self._logprobs, tokenizer)
        for part in completion.parts_of(delta):
            told, self._told = self._told, []
            events += self._events.part(part, told if isinstance(part, Content) else None)
        if delta.finish_reason is not None:
            cut_short = delta.finish_reason is FinishReason.LENGTH
            usage = response_usage(completion)
            told_at = completion.trace.told_at
            ended_at = int(time.time()) if told_at is None else told_at
            events += self._events.end(cut_short, usage, ended_at)
        return events

    async def last(self) -> list[Event]:
        if self._keep is not None:
            self._events.response["store"] = await self._keep(self.stored())
        return self._events.last()

    def stored(self, **fields: Any) -> Stored:
        """Return the response as it is now, in the form that is stored. `fields` replace fields of
        the response."""
        response = {**self._events.response, **fields}
        return Stored(response, kept(self._items, response["id"]))

    def broken(self, error: BatonError) -> list[Event]:
        return self._events.fail(**error_of(error))

    def whole(self) -> dict[str, Any]:
        return self._events.response


def error_of(error: BatonError) -> dict[str, str]:
    """Return the field `error` of a failed response."""
    code = "rate_limit_exceeded" if error.http_status == 429 else "server_error"
    return {"code": code, "message": error_object(error)["error"]["message"]}


def response_usage(completion: Completion) -> dict[str, Any]:
    """Return the `usage` so far; it is final when the completion has ended."""
    prompt, output = completion.prompt_tokens, completion.completion_tokens
    images = {"image_tokens": completion.image_tokens} if completion.request.images else {}
    return {
        "input_tokens": prompt,
        "input_tokens_details": {
            "cached_tokens": completion.cached_tokens,
            "cache_write_tokens": 0,
            **images,
        },
        "output_tokens": output,
        "output_tokens_details": {"reasoning_tokens": completion.reasoning_tokens},
        "total_tokens": prompt + output,
    }


def response_head(
    id_: str, created: int, call: ResponsesCall, completion: Completion
) -> dict[str, Any]:
    """Return the fields that a response has in all its states: mostly the request's parameters,
    with the defaults that are used."""
    body, params = call.body, completion.request.params
    reasoning, text = body.reasoning, body.text
    summary = (reasoning.summary or reasoning.generate_summary) if reasoning else None
    return {
        "id": id_,
        "object": "response",
        "created_at": created,
        "model": completion.model,
        "background": body.background is True,
        "instructions": body.instructions,
        "max_output_tokens": body.max_output_tokens,
        "max_tool_calls": body.max_tool_calls,
        "metadata": body.metadata or {},
        "parallel_tool_calls": body.parallel_tool_calls is not False,
        "previous_response_id": body.previous_response_id,
        "reasoning": {"effort": reasoning.effort if reasoning else None, "summary": summary},
        "service_tier": "default",
        "temperature": params.temperature,
        "text": {
            "format": (text.format if text else None) or {"type": "text"},
            "verbosity": (text.verbosity if text else None) or "medium",
        },
        "tool_choice": body.tool_choice if body.tool_choice is not None else "auto",
        "tools": call.tools.kept,
        "top_logprobs": body.top_logprobs or 0,
        "top_p": params.top_p,
        "truncation": "disabled",
        **{name: value for name, value in _only_if_said(call).items() if value},
    }


def _only_if_said(call: ResponsesCall) -> dict[str, Any]:
    """Return the fields that a response has only if they have a value; they are never null."""
    body = call.body
    return {
        "user": body.user,
        "prompt_cache_key": body.prompt_cache_key,
        "safety_identifier": body.safety_identifier,
        "baton_notes": call.tools.notes,
    }
