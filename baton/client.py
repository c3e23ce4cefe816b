"""Python client of the router's gRPC API (protos/serve.proto), synchronous and asynchronous.

    with Client("127.0.0.1:50051") as client:
        for event in client.stream("What is prefill?", SamplingParams(temperature=0.0)):
            ...

Without SamplingParams a call sends none, and the server's defaults for the model hold. Both raise
Baton's own errors (baton/errors.py). Protobuf stays inside this file.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Generator, Sequence
from dataclasses import dataclass, replace
from types import TracebackType
from typing import Any, Final, NoReturn, Self

import grpc

from baton import wire
from baton.errors import BatonError, DeadlineExceeded, Unavailable, error_from_code
from baton.events import TokenLogprob
from baton.sampling import SamplingParams
from baton.timing import Timing, channel_options
from baton.tls import ClientTls
from baton.wire_guided import guided_to_wire
from protos import node_pb2, serve_pb2, serve_pb2_grpc

# Trailing metadata of a failed call: the error's code and field (baton.errors).
ERROR_CODE_METADATA: Final = "baton-error-code"
ERROR_FIELD_METADATA: Final = "baton-error-field"
_CODE_OF: Final = {
    grpc.StatusCode.INVALID_ARGUMENT: "invalid_request",
    grpc.StatusCode.NOT_FOUND: "model_not_found",
    grpc.StatusCode.UNAUTHENTICATED: "unauthenticated",
    grpc.StatusCode.RESOURCE_EXHAUSTED: "overloaded",
    grpc.StatusCode.UNAVAILABLE: "unavailable",
    grpc.StatusCode.DEADLINE_EXCEEDED: "deadline_exceeded",
    grpc.StatusCode.CANCELLED: "cancelled",
    grpc.StatusCode.ABORTED: "fenced",
}

# What gRPC (1.76 to 1.85) says when no connection came about, before any server's word.
_NOBODY_THERE: Final = "failed to connect to all addresses"


@dataclass(frozen=True, slots=True)
class GenerateOptions:
    """What a call asks beyond its prompt and SamplingParams. `timeout_s` bounds the whole call;
    `resume`: "fast" or "exact", "" = the server's default (docs/failover.md)."""

    stop: tuple[str, ...] = ()
    model: str = ""
    request_id: str = ""
    priority: int = 0
    cache_salt: str = ""
    skip_special_tokens: bool = True
    timeout_s: float = 600.0
    resume: str = ""


@dataclass(frozen=True, slots=True)
class Usage:
    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0


Logprobs = tuple[tuple[TokenLogprob, ...], ...]  # per token: itself first, then the best others


@dataclass(frozen=True, slots=True)
class GenerateEvent:
    """New tokens and text of one sample; `usage` with the last event of the request.

    `logprobs[i]` belongs to token_ids[i], `prompt_logprobs[i]` (in the first event) to prompt token
    i + 1; both are empty unless they were asked for.
    """

    request_id: str
    sample: int
    position: int
    token_ids: tuple[int, ...]
    text: str
    finish_reason: str | None
    retries: int
    usage: Usage | None
    logprobs: Logprobs = ()
    prompt_logprobs: Logprobs = ()


@dataclass(frozen=True, slots=True)
class Generation:
    """A finished request: its first answer, and the `others` if there are several (their `usage` is
    the request's, the same for all)."""

    request_id: str
    token_ids: tuple[int, ...]
    text: str
    finish_reason: str
    retries: int
    usage: Usage
    logprobs: Logprobs = ()
    prompt_logprobs: Logprobs = ()
    others: tuple[Generation, ...] = ()


@dataclass(frozen=True, slots=True)
class Model:
    id: str
    max_model_len: int
    digest: str
    parent: str


@dataclass(frozen=True, slots=True)
class Node:
    node_id: str
    role: str  # "prefill" | "decode"
    address: str
    model: str
    running: int
    waiting: int
    free_blocks: int
    total_blocks: int
    draining: bool


@dataclass(frozen=True, slots=True)
class Migrations:
    """Running requests that changed their decode node with their KV, since the router's start.

    `failed`: node or KV were lost on the way. `seconds`: from the question to the new node's first
    token, summed. `given_back`: requests that moved without KV, having none worth it.
    """

    done: int = 0
    failed: int = 0
    tokens: int = 0
    seconds: float = 0.0
    given_back: int = 0


@dataclass(frozen=True, slots=True)
class ServerInfo:
    version: str
    nodes: tuple[Node, ...]
    requests_by_state: dict[str, int]
    migrations: Migrations = Migrations()


# A client may be far away or busy: it asks less often than nodes ask each other, and waits longer.
CLIENT_TIMING: Final = Timing(ping_interval_s=10.0, ping_timeout_s=10.0)
DEFAULT_OPTIONS: Final = GenerateOptions()
Prompt = str | Sequence[int]


