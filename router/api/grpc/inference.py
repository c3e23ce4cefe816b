"""The router's gRPC API: serve.proto's Inference, grpc.health.v1, reflection.

This file turns protobuf messages into a Completion, which runs as one of the HTTP API does
(router/request/completion.py). An error becomes a gRPC status, with Baton's error code and field in
the trailing metadata (baton/client/client.py reads them). If API keys are configured, every call
but health needs `authorization: Bearer KEY`. ServerInfo always needs an operator's key, unless no
keys of either kind are configured.
The life: bind() -> start() -> watch() as a task -> stop().
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing
from dataclasses import replace
from typing import Any, Final, NoReturn

import grpc
import grpc.aio
import msgspec
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from baton import __version__
from baton.client.client import ERROR_CODE_METADATA, ERROR_FIELD_METADATA
from baton.protocol import wire
from baton.protocol.errors import ConfigError, InvalidRequest
from baton.protocol.request import Request
from baton.protocol.sampling import SamplingParams
from baton.protocol.wire_sampling import sampling_fields
from baton.protocol.wire_values import logprobs_to_wire
from baton.runtime.log import request_context
from baton.runtime.timing import CLIENT_TIMING, channel_options, server_options
from protos import serve_pb2, serve_pb2_grpc
from router.api.http.reading import MAX_BODY_BYTES
from router.api.http.web_errors import error_object
from router.api.openai.bodies import check_priority, check_token_ids, token_ids_below
from router.api.openai.fields import MAX_NAME_CHARS, MAX_STOP_CHARS, MAX_STOPS
from router.api.openai.prompt_options import logprobs_within
from router.api.receipt import HEADER, header_of, receipt_of
from router.api.resumable.grpc import GrpcAsked, NoCaller, ResumableCalls
from router.api.served import adapter_named, served_model
from router.images import limits
from router.images.parts import ImagePart
from router.models import PromptReaders
from router.nodes.registry import ReportedModel
from router.prompts.reader import (
    DEFAULT_MAX_TOKENS,
    Length,
    PromptReader,
    ReadPrompt,
    TextInputs,
    beyond_room,
    check_logprobs,
    check_prompt_logprobs,
    room_for_output,
)
from router.request.completion import CallRunner, Completion, Delta, OutputRules
from router.request.failures import as_baton_error, log_failure
from router.request.terms import read_terms, resume_of
from router.resumable.canonical import owner_digest, record_id
from router.services import RouterServices
from router.tenants.keys import EVERYBODY, Grant, KeyRing

log = logging.getLogger(__name__)

RETRY_PUSHBACK_METADATA: Final = "grpc-retry-pushback-ms"  # gRPC's own name: proposal A6
SERVICE: Final = "baton.serve.v1.Inference"
STOP_MARGIN_S: Final = 1.0
CONNECTION_AGE_S: Final = 3600.0
MAX_CALLS: Final = 4096  # calls of all clients at once; more are refused (RESOURCE_EXHAUSTED)
_HEALTH_PREFIX: Final = "/grpc.health.v1.Health/"
_OPERATORS: Final = frozenset({f"/{SERVICE}/ServerInfo"})


class InferenceService(serve_pb2_grpc.InferenceServicer):
    """Implements serve.proto's Inference with a router's services."""

    def __init__(self, services: RouterServices, prompts: PromptReaders, keys: KeyRing) -> None:
        self._services = services
        self._prompts = prompts
        self._keys = keys
        self._resumable = ResumableCalls(services, self._again)

    async def Generate(
        self, request: serve_pb2.GenerateRequest, context: Any
    ) -> AsyncGenerator[serve_pb2.GenerateEvent, None]:
        """Stream the events of one request. If the client goes away, the request is aborted on
        every node; a resumable request instead goes on for its grace."""
        request_id = request.request_id or "gen-" + secrets.token_hex(12)
        with request_context(request_id):
            try:
                completion, deltas = await self._opened(request, request_id, context)
                running = completion.num_choices
                first = True
                async with aclosing(deltas):
                    async for delta, fresh in deltas:
                        running -= delta.finish_reason is not None
                        event = _event(completion, delta, first=first, last=not running)
                        event.request_id = request_id
                        if fresh:
                            yield event
                        first = False
                if completion.trace.terms.receipt:
                    told = header_of(receipt_of(completion))
                    context.set_trailing_metadata(((HEADER, told),))
                completion.trace.answered_at = self._services.clock.monotonic()
            except Exception as error:  # noqa: BLE001  every failure becomes one gRPC status
                await _abort(context, error)

    async def Abort(self, request: serve_pb2.AbortRequest, context: Any) -> serve_pb2.AbortReply:
        """Abort a request of the caller's tenant; one of another tenant counts as not found."""
        own_id = record_id(self._owner(context), request.request_id)
        found = await self._services.aborts.everywhere([own_id], domain=self._grant(context).domain)
        return serve_pb2.AbortReply(found=bool(found))

    async def Models(self, request: serve_pb2.ModelsRequest, context: Any) -> serve_pb2.ModelsReply:
        """List the served models, each once a node of it has registered."""
        infos = [(it, self._services.registry.model(it.key)) for it in self._services.models.all]
        return serve_pb2.ModelsReply(
            models=[
                serve_pb2.ModelInfo(
                    id=model.names(info)[0], max_model_len=info.max_model_len, digest=info.digest
                )
                for model, info in infos
                if info is not None
            ]
        )

    async def ServerInfo(
        self, request: serve_pb2.ServerInfoRequest, context: Any
    ) -> serve_pb2.ServerInfoReply:
        """Tell the connected nodes with their load, the number of requests by state, and the
        migrations."""
        counts = await self._services.store.counts()
        moves = self._services.dispatcher.migrations
        return serve_pb2.ServerInfoReply(
            version=__version__,
            nodes=[wire.record_to_wire(record) for record in self._services.registry.records()],
            requests_by_state={state.value: max(0, count) for state, count in counts.items()},
            migrations=serve_pb2.Migrations(
                done=moves.done,
                failed=moves.failed,
                tokens=moves.tokens,
                seconds=moves.seconds,
                given_back=moves.given_back,
            ),
        )

    async def _opened(
        self, message: serve_pb2.GenerateRequest, request_id: str, context: Any
    ) -> tuple[Completion, AsyncGenerator[tuple[Delta, bool], None]]:
        """Return a completion and its deltas. Each delta comes with a bool: False if the reader of
        a resumable request has seen it already. Raises BatonError."""
        if message.resumable_s or message.starting_after:
            after = tuple(message.starting_after)
            message.ClearField("starting_after")
            body = message.SerializeToString(deterministic=True)
            asked = GrpcAsked(request_id, self._owner(context), message.resumable_s, after, body)
            first = None if any(after) else await self._prepared(message, request_id, context)
            completion, numbered = await self._resumable.open(asked, first)
            terms = completion.trace.terms
            completion.trace.terms = msgspec.structs.replace(terms, receipt=False)
            return completion, numbered
        services = self._services
        completion = await self._prepared(message, request_id, context)
        # The id includes the key's digest: two keys may use the same name without any conflict.
        own_id = record_id(self._owner(context), request_id)
        completion.request = replace(completion.request, id=own_id)
        runner = CallRunner(services.dispatcher, services.metrics, services.clock)
        return completion, _all_fresh(completion.deltas(runner))

    async def _prepared(
        self, message: serve_pb2.GenerateRequest, request_id: str, context: Any
    ) -> Completion:
        """Make the completion of a new call. Meanwhile it counts with its API key."""
        with self._services.dispatcher.gate.preparing(self._grant(context)):
            return await self._completion(message, request_id, context)

    async def _again(self, body: bytes, name: str) -> Completion:
        """Make the completion of a resumable request again, from the message in its record."""
        message = serve_pb2.GenerateRequest.FromString(body)
        return await self._completion(message, name, NoCaller())

    def _owner(self, context: Any) -> str:
        """Return the digest of the caller's API key; without keys all callers have the same one."""
        if not len(self._keys):
            return owner_digest([])
        _, _, key = _metadata(context.invocation_metadata(), "authorization").partition(" ")
        return owner_digest([key.strip().encode()])

    async def _completion(
        self, message: serve_pb2.GenerateRequest, request_id: str, context: Any
    ) -> Completion:
        """Check a message and make its completion, with a random seed if it has none.

        Raises InvalidRequest, naming the field; ModelNotFound; Unavailable."""
        now = self._services.clock.monotonic()
        served = served_model(self._services, message.model or None, writes=True)
        own, model, prompts = served.model, served.info, self._prompts.of[served.model.key]
        if len(request_id) > MAX_NAME_CHARS or not request_id.isprintable():
            raise InvalidRequest(
                f"request_id: at most {MAX_NAME_CHARS} printable characters", field="request_id"
            )
        check_priority(message.priority)
        rules = OutputRules(
            stop=_stops(message),
            skip_special_tokens=not message.HasField("skip_special_tokens")
            or message.skip_special_tokens,
        )
        grant = self._grant(context)
        prompt, field = await _prompt(prompts, message, model, grant)
        ids = prompt.ids
        room = room_for_output(len(ids), model.max_model_len, field)
        defaults = {
            "max_tokens": min(DEFAULT_MAX_TOKENS, room),
            **own.sampling_defaults,
        }
        most = own.config.max_logprobs
        params = logprobs_within(_sampling_params(message, defaults), most, model.vocab_size)
        check_logprobs(params, at_once=False, field="logprobs")
        await prompts.check_guided(params.guided, grant)
        if len(ids) + params.max_tokens > model.max_model_len:
            raise beyond_room(len(ids), params.max_tokens, model.max_model_len, "max_tokens")
        check_prompt_logprobs(len(ids), params.prompt_logprobs, "prompt_logprobs")
        check_token_ids(params, model.vocab_size)
        timeout_s = self._services.config.request_timeout_s
        remaining = context.time_remaining()  # None if the caller sets no deadline
        metadata = context.invocation_metadata()
        terms = read_terms(lambda name: _metadata(metadata, name), grant)
        request = Request(
            id=request_id,
            prompt_ids=ids,
            params=params,
            adapter=adapter_named(self._services, own, message.adapter) or served.adapter,
            priority=message.priority,
            tenant_salt=message.cache_salt,
            deadline=now + (timeout_s if remaining is None else min(timeout_s, remaining)),
            resume=self._services.config.resume,
            traceparent=_metadata(metadata, "traceparent"),
            arrival=now,
            images=prompt.images,
        )
        # proto3 does not tell a priority of 0 from no priority: the metadata's is used then.
        receipt = terms.receipt and self._services.config.receipts
        resume = resume_of(message.resume, "resume") or terms.resume
        priority = message.priority or terms.priority
        terms = msgspec.structs.replace(terms, priority=priority, receipt=receipt, resume=resume)
        request = terms.applied(request)
        return Completion(request, served.name, rules, own.tokenizer, terms, own.key)

    def _grant(self, context: Any) -> Grant:
        given = _metadata(context.invocation_metadata(), "authorization")
        return self._keys.bearer(given.encode()) or EVERYBODY


