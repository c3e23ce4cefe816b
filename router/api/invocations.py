"""/invocations: SageMaker's one door; what a body has says which endpoint it is for."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, Final

from starlette.requests import Request as HttpRequest
from starlette.types import Message

from baton.protocol.errors import InvalidRequest
from router.api.http.reading import read_body
from router.api.openai.bodies import object_of
from router.api.pooling.rerank import SIDES

Handler = Callable[[HttpRequest], Awaitable[Any]]
# Fields that a body must have, all of one entry -> the endpoint, in the order in which they count.
ENDPOINTS: Final[Sequence[tuple[Sequence[str], str]]] = (
    (("messages",), "/v1/chat/completions"),
    (("prompt",), "/v1/completions"),
    (("input",), "/v1/embeddings"),
    (("query", "documents"), "/v1/rerank"),
    *((pair, "/v1/score") for pair in SIDES),
)


class Invocations:
    """`handlers`: of the endpoints. `classifies`: inputs are for /classify."""

    def __init__(self, handlers: Mapping[str, Handler], classifies: bool) -> None:
        self._handlers = handlers
        self._classifies = classifies

    async def invoke(self, request: HttpRequest) -> Any:
        """What the endpoint answers. Raises InvalidRequest for a body that is for none."""
        raw = await read_body(request)
        given = object_of(raw)
        for names, path in ENDPOINTS:
            if all(given.get(name) is not None for name in names):
                chosen = "/classify" if self._classifies and path == "/v1/embeddings" else path
                break
        else:
            wanted = ", ".join(" and ".join(names) for names, _ in ENDPOINTS)
            raise InvalidRequest(f"the body has none of: {wanted}")

        bodies: list[Message] = [{"type": "http.request", "body": raw, "more_body": False}]

        async def receive() -> Message:
            return bodies.pop() if bodies else await request.receive()

        return await self._handlers[chosen](HttpRequest(request.scope, receive))
