"""OpenAIExchange: one call of OpenAI's API, a chat or a completion of one or several prompts.

In a streaming answer each choice has a writer of frames; in a non-streaming answer each choice is
collected (router/api/openai/chat_choices.py, text_choices.py).

Choices are numbered prompt by prompt: choice i is sample i % n of prompt i // n.
"""

from __future__ import annotations

import time
from collections.abc import Awaitable, Mapping, Sequence
from contextlib import aclosing
from typing import Any, Final

import msgspec
import orjson
from starlette.types import Receive, Scope, Send

from baton.protocol.adapters import adapter_name
from baton.protocol.errors import BatonError
from baton.runtime.concurrency import together
from router.api.exchange import Frames, respond
from router.api.http.web_errors import error_object
from router.api.openai.bodies import ChatBody, CompletionBody
from router.api.openai.chat_choices import ChatFrames, WholeChat
from router.api.openai.chat_rules import said_first
from router.api.openai.logprobs import prompt_logprobs
from router.api.openai.replies import (
    DONE,
    FINGERPRINT,
    ChatReply,
    CompletionReply,
    CompletionTokensDetails,
    PromptTokensDetails,
    Usage,
    sse_frame,
    told_count,
)
from router.api.openai.reply_ids import pin_of
from router.api.openai.text_choices import CompletionFrames, WholeText
from router.api.receipt import receipt_frame
from router.request.completion import CallRunner, Completion, Delta
from router.services import RouterServices

# The usage in a chunk (OpenAIExchange.chunk). Quotes within JSON strings are escaped, so no text of
# a client or a model can contain these bytes.
_NO_USAGE: Final = b'"usage":null'