class ApiKeyInterceptor(grpc.aio.ServerInterceptor):
    """Refuses calls without a known key: ServerInfo needs an operator's key, health needs none, and
    the other methods need an API key if any is configured."""

    def __init__(self, keys: KeyRing, admin_keys: KeyRing) -> None:
        self._keys = keys
        self._admin_keys = admin_keys
        self._denial = grpc.unary_unary_rpc_method_handler(self._deny)

    async def intercept_service(self, continuation: Any, handler_call_details: Any) -> Any:
        details = handler_call_details
        method = details.method
        if method.startswith(_HEALTH_PREFIX) or self._admits(method, details.invocation_metadata):
            return await continuation(details)
        return self._denial

    def _admits(self, method: str, metadata: Any) -> bool:
        keys = self._admin_keys if method in _OPERATORS else self._keys
        if not (len(keys) or method in _OPERATORS):
            return True
        return keys.bearer(_metadata(metadata, "authorization").encode()) is not None

    @staticmethod
    async def _deny(_: Any, context: Any) -> NoReturn:
        context.set_trailing_metadata(((ERROR_CODE_METADATA, "unauthenticated"),))
        await context.abort(
            grpc.StatusCode.UNAUTHENTICATED,
            "missing or wrong key (metadata authorization: Bearer ...): an API key, or for"
            " ServerInfo one of operators (--admin-key)",
        )
        raise AssertionError("abort raises")


