"""The endpoint picker's gRPC server: Envoy's external processing protocol, for the Gateway API
Inference Extension (its endpoint picker protocol 1.0).

One stream of messages per HTTP request of the gateway:

    request headers    kept; answered at once if the gateway sends the whole body in one message
    request body       collected up to its end; then a router and nodes are picked (pick.py), and
                       the answer sets headers, or ends the request with an error
    response           passes through unchanged

In mode FULL_DUPLEX_STREAMED, which the protocol demands and which is assumed if the gateway names
none, the headers are answered after the body's last piece, and the body is sent back. BUFFERED
works, too. In the other modes the headers would be gone before the body is known, so these are
refused.
The life: bind() -> start() -> watch() as a task -> stop().
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Iterator
from dataclasses import dataclass, field
from typing import Any, Final

import grpc
import grpc.aio
from google.protobuf import struct_pb2
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from starlette.exceptions import HTTPException
from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from baton.protocol.errors import ConfigError
from baton.runtime.timing import server_options
from protos import gateway_pb2 as wire
from router.api.http.web_errors import http_error_response, on_baton_error, on_http_exception
from router.images.limits import MAX_BODY_BYTES
from router.models import PromptReaders
from router.picker.pick import Headers, Picked, Picker, ProxiedRequest
from router.services import RouterServices

SERVICE: Final = "envoy.service.ext_proc.v3.ExternalProcessor"
DESTINATION: Final = "x-gateway-destination-endpoint"
PREFILLER: Final = "x-prefiller-host-port"  # llm-d's
NODES: Final = "x-baton-nodes"
NAMESPACE: Final = "envoy.lb"
SUBSET: Final = ("envoy.lb.subset_hint", "x-gateway-destination-endpoint-subset")
PIECE_BYTES: Final = 62 << 10  # of a body that is sent back: Envoy takes 64 KiB in one message
STOP_MARGIN_S: Final = 1.0
_DUPLEX: Final = wire.FULL_DUPLEX_STREAMED
_SERVED_MODES: Final = (wire.NONE, wire.BUFFERED, _DUPLEX)


@dataclass(slots=True)
class PickerStream:
    """What is known of one HTTP request of the gateway. `answered`: its headers were sent on."""

    headers: Headers = ()
    subset: tuple[str, ...] | None = None
    request_mode: int = _DUPLEX
    response_mode: int = _DUPLEX
    body: bytearray = field(default_factory=bytearray)
    answered: bool = False

    def header(self, name: bytes) -> str:
        return next((value.decode("latin-1") for key, value in self.headers if key == name), "")

    def asked(self) -> ProxiedRequest:
        method, path = self.header(b":method"), self.header(b":path")
        return ProxiedRequest(method, path, self.headers, bytes(self.body), self.subset)


class PickerService:
    """Implements the service's one method, Process."""

    def __init__(self, picker: Picker) -> None:
        self._picker = picker

    async def process(
        self, requests: AsyncIterator[wire.ProcessingRequest], _: Any
    ) -> AsyncGenerator[wire.ProcessingResponse, None]:
        """Answer the messages of one HTTP request. An immediate response ends the stream."""
        stream = PickerStream()
        async for message in requests:
            async for answer in self._answers(stream, message):
                yield answer
                if answer.HasField("immediate_response"):
                    return

    async def _answers(
        self, stream: PickerStream, message: wire.ProcessingRequest
    ) -> AsyncGenerator[wire.ProcessingResponse, None]:
        match message.WhichOneof("request"):
            case "request_headers":
                async for answer in self._on_headers(stream, message):
                    yield answer
            case "request_body":
                stream.body += message.request_body.body
                if len(stream.body) > MAX_BODY_BYTES:
                    yield _refusal(http_error_response(413, "the body is too large"))
                elif message.request_body.end_of_stream:
                    async for answer in self._picked(stream, ends=True):
                        yield answer
            case "request_trailers":
                if not stream.answered:  # the body ended with them
                    async for answer in self._picked(stream, ends=False):
                        yield answer
                yield wire.ProcessingResponse(request_trailers=wire.TrailersResponse())
            case _:
                answer = _of_response(stream, message)
                if answer is not None:
                    yield answer

    async def _on_headers(
        self, stream: PickerStream, message: wire.ProcessingRequest
    ) -> AsyncGenerator[wire.ProcessingResponse, None]:
        if message.HasField("protocol_config"):
            stream.request_mode = message.protocol_config.request_body_mode
            stream.response_mode = message.protocol_config.response_body_mode
        stream.headers = [
            (each.key.lower().encode("latin-1"), each.raw_value or each.value.encode())
            for each in message.request_headers.headers.headers
        ]
        stream.subset = _subset_of(message.metadata_context)
        if message.request_headers.end_of_stream or stream.request_mode == wire.NONE:
            async for answer in self._picked(stream, ends=True):
                yield answer
        elif stream.request_mode not in _SERVED_MODES:
            mode = wire.BodySendMode.Name(stream.request_mode)
            text = (
                f"the endpoint picker cannot serve request_body_mode {mode}: FULL_DUPLEX_STREAMED"
            )
            yield _refusal(http_error_response(500, text))
        elif stream.request_mode == wire.BUFFERED:
            yield wire.ProcessingResponse(request_headers=wire.HeadersResponse())
            stream.answered = True

    async def _picked(
        self, stream: PickerStream, *, ends: bool
    ) -> AsyncGenerator[wire.ProcessingResponse, None]:
        """Pick, and send headers and body on; or end the request with the error. `ends`: nothing
        follows the body."""
        request = HttpRequest({"type": "http", "method": "POST", "path": "", "headers": []})
        try:
            picked = await self._picker.pick(stream.asked())
        except HTTPException as error:
            yield _refusal(await on_http_exception(request, error))
            return
        except Exception as error:  # noqa: BLE001  every failure becomes one answer
            yield _refusal(await on_baton_error(request, error))
            return
        change = wire.CommonResponse(header_mutation=_headers_of(picked), clear_route_cache=True)
        metadata = struct_pb2.Struct()
        metadata.update({NAMESPACE: {DESTINATION: picked.endpoint}})
        if stream.answered:  # the body came whole, and takes the headers along
            body = wire.BodyResponse(response=change)
            yield wire.ProcessingResponse(request_body=body, dynamic_metadata=metadata)
            return
        stream.answered = True
        headers = wire.HeadersResponse(response=change)
        yield wire.ProcessingResponse(request_headers=headers, dynamic_metadata=metadata)
        if stream.body or not ends:
            for piece in _pieces(bytes(stream.body), ends=ends):
                mutation = wire.BodyMutation(streamed_response=piece)
                response = wire.CommonResponse(body_mutation=mutation)
                yield wire.ProcessingResponse(request_body=wire.BodyResponse(response=response))