class OpenAIExchange:
    """The Exchange (router/api/exchange.py) of OpenAI's API: a checked call and its answer.

    `logprobs`: log-probabilities of tokens up to this rank are returned; None: no
    log-probabilities. `named_by_id`: they name tokens `token_id:<number>`. `role`: the role of a
    chat's answer. `lead`: text that is sent before a chat's content.
    """

    def __init__(
        self,
        services: RouterServices,
        runner: CallRunner,
        body: ChatBody | CompletionBody,
        completions: Sequence[Completion],
        id_: str,
        scope: Scope,
    ) -> None:
        self.body = body
        self.completions = completions
        self.stream = bool(body.stream)
        self.timeout_s = services.config.request_timeout_s
        self.pinned = pin_of(scope)
        first = completions[0]
        self.logprobs = told_count(first.request.params)
        own = services.models[first.trace.model].config
        by_id = body.return_tokens_as_token_ids
        self.named_by_id = own.return_tokens_as_token_ids if by_id is None else by_id
        usage = body.stream_options
        self._tells_usage = usage is not None and bool(usage.include_usage)
        self._counts_usage = usage is not None and bool(usage.continuous_usage_stats)
        self._runner = runner
        chat = isinstance(body, ChatBody)
        self.role, self.lead = said_first(body, own.response_role) if chat else ("", "")
        self._head: dict[str, Any] = {
            "id": id_,
            "object": "chat.completion.chunk" if chat else "text_completion",
            "created": int(time.time()) if self.pinned is None else self.pinned.created,
            "model": adapter_name(first.request.adapter) or first.model,
        }

    def __call__(self, scope: Scope, receive: Receive, send: Send) -> Awaitable[None]:
        return respond(self, self._runner, scope, receive, send)

    # ---- streamed ----

    def frames(self, prompt: int) -> Sequence[Frames]:
        completion = self.completions[prompt]
        kind = ChatFrames if isinstance(self.body, ChatBody) else CompletionFrames
        frames = [kind(self, completion, index) for index in self._indices(prompt)]
        if self._tells_usage and self._counts_usage:
            return [CountedFrames(each, completion.prompt_tokens) for each in frames]
        return frames

    def chunk(self, choice: Mapping[str, Any], **more: Any) -> bytes:
        """Return the frame of one choice. With include_usage it has `usage: null`, because only the
        last chunk of the stream has the usage."""
        content = {**self._head, "system_fingerprint": FINGERPRINT, "choices": [choice]}
        if self._tells_usage:
            content["usage"] = None
        return b"data: " + orjson.dumps({**content, **more}) + b"\n\n"

    async def tail(self) -> bytes:
        data = b""
        if self.completions[0].trace.terms.receipt:
            data += receipt_frame(self.completions, self._head)
        if self._tells_usage:
            head = {**self._head, "system_fingerprint": FINGERPRINT}
            data += sse_frame({**head, "choices": [], "usage": msgspec.to_builtins(self._usage())})
        return data + DONE

    def broken(self, error: BatonError) -> bytes:
        return sse_frame(error_object(error)) + DONE

    # ---- whole ----

    async def whole(self, runner: CallRunner) -> bytes:
        if len(self.completions) == 1:
            return msgspec.json.encode(self._reply(await self._choices(0, runner)))
        prompts = range(len(self.completions))
        several = await together([self._choices(prompt, runner) for prompt in prompts])
        return msgspec.json.encode(self._reply([choice for each in several for choice in each]))

    async def _choices(self, prompt: int, runner: CallRunner) -> list[Any]:
        """Run the completion of one prompt; return its choices."""
        completion = self.completions[prompt]
        kind = WholeChat if isinstance(self.body, ChatBody) else WholeText
        choices = [kind(self, completion, index) for index in self._indices(prompt)]
        async with aclosing(completion.deltas(runner)) as deltas:
            async for delta in deltas:
                choices[delta.sample].take(delta)
        return [each.choice() for each in choices]

    def _reply(self, choices: list[Any]) -> CompletionReply | ChatReply:
        id_, created, model = (self._head[name] for name in ("id", "created", "model"))
        usage = self._usage()
        if not isinstance(self.body, ChatBody):
            return CompletionReply(id_, created, model, choices, usage)
        first = self.completions[0]
        return ChatReply(
            id_,
            created,
            model,
            choices,
            usage,
            prompt_logprobs=self.told_of_prompt(first),
            prompt_token_ids=list(first.request.prompt_ids) if self.body.return_token_ids else None,
        )

    # ---- both ----

    def told_of_prompt(self, completion: Completion) -> Any:
        """Return vLLM's `prompt_logprobs`, or None if the client did not ask."""
        count = self.body.prompt_logprobs
        if count == -1:
            count = completion.request.params.prompt_logprobs
        if count is None:
            return None
        return prompt_logprobs(completion.prompt_logprobs, count, completion.tokenizer)

    def _indices(self, prompt: int) -> range:
        """Return the numbers of a prompt's choices, in the order of its samples."""
        count = self.completions[prompt].request.params.n
        return range(prompt * count, (prompt + 1) * count)

    def _usage(self) -> Usage:
        """Return the usage of all completions together; final when they have ended."""
        prompt = completion = cached = reasoning = images = 0
        for each in self.completions:
            prompt += each.prompt_tokens
            completion += each.completion_tokens
            cached += each.cached_tokens
            reasoning += each.reasoning_tokens
            images += each.image_tokens
        return Usage(
            prompt,
            completion,
            prompt + completion,
            PromptTokensDetails(cached, images or msgspec.UNSET),
            CompletionTokensDetails(reasoning),
        )


class CountedFrames:
    """Writes the frames of one choice with a usage in each, for vLLM's
    `stream_options.continuous_usage_stats`.

    The usage is that of one choice: the prompt's tokens and the choice's tokens so far. The usage
    in the last chunk of the stream is the sum over all choices."""

    def __init__(self, frames: Frames, prompt_tokens: int) -> None:
        self._frames = frames
        self._prompt_tokens = prompt_tokens
        self._output_tokens = 0

    def opening(self) -> bytes:
        return self._counted(self._frames.opening())

    def delta(self, delta: Delta) -> bytes:
        self._output_tokens += len(delta.token_ids)
        return self._counted(self._frames.delta(delta))

    def _counted(self, frames: bytes) -> bytes:
        prompt, output = self._prompt_tokens, self._output_tokens
        counts = {
            "prompt_tokens": prompt, "completion_tokens": output, "total_tokens": prompt + output
        }  # fmt: skip
        return frames.replace(_NO_USAGE, b'"usage":' + orjson.dumps(counts))
