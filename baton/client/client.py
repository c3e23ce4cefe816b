"""Python client of the router's gRPC API (protos/serve.proto), synchronous and asynchronous.

    with Client("127.0.0.1:50051") as client:
        for event in client.stream("What is prefill?", SamplingParams(temperature=0.0)):
            ...

Several addresses, `Client("10.0.0.1:50051,10.0.0.2:50051")`, are tried in turn. If its router dies,
a call with `resumable_s` continues at another router, and no token is lost or sent twice. Without
SamplingParams a call sends none, and the server's defaults for the model apply. Both clients raise
Baton's own errors (baton/protocol/errors.py). Protobuf stays inside this package.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncGenerator, Callable, Generator, Sequence
from dataclasses import replace
from types import TracebackType
from typing import Any, Final, Self

import grpc

from baton.client.reconnect import Attempts, addresses_of, draw_request_id
from baton.client.values import (
    DEFAULT_OPTIONS,
    GenerateEvent,
    GenerateOptions,
    Generation,
    Model,
    Prompt,
    ServerInfo,
    collect,
    event_of,
    generate_request,
    model_of,
    server_info_of,
)
from baton.protocol.errors import BatonError, DeadlineExceeded, Unavailable, error_from_code
from baton.protocol.sampling import SamplingParams
from baton.runtime.timing import CLIENT_TIMING, Timing, channel_options
from baton.runtime.tls import ClientTls
from protos import serve_pb2, serve_pb2_grpc

# Trailing metadata of a failed call: the error's code and field (baton.protocol.errors).
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

# Methods by name, so that a call can be made again at another router.
_METHODS: Final[dict[str, Callable[[Any], Any]]] = {
    "Abort": lambda stub: stub.Abort,
    "Models": lambda stub: stub.Models,
    "ServerInfo": lambda stub: stub.ServerInfo,
}

# gRPC's text (1.76 to 1.85) if no connection could be made: no server has answered.
_NOBODY_THERE: Final = "failed to connect to all addresses"


class Client:
    """Blocking client, a context manager. Safe in several threads; `close` may be called twice."""

    def __init__(
        self,
        address: str | Sequence[str],
        api_key: str = "",
        *,
        timeout_s: float = 10.0,
        timing: Timing | None = None,
        tls: ClientTls | None = None,
    ) -> None:
        """Open channels to `address`, which is HOST:PORT or several of them.

        `timeout_s` limits models, server_info and abort. `tls` None means without TLS.
        """
        self._addresses = addresses_of(address)
        options = channel_options(timing or CLIENT_TIMING)
        self._channels = [_channel(each, tls, options) for each in self._addresses]
        self._stubs: list[Any] = [serve_pb2_grpc.InferenceStub(each) for each in self._channels]
        self._index = 0  # index of the router that answered last
        self._closed = threading.Event()
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
        self._closed.set()
        for channel in self._channels:
            channel.close()

    def stream(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        options: GenerateOptions = DEFAULT_OPTIONS,
    ) -> Generator[GenerateEvent, None, None]:
        """Yield events as they come. Raises BatonError.

        Closing the generator aborts the request. With `resumable_s` it only begins the grace
        period.
        """
        message = _prepared(prompt, params, options)
        attempts = _attempts(len(self._addresses), self._index, options)
        while True:
            stub = self._stubs[attempts.index]
            call = stub.Generate(
                _from(message, attempts), timeout=attempts.remaining_s, metadata=self._metadata
            )
            try:
                for event in call:
                    attempts.saw(event.sample)
                    self._index = attempts.index
                    yield event_of(event)
                return
            except grpc.RpcError as error:
                wait_s = _next_attempt(error, attempts, self._addresses)
            finally:
                call.cancel()
            self._closed.wait(wait_s)

    def generate(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        options: GenerateOptions = DEFAULT_OPTIONS,
    ) -> Generation:
        """Return the whole output. Raises BatonError."""
        return collect(list(self.stream(prompt, params, options)))

    def abort(self, request_id: str) -> bool:
        """Stop a request. Return False if the router does not know it (any more)."""
        return self._call("Abort", serve_pb2.AbortRequest(request_id=request_id)).found

    def models(self) -> list[Model]:
        reply = self._call("Models", serve_pb2.ModelsRequest())
        return [model_of(item) for item in reply.models]

    def server_info(self) -> ServerInfo:
        return server_info_of(self._call("ServerInfo", serve_pb2.ServerInfoRequest()))

    def _call(self, method: str, message: Any) -> Any:
        attempts = Attempts(len(self._addresses), self._index, timeout_s=self._timeout_s, grace_s=0)
        while True:
            try:
                ask = _METHODS[method](self._stubs[attempts.index])
                reply = ask(message, timeout=attempts.remaining_s, metadata=self._metadata)
            except grpc.RpcError as error:
                self._closed.wait(_next_attempt(error, attempts, self._addresses))
            else:
                self._index = attempts.index
                return reply


class AsyncClient:
    """Client for asyncio; it must be made and used within one event loop."""

    def __init__(
        self,
        address: str | Sequence[str],
        api_key: str = "",
        *,
        timeout_s: float = 10.0,
        timing: Timing | None = None,
        tls: ClientTls | None = None,
    ) -> None:
        self._addresses = addresses_of(address)
        options = channel_options(timing or CLIENT_TIMING)
        self._channels = [_aio_channel(each, tls, options) for each in self._addresses]
        self._stubs: list[Any] = [serve_pb2_grpc.InferenceStub(each) for each in self._channels]
        self._index = 0
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
        for channel in self._channels:
            await channel.close()

    async def stream(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        options: GenerateOptions = DEFAULT_OPTIONS,
    ) -> AsyncGenerator[GenerateEvent, None]:
        """Yield events as they come. Raises BatonError.

        Closing the generator aborts the request. With `resumable_s` it only begins the grace
        period.
        """
        message = _prepared(prompt, params, options)
        attempts = _attempts(len(self._addresses), self._index, options)
        while True:
            stub = self._stubs[attempts.index]
            call = stub.Generate(
                _from(message, attempts), timeout=attempts.remaining_s, metadata=self._metadata
            )
            try:
                async for event in call:
                    attempts.saw(event.sample)
                    self._index = attempts.index
                    yield event_of(event)
                return
            except grpc.RpcError as error:
                wait_s = _next_attempt(error, attempts, self._addresses)
            finally:
                call.cancel()
            await asyncio.sleep(wait_s)

    async def generate(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        options: GenerateOptions = DEFAULT_OPTIONS,
    ) -> Generation:
        """Return the whole output. Raises BatonError."""
        return collect([event async for event in self.stream(prompt, params, options)])

    async def abort(self, request_id: str) -> bool:
        """Stop a request. Return False if the router does not know it (any more)."""
        message = serve_pb2.AbortRequest(request_id=request_id)
        return (await self._call("Abort", message)).found

    async def models(self) -> list[Model]:
        reply = await self._call("Models", serve_pb2.ModelsRequest())
        return [model_of(item) for item in reply.models]

    async def server_info(self) -> ServerInfo:
        message = serve_pb2.ServerInfoRequest()
        return server_info_of(await self._call("ServerInfo", message))

    async def _call(self, method: str, message: Any) -> Any:
        attempts = Attempts(len(self._addresses), self._index, timeout_s=self._timeout_s, grace_s=0)
        while True:
            try:
                ask = _METHODS[method](self._stubs[attempts.index])
                reply = await ask(message, timeout=attempts.remaining_s, metadata=self._metadata)
            except grpc.RpcError as error:
                await asyncio.sleep(_next_attempt(error, attempts, self._addresses))
            else:
                self._index = attempts.index
                return reply


def _channel(address: str, tls: ClientTls | None, options: Sequence[tuple[str, int]]) -> Any:
    if tls is None:
        return grpc.insecure_channel(address, options)
    return grpc.secure_channel(address, tls.channel_credentials(), options)


def _aio_channel(address: str, tls: ClientTls | None, options: Sequence[tuple[str, int]]) -> Any:
    if tls is None:
        return grpc.aio.insecure_channel(address, options)
    return grpc.aio.secure_channel(address, tls.channel_credentials(), options)


def _metadata(api_key: str) -> tuple[tuple[str, str], ...]:
    return (("authorization", f"Bearer {api_key}"),) if api_key else ()


def _prepared(prompt: Prompt, params: SamplingParams | None, options: GenerateOptions) -> Any:
    """Return the call's message.

    A resumable call gets a request id, with which it can be asked for again.
    """
    if options.resumable_s and not options.request_id:
        options = replace(options, request_id=draw_request_id())
    return generate_request(prompt, params, options)


def _attempts(num_addresses: int, start: int, options: GenerateOptions) -> Attempts:
    return Attempts(num_addresses, start, timeout_s=options.timeout_s, grace_s=options.resumable_s)


def _from(message: Any, attempts: Attempts) -> Any:
    """Set in `message` how many events of each sample were seen so far, and return it."""
    if message.resumable_s:
        message.starting_after[:] = attempts.steps
    return message


def _next_attempt(error: Any, attempts: Attempts, addresses: Sequence[str]) -> float:
    """Return the seconds until the next attempt, or raise the BatonError of a final failure."""
    nobody = error.code() is grpc.StatusCode.UNAVAILABLE and _NOBODY_THERE in (
        error.details() or ""
    )
    if nobody:
        # gRPC's own text fills a screen and says no more than this.
        found: BatonError = Unavailable(
            f"no router at {' or '.join(addresses)}; is `./run up` running?"
        )
        found.__suppress_context__ = True
    else:
        found = _error(error)
        found.__cause__ = error
    said = any(item[0] == ERROR_CODE_METADATA for item in error.trailing_metadata() or ())
    return attempts.failed(found, nobody=nobody, said=said)


def _error(error: Any) -> BatonError:
    """Return the BatonError of a failed call: by the server's own code, else by gRPC's status."""
    trailing = {item[0]: item[1] for item in error.trailing_metadata() or ()}
    message = error.details() or str(error.code())
    code = trailing.get(ERROR_CODE_METADATA) or _CODE_OF.get(error.code(), "internal")
    if code == DeadlineExceeded.code and not error.details():
        message = "the call ran into its deadline"
    return error_from_code(str(code), message, trailing.get(ERROR_FIELD_METADATA))