class PickerServer:
    """The picker's gRPC server."""

    def __init__(self, services: RouterServices, own_address: str) -> None:
        """`own_address`: HOST:PORT of this router, the pick if the config names no routers."""
        self._services = services
        routers = services.config.picker_router or (own_address,)
        self._prompts = PromptReaders(services.config, services.models)
        service = PickerService(Picker(services, self._prompts, routers))
        self._server = grpc.aio.server(options=list(server_options(services.config.timing)))
        # pyright does not see the conditional import of `aio` in there
        self._health: Any = health.aio.HealthServicer()  # pyright: ignore
        method = grpc.stream_stream_rpc_method_handler(
            service.process,
            request_deserializer=wire.ProcessingRequest.FromString,
            response_serializer=wire.ProcessingResponse.SerializeToString,
        )
        handler = grpc.method_handlers_generic_handler(SERVICE, {"Process": method})
        self._server.add_generic_rpc_handlers((handler,))
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self._server)

    def bind(self) -> int:
        """Bind the port of the config, and return it. Raises ConfigError if it is taken."""
        config = self._services.config
        host = f"[{config.host}]" if ":" in config.host else config.host
        address, tls = f"{host}:{config.picker_port}", config.tls
        try:
            if tls is not None:
                return self._server.add_secure_port(address, tls.server_credentials())
            return self._server.add_insecure_port(address)
        except RuntimeError as error:
            raise ConfigError(f"cannot bind {address}: {error}", field="picker_port") from error

    async def start(self) -> None:
        await self._server.start()
        await self._health.set("liveness", health_pb2.HealthCheckResponse.SERVING)
        await self._tell_health()

    async def watch(self) -> None:
        """Publish the health whenever the router becomes ready or unready, until cancelled."""
        services = self._services
        while True:
            ready = await self._tell_health()
            await services.registry.wait_until(lambda ready=ready: services.ready != ready)

    async def stop(self) -> None:
        """End all streams. Calling it twice is safe."""
        stopping = asyncio.create_task(self._server.stop(0))
        await asyncio.wait({stopping}, timeout=STOP_MARGIN_S)
        self._prompts.close()

    async def _tell_health(self) -> bool:
        ready = self._services.ready
        status = health_pb2.HealthCheckResponse.SERVING
        if not ready:
            status = health_pb2.HealthCheckResponse.NOT_SERVING
        for name in ("", "readiness", SERVICE):
            await self._health.set(name, status)
        return ready


