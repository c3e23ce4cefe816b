"""The routes of /v1/messages: a body becomes a chat, and the chat's deltas become a message."""

from __future__ import annotations

import orjson
from starlette.requests import Request as HttpRequest
from starlette.responses import Response
from starlette.routing import Route

from router.api.anthropic import body
from router.api.anthropic.answer import MessageAnswer
from router.api.anthropic.errors import PREFIX
from router.api.dialect import DialectExchange, in_own_names, own_name
from router.api.http.reading import read_body
from router.api.intake import Intake
from router.api.openai.reply_ids import call_ids, pin_of
from router.api.served import served_model
from router.request.completion import CallRunner
from router.request.request_ids import reply_id
from router.services import RouterServices


class AnthropicApi:
    """The routes. router/api/anthropic/errors.py turns failures into Anthropic's error objects."""

    def __init__(self, services: RouterServices, intake: Intake, runner: CallRunner) -> None:
        self._services = services
        self._intake = intake
        self._runner = runner

    def routes(self) -> list[Route]:
        return [
            Route(PREFIX, self.create, methods=["POST"]),
            Route(f"{PREFIX}/count_tokens", self.count_tokens, methods=["POST"]),
        ]

    async def create(self, request: HttpRequest) -> DialectExchange:
        chat = body.read(await read_body(request))
        if chat.thinking_token_budget is not None:
            thought = served_model(self._services, chat.model).model.formats.reasoning
            if thought is None or not thought.can_end:  # nothing here could obey it
                chat.thinking_token_budget = None
        id_ = reply_id("msg_", request, chat.request_id)
        most = chat.max_tokens
        with in_own_names(body.NAMES):
            completion = await self._intake.chat(chat, id_, request, fit_room=True)
        completion.guided_field = own_name(body.NAMES, completion.guided_field)
        draw_id = call_ids(pin_of(request.scope), completion.rules.message, "toolu_")
        answer = MessageAnswer(id_, completion, draw_id, fitted=chat.max_tokens != most)
        timeout_s = self._services.config.request_timeout_s
        return DialectExchange(completion, answer, self._runner, bool(chat.stream), timeout_s)

    async def count_tokens(self, request: HttpRequest) -> Response:
        chat = body.read_count(await read_body(request))
        with in_own_names(body.NAMES):
            count = await self._intake.count(chat, request)
        return Response(orjson.dumps({"input_tokens": count}), media_type="application/json")
