"""The HTTP routes: read a body, parse, check, tokenize, hand a call to its reply.

Bodies and their fields are in router/api/openai/bodies.py, the way from a body to a request in
router/api/intake.py, streaming in router/api/sse.py, whole answers in router/api/whole.py, the
dialects of /v1/responses and /v1/messages in packages of their own. All state is in the
RouterServices passed in.
"""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from typing import Any, Final

import msgspec
from starlette.requests import Request as HttpRequest
from starlette.responses import Response
from starlette.routing import Route

from baton import __version__
from baton.protocol.adapters import adapter_name
from baton.protocol.errors import InvalidRequest, UnsupportedFeature
from baton.runtime.metrics import CONTENT_TYPE
from router.api.anthropic.api import AnthropicApi
from router.api.calls import Api, Call, CallRunner
from router.api.http.preparing import end_preparing
from router.api.http.reading import read_body
from router.api.intake import CheckedPrompt, Intake, countable, cut_prompt, length_of
from router.api.openai.bodies import (
    Body,
    ChatBody,
    CompletionBody,
    DetokenizeBody,
    StreamOptions,
    TokenizeBody,
    check_common,
    parse,
    prompts_of,
    token_ids_below,
)
from router.api.openai.chat_rules import conversation_of
from router.api.openai.guided_fields import asked_of, limited_text
from router.api.openai.logprobs import told_count
from router.api.openai.replies import ModelList, ReplyHead, ReplyRules
from router.api.openai.reply_ids import created_at
from router.api.responses.api import ResponsesApi
from router.api.served import cards
from router.api.sse import StreamReply
from router.api.whole import WholeReply
from router.prompts.reader import DEFAULT_MAX_TOKENS, PromptReader, TextInputs, room_for_output
from router.request.completion import Completion
from router.request.request_ids import engine_id, note_body_id, reply_id
from router.request.terms import Terms, terms_of
from router.services import RouterServices

SPARE_COMMAS: Final = 64  # of a body beside its tokens
# POST routes that are worth a short way (router/server/direct.py).
BUSIEST: Final = frozenset({"/v1/completions", "/v1/chat/completions"})


