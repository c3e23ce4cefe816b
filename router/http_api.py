"""The HTTP routes: read a body within its limit, parse, check, tokenize, hand a call to its reply.

Bodies and their fields are in router/openai.py, streaming in router/sse.py, whole answers in
router/calls.py. All state is in the RouterServices passed in.
"""

from __future__ import annotations

import re
import secrets
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final, Protocol

import msgspec
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.requests import Request as HttpRequest
from starlette.responses import Response
from starlette.routing import Route

from baton import __version__
from baton.errors import Cancelled, InvalidRequest, ModelNotFound, Unavailable
from baton.metrics import CONTENT_TYPE
from baton.request import Request
from router.calls import Api, Call, Runner, WholeReply
from router.chat_rules import conversation_of, message_rules, tool_format
from router.completion import Completion, OutputRules
from router.openai import (
    Body,
    ChatBody,
    CompletionBody,
    DetokenizeBody,
    TokenizeBody,
    check_common,
    parse,
    prompts_of,
    sampling_params,
    stops_of,
    token_ids_below,
)
from router.openai_message import draw_call_id, draw_short_call_id
from router.openai_replies import Model, ModelList, ReplyHead, ReplyRules
from router.parsers.message import MessageRules
from router.prompts import (
    DEFAULT_MAX_TOKENS,
    PromptReader,
    check_prompt_logprobs,
    check_room,
    room_for_output,
)
from router.services import RouterServices
from router.sse import StreamReply

MAX_BODY_BYTES: Final = 8 << 20
_TRACEPARENT: Final = re.compile(r"00-[0-9a-f]{32}-[0-9a-f]{16}-[0-9a-f]{2}")


class ServedModel(Protocol):
    """What `registry.model()` tells."""

    @property
    def name(self) -> str: ...
    @property
    def max_model_len(self) -> int: ...
    @property
    def vocab_size(self) -> int: ...


