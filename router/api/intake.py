"""Intake: turns the checked body of any HTTP API into a Completion, ready to run.

It finds the model, the prompt's token ids, the room that they leave in the context, the sampling
parameters, and makes the Request. Bodies are in router/api/openai/bodies.py. Other dialects
(router/api/responses, router/api/anthropic) translate theirs into a ChatBody first. Of the HTTP
request this file reads only the headers. It keeps no state of requests.
"""

from __future__ import annotations

import os
from dataclasses import replace
from operator import attrgetter
from typing import Final

from starlette.requests import Request as HttpRequest

from baton.parsers.message import MessageRules
from baton.protocol.request import Request
from baton.protocol.sampling import SamplingParams
from router.api.http.preparing import end_preparing
from router.api.openai.bodies import (
    ChatBody,
    CompletionBody,
    check_common,
    check_token_ids,
    name_in,
    sampling_params,
    stops_of,
)
from router.api.openai.chat_rules import (
    apply_allowed,
    conversation_of,
    message_rules,
    tool_format,
)
from router.api.openai.guided_fields import asked_of, asked_of_chat
from router.api.openai.prompt_options import (
    bad_word_ids,
    logprobs_within,
    truncated,
    useful_length,
)
from router.api.openai.reply_ids import pin_of
from router.api.served import ServedCall, served_model
from router.images.parts import refuse_remote
from router.models import PromptReaders
from router.prompts.grammar_checks import Constraint
from router.prompts.reader import (
    ChatInputs,
    Length,
    beyond_room,
    check_logprobs,
    check_prompt_logprobs,
    room_for_output,
    whole_length,
)
from router.request.completion import PLAIN_OUTPUT, Completion, OutputRules
from router.request.request_ids import engine_id
from router.request.terms import Terms, terms_of
from router.services import RouterServices

COUNTED_CONTEXTS: Final = 8
# The fields that say what an answer must look like (router/api/openai/guided_fields.py).
_form: Final = attrgetter(
    "response_format", "structured_outputs", "guided_json", "guided_regex", "guided_choice",
    "guided_grammar", "guided_decoding_backend",
)  # fmt: skip
_NO_FORM: Final = (None,) * 7


def cut_prompt(
    body: CompletionBody | ChatBody, ids: tuple[int, ...], max_model_len: int
) -> tuple[int, ...]:
    """Cut a prompt to `truncate_prompt_tokens`, if the body has that field; -1 cuts it so that the
    wanted output fits. Raises InvalidRequest."""
    newer = body.max_completion_tokens if isinstance(body, ChatBody) else None
    limit = max_model_len - (newer or body.max_tokens or 1)
    return truncated(ids, body.truncate_prompt_tokens, limit, body.truncation_side or "left")


def length_of(body: CompletionBody | ChatBody, max_model_len: int) -> Length:
    """Return how long a body's prompt may be before it is cut or refused."""
    if body.truncate_prompt_tokens is None:
        return whole_length(max_model_len)
    side = body.truncation_side or "left"
    return useful_length(body.truncate_prompt_tokens, max_model_len, side)


def countable(max_model_len: int) -> Length:
    """Return how long a prompt may be whose tokens are only counted. It may exceed the context, so
    that a client can ask by how much."""
    most = max_model_len * COUNTED_CONTEXTS
    return Length(most, name=f"the limit for counting, {COUNTED_CONTEXTS} contexts,")


def output_rules(
    body: CompletionBody | ChatBody, message: MessageRules | None = None, echo: str = ""
) -> OutputRules:
    """Return how the tokens of an answer become text. `message`: how the text is split into
    content, reasoning and calls; None: it is not split. `echo`: text before the answer."""
    shows_all = body.skip_special_tokens is False or body.include_stop_str_in_output
    discard = isinstance(body, CompletionBody) and body.only_echo
    if not (body.stop or shows_all or message or echo or discard):
        return PLAIN_OUTPUT
    return OutputRules(
        stop=stops_of(body),
        include_stop=bool(body.include_stop_str_in_output),
        skip_special_tokens=body.skip_special_tokens is not False,
        message=message,
        echo=echo,
        discard=discard,
    )


