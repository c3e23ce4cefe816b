"""The routes that make responses: a body becomes a chat, and the chat's deltas become a response.

The routes for stored responses are in router/api/responses/stored_api.py.
"""

from __future__ import annotations

import time

import orjson
from starlette.requests import Request as HttpRequest
from starlette.responses import Response
from starlette.routing import Route

from router.api.dialect import DialectExchange, in_own_names, own_name
from router.api.http.reading import read_body
from router.api.intake import Intake
from router.api.openai.reply_ids import call_ids, pin_of
from router.api.responses import body
from router.api.responses.answer import Keep, ResponseAnswer, response_head
from router.api.responses.conversation import conversation_of
from router.api.responses.keeper import Keeper
from router.api.responses.output import RESPONSE_PREFIX
from router.api.resumable.http import owner_of
from router.request.completion import CallRunner
from router.request.request_ids import reply_id
from router.services import RouterServices


class ResponsesApi:
    """The routes. For a response in the background, too, the exchange is made here;
    router/api/responses/background.py runs it."""

    def __init__(self, services: RouterServices, intake: Intake, runner: CallRunner) -> None:
        self._services = services
        self._intake = intake
        self._runner = runner
        self._keeper = Keeper.of(services)

    def routes(self) -> list[Route]:
        return [
            Route("/v1/responses", self.create, methods=["POST"]),
            Route("/v1/responses/input_tokens", self.input_tokens, methods=["POST"]),
        ]

    async def create(self, request: HttpRequest) -> DialectExchange:
        call = await self._read(request)
        chat = call.chat
        id_ = reply_id("resp_", request, chat.request_id)
        with in_own_names(call.names):
            completion = await self._intake.chat(chat, id_, request)
        completion.guided_field = own_name(call.names, completion.guided_field)
        pinned = pin_of(request.scope)
        head = response_head(
            id_, int(time.time()) if pinned is None else pinned.created, call, completion
        )
        draw_id = call_ids(pinned, completion.rules.message)
        keep = self._keep(call, owner_of(request.scope))
        answer = ResponseAnswer(head, call, completion, draw_id, keep)
        timeout_s = self._services.config.request_timeout_s
        return DialectExchange(completion, answer, self._runner, bool(chat.stream), timeout_s)

    async def input_tokens(self, request: HttpRequest) -> Response:
        """Tell how many tokens the prompt of a body has, without running the model."""
        call = await self._read(request)
        with in_own_names(call.names):
            count = await self._intake.count(call.chat, request)
        told = {"object": "response.input_tokens", "input_tokens": count}
        return Response(orjson.dumps(told), media_type="application/json")

    async def _read(self, request: HttpRequest) -> body.ResponsesCall:
        given, pinned = body.read(await read_body(request)), pin_of(request.scope)
        told = RESPONSE_PREFIX + pinned.name if pinned is not None and pinned.again else None
        earlier, items = await conversation_of(given.body, request.scope, self._keeper, told)
        drops_tools = self._services.config.responses_drop_builtin_tools
        return body.call_of(given, earlier, items, drops_tools)

    def _keep(self, call: body.ResponsesCall, owner: str) -> Keep | None:
        keeper = self._keeper
        if keeper is None or call.body.store is False:
            return None
        return lambda stored: keeper.settle(owner, stored)
