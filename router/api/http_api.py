"""The HTTP routes of OpenAI's generation API and of the server's state.

A generating route reads a body, parses, checks and tokenizes it, and returns an exchange that
answers. Bodies are in router/api/openai/bodies.py, the way from a body to a request in
router/api/intake.py, answers in router/api/openai/exchange.py and router/api/exchange.py.
/v1/responses and /v1/messages have their own packages. This file keeps no state of requests.
"""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Final

import msgspec
from starlette.requests import Request as HttpRequest
from starlette.responses import Response
from starlette.routing import Route

from baton import __version__
from baton.protocol.errors import InvalidRequest, UnsupportedFeature
from baton.runtime.metrics import CONTENT_TYPE
from router.api.anthropic.api import AnthropicApi
from router.api.http.preparing import end_preparing
from router.api.http.reading import read_body
from router.api.intake import Intake, countable, cut_prompt, length_of, output_rules
from router.api.openai.bodies import (
    ChatBody,
    CompletionBody,
    DetokenizeBody,
    TokenizeBody,
    check_common,
    parse,
    prompts_of,
    token_ids_below,
)
from router.api.openai.chat_rules import conversation_of
from router.api.openai.exchange import OpenAIExchange
from router.api.openai.guided_fields import asked_of, limited_text
from router.api.openai.replies import ModelList
from router.api.responses.api import ResponsesApi
from router.api.served import cards, longest_context, served_model
from router.models import PromptReaders
from router.prompts.reader import (
    DEFAULT_MAX_TOKENS,
    ChatInputs,
    TextInputs,
    room_for_output,
)
from router.request.completion import CallRunner, Completion
from router.request.request_ids import engine_id, reply_id
from router.request.terms import Terms, terms_of
from router.services import RouterServices

SPARE_COMMAS: Final = 64  # commas of a /detokenize body that are not between tokens
# POST routes that router/server/app.py calls without Starlette's layers.
BUSIEST: Final = frozenset({"/v1/completions", "/v1/chat/completions"})


