"""The way in that all HTTP dialects share: a checked body becomes a Completion, ready to run.

Which model, the prompt's ids, the room that they leave, sampling parameters, the Request. Bodies
are in router/api/openai/bodies.py; another dialect (router/api/responses, router/api/anthropic)
says what it wants as a ChatBody and gets what a chat gets. Of the HTTP request only headers are
read here. All state is in the RouterServices passed in.
"""

from __future__ import annotations

import secrets
from dataclasses import dataclass, replace
from typing import Final

from starlette.requests import Request as HttpRequest

from baton.protocol.request import Request
from router.api.http.preparing import end_preparing
from router.api.openai.allowed_tools import apply_allowed
from router.api.openai.bodies import (
    ChatBody,
    CompletionBody,
    check_common,
    check_token_ids,
    sampling_params,
    stops_of,
)
from router.api.openai.chat_rules import conversation_of, message_rules, said_first, tool_format
from router.api.openai.guided_fields import asked_of, asked_of_chat
from router.api.openai.message import DrawId
from router.api.openai.prompt_options import bad_word_ids, logprobs_within, truncated, useful_length
from router.api.openai.reply_ids import call_ids
from router.api.served import ServedName, adapter_of, model_name, served_model
from router.parsers.message import MessageRules
from router.parsers.registry import Choice, formats_of
from router.prompts.grammar_checks import Constraint
from router.prompts.reader import (
    Length,
    PromptReader,
    check_logprobs,
    check_prompt_logprobs,
    check_room,
    room_for_output,
)
from router.request.completion import Completion, OutputRules
from router.request.request_ids import engine_id
from router.request.terms import STANDARD, Terms, terms_of
from router.services import RouterServices

COUNTED_CONTEXTS: Final = 8


@dataclass(frozen=True, slots=True)
class CheckedPrompt:
    """One prompt on its way to a Request."""

    id: str
    prompt_ids: tuple[int, ...]
    default_max_tokens: int
    terms: Terms = STANDARD
    echo: str = ""
    message: MessageRules | None = None
    guided: Constraint | None = None


@dataclass(frozen=True, slots=True)
class ChatTurn:
    """A chat's answer to be. `parsed`: its text is taken apart; `draw_id` names its tool calls.

    `fitted`: the client's max_tokens was more than the room, and lowered to it.
    """

    completion: Completion
    parsed: bool
    draw_id: DrawId
    fitted: bool = False
    short_ids: bool = False
    role: str = "assistant"
    lead: str = ""  # of the message that the answer goes on with


def cut_prompt(
    body: CompletionBody | ChatBody, ids: tuple[int, ...], max_model_len: int
) -> tuple[int, ...]:
    """As much of a prompt as its body wants, and leaves room to answer. Raises InvalidRequest."""
    newer = body.max_completion_tokens if isinstance(body, ChatBody) else None
    limit = max_model_len - (newer or body.max_tokens or 1)
    return truncated(ids, body.truncate_prompt_tokens, limit, body.truncation_side or "left")


def length_of(body: CompletionBody | ChatBody, max_model_len: int) -> Length:
    """How much of a body's prompt is of any use."""
    side = body.truncation_side or "left"
    return useful_length(body.truncate_prompt_tokens, max_model_len, side)


def countable(max_model_len: int) -> Length:
    """Of prompts whose tokens are only counted: by how much one is too long may be asked."""
    most = max_model_len * COUNTED_CONTEXTS
    return Length(most, name=f"the limit for counting, {COUNTED_CONTEXTS} contexts,")