class Intake:
    """Turns bodies into completions."""

    def __init__(self, services: RouterServices, prompts: PromptReaders) -> None:
        self._services = services
        self._prompts = prompts
        for model in services.models.all:
            _ = model.formats  # found, logged or refused at the start

    async def chat(
        self, body: ChatBody, id_: str, request: HttpRequest, fit_room: bool = False
    ) -> Completion:
        """Render a chat and make its completion.

        `fit_room`: lower `body.max_tokens` to the room that the prompt leaves; otherwise a larger
        value is refused. Raises InvalidRequest, naming the field of ChatBody.
        """
        services = self._services
        check_common(body)
        if isinstance(body.tool_choice, dict):
            apply_allowed(body)
        served = served_model(services, body.model, writes=True)
        model, formats, prompts = (
            served.info,
            served.model.formats,
            self._prompts.of[served.model.key],
        )
        tools = tool_format(body, formats)  # refused before anything is rendered
        terms = terms_of(request).with_body(body, services.config.receipts)
        chat, images = conversation_of(body)
        if pin_of(request.scope) is not None:
            refuse_remote(images)
        prompt = await prompts.chat(
            ChatInputs(
                chat,
                length_of(body, model.max_model_len),
                terms.grant,
                terms.salt(body.cache_salt or ""),
                body.add_special_tokens is True,
                body.chat_template,
                images,
            )
        )
        ids = prompt.ids
        if body.truncate_prompt_tokens is not None:
            ids = cut_prompt(body, ids, model.max_model_len)
        room = room_for_output(len(ids), model.max_model_len, "messages")
        if fit_room and body.max_tokens is not None:
            body.max_tokens = min(body.max_tokens, room)
        guided = own = asked_of(body) if _form(body) != _NO_FORM else None
        message = message_rules(body, chat, prompt.text, tools, formats.reasoning, own)
        if own is not None or body.tools or body.thinking_token_budget is not None:
            constraint = asked_of_chat(body, own, formats, message)
            guided = await prompts.checked(constraint, terms.grant)
        params = self.params(body, served, len(ids), room, guided)
        asked = self.request(body, engine_id(id_), ids, params, terms, served.adapter)
        if prompt.images:
            asked = replace(asked, images=prompt.images)
        return self.completion(asked, served, output_rules(body, message), terms, guided)

    async def count(self, body: ChatBody, request: HttpRequest) -> int:
        """Return how many tokens a chat's prompt has. Raises the same exceptions as `chat`."""
        served = served_model(self._services, body.model)
        apply_allowed(body)
        terms, length = terms_of(request), countable(served.info.max_model_len)
        chat, images = conversation_of(body)
        salt, special = terms.salt(body.cache_salt or ""), body.add_special_tokens is True
        prompt = await self._prompts.of[served.model.key].chat(
            ChatInputs(chat, length, terms.grant, salt, special, body.chat_template, images)
        )
        end_preparing(request.scope, len(prompt.ids))
        return len(prompt.ids)

    def params(
        self,
        body: CompletionBody | ChatBody,
        served: ServedCall,
        num_prompt_tokens: int,
        default_max_tokens: int,
        guided: Constraint | None,
    ) -> SamplingParams:
        """Return a body's sampling parameters, checked against the model and the prompt's length.

        Raises InvalidRequest, naming the body's field."""
        own, model = served.model, served.info
        defaults = {"max_tokens": default_max_tokens, "seed": int.from_bytes(os.urandom(8), "big")}
        params = sampling_params(body, {**defaults, **own.sampling_defaults})
        if params.logprobs is not None or params.prompt_logprobs is not None:
            field, most = name_in(body, "logprobs"), own.config.max_logprobs
            params = logprobs_within(params, most, model.vocab_size, field)
            check_logprobs(params, not body.stream, field)
            field = "logprobs" if body.prompt_logprobs is None else "prompt_logprobs"
            check_prompt_logprobs(num_prompt_tokens, params.prompt_logprobs, field)
        if body.bad_words or guided is not None:
            words = bad_word_ids(body.bad_words, own.tokenizer)
            params = replace(
                params, bad_words=words, guided=None if guided is None else guided.guided
            )
        if num_prompt_tokens + params.max_tokens > model.max_model_len:
            field = name_in(body, "max_tokens")
            raise beyond_room(num_prompt_tokens, params.max_tokens, model.max_model_len, field)
        check_token_ids(params, model.vocab_size)
        return params

    def request(
        self,
        body: CompletionBody | ChatBody,
        id_: str,
        ids: tuple[int, ...],
        params: SamplingParams,
        terms: Terms,
        adapter: str,
    ) -> Request:
        """Return the request for the dispatcher. `terms`: from the headers and from the body."""
        config, arrival = self._services.config, terms.arrival
        if arrival is None:
            arrival = self._services.clock.monotonic()
        return terms.applied(
            Request(
                id=id_,
                prompt_ids=ids,
                params=params,
                adapter=adapter,
                priority=body.priority or 0,
                tenant_salt=body.cache_salt or "",
                deadline=arrival + config.request_timeout_s,
                resume=config.resume,
                traceparent=terms.traceparent,
                arrival=arrival,
            )
        )

    def completion(
        self,
        request: Request,
        served: ServedCall,
        rules: OutputRules,
        terms: Terms,
        guided: Constraint | None,
    ) -> Completion:
        """Return the completion of a request, ready to run."""
        model = served.model
        made = Completion(request, served.name, rules, model.tokenizer, terms, model.key)
        if guided is not None:
            made.guided_field = guided.field
        return made