class Client:
    """Blocking client, a context manager; `close` twice is safe. Safe in several threads."""

    def __init__(
        self,
        address: str,
        api_key: str = "",
        *,
        timeout_s: float = 10.0,
        timing: Timing | None = None,
        tls: ClientTls | None = None,
    ) -> None:
        """`address` is HOST:PORT; `timeout_s` bounds models, server_info and abort; `tls` None:
        without."""
        self._address = address
        options = channel_options(timing or CLIENT_TIMING)
        if tls is None:
            self._channel = grpc.insecure_channel(address, options)
        else:
            self._channel = grpc.secure_channel(address, tls.channel_credentials(), options)
        self._stub: Any = serve_pb2_grpc.InferenceStub(self._channel)
        self._metadata = _metadata(api_key)
        self._timeout_s = timeout_s

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        self._channel.close()

    def stream(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        options: GenerateOptions = DEFAULT_OPTIONS,
    ) -> Generator[GenerateEvent, None, None]:
        """Events as they come; closing the generator aborts the request. Raises BatonError."""
        message = _generate_request(prompt, params, options)
        call = self._stub.Generate(message, timeout=options.timeout_s, metadata=self._metadata)
        try:
            for event in call:
                yield _event(event)
        except grpc.RpcError as error:
            _fail(error, self._address)
        finally:
            call.cancel()

    def generate(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        options: GenerateOptions = DEFAULT_OPTIONS,
    ) -> Generation:
        """The whole output. Raises BatonError."""
        return _collect(list(self.stream(prompt, params, options)))

    def abort(self, request_id: str) -> bool:
        """Stop a request; False if it is not known (any more)."""
        return self._call(self._stub.Abort, serve_pb2.AbortRequest(request_id=request_id)).found

    def models(self) -> list[Model]:
        reply = self._call(self._stub.Models, serve_pb2.ModelsRequest())
        return [_model(item) for item in reply.models]

    def server_info(self) -> ServerInfo:
        return _server_info(self._call(self._stub.ServerInfo, serve_pb2.ServerInfoRequest()))

    def _call(self, method: Any, message: Any) -> Any:
        try:
            return method(message, timeout=self._timeout_s, metadata=self._metadata)
        except grpc.RpcError as error:
            _fail(error, self._address)


class AsyncClient:
    """The same for asyncio; made and used within one event loop."""

    def __init__(
        self,
        address: str,
        api_key: str = "",
        *,
        timeout_s: float = 10.0,
        timing: Timing | None = None,
        tls: ClientTls | None = None,
    ) -> None:
        self._address = address
        options = channel_options(timing or CLIENT_TIMING)
        if tls is None:
            self._channel = grpc.aio.insecure_channel(address, options)
        else:
            self._channel = grpc.aio.secure_channel(address, tls.channel_credentials(), options)
        self._stub: Any = serve_pb2_grpc.InferenceStub(self._channel)
        self._metadata = _metadata(api_key)
        self._timeout_s = timeout_s

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.close()

    async def close(self) -> None:
        await self._channel.close()

    async def stream(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        options: GenerateOptions = DEFAULT_OPTIONS,
    ) -> AsyncGenerator[GenerateEvent, None]:
        """Events as they come; closing the generator aborts the request. Raises BatonError."""
        message = _generate_request(prompt, params, options)
        call = self._stub.Generate(message, timeout=options.timeout_s, metadata=self._metadata)
        try:
            async for event in call:
                yield _event(event)
        except grpc.RpcError as error:
            _fail(error, self._address)
        finally:
            call.cancel()

    async def generate(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        options: GenerateOptions = DEFAULT_OPTIONS,
    ) -> Generation:
        """The whole output. Raises BatonError."""
        return _collect([event async for event in self.stream(prompt, params, options)])

    async def abort(self, request_id: str) -> bool:
        """Stop a request; False if it is not known (any more)."""
        message = serve_pb2.AbortRequest(request_id=request_id)
        return (await self._call(self._stub.Abort, message)).found

    async def models(self) -> list[Model]:
        reply = await self._call(self._stub.Models, serve_pb2.ModelsRequest())
        return [_model(item) for item in reply.models]

    async def server_info(self) -> ServerInfo:
        message = serve_pb2.ServerInfoRequest()
        return _server_info(await self._call(self._stub.ServerInfo, message))

    async def _call(self, method: Any, message: Any) -> Any:
        try:
            return await method(message, timeout=self._timeout_s, metadata=self._metadata)
        except grpc.RpcError as error:
            _fail(error, self._address)


def _metadata(api_key: str) -> tuple[tuple[str, str], ...]:
    return (("authorization", f"Bearer {api_key}"),) if api_key else ()