class GrpcServer:
    """The grpc.aio server of one router. The life: bind() -> start() -> watch() -> stop()."""

    def __init__(self, services: RouterServices) -> None:
        self._services = services
        self._prompts = PromptReaders(services.config, services.models)
        keys, admin_keys = services.config.key_ring(), services.config.admin_ring()
        guarded = len(keys) or len(admin_keys)
        self._server = grpc.aio.server(
            options=_server_options(services),
            interceptors=[ApiKeyInterceptor(keys, admin_keys)] if guarded else [],
            maximum_concurrent_rpcs=MAX_CALLS,
        )
        # pyright does not see the conditional import of `aio` in there
        self._health: Any = health.aio.HealthServicer()  # pyright: ignore
        serve_pb2_grpc.add_InferenceServicer_to_server(
            InferenceService(services, self._prompts, keys), self._server
        )
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self._server)
        names = (SERVICE, health.SERVICE_NAME, reflection.SERVICE_NAME)
        reflection.enable_server_reflection(names, self._server)

    def bind(self) -> int:
        """Bind the port and return it. Raises ConfigError if the port is taken."""
        config = self._services.config
        host = f"[{config.host}]" if ":" in config.host else config.host
        address = f"{host}:{config.grpc_port}"
        tls = config.tls
        credentials = None if tls is None else tls.server_credentials()
        try:
            if credentials is not None:
                return self._server.add_secure_port(address, credentials)
            return self._server.add_insecure_port(address)
        except RuntimeError as error:
            raise ConfigError(f"cannot bind {address}: {error}", field="grpc_port") from error

    async def start(self) -> None:
        await self._server.start()
        await self.tell_health()

    async def tell_health(self) -> bool:
        """Publish whether the router is ready, in grpc.health.v1; return it."""
        ready = self._services.ready
        status = health_pb2.HealthCheckResponse.SERVING
        if not ready:
            status = health_pb2.HealthCheckResponse.NOT_SERVING
        for name in ("", SERVICE):
            await self._health.set(name, status)
        return ready

    async def watch(self) -> None:
        """Publish the health whenever the router becomes ready or unready, until cancelled."""
        services = self._services
        while True:
            if await self.tell_health():
                await services.registry.wait_until(lambda: not services.ready)
            else:
                await services.registry.wait_until(lambda: services.ready)

    async def stop(self, grace_s: float) -> None:
        """Take no new calls; running calls get `grace_s` seconds. Calling it twice is safe."""
        # With a deadline: grpc waits for the peer of every stream; one peer was seen to keep a
        # process for ever.
        stopping = asyncio.create_task(self._server.stop(grace_s))
        _, late = await asyncio.wait({stopping}, timeout=grace_s + STOP_MARGIN_S)
        if late:
            log.warning("gRPC calls did not end within their grace")
        self._prompts.close()


