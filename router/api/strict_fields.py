"""--strict-fields: refuse a body with a field that this server does not read.

By default unknown fields are ignored, as OpenAI's clients expect. But then a sampling field of
another server (such as `penalty_alpha`) has no effect, and nobody is told. Known fields are those
of the bodies' structs, those that router/api/unserved.py refuses with its own message, and IGNORED.
With the option, the routes are wrapped and parse each body a second time; without it, they are not.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import msgspec
import orjson
from starlette.requests import Request as HttpRequest
from starlette.routing import Route
from starlette.types import Message

from baton.protocol.errors import UnsupportedFeature
from router.api.anthropic.body import UNSERVED as ANTHROPIC_UNSERVED
from router.api.anthropic.body import CountBody, MessagesBody
from router.api.dialect import SAME
from router.api.generate_ids import GenerateBody
from router.api.http.reading import read_body
from router.api.openai.bodies import ChatBody, CompletionBody, DetokenizeBody, TokenizeBody
from router.api.pooling.classify import ClassifyBody, PoolBody
from router.api.pooling.cohere import EmbedBody
from router.api.pooling.embeddings import EmbeddingBody
from router.api.pooling.rerank import RerankBody, ScoreBody
from router.api.responses.body import UNSERVED as RESPONSES_UNSERVED
from router.api.responses.body import ResponsesBody
from router.api.unserved import COHERE, COMPLETIONS, GENERATING, POOLING, RERANKING, Unserved

# Fields that are accepted without effect: ignoring them changes no answer (docs/http_api.md).
IGNORED: Final = frozenset({
    "cache_salt", "chat_template_kwargs", "max_tool_calls", "media_io_kwargs", "metadata",
    "mm_processor_kwargs", "model", "prediction", "return_mm_kwargs", "return_token_offsets",
    "routed_experts_prompt_start", "safety_identifier", "service_tier",
    "spaces_between_special_tokens", "store", "stream_interval", "user", "verbosity",
})  # fmt: skip


def _names(kind: type[msgspec.Struct], *unserved: Unserved) -> frozenset[str]:
    own = (field.encode_name for field in msgspec.structs.fields(kind))
    return IGNORED.union(own, *unserved)


_DIALECT: Final = frozenset({*SAME, *GENERATING})
_RERANKED: Final = {kind: _names(kind, RERANKING) for kind in (RerankBody, ScoreBody)}
_KNOWN: Final[Mapping[str, frozenset[str]]] = {
    "/v1/chat/completions": _names(ChatBody, GENERATING),
    "/v1/completions": _names(CompletionBody, GENERATING, COMPLETIONS),
    "/v1/responses": _names(ResponsesBody, RESPONSES_UNSERVED) | _DIALECT,
    "/v1/responses/input_tokens": _names(ResponsesBody, RESPONSES_UNSERVED) | _DIALECT,
    "/v1/messages": _names(MessagesBody, ANTHROPIC_UNSERVED) | _DIALECT,
    "/v1/messages/count_tokens": _names(CountBody, ANTHROPIC_UNSERVED) | _DIALECT,
    "/v1/embeddings": _names(EmbeddingBody, POOLING),
    "/v2/embed": _names(EmbedBody, COHERE),
    "/classify": _names(ClassifyBody, POOLING),
    "/pooling": _names(PoolBody, POOLING),
    **dict.fromkeys(("/v1/rerank", "/v2/rerank", "/rerank"), _RERANKED[RerankBody]),
    **dict.fromkeys(("/v1/score", "/score"), _RERANKED[ScoreBody]),
    "/inference/v1/generate": _names(GenerateBody),
    "/tokenize": _names(TokenizeBody, GENERATING),
    "/detokenize": _names(DetokenizeBody),
}
# /invocations takes the bodies of several endpoints.
KNOWN: Final = {**_KNOWN, "/invocations": frozenset[str]().union(*_KNOWN.values())}


def strict(route: Route) -> Route:
    """Return the route with the check of its body's fields; an unlisted route as it is."""
    known = KNOWN.get(route.path)
    if known is None:
        return route
    endpoint = route.endpoint

    async def checked(request: HttpRequest) -> Any:
        raw = await read_body(request)
        check_fields(raw, known)
        given = False

        async def receive() -> Message:
            nonlocal given
            if given:
                return await request.receive()
            given = True
            return {"type": "http.request", "body": raw, "more_body": False}

        return await endpoint(HttpRequest(request.scope, receive))

    return Route(route.path, checked, methods=["POST"])


def check_fields(raw: bytes, known: frozenset[str]) -> None:
    """Raise UnsupportedFeature for a field that is not in `known` and not null. A body that is no
    JSON object passes; the route itself refuses it."""
    try:
        content = orjson.loads(raw)
    except orjson.JSONDecodeError:
        return
    for name, value in content.items() if isinstance(content, dict) else ():
        if value is not None and name not in known:
            _refuse(name)
    params = content.get("sampling_params") if isinstance(content, dict) else None
    for name, value in params.items() if isinstance(params, dict) else ():
        if value is not None and name not in KNOWN["/v1/completions"]:
            _refuse(f"sampling_params.{name}")


def _refuse(name: str) -> None:
    shown = name[:100]
    message = f"{shown} is no field of this API (--strict-fields)"
    raise UnsupportedFeature(message, field=shown)