def _generate_request(
    prompt: Prompt, params: SamplingParams | None, options: GenerateOptions
) -> serve_pb2.GenerateRequest:
    """No `params`: their fields stay absent, so the server's defaults hold."""
    message = serve_pb2.GenerateRequest(
        request_id=options.request_id,
        model=options.model,
        stop=options.stop,
        priority=options.priority,
        cache_salt=options.cache_salt,
        skip_special_tokens=options.skip_special_tokens,
        resume=options.resume,
    )
    if params is not None:
        message.MergeFrom(_sampling_fields(params))
    if isinstance(prompt, str):
        message.text = prompt
    else:
        message.token_ids.CopyFrom(node_pb2.TokenIds(ids=prompt))
    return message


def _sampling_fields(params: SamplingParams) -> serve_pb2.GenerateRequest:
    message = serve_pb2.GenerateRequest(
        max_tokens=params.max_tokens,
        min_tokens=params.min_tokens,
        temperature=params.temperature,
        top_k=params.top_k,
        top_p=params.top_p,
        min_p=params.min_p,
        seed=params.seed,
        stop_token_ids=params.stop_token_ids,
        ignore_eos=params.ignore_eos,
        n=params.n,
        best_of=params.best_of,
        beam_width=params.beam_width,
        length_penalty=params.length_penalty,
        early_stopping=params.early_stopping,
        presence_penalty=params.presence_penalty,
        frequency_penalty=params.frequency_penalty,
        repetition_penalty=params.repetition_penalty,
        logit_bias=dict(params.logit_bias),
        logprobs=params.logprobs,
        prompt_logprobs=params.prompt_logprobs,
    )
    if params.guided is not None:
        message.guided.CopyFrom(guided_to_wire(params.guided))
    return message


def _event(message: Any) -> GenerateEvent:
    return GenerateEvent(
        request_id=message.request_id,
        sample=message.sample,
        position=message.position,
        token_ids=tuple(message.token_ids),
        text=message.text,
        finish_reason=message.finish_reason or None,
        retries=message.retries,
        usage=_usage(message.usage) if message.HasField("usage") else None,
        logprobs=wire.logprobs_from_wire(message.logprobs),
        prompt_logprobs=wire.logprobs_from_wire(message.prompt_logprobs),
    )


def _usage(message: Any) -> Usage:
    return Usage(message.prompt_tokens, message.completion_tokens, message.cached_tokens)


def _collect(events: Sequence[GenerateEvent]) -> Generation:
    """One Generation of all events. Raises InternalError if none of them was the last."""
    usage = events[-1].usage if events else None
    if usage is None:
        raise error_from_code("internal", "the stream ended without a finish reason")
    samples: dict[int, list[GenerateEvent]] = {}
    for event in events:
        samples.setdefault(event.sample, []).append(event)
    prompt_logprobs = events[0].prompt_logprobs
    first, *others = (
        _collect_sample(samples[index], usage, prompt_logprobs) for index in sorted(samples)
    )
    return replace(first, others=tuple(others))


def _collect_sample(
    events: Sequence[GenerateEvent], usage: Usage, prompt_logprobs: Logprobs
) -> Generation:
    last = events[-1]
    return Generation(
        request_id=last.request_id,
        token_ids=tuple(token for event in events for token in event.token_ids),
        text="".join(event.text for event in events),
        finish_reason=str(last.finish_reason),
        retries=last.retries,
        usage=usage,
        logprobs=tuple(row for event in events for row in event.logprobs),
        prompt_logprobs=prompt_logprobs,
    )


def _model(message: Any) -> Model:
    return Model(message.id, message.max_model_len, message.digest, message.parent)


def _server_info(message: Any) -> ServerInfo:
    nodes = tuple(
        Node(
            node_id=node.node_id,
            role="prefill" if node.role == node_pb2.ROLE_PREFILL else "decode",
            address=node.address,
            model=node.model,
            running=node.load.running,
            waiting=node.load.waiting,
            free_blocks=node.load.free_blocks,
            total_blocks=node.load.total_blocks,
            draining=node.load.draining,
        )
        for node in message.nodes
    )
    moves = message.migrations
    return ServerInfo(
        version=message.version,
        nodes=nodes,
        requests_by_state=dict(message.requests_by_state),
        migrations=Migrations(
            moves.done, moves.failed, moves.tokens, moves.seconds, moves.given_back
        ),
    )


def _fail(error: Any, address: str) -> NoReturn:
    """Raise the BatonError behind a failed call."""
    if error.code() is grpc.StatusCode.UNAVAILABLE and _NOBODY_THERE in (error.details() or ""):
        # gRPC's own words about it fill a screen and say no more.
        raise Unavailable(f"no router at {address}; is `./run up` running?") from None
    raise _error(error) from error


def _error(error: Any) -> BatonError:
    """The BatonError behind a failed call: by the server's own code, else by gRPC's status."""
    trailing = {item[0]: item[1] for item in error.trailing_metadata() or ()}
    message = error.details() or str(error.code())
    code = trailing.get(ERROR_CODE_METADATA) or _CODE_OF.get(error.code(), "internal")
    if code == DeadlineExceeded.code and not error.details():
        message = "the call ran into its deadline"
    return error_from_code(str(code), message, trailing.get(ERROR_FIELD_METADATA))
