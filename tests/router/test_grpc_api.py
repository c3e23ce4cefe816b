"""The gRPC front door with Baton's own client, over a real server and a scripted decode node."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from dataclasses import dataclass, replace
from typing import Any

import grpc
import grpc.aio
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from baton.client import AsyncClient, GenerateEvent, GenerateOptions
from baton.protocol.clock import SystemClock
from baton.protocol.errors import (
    BatonError,
    Cancelled,
    ContextLengthExceeded,
    InvalidRequest,
    ModelNotFound,
    Unauthenticated,
    Unavailable,
)
from baton.protocol.events import TokenLogprob
from baton.protocol.handles import Role
from baton.protocol.messages import AbortRequest, SubmitDecode
from baton.protocol.request import FinishReason, RequestState
from baton.protocol.sampling import SamplingParams
from baton.runtime.timing import Timing
from baton.text.generation_config import SamplingDefaults
from router.api.grpc.inference import GrpcServer
from router.config import RouterConfig
from router.metrics.router import RouterMetrics
from router.models import Models, ServedModel
from router.request.aborts import Aborts
from router.services import RouterServices
from tests.chaos.cluster import free_ports
from tests.chaos.proxy import Fault, FaultProxy, Way
from tests.front.fakes import CHAT_TEMPLATE, EOS, TOKENIZER
from tests.router.fakes import PATIENCE_S, FakeNode, FakeRouter, make_record, running_router

GREEDY = SamplingParams(temperature=0.0, seed=7, max_tokens=8)


@dataclass
class Door:
    address: str
    router: FakeRouter
    node: FakeNode

    def client(self, key: str = "") -> AsyncClient:
        return AsyncClient(self.address, key, timeout_s=PATIENCE_S)


@contextlib.asynccontextmanager
async def open_door(
    *keys: str,
    connected: bool = True,
    defaults: SamplingDefaults | None = None,
    timing: Timing | None = None,
) -> AsyncIterator[Door]:
    node = FakeNode(make_record("d", Role.DECODE, vocab_size=TOKENIZER.vocab_size))
    await node.start()
    nodes = [node] if connected else []
    async with running_router(nodes) as router:
        config = RouterConfig(
            api_key=keys, grpc_port=0, request_timeout_s=20.0, timing=timing or Timing()
        )
        server = GrpcServer(
            RouterServices(
                config=config,
                dispatcher=router.dispatcher,
                registry=router.registry,
                store=router.guard,
                models=Models(ServedModel(config, TOKENIZER, CHAT_TEMPLATE, defaults or {})),
                metrics=RouterMetrics(),
                aborts=Aborts(router.dispatcher),
                clock=SystemClock(),
            )
        )
        port = server.bind()
        await server.start()
        try:
            yield Door(f"127.0.0.1:{port}", router, node)
        finally:
            await server.stop(0)
            await node.stop()


def health_stub(channel: Any) -> Any:
    return health_pb2_grpc.HealthStub(channel)


def reflection_stub(channel: Any) -> Any:
    return reflection_pb2_grpc.ServerReflectionStub(channel)


async def collect(
    client: AsyncClient, prompt: str | list[int], **options: object
) -> list[GenerateEvent]:
    given = GenerateOptions(timeout_s=PATIENCE_S, **options)  # pyright: ignore[reportArgumentType]
    return [event async for event in client.stream(prompt, GREEDY, given)]


async def test_how_it_resumes_is_the_callers_word_else_the_servers() -> None:
    async with open_door() as door, door.client() as client:
        for given, wanted in (("", "fast"), ("exact", "exact"), ("fast", "fast")):
            reading = asyncio.create_task(collect(client, "hello", resume=given))
            request = (await door.node.hear(SubmitDecode)).request
            assert request.resume == wanted
            door.node.finish(request, 0, EOS)
            await reading
        with pytest.raises(InvalidRequest) as caught:
            await collect(client, "hello", resume="soon")
        assert caught.value.field == "resume"


async def test_the_models_sampling_defaults_hold_where_the_client_says_nothing() -> None:
    defaults = {"temperature": 0.0, "top_k": 20}
    async with open_door(defaults=defaults) as door, door.client() as client:
        for params, wanted in (
            (None, (0.0, 20, 16)),
            (SamplingParams(temperature=0.7, max_tokens=3), (0.7, 0, 3)),
        ):
            reading = asyncio.create_task(client.generate("hello", params))
            request = (await door.node.hear(SubmitDecode)).request
            sent = request.params
            assert (sent.temperature, sent.top_k, sent.max_tokens) == wanted
            door.node.finish(request, 0, EOS)
            assert (await reading).finish_reason == "length"


async def test_text_in_text_out() -> None:
    async with open_door() as door, door.client() as client:
        reading = asyncio.create_task(collect(client, "hello", request_id="mine"))
        request = (await door.node.hear(SubmitDecode)).request
        assert request.prompt_ids == tuple(TOKENIZER.encode("hello"))
        assert (request.params.max_tokens, request.params.seed) == (8, 7)
        ids = TOKENIZER.encode(" world", add_special_tokens=False)
        door.node.tokens(request, 0, *ids)
        door.node.tokens(request, len(ids), EOS)
        door.node.finish(request, len(ids) + 1, EOS)
        events = await reading
        assert "".join(event.text for event in events).startswith(" world")
        assert {event.request_id for event in events} == {"mine"}
        assert events[-1].finish_reason == "length"
        usage = events[-1].usage
        assert usage is not None
        assert usage.prompt_tokens == len(request.prompt_ids)
        assert usage.completion_tokens == len(ids) + 2


async def test_a_client_that_answers_no_pings_for_a_moment_keeps_its_stream() -> None:
    """It may be busy, or far away: it is not one of Baton's own processes, which are given up."""
    timing = Timing(ping_interval_s=0.1, ping_timeout_s=0.1)
    async with open_door(timing=timing) as door:
        host, _, port = door.address.partition(":")
        [free] = free_ports(1)
        async with (
            FaultProxy((host, free), (host, int(port))) as proxy,
            AsyncClient(f"{host}:{free}") as client,
        ):
            reading = asyncio.create_task(collect(client, "hello"))
            request = (await door.node.hear(SubmitDecode)).request
            await proxy.set(Fault.STALL, Way.UP)
            await asyncio.sleep(5 * (timing.ping_interval_s + timing.ping_timeout_s))
            await proxy.set(Fault.NONE)
            door.node.finish(request, 0, EOS)
            assert (await reading)[-1].finish_reason == "length"