def _server_options(services: RouterServices) -> list[tuple[str, int]]:
    config = services.config
    # Keepalive: the server pings clients as Baton's clients ping servers, and accepts their pings.
    own = dict(server_options(config.timing)) | dict(channel_options(CLIENT_TIMING))
    own["grpc.so_reuseport"] = int(config.reuse_port)
    sees = any(model.images is not None for model in services.models.all)
    most = limits.MAX_BODY_BYTES if sees else MAX_BODY_BYTES
    own["grpc.max_receive_message_length"] = most  # as HTTP's
    # An old connection is closed when its calls have ended, so none stays open for ever.
    own["grpc.max_connection_age_ms"] = int(CONNECTION_AGE_S * 1000)
    own["grpc.max_connection_age_grace_ms"] = int((config.request_timeout_s + STOP_MARGIN_S) * 1000)
    return list(own.items())


async def _prompt(
    prompts: PromptReader, message: serve_pb2.GenerateRequest, model: ReportedModel, grant: Grant
) -> tuple[ReadPrompt, str]:
    """Return the prompt with its images, and the name of the field that held the prompt."""
    match message.WhichOneof("prompt"):
        case "text" if message.text:
            item, field = message.text, "text"
        case "token_ids" if message.token_ids.ids:
            ids, field = tuple(message.token_ids.ids), "token_ids"
            item = token_ids_below(ids, model.vocab_size, field)
        case _:
            raise InvalidRequest("the prompt is empty", field="prompt")
    asked = TextInputs([item], field, Length(model.max_model_len), grant)
    if message.images:
        if not all(message.images):
            raise InvalidRequest("images: a file is empty", field="images")
        parts = [
            ImagePart(f"images[{number}]", data=data) for number, data in enumerate(message.images)
        ]
        return await prompts.illustrated(asked, parts), field
    [ids] = await prompts.read(asked)
    return ReadPrompt(ids), field