class HttpApi:
    """The endpoints of one router."""

    def __init__(self, services: RouterServices, prompts: PromptReader) -> None:
        self._services = services
        self._prompts = prompts
        self._runner = Runner(services.dispatcher, services.metrics, services.clock)
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
            ("/ping", self.health),
            ("/ready", self.ready),
            ("/readyz", self.ready),
            ("/version", self.version),
            ("/metrics", self.metrics),
        )
        return [Route(path, handler, methods=["POST"]) for path, handler in post] + [
            Route(path, handler, methods=["GET"]) for path, handler in get
        ]

    # ---- generation ----

    async def completions(self, request: HttpRequest) -> WholeReply | StreamReply:
        body = await self._read(request, CompletionBody)
        check_common(body)
        model = self._model(body.model)
        id_ = "cmpl-" + secrets.token_hex(12)
        prompts = prompts_of(body)
        special = body.add_special_tokens is not False
        completions: list[Completion] = []
        for index, prompt in enumerate(prompts):
            field = (
                "prompt"
                if isinstance(body.prompt, str) or len(prompts) == 1
                else f"prompt[{index}]"
            )
            ids = (
                await self._prompts.text(prompt, field, special)
                if isinstance(prompt, str)
                else token_ids_below(prompt, model.vocab_size, field)
            )
            room = room_for_output(len(ids), model.max_model_len, field)
            default = min(DEFAULT_MAX_TOKENS, room)
            echo = ""
            if body.echo:
                echo = prompt if isinstance(prompt, str) else await self._prompts.decode(ids)
            intake = _Intake(f"{id_}-{index}", ids, default, _traceparent(request), echo=echo)
            completions.append(self._completion(body, intake, model))
        rules = ReplyRules(
            self._services.tokenizer, body.logprobs, body.prompt_logprobs, echo=bool(body.echo)
        )
        return self._reply(_Plan("completion", id_, rules), body, completions)

    async def chat_completions(self, request: HttpRequest) -> WholeReply | StreamReply:
        body = await self._read(request, ChatBody)
        check_common(body)
        model = self._model(body.model)
        config = self._services.config
        calls = tool_format(body, config)  # refused before anything is rendered
        asked = conversation_of(body)
        prompt = await self._prompts.chat(asked)
        room = room_for_output(len(prompt.ids), model.max_model_len, "messages")
        id_ = "chatcmpl-" + secrets.token_hex(12)
        message = message_rules(body, asked, prompt, config)
        intake = _Intake(id_, prompt.ids, room, _traceparent(request), message=message)
        completion = self._completion(body, intake, model)
        rules = ReplyRules(
            self._services.tokenizer,
            (body.top_logprobs or 0) if body.logprobs else None,
            body.prompt_logprobs,
            parsed=message is not None,
            draw_id=draw_short_call_id if calls and calls.short_ids else draw_call_id,
        )
        return self._reply(_Plan("chat", id_, rules), body, [completion])

    def _completion(
        self, body: CompletionBody | ChatBody, intake: _Intake, model: ServedModel
    ) -> Completion:
        """Everything checked and drawn: the request goes to the dispatcher as it is."""
        defaults = {
            "max_tokens": intake.default_max_tokens,
            **self._services.sampling_defaults,
        }
        params = sampling_params(body, defaults)
        field = "max_tokens"
        if isinstance(body, ChatBody) and body.max_completion_tokens is not None:
            field = "max_completion_tokens"
        check_room(len(intake.prompt_ids), params.max_tokens, model.max_model_len, field)
        field = "logprobs" if body.prompt_logprobs is None else "prompt_logprobs"
        check_prompt_logprobs(len(intake.prompt_ids), params.prompt_logprobs, field)
        token_ids_below(params.stop_token_ids, model.vocab_size, "stop_token_ids")
        if params.seed is None:
            params = replace(params, seed=secrets.randbits(64))
        now = self._services.clock.monotonic()
        rules = OutputRules(
            stop=stops_of(body),
            include_stop=bool(body.include_stop_str_in_output),
            skip_special_tokens=body.skip_special_tokens is not False,
            message=intake.message,
            echo=intake.echo,
            discard=isinstance(body, CompletionBody) and body.only_echo,
        )
        request = Request(
            id=intake.id,
            prompt_ids=intake.prompt_ids,
            params=params,
            priority=body.priority or 0,
            tenant_salt=body.cache_salt or "",
            deadline=now + self._services.config.request_timeout_s,
            traceparent=intake.traceparent,
            arrival=now,
        )
        return Completion(request, self._name(model), rules, self._services.tokenizer)

    def _reply(
        self, plan: _Plan, body: CompletionBody | ChatBody, completions: list[Completion]
    ) -> WholeReply | StreamReply:
        head = ReplyHead(plan.id, completions[0].model, int(time.time()))
        include_usage = body.stream_options is not None and bool(body.stream_options.include_usage)
        timeout_s = self._services.config.request_timeout_s
        call = Call(plan.api, head, tuple(completions), plan.rules, include_usage, timeout_s)
        return StreamReply(call, self._runner) if body.stream else WholeReply(call, self._runner)

    # ---- tokens ----

    async def tokenize(self, request: HttpRequest) -> Response:
        body = await self._read(request, TokenizeBody)
        model = self._model(body.model)
        if (body.prompt is None) == (body.messages is None):
            raise InvalidRequest("give either prompt or messages", field="prompt")
        if body.messages is not None:
            ids = (await self._prompts.chat(conversation_of(body))).ids
        else:
            special = body.add_special_tokens is not False
            ids = await self._prompts.text(body.prompt or "", "prompt", special)
        strings = self._prompts.spell(ids) if body.return_token_strs else None
        return _json(
            {
                "count": len(ids),
                "max_model_len": model.max_model_len,
                "tokens": ids,
                "token_strs": strings,
            }
        )

    async def detokenize(self, request: HttpRequest) -> Response:
        body = await self._read(request, DetokenizeBody)
        model = self._model(body.model)
        if min(body.tokens, default=0) < 0:
            raise InvalidRequest("tokens: token ids are integers from 0 on", field="tokens")
        ids = token_ids_below(tuple(body.tokens), model.vocab_size, "tokens")
        return _json({"prompt": await self._prompts.decode(ids)})

    # ---- about the server ----

    async def models(self, _: HttpRequest) -> Response:
        """The served model; an empty list until a node has said which it is."""
        model: ServedModel | None = self._services.registry.model()
        return _json(ModelList([] if model is None else [self._card(model)]))

    async def model(self, request: HttpRequest) -> Response:
        return _json(self._card(self._model(str(request.path_params["name"]))))

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

    def _model(self, asked: str | None) -> ServedModel:
        """The served model. Raises ModelNotFound for another name, Unavailable without a node."""
        model: ServedModel | None = self._services.registry.model()
        if model is None:
            raise Unavailable("no node has registered yet")
        if asked is not None and asked != self._name(model):
            raise ModelNotFound(f"the model {asked[:200]!r} does not exist", field="model")
        return model

    def _name(self, model: ServedModel) -> str:
        return self._services.config.served_model_name or model.name

    def _card(self, model: ServedModel) -> Model:
        return Model(self._name(model), self._started, model.name, model.max_model_len)

    async def _read(self, request: HttpRequest, kind: type[Body]) -> Body:
        content_type = request.headers.get("content-type", "")
        # Only JSON by name: a foreign web page then cannot post here without a CORS preflight.
        if content_type.partition(";")[0].strip().lower() != "application/json":
            raise HTTPException(415, "the content-type must be application/json")
        raw = bytearray()
        try:
            async for piece in request.stream():
                raw += piece
                if len(raw) > MAX_BODY_BYTES:
                    raise HTTPException(
                        413, f"the body exceeds {MAX_BODY_BYTES} bytes", {"connection": "close"}
                    )
        except ClientDisconnect as error:
            raise Cancelled("the client went away") from error
        return parse(bytes(raw), kind)


@dataclass(frozen=True, slots=True)
class _Intake:
    """One prompt on its way to a Request."""

    id: str
    prompt_ids: tuple[int, ...]
    default_max_tokens: int
    traceparent: str
    echo: str = ""
    message: MessageRules | None = None


@dataclass(frozen=True, slots=True)
class _Plan:
    """What kind of reply, under which id."""

    api: Api
    id: str
    rules: ReplyRules


def _traceparent(request: HttpRequest) -> str:
    given = request.headers.get("traceparent", "")
    return given if _TRACEPARENT.fullmatch(given) else ""


def _json(content: object, status: int = 200) -> Response:
    return Response(msgspec.json.encode(content), status, media_type="application/json")