class HttpApi:
    """The endpoints of this file, with those of the two dialects."""

    def __init__(self, services: RouterServices, prompts: PromptReaders) -> None:
        self._services = services
        self._prompts = prompts
        self._intake = Intake(services, prompts)
        self._runner = CallRunner(
            services.dispatcher, services.metrics, services.clock, direct=True
        )
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

    async def chat_completions(self, request: HttpRequest) -> OpenAIExchange:
        body = parse(await read_body(request), ChatBody)
        id_ = reply_id("chatcmpl-", request, body.request_id)
        made = [await self._intake.chat(body, id_, request)]
        return OpenAIExchange(self._services, self._runner, body, made, id_, request.scope)

    async def completions(self, request: HttpRequest) -> OpenAIExchange:
        body = parse(await read_body(request), CompletionBody)
        id_ = reply_id("cmpl-", request, body.request_id)
        check_common(body)
        served = served_model(self._services, body.model, writes=True)
        model, prompts = served.info, self._prompts.of[served.model.key]
        terms = terms_of(request).with_body(body, self._services.config.receipts)
        guided = await prompts.checked(asked_of(body), terms.grant)
        special = body.add_special_tokens is not False
        length = length_of(body, model.max_model_len)
        asked = TextInputs(prompts_of(body), "prompt", length, terms.grant, special)
        made: list[Completion] = []
        read = zip(await prompts.read(asked), asked.items, asked.fields, strict=True)
        for index, (all_ids, prompt, field) in enumerate(read):
            if not isinstance(prompt, str):
                token_ids_below(prompt, model.vocab_size, field)
            ids = cut_prompt(body, all_ids, model.max_model_len)
            room = room_for_output(len(ids), model.max_model_len, field)
            text = prompt if isinstance(prompt, str) else ""
            if not text and (body.echo or body.thinking_token_budget is not None):
                text = await prompts.decode(ids, terms.grant)
            own = guided
            if body.thinking_token_budget is not None:
                own = limited_text(guided, body, text, served.model.formats.reasoning)
            most = min(DEFAULT_MAX_TOKENS, room)
            params = self._intake.params(body, served, len(ids), most, own)
            one = engine_id(id_, index)
            wanted = self._intake.request(body, one, ids, params, terms, served.adapter)
            rules = output_rules(body, echo=text if body.echo else "")
            made.append(self._intake.completion(wanted, served, rules, terms, own))
        return OpenAIExchange(self._services, self._runner, body, made, id_, request.scope)

    async def of_tokens(
        self, body: CompletionBody, ids: tuple[int, ...], id_: str, terms: Terms
    ) -> Completion:
        """Make the completion of a prompt of token ids, for router/api/generate_ids.py.

        By default max_tokens is what the model's context leaves. Raises InvalidRequest, naming the
        field of /v1/completions."""
        served = served_model(self._services, body.model, writes=True)
        model, prompts = served.info, self._prompts.of[served.model.key]
        token_ids_below(ids, model.vocab_size, "token_ids")
        prompts.refuse_markers(ids, "token_ids")
        ids = cut_prompt(body, ids, model.max_model_len)
        room = room_for_output(len(ids), model.max_model_len, "token_ids")
        guided = await prompts.checked(asked_of(body), terms.grant)
        if body.thinking_token_budget is not None:
            text = await prompts.decode(ids, terms.grant)
            guided = limited_text(guided, body, text, served.model.formats.reasoning)
        terms = terms.with_body(body, self._services.config.receipts)
        params = self._intake.params(body, served, len(ids), room, guided)
        wanted = self._intake.request(body, id_, ids, params, terms, served.adapter)
        return self._intake.completion(wanted, served, output_rules(body), terms, guided)

    # ---- tokens ----

    async def tokenize(self, request: HttpRequest) -> Response:
        body = parse(await read_body(request), TokenizeBody)
        served = served_model(self._services, body.model)
        model, prompts = served.info, self._prompts.of[served.model.key]
        if (body.prompt is None) == (body.messages is None):
            raise InvalidRequest("give either prompt or messages", field="prompt")
        terms, length = terms_of(request), countable(model.max_model_len)
        if body.messages is not None:
            (chat, images), special = conversation_of(body), body.add_special_tokens is True
            asked = ChatInputs(
                chat, length, terms.grant, terms.salt(""), special, body.chat_template, images
            )
            ids = (await prompts.chat(asked)).ids
        else:
            if body.chat_template is not None:
                message = "chat_template is not supported with prompt: it renders messages"
                raise UnsupportedFeature(message, field="chat_template")
            special = body.add_special_tokens is not False
            texts = TextInputs([body.prompt or ""], "prompt", length, terms.grant, special)
            [ids] = await prompts.read(texts)
        strings = await prompts.spell(ids, terms.grant) if body.return_token_strs else None
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
        most = countable(longest_context(self._services)).tokens
        if raw.count(b",") > most + SPARE_COMMAS:  # refused before a million numbers are parsed
            raise InvalidRequest(f"tokens: at most {most} at once", field="tokens")
        body = parse(raw, DetokenizeBody)
        served = served_model(self._services, body.model)
        ids = token_ids_below(tuple(body.tokens), served.info.vocab_size, "tokens")
        text = await self._prompts.of[served.model.key].decode(ids, terms_of(request).grant)
        return _json({"prompt": text})

    # ---- about the server ----

    async def models(self, _: HttpRequest) -> Response:
        """List the served model and its adapters. The list is empty until a node has registered."""
        return _json(ModelList(cards(self._services, self._started)))

    async def model(self, request: HttpRequest) -> Response:
        name = str(request.path_params["name"])
        served_model(self._services, name)
        found = cards(self._services, self._started)
        return _json(next(card for card in found if card.id == name))

    async def health(self, _: HttpRequest) -> Response:
        """Answer that the process is alive. Nodes do not matter here: if they are away, restarting
        the router would not help."""
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


def _json(content: object, status: int = 200) -> Response:
    return Response(msgspec.json.encode(content), status, media_type="application/json")