async def test_a_stop_string_ends_it_and_aborts_the_node() -> None:
    async with open_door() as door, door.client() as client:
        reading = asyncio.create_task(collect(client, [5, 6], stop=("wor",)))
        request = (await door.node.hear(SubmitDecode)).request
        assert request.prompt_ids == (5, 6)
        door.node.tokens(request, 0, *TOKENIZER.encode("hello world", add_special_tokens=False))
        events = await reading
        assert "".join(event.text for event in events) == "hello "
        assert events[-1].finish_reason == "stop"
        assert (await door.node.hear(AbortRequest)).request_id == request.id
        record = await door.router.store.read(request.id)
        assert record is not None
        assert record.state is RequestState.FINISHED


async def test_a_client_that_leaves_aborts_the_node() -> None:
    async with open_door() as door:
        client = door.client()
        reading = asyncio.create_task(collect(client, "hello"))
        request = (await door.node.hear(SubmitDecode)).request
        reading.cancel()
        assert (await door.node.hear(AbortRequest)).request_id == request.id
        await asyncio.wait({reading})
        await client.close()


async def test_abort_by_id() -> None:
    async with open_door() as door, door.client() as client:
        reading = asyncio.create_task(collect(client, "hello", request_id="a"))
        await door.node.hear(SubmitDecode)
        assert await client.abort("a")
        assert not await client.abort("b")
        with pytest.raises(Cancelled, match=r"^the request was cancelled$"):
            await reading


@pytest.mark.parametrize(
    ("prompt", "options", "error", "field"),
    [
        ("", {}, InvalidRequest, "prompt"),
        ([], {}, InvalidRequest, "prompt"),
        ([1, 10**6], {}, InvalidRequest, "token_ids"),
        (list(range(5, 260)) + [5] * 10, {}, ContextLengthExceeded, "token_ids"),
        ([5] * 250, {}, ContextLengthExceeded, "max_tokens"),
        ("x", {"model": "other"}, ModelNotFound, "model"),
        ("x", {"stop": ("",)}, InvalidRequest, "stop"),
        ("x", {"request_id": "a\nb"}, InvalidRequest, "request_id"),
        ("x", {"priority": -(2**31)}, InvalidRequest, "priority"),
    ],
)
async def test_bad_requests_name_their_field(
    prompt: str | list[int], options: dict[str, object], error: type[BatonError], field: str
) -> None:
    async with open_door() as door, door.client() as client:
        with pytest.raises(error) as caught:
            await collect(client, prompt, **options)
        assert (type(caught.value), caught.value.field) == (error, field)
        assert not door.node.heard_of(SubmitDecode)


