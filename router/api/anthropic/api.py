"""The routes of /v1/messages: a body becomes a chat's turn, its deltas become a message."""

from __future__ import annotations

import orjson
from starlette.requests import Request as HttpRequest
from starlette.responses import Response
from starlette.routing import Route

from router.api.anthropic import body
from router.api.anthropic.answer import MessageAnswer
from router.api.anthropic.errors import PREFIX
from router.api.calls import CallRunner
from router.api.dialect import DialectCall, in_own_names, own_name
from router.api.http.reading import read_body
from router.api.intake import Intake
from router.api.openai.replies import ReplyRules
from router.api.sse import StreamReply
from router.api.whole import WholeReply
from router.request.request_ids import note_body_id, reply_id
from router.services import RouterServices


class AnthropicApi:
    """Failures leave in Anthropic's words through router/api/anthropic/errors.py."""

    def __init__(self, services: RouterServices, intake: Intake, runner: CallRunner) -> None:
        self._services = services
        self._intake = intake
        self._runner = runner

    def routes(self) -> list[Route]:
        return [
            Route(PREFIX, self.create, methods=["POST"]),
            Route(f"{PREFIX}/count_tokens", self.count_tokens, methods=["POST"]),
        ]

    async def create(self, request: HttpRequest) -> StreamReply | WholeReply:
        thought = self._intake.formats.reasoning
        limits = thought is not None and thought.can_end
        chat = body.read(await read_body(request), limits)
        note_body_id(request, chat.request_id)
        id_ = reply_id("msg_", request)
        with in_own_names(body.NAMES):
            turn = await self._intake.chat(chat, id_, request, fit_room=True)
        completion = turn.completion
        completion.guided_field = own_name(body.NAMES, completion.guided_field)
        rules = ReplyRules(self._services.tokenizer, parsed=turn.parsed, draw_id=turn.draw_id)
        answer = MessageAnswer(id_, turn, rules)
        timeout_s = self._services.config.request_timeout_s
        return DialectCall(completion, answer, timeout_s).reply(self._runner, chat.stream)

    async def count_tokens(self, request: HttpRequest) -> Response:
        chat = body.read_count(await read_body(request))
        with in_own_names(body.NAMES):
            count = await self._intake.count(chat, request)
        return Response(orjson.dumps({"input_tokens": count}), media_type="application/json")