class HttpApi:
    """The endpoints of one router."""

    def __init__(self, services: RouterServices, prompts: PromptReader) -> None:
        self._services = services
        self._prompts = prompts
        self._intake = Intake(services, prompts)
        self._runner = CallRunner(services.dispatcher, services.metrics, services.clock)
        self._started = int(time.time())  # what /v1/models calls `created`

    def routes(self) -> list[Route]:
        post: Sequence[tuple[str, Callable[[HttpRequest], Awaitable[Any]]]] = (
            ("/v1/completions", self.completions),
            ("/v1/chat/completions", self.chat_completions),
            ("/tokenize", self.tokenize),
            ("/detokenize", self.detokenize),
        )
        get: Sequence[tuple[str, Callable[[HttpRequest], Awaitable[Any]]]] = (
            ("/v1/models", self.models),
            ("/v1/models/{name:path}", self.model),
            ("/health", self.health),
            ("/ready", self.ready),
            ("/readyz", self.ready),
            ("/version", self.version),
            ("/metrics", self.metrics),
        )
        dialects = (
            *ResponsesApi(self._services, self._intake, self._runner).routes(),
            *AnthropicApi(self._services, self._intake, self._runner).routes(),
        )
        own = [Route(path, handler, methods=["POST"]) for path, handler in post] + [
            Route(path, handler, methods=["GET"]) for path, handler in get
        ]
        ping = Route("/ping", self.health, methods=["GET", "POST"])  # SageMaker posts
        return [*own, ping, *dialects]

    # ---- generation ----

    async def completions(self, request: HttpRequest) -> WholeReply | StreamReply:
        body = await self._read(request, CompletionBody)
        note_body_id(request, body.request_id)
        check_common(body)
        model = self._intake.model(body.model)
        id_ = reply_id("cmpl-", request)
        terms = terms_of(request)
        guided = await self._prompts.checked(asked_of(body), terms.grant)
        special = body.add_special_tokens is not False
        length = length_of(body, model.max_model_len)
        asked = TextInputs(prompts_of(body), "prompt", length, terms.grant, special)
        completions: list[Completion] = []
        read = zip(await self._prompts.read(asked), asked.items, asked.fields, strict=True)
        for index, (all_ids, prompt, field) in enumerate(read):
            if not isinstance(prompt, str):
                token_ids_below(prompt, model.vocab_size, field)
            ids = cut_prompt(body, all_ids, model.max_model_len)
            room = room_for_output(len(ids), model.max_model_len, field)
            default = min(DEFAULT_MAX_TOKENS, room)
            echo = prompt if body.echo and isinstance(prompt, str) else ""
            if body.echo and not isinstance(prompt, str):
                echo = await self._prompts.decode(ids, terms.grant)
            own = guided
            if body.thinking_token_budget is not None:
                text = prompt if isinstance(prompt, str) else ""
                text = text or await self._prompts.decode(ids, terms.grant)
                own = limited_text(guided, body, text, self._intake.formats.reasoning)
            one = CheckedPrompt(engine_id(id_, index), ids, default, terms, echo=echo, guided=own)
            completions.append(self._intake.completion(body, one, model))
        rules = self._rules(body, completions[0], echo=bool(body.echo))
        head = self._head(id_, completions, request)
        return self._reply("completion", head, rules, body, completions)

    async def chat_completions(self, request: HttpRequest) -> WholeReply | StreamReply:
        body = await self._read(request, ChatBody)
        note_body_id(request, body.request_id)
        id_ = reply_id("chatcmpl-", request)
        turn = await self._intake.chat(body, id_, request)
        rules = replace(
            self._rules(body, turn.completion),
            parsed=turn.parsed,
            draw_id=turn.draw_id,
            role=turn.role,
            lead=turn.lead,
        )
        head = self._head(id_, [turn.completion], request)
        return self._reply("chat", head, rules, body, [turn.completion])

    async def of_tokens(
        self, body: CompletionBody, ids: tuple[int, ...], id_: str, terms: Terms
    ) -> Completion:
        """A completion of tokens, for router/api/generate_ids.py: up to what the model holds."""
        model = self._intake.model(body.model)
        token_ids_below(ids, model.vocab_size, "token_ids")
        ids = cut_prompt(body, ids, model.max_model_len)
        room = room_for_output(len(ids), model.max_model_len, "token_ids")
        guided = await self._prompts.checked(asked_of(body), terms.grant)
        if body.thinking_token_budget is not None:
            text = await self._prompts.decode(ids, terms.grant)
            guided = limited_text(guided, body, text, self._intake.formats.reasoning)
        one = CheckedPrompt(id_, ids, room, terms, guided=guided)
        return self._intake.completion(body, one, model)

    def _rules(
        self, body: CompletionBody | ChatBody, completion: Completion, echo: bool = False
    ) -> ReplyRules:
        """What the client wants told of each choice."""
        params, by_id = completion.request.params, body.return_tokens_as_token_ids
        if by_id is None:
            by_id = self._services.config.return_tokens_as_token_ids
        return ReplyRules(
            self._services.tokenizer,
            told_count(params),
            params.prompt_logprobs if body.prompt_logprobs == -1 else body.prompt_logprobs,
            echo=echo,
            token_ids=bool(body.return_token_ids),
            named_by_id=by_id,
        )

    def _head(self, id_: str, completions: Sequence[Completion], request: HttpRequest) -> ReplyHead:
        name = adapter_name(completions[0].request.adapter) or completions[0].model
        return ReplyHead(id_, name, created_at(request))

    def _reply(
        self,
        api: Api,
        head: ReplyHead,
        rules: ReplyRules,
        body: CompletionBody | ChatBody,
        completions: list[Completion],
    ) -> WholeReply | StreamReply:
        told = body.stream_options or StreamOptions()
        call = Call(
            api,
            head,
            tuple(completions),
            rules,
            bool(told.include_usage),
            self._services.config.request_timeout_s,
            continuous_usage=bool(told.include_usage and told.continuous_usage_stats),
        )
        return StreamReply(call, self._runner) if body.stream else WholeReply(call, self._runner)

    # ---- tokens ----

    async def tokenize(self, request: HttpRequest) -> Response:
        body = await self._read(request, TokenizeBody)
        model = self._intake.model(body.model)
        if (body.prompt is None) == (body.messages is None):
            raise InvalidRequest("give either prompt or messages", field="prompt")
        terms, length = terms_of(request), countable(model.max_model_len)
        if body.messages is not None:
            ids = (await self._prompts.chat(conversation_of(body, terms, length))).ids
        else:
            if body.chat_template is not None:
                message = "chat_template is not supported with prompt: it renders messages"
                raise UnsupportedFeature(message, field="chat_template")
            special = body.add_special_tokens is not False
            asked = TextInputs([body.prompt or ""], "prompt", length, terms.grant, special)
            [ids] = await self._prompts.read(asked)
        strings = await self._prompts.spell(ids, terms.grant) if body.return_token_strs else None
        end_preparing(request.scope, len(ids))
        return _json(
            {
                "count": len(ids),
                "max_model_len": model.max_model_len,
                "tokens": ids,
                "token_strs": strings,
            }
        )

    async def detokenize(self, request: HttpRequest) -> Response:
        raw = await read_body(request)
        model = self._intake.model(None)
        most = countable(model.max_model_len).tokens
        if raw.count(b",") > most + SPARE_COMMAS:  # before a million numbers are made of it
            raise InvalidRequest(f"tokens: at most {most} at once", field="tokens")
        body = parse(raw, DetokenizeBody)
        model = self._intake.model(body.model)
        ids = token_ids_below(tuple(body.tokens), model.vocab_size, "tokens")
        text = await self._prompts.decode(ids, terms_of(request).grant)
        return _json({"prompt": text})

    # ---- about the server ----

    async def models(self, _: HttpRequest) -> Response:
        """The served model and its adapters; empty until a node has said which they are."""
        return _json(ModelList(cards(self._services, self._started)))

    async def model(self, request: HttpRequest) -> Response:
        name = str(request.path_params["name"])
        self._intake.model(name)
        found = cards(self._services, self._started)
        return _json(next(card for card in found if card.id == name))

    async def health(self, _: HttpRequest) -> Response:
        """The process answers. Says nothing of nodes: a restart would not help them."""
        return _json({"status": "ok"})

    async def ready(self, _: HttpRequest) -> Response:
        ready = self._services.ready
        status = "draining" if self._services.lifecycle.draining else "waiting for nodes"
        return _json({"status": "ready" if ready else status}, 200 if ready else 503)

    async def version(self, _: HttpRequest) -> Response:
        return _json({"version": __version__})

    async def metrics(self, _: HttpRequest) -> Response:
        body = self._services.metrics.render()
        return Response(body, headers={"content-type": CONTENT_TYPE})

    # ---- shared ----

    async def _read(self, request: HttpRequest, kind: type[Body]) -> Body:
        return parse(await read_body(request), kind)


def _json(content: object, status: int = 200) -> Response:
    return Response(msgspec.json.encode(content), status, media_type="application/json")