@pytest.mark.parametrize("field", ["stop_token_ids", "allowed_token_ids", "bad_words"])
async def test_ids_beyond_the_vocabulary_name_their_field(field: str) -> None:
    ids = (5, 10**6)
    given: dict[str, Any] = {field: (ids,) if field == "bad_words" else ids}
    async with open_door() as door, door.client() as client:
        with pytest.raises(InvalidRequest) as caught:
            await client.generate("x", replace(GREEDY, **given))
        assert caught.value.field == field


async def test_several_samples_come_with_their_index_and_one_usage() -> None:
    params = SamplingParams(n=2, seed=1, max_tokens=3, prompt_logprobs=0)
    told = ((TokenLogprob(40, -0.5, 1),),)
    async with open_door() as door, door.client() as client:
        reading = asyncio.create_task(client.generate([39, 40], params))
        request = (await door.node.hear(SubmitDecode)).request
        assert request.params.n == 2
        door.node.tokens(request, 0, 41, prompt_logprobs=told)
        door.node.tokens(request, 0, 42, 43, sample=1)
        end = {"finish_reason": FinishReason.LENGTH}
        door.node.tokens(request, 2, 44, sample=1, **end)
        door.node.tokens(request, 1, 45, 46, **end)
        async with asyncio.timeout(PATIENCE_S):
            first = await reading
        (second,) = first.others
        assert (first.token_ids, second.token_ids) == ((41, 45, 46), (42, 43, 44))
        assert {first.finish_reason, second.finish_reason} == {"length"}
        usage = (first.usage.prompt_tokens, first.usage.completion_tokens)
        assert usage == (2, 6), "the prompt is counted once"
        assert first.prompt_logprobs == told


async def test_beams_travel_with_their_options() -> None:
    params = SamplingParams(
        n=2, beam_width=4, length_penalty=0.5, early_stopping="never", seed=0, max_tokens=3,
        allowed_token_ids=(41, 42, 43, 44), bad_words=((40,), (39, 42)),
    )  # fmt: skip
    async with open_door() as door, door.client() as client:
        reading = asyncio.create_task(client.generate([39, 40], params))
        request = (await door.node.hear(SubmitDecode)).request
        assert request.params == params
        end = {"finish_reason": FinishReason.LENGTH}
        door.node.tokens(request, 0, 41, 42, 43, **end)
        door.node.tokens(request, 0, 41, 42, 44, sample=1, **end)
        async with asyncio.timeout(PATIENCE_S):
            first = await reading
        assert first.others[0].token_ids == (41, 42, 44)


async def test_about_the_server() -> None:
    async with open_door() as door, door.client() as client:
        (model,) = await client.models()
        assert (model.id, model.max_model_len, model.digest) == ("tiny", 256, "digest")
        info = await client.server_info()
        assert [(node.node_id, node.role, node.free_blocks) for node in info.nodes] == [
            ("d", "decode", 64)
        ]
        async with grpc.aio.insecure_channel(door.address) as channel:
            reply = await health_stub(channel).Check(
                health_pb2.HealthCheckRequest(service="baton.serve.v1.Inference")
            )
            assert reply.status == health_pb2.HealthCheckResponse.SERVING
            stub = reflection_stub(channel)
            call = stub.ServerReflectionInfo()
            await call.write(reflection_pb2.ServerReflectionRequest(list_services=""))
            listed = await call.read()
            names = {service.name for service in listed.list_services_response.service}
            assert {"baton.serve.v1.Inference", "grpc.health.v1.Health"} <= names
            await call.done_writing()


async def test_without_nodes_it_is_unavailable() -> None:
    async with open_door(connected=False) as door, door.client() as client:
        assert await client.models() == []
        with pytest.raises(Unavailable):
            await collect(client, "x")
        async with grpc.aio.insecure_channel(door.address) as channel:
            reply = await health_stub(channel).Check(health_pb2.HealthCheckRequest())
            assert reply.status == health_pb2.HealthCheckResponse.NOT_SERVING


async def test_every_call_but_health_needs_the_key() -> None:
    async with open_door("right", "other") as door:
        for key in ("", "wrong"):
            async with door.client(key) as client:
                with pytest.raises(Unauthenticated):
                    await client.models()
                with pytest.raises(Unauthenticated):
                    await collect(client, "x")
        for key in ("right", "other"):
            async with door.client(key) as client:
                assert len(await client.models()) == 1
        async with grpc.aio.insecure_channel(door.address) as channel:
            await health_stub(channel).Check(health_pb2.HealthCheckRequest())
            call = reflection_stub(channel).ServerReflectionInfo()
            await call.write(reflection_pb2.ServerReflectionRequest(list_services=""))
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await call.read()
            assert caught.value.code() is grpc.StatusCode.UNAUTHENTICATED