async def _all_fresh(
    deltas: AsyncGenerator[Delta, None],
) -> AsyncGenerator[tuple[Delta, bool], None]:
    async with aclosing(deltas):
        async for delta in deltas:
            yield delta, True


def _event(
    completion: Completion, delta: Delta, *, first: bool, last: bool
) -> serve_pb2.GenerateEvent:
    event = serve_pb2.GenerateEvent(
        request_id=completion.request.id,
        sample=delta.sample,
        position=delta.position,
        token_ids=delta.token_ids,
        text=delta.text,
        retries=completion.trace.retries,
        logprobs=logprobs_to_wire(delta.logprobs),
        prompt_logprobs=logprobs_to_wire(completion.prompt_logprobs if first else ()),
    )
    if delta.finish_reason is not None:
        event.finish_reason = delta.finish_reason.value
    if last:
        event.usage.prompt_tokens = completion.prompt_tokens
        event.usage.completion_tokens = completion.completion_tokens
        event.usage.cached_tokens = completion.cached_tokens
        event.usage.image_tokens = completion.image_tokens
    return event


def _sampling_params(
    message: serve_pb2.GenerateRequest, defaults: Mapping[str, int | float]
) -> SamplingParams:
    """Return the sampling parameters of a message. `defaults`: values of absent fields; it has at
    least max_tokens.

    Raises InvalidRequest out of bounds, UnsupportedFeature for what no engine serves yet."""
    given: dict[str, Any] = {"seed": secrets.randbits(64), **defaults, **sampling_fields(message)}
    return SamplingParams(**given)


def _stops(message: serve_pb2.GenerateRequest) -> tuple[str, ...]:
    if len(message.stop) > MAX_STOPS:
        raise InvalidRequest(f"stop: at most {MAX_STOPS} strings", field="stop")
    if not all(0 < len(stop) <= MAX_STOP_CHARS for stop in message.stop):
        raise InvalidRequest(f"stop: strings of 1 to {MAX_STOP_CHARS} characters", field="stop")
    return tuple(dict.fromkeys(message.stop))


def _metadata(metadata: Any, name: str) -> str:
    """Return the value of a metadata key, "" if the key is absent or there several times."""
    values = [value for key, value in metadata or () if key == name]
    return str(values[0]) if len(values) == 1 else ""


async def _abort(context: Any, cause: Exception) -> NoReturn:
    """End the call with the status, code and field of `cause`."""
    if isinstance(cause, grpc.aio.AbortError):
        raise cause
    error = as_baton_error(cause)
    log_failure(error, cause)
    trailing = [(ERROR_CODE_METADATA, error.code)]
    if error.field is not None:
        trailing.append((ERROR_FIELD_METADATA, error.field))
    if error.retry_after_s is not None:
        trailing.append((RETRY_PUSHBACK_METADATA, str(error.retry_after_s * 1000)))
    context.set_trailing_metadata(tuple(trailing))
    message = error_object(error)["error"]["message"]
    await context.abort(grpc.StatusCode[error.grpc_code], message)
    raise AssertionError("abort raises")