class Intake:
    """Bodies in, completions out."""

    def __init__(self, services: RouterServices, prompts: PromptReader) -> None:
        self._services = services
        self._prompts = prompts
        config, template, tokenizer = services.config, services.chat_template, services.tokenizer
        self.formats = formats_of(
            Choice(
                config.tool_call_parser, config.reasoning_parser, config.enable_auto_tool_choice
            ),
            None if template is None else template.source,
            [tokenizer.token(token_id) or "" for token_id in tokenizer.special_ids],
        )

    def model(self, asked: str | None) -> ServedName:
        """See served_model."""
        return served_model(self._services, asked)

    def name(self, model: ServedName) -> str:
        return model_name(self._services, model)

    async def chat(
        self, body: ChatBody, id_: str, request: HttpRequest, fit_room: bool = False
    ) -> ChatTurn:
        """Render a chat and make its request. `fit_room` mutates a max_tokens beyond the room.

        Raises InvalidRequest, naming the field of ChatBody.
        """
        check_common(body)
        apply_allowed(body)
        model = self.model(body.model)
        formats = self.formats
        calls = tool_format(body, formats)  # refused before anything is rendered
        terms = terms_of(request)
        asked = conversation_of(body, terms, length_of(body, model.max_model_len))
        prompt = await self._prompts.chat(asked)
        ids = cut_prompt(body, prompt.ids, model.max_model_len)
        room = room_for_output(len(ids), model.max_model_len, "messages")
        fitted = fit_room and body.max_tokens is not None and body.max_tokens > room
        if fitted:
            body.max_tokens = room
        own = asked_of(body)
        message = message_rules(body, asked.chat, prompt, formats, own)
        constraint = asked_of_chat(body, own, formats, message)
        guided = await self._prompts.checked(constraint, terms.grant)
        one = CheckedPrompt(engine_id(id_), ids, room, terms, message=message, guided=guided)
        short = calls is not None and calls.short_ids
        draw_id, parsed = call_ids(request, short), message is not None
        completion = self.completion(body, one, model)
        first = said_first(body, asked.chat, self._services.config.response_role)
        return ChatTurn(completion, parsed, draw_id, fitted, short, *first)

    async def count(self, body: ChatBody, request: HttpRequest) -> int:
        """How many tokens a chat's prompt has. Raises like `chat`."""
        model = self.model(body.model)
        apply_allowed(body)
        length = countable(model.max_model_len)
        asked = conversation_of(body, terms_of(request), length)
        count = len((await self._prompts.chat(asked)).ids)
        end_preparing(request.scope, count)
        return count

    def completion(
        self, body: CompletionBody | ChatBody, asked: CheckedPrompt, model: ServedName
    ) -> Completion:
        """Everything checked and drawn: the request goes to the dispatcher as it is."""
        defaults = {
            "max_tokens": asked.default_max_tokens,
            "seed": secrets.randbits(64),
            **self._services.sampling_defaults,
        }
        field = "top_logprobs" if isinstance(body, ChatBody) else "logprobs"
        most = self._services.config.max_logprobs
        params = sampling_params(body, defaults)
        params = logprobs_within(params, most, model.vocab_size, field)
        check_logprobs(params, not body.stream, field)
        words = bad_word_ids(body.bad_words, self._services.tokenizer)
        if words or asked.guided is not None:
            guided = None if asked.guided is None else asked.guided.guided
            params = replace(params, bad_words=words, guided=guided)
        field = "max_tokens"
        if isinstance(body, ChatBody) and body.max_completion_tokens is not None:
            field = "max_completion_tokens"
        check_room(len(asked.prompt_ids), params.max_tokens, model.max_model_len, field)
        field = "logprobs" if body.prompt_logprobs is None else "prompt_logprobs"
        check_prompt_logprobs(len(asked.prompt_ids), params.prompt_logprobs, field)
        check_token_ids(params, model.vocab_size)
        now = self._services.clock.monotonic()
        rules = OutputRules(
            stop=stops_of(body),
            include_stop=bool(body.include_stop_str_in_output),
            skip_special_tokens=body.skip_special_tokens is not False,
            message=asked.message,
            echo=asked.echo,
            discard=isinstance(body, CompletionBody) and body.only_echo,
        )
        request = Request(
            id=asked.id,
            prompt_ids=asked.prompt_ids,
            params=params,
            adapter=adapter_of(self._services, body.model),
            priority=body.priority or 0,
            tenant_salt=body.cache_salt or "",
            deadline=now + self._services.config.request_timeout_s,
            resume=self._services.config.resume,
            traceparent=asked.terms.traceparent,
            arrival=now,
        )
        terms = asked.terms.with_body(body, self._services.config.receipts)
        request = terms.applied(request)
        made = Completion(request, self.name(model), rules, self._services.tokenizer, terms)
        if asked.guided is not None:
            made.guided_field = asked.guided.field
        return made