def _subset_of(context: wire.Metadata) -> tuple[str, ...] | None:
    """Return the endpoints of which the gateway wants one; None if it names none."""
    namespace, key = SUBSET
    if namespace not in context.filter_metadata:
        return None
    found = context.filter_metadata[namespace].fields
    if key not in found:
        return None
    if found[key].HasField("string_value"):
        return tuple(each.strip() for each in found[key].string_value.split(","))
    return tuple(each.string_value for each in found[key].list_value.values)


def _headers_of(picked: Picked) -> wire.HeaderMutation:
    """Return the headers of a choice; those that it does not have are removed, whoever set them."""
    values = {
        DESTINATION: picked.endpoint,
        PREFILLER: picked.prefill,
        NODES: ",".join(picked.nodes),
    }
    return wire.HeaderMutation(
        set_headers=[
            wire.HeaderValueOption(
                header=wire.HeaderValue(key=name, raw_value=value.encode()),
                append_action=wire.HeaderValueOption.OVERWRITE_IF_EXISTS_OR_ADD,
            )
            for name, value in values.items()
            if value
        ],
        remove_headers=[name for name, value in values.items() if not value],
    )


def _pieces(body: bytes, *, ends: bool) -> Iterator[wire.StreamedBodyResponse]:
    """Yield a body in pieces; the last one ends it if `ends`."""
    for start in range(0, max(1, len(body)), PIECE_BYTES):
        piece = body[start : start + PIECE_BYTES]
        last = start + PIECE_BYTES >= len(body)
        yield wire.StreamedBodyResponse(body=piece, end_of_stream=ends and last)


def _of_response(
    stream: PickerStream, message: wire.ProcessingRequest
) -> wire.ProcessingResponse | None:
    """Return the answer that lets a part of the response pass unchanged; None for a message of a
    kind that is not known here."""
    match message.WhichOneof("request"):
        case "response_headers":
            return wire.ProcessingResponse(response_headers=wire.HeadersResponse())
        case "response_trailers":
            return wire.ProcessingResponse(response_trailers=wire.TrailersResponse())
        case "response_body":
            return _passed_on(stream, message.response_body)
        case _:
            return None


def _passed_on(stream: PickerStream, body: wire.HttpBody) -> wire.ProcessingResponse:
    """Return the answer that lets a piece of the response's body pass unchanged."""
    if stream.response_mode != _DUPLEX:
        return wire.ProcessingResponse(response_body=wire.BodyResponse())
    piece = wire.StreamedBodyResponse(body=body.body, end_of_stream=body.end_of_stream)
    response = wire.CommonResponse(body_mutation=wire.BodyMutation(streamed_response=piece))
    return wire.ProcessingResponse(response_body=wire.BodyResponse(response=response))


def _refusal(reply: Response) -> wire.ProcessingResponse:
    """Return the answer that ends the request with an error of the router's."""
    headers = [
        wire.HeaderValueOption(header=wire.HeaderValue(key=name.decode(), raw_value=value))
        for name, value in reply.raw_headers
        if name != b"content-length"
    ]
    return wire.ProcessingResponse(
        immediate_response=wire.ImmediateResponse(
            status=wire.HttpStatus(code=reply.status_code),
            headers=wire.HeaderMutation(set_headers=headers),
            body=bytes(reply.body),
            details="baton_endpoint_picker",
        )
    )
