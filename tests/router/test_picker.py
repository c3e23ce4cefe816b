"""The endpoint picker, asked as Envoy asks: the client's messages are of Envoy's own protos.

They come from the package envoy-data-plane and share no code with protos/gateway.proto, which has
the numbers of some of their fields.
"""

from __future__ import annotations

import random
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from typing import Any, cast

import grpc.aio
import orjson
import pytest
from envoy_data_plane.envoy.config.core.v3 import HeaderMap, HeaderValue, Metadata
from envoy_data_plane.envoy.extensions.filters.http.ext_proc.v3 import (
    ProcessingModeBodySendMode as BodyMode,
)
from envoy_data_plane.envoy.service.ext_proc.v3 import (
    HttpBody,
    HttpHeaders,
    HttpTrailers,
    ProcessingRequest,
    ProcessingResponse,
    ProtocolConfiguration,
)
from envoy_data_plane.google.protobuf import ListValue, Struct, Value
from grpc_health.v1 import health_pb2, health_pb2_grpc

from baton.protocol.block_hashes import block_hashes, root_hash
from baton.protocol.clock import SystemClock
from baton.protocol.errors import BatonError, ConfigError, InvalidRequest
from baton.protocol.handles import NodeLoad, NodeRecord, Role
from baton.protocol.messages import SubmitDecode, SubmitPrefill
from baton.runtime.timing import Timing
from router.config import RouterConfig
from router.models import ModelNodes, Models, ServedModel
from router.nodes.policy import Ask, NodeSnapshot, PolicySettings, Route, choose_route
from router.nodes.registry import NodeRegistry, ReportedModel
from router.picker.service import PickerServer
from router.request.dispatch_parts import DispatchParts
from router.request.dispatcher import Dispatcher
from router.request.sessions import session_key, tie_of
from router.request.terms import Terms, read_terms
from router.services import RouterServices
from router.store.guard import StoreGuard
from router.store.memory_store import MemoryStore
from tests.front.fakes import CHAT_TEMPLATE, MAX_MODEL_LEN, TOKENIZER, Front
from tests.router.clients import Client
from tests.router.fakes import fake_nodes, make_record, make_request, running_router
from tests.waiting import eventually

METHOD = "/envoy.service.ext_proc.v3.ExternalProcessor/Process"
ROUTERS = ("10.0.0.1:8000", "10.0.0.2:8000", "10.0.0.3:8000")
WORDS = ("what", "is", "the", "quick", "brown", "fox", "over", "lazy", "dog", "hello", "world")
PATIENCE_S = 30.0
SETTINGS = PolicySettings()
Pieces = Sequence[bytes]


@dataclass
class Nodes:
    """What a registry says of nodes that a test makes up."""

    now: list[NodeSnapshot] = field(default_factory=list[NodeSnapshot])
    keys: tuple[str, ...] = ("",)

    def snapshots(self) -> list[NodeSnapshot]:
        return self.now

    def records(self, model: str | None = None) -> list[NodeRecord]:
        return [
            make_record(
                node.node_id, node.role, boot_id=node.boot_id, address=address_of(node.node_id)
            )
            for node in self.now
            if model in (None, node.model)
        ]

    def model(self, key: str = "") -> ReportedModel | None:
        known = key in self.keys
        return ReportedModel(key or "tiny", "d", MAX_MODEL_LEN, 400, (1,)) if known else None

    def can_serve(self) -> bool:
        return bool(self.now)

    def watch_reports(self, watcher: Any) -> None:
        """No node reports anything."""


def address_of(name: str) -> str:
    """Two nodes of each role are on the routers' hosts, others are elsewhere."""
    return f"10.0.0.{int(name[1:]) + 1}:7000"


@dataclass
class Gateway:
    """Asks a picker as Envoy does, one stream per HTTP request."""

    channel: grpc.aio.Channel
    nodes: Nodes

    async def ask(self, *messages: ProcessingRequest) -> list[ProcessingResponse]:
        """The answers to all messages."""
        call: Any = self.channel.stream_stream(
            METHOD, request_serializer=bytes, response_deserializer=ProcessingResponse.parse
        )

        async def sent() -> AsyncIterator[ProcessingRequest]:
            for message in messages:
                yield message

        return [answer async for answer in call(sent(), timeout=PATIENCE_S)]

    async def post(
        self,
        body: object,
        pieces: int = 1,
        path: str = "/v1/completions",
        mode: BodyMode | None = None,
        subset: Sequence[str] | None = None,
        **headers: str,
    ) -> list[ProcessingResponse]:
        raw = body if isinstance(body, bytes) else orjson.dumps(body)
        size = max(1, -(-len(raw) // pieces))
        parts = [raw[at : at + size] for at in range(0, len(raw), size)] or [b""]
        bodies = [
            ProcessingRequest(
                request_body=HttpBody(body=part, end_of_stream=index == len(parts) - 1)
            )
            for index, part in enumerate(parts)
        ]
        return await self.ask(head(path, mode, subset, **headers), *bodies)


def head(
    path: str,
    mode: BodyMode | None = None,
    subset: Sequence[str] | None = None,
    method: str = "POST",
    **headers: str,
) -> ProcessingRequest:
    """The first message; `headers` with underscores."""
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    values = {":method": method, ":path": path, "content-type": "application/json", **named}
    listed = [HeaderValue(key=name, raw_value=value.encode()) for name, value in values.items()]
    context = None
    if subset is not None:
        hosts = ListValue(values=[Value(string_value=each) for each in subset])
        hint = Struct(fields={"x-gateway-destination-endpoint-subset": Value(list_value=hosts)})
        context = Metadata(filter_metadata={"envoy.lb.subset_hint": hint})
    return ProcessingRequest(
        request_headers=HttpHeaders(
            headers=HeaderMap(headers=listed), end_of_stream=method == "GET"
        ),
        metadata_context=context,
        protocol_config=None if mode is None else ProtocolConfiguration(request_body_mode=mode),
    )


def headers_of(answer: ProcessingResponse) -> dict[str, str]:
    """The headers that an answer sets; the destination is in the metadata, too."""
    found = answer.request_headers or answer.request_body
    assert found is not None
    assert found.response is not None
    assert found.response.clear_route_cache
    assert found.response.header_mutation is not None
    told = {
        option.header.key: option.header.raw_value.decode()
        for option in found.response.header_mutation.set_headers
        if option.header is not None
    }
    metadata = cast("Any", answer.dynamic_metadata).to_dict()
    assert metadata == {
        "envoy.lb": {"x-gateway-destination-endpoint": told["x-gateway-destination-endpoint"]}
    }
    return told


def refusal_of(answers: Sequence[ProcessingResponse]) -> tuple[int, dict[str, Any]]:
    [answer] = answers
    assert answer.immediate_response is not None
    assert answer.immediate_response.status is not None
    content = orjson.loads(answer.immediate_response.body)
    return int(answer.immediate_response.status.code), content["error"]


@asynccontextmanager
async def gateway(*models: ServedModel, **config: Any) -> AsyncIterator[Gateway]:
    nodes = Nodes(keys=tuple(model.key for model in models) or ("",))
    clock = SystemClock()
    guard = StoreGuard(MemoryStore("r", Timing(), clock), Timing())
    registry = cast("NodeRegistry", nodes)
    own = RouterConfig(picker_port=0, **{"picker_router": ROUTERS, **config})
    served = Models(*(models or (ServedModel(own, TOKENIZER, CHAT_TEMPLATE),)))
    services: RouterServices = replace(
        Front(config=own).services,
        registry=registry,
        dispatcher=Dispatcher(DispatchParts(registry, guard, clock, SETTINGS)),
        models=served,
    )
    server = PickerServer(services, "127.0.0.1:8000")
    port = server.bind()
    await server.start()
    try:
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
            yield Gateway(channel, nodes)
    finally:
        await server.stop()


def made_up(draw: random.Random, prompt: tuple[int, ...]) -> list[NodeSnapshot]:
    """Nodes with any load, some of which hold a part of the prompt."""
    root = root_hash("m", "", "float32")
    found: list[NodeSnapshot] = []
    for name in [f"{role}{n}" for role in "pd" for n in range(draw.randrange(5))]:
        total = draw.choice((1, 2, 40, 400))
        load = NodeLoad(
            running=draw.randrange(20), waiting=draw.randrange(4), swapped=draw.randrange(2),
            free_blocks=draw.randrange(total + 1), total_blocks=total,
            draining=draw.random() < 0.1, asleep=draw.random() < 0.05,
        )  # fmt: skip
        hashes = block_hashes(root, prompt[: draw.randrange(len(prompt) + 1)], 4)
        found.append(
            NodeSnapshot(
                name, f"boot-{name}", Role.PREFILL if name[0] == "p" else Role.DECODE, "m",
                draw.choice(("one", "one", "two")), 4, "float32", load=load,
                prefix=frozenset(hashes), assigned=draw.randrange(5),
                assigned_tokens=draw.randrange(300), shunned=draw.random() < 0.1,
            )
        )  # fmt: skip
    return found


def chosen(
    prompt: tuple[int, ...], nodes: Sequence[NodeSnapshot], session: str
) -> Route | BatonError:
    """What the router's policy says."""
    try:
        return choose_route(Ask(prompt), nodes, SETTINGS, tie_of(session_key("", session)))
    except BatonError as error:
        return error


@pytest.mark.long
async def test_it_picks_as_the_router_would_for_a_thousand_snapshots() -> None:
    draw = random.Random(7)
    ends = {"both": 0, "decode alone": 0, "refused": 0}
    async with gateway() as it:
        for number in range(1000):
            text = " ".join(draw.choices(WORDS, k=draw.randrange(1, 20)))
            prompt = tuple(TOKENIZER.encode(text))
            it.nodes.now = made_up(draw, prompt)
            session = f"s{number}"
            body = {"prompt": text, "max_tokens": 2}
            answers = await it.post(body, draw.randrange(1, 4), x_session_id=session)
            expected = chosen(prompt, it.nodes.now, session)
            if isinstance(expected, BatonError):
                status, error = refusal_of(answers)
                assert (status, error["code"]) == (expected.http_status, expected.code)
                ends["refused"] += 1
                continue
            told = headers_of(answers[0])
            decode, prefill = expected.decode.node_id, expected.prefill
            ends["decode alone" if prefill is None else "both"] += 1
            names = [decode] if prefill is None else [prefill.node_id, decode]
            assert told["x-baton-nodes"] == ",".join(names)
            wanted = None if prefill is None else address_of(prefill.node_id)
            assert told.get("x-prefiller-host-port") == wanted
            host = address_of(decode).partition(":")[0]
            near = [each for each in ROUTERS if each.startswith(f"{host}:")]
            assert told["x-gateway-destination-endpoint"] in (near or ROUTERS)
    assert min(ends.values()) > 50, ends


async def test_a_body_in_pieces_is_sent_back_after_the_headers() -> None:
    text = "x" * 100_000  # more than Envoy takes in one message
    body = orjson.dumps(
        {"prompt": [1, 2, 3], "max_tokens": 2, "user": "u", "suffix": None, "stop": text[:9]}
    )
    async with gateway() as it:
        it.nodes.now = made_up(random.Random(1), (1, 2, 3))
        for pieces in (1, 5, len(body)):
            first, *rest = await it.post(body, pieces)
            assert headers_of(first)
            parts = [each.request_body.response.body_mutation.streamed_response for each in rest]  # pyright: ignore[reportOptionalMemberAccess]
            assert b"".join(part.body for part in parts if part) == body
            assert [part.end_of_stream for part in parts if part] == [False] * (len(parts) - 1) + [
                True
            ]
        large = body[:-1] + b" " * 200_000 + b"}"
        first, *rest = await it.post(large, 9)
        assert headers_of(first)
        parts = [each.request_body.response.body_mutation.streamed_response for each in rest]  # pyright: ignore[reportOptionalMemberAccess]
        assert len(parts) == 4
        assert b"".join(part.body for part in parts if part) == large


async def test_trailers_end_a_body_too() -> None:
    async with gateway() as it:
        it.nodes.now = made_up(random.Random(1), (1, 2, 3))
        piece = ProcessingRequest(request_body=HttpBody(body=b'{"prompt": [1, 2, 3]}'))
        trailers = ProcessingRequest(request_trailers=HttpTrailers())
        first, body, last = await it.ask(head("/v1/completions"), piece, trailers)
        assert headers_of(first)
        assert body.request_body is not None
        assert not body.request_body.response.body_mutation.streamed_response.end_of_stream  # pyright: ignore[reportOptionalMemberAccess]
        assert last.request_trailers is not None


async def test_a_buffered_body_takes_the_headers_along() -> None:
    async with gateway() as it:
        it.nodes.now = made_up(random.Random(1), (1, 2, 3))
        first, second = await it.post({"prompt": [1, 2, 3]}, mode=BodyMode.BUFFERED)
        assert first.request_headers is not None
        assert first.request_headers.response is None
        assert headers_of(second)


@pytest.mark.parametrize("mode", [BodyMode.STREAMED, BodyMode.BUFFERED_PARTIAL, BodyMode.GRPC])
async def test_a_mode_that_hides_the_body_is_refused(mode: BodyMode) -> None:
    async with gateway() as it:
        status, error = refusal_of(await it.post({"prompt": "x"}, mode=mode))
        assert status == 500
        assert mode.name in error["message"]


@pytest.mark.parametrize(
    ("body", "status", "param"),
    [
        (b"", 400, None),
        (b"{", 400, None),
        (b"[1]", 400, None),
        (b'{"prompt": "x", "n": 0}', 400, "n"),
        (b'{"prompt": "x", "max_tokens": 100000}', 400, "max_tokens"),
        (b'{"prompt": "x", "model": "none"}', 404, "model"),
        (b"\xff" * 70_000, 400, None),
    ],
)
async def test_a_bad_body_is_the_routers_own_error(body: bytes, status: int, param: str) -> None:
    async with gateway() as it:
        found, error = refusal_of(await it.post({"prompt": "x"}))
        assert (found, error["code"]) == (503, "unavailable"), "no node is there"
        it.nodes.now = made_up(random.Random(1), (1, 2, 3))
        found, error = refusal_of(await it.post(body, 3))
        assert (found, error["param"]) == (status, param), error
        late = await it.post({"prompt": [1, 2, 3]})
        assert headers_of(late[0]), "the next request is served"


async def test_a_subset_of_the_gateway_is_kept_to() -> None:
    async with gateway() as it:
        it.nodes.now = made_up(random.Random(1), (1, 2, 3))
        for router in ROUTERS:
            answers = await it.post({"prompt": [1, 2, 3]}, subset=[router, "10.9.9.9:1"])
            assert headers_of(answers[0])["x-gateway-destination-endpoint"] == router
        for none in ([], ["10.9.9.9:1"]):
            status, error = refusal_of(await it.post({"prompt": [1, 2, 3]}, subset=none))
            assert status == 503
            assert "subset" in error["message"]


async def test_other_paths_get_a_router_alone() -> None:
    async with gateway() as it:
        [answer] = await it.ask(head("/v1/models", method="GET"))
        told = headers_of(answer)
        assert told.keys() == {"x-gateway-destination-endpoint"}
        assert told["x-gateway-destination-endpoint"] in ROUTERS
        removed = answer.request_headers.response.header_mutation.remove_headers  # pyright: ignore[reportOptionalMemberAccess]
        assert set(removed) == {"x-baton-nodes", "x-prefiller-host-port"}, "no client sets them"
        first, *_ = await it.post({"input": "x"}, path="/v1/embeddings")
        assert headers_of(first).keys() == {"x-gateway-destination-endpoint"}


async def test_the_response_passes_unchanged() -> None:
    async with gateway() as it:
        it.nodes.now = made_up(random.Random(1), (1, 2, 3))
        answers = await it.ask(
            head("/v1/models", method="GET"),
            ProcessingRequest(response_headers=HttpHeaders()),
            ProcessingRequest(response_body=HttpBody(body=b"abc")),
            ProcessingRequest(response_body=HttpBody(body=b"", end_of_stream=True)),
            ProcessingRequest(response_trailers=HttpTrailers()),
        )
        _, headers, first, last, trailers = answers
        assert headers.response_headers is not None
        bodies = [it.response_body.response.body_mutation.streamed_response for it in (first, last)]  # pyright: ignore[reportOptionalMemberAccess]
        assert [(part.body, part.end_of_stream) for part in bodies if part] == [
            (b"abc", False),
            (b"", True),
        ]
        assert trailers.response_trailers is not None


async def test_each_model_gets_its_own_nodes() -> None:
    config = RouterConfig()
    models = [
        ServedModel(
            replace(config, served_model_name=(key,)), TOKENIZER, CHAT_TEMPLATE, key=key,
            nodes=ModelNodes((key,)),
        )
        for key in ("a", "b")
    ]  # fmt: skip
    async with gateway(*models) as it:
        it.nodes.now = [
            NodeSnapshot(
                name, f"boot-{name}", Role.PREFILL if name[0] == "p" else Role.DECODE,
                f"m-{model}", "layout", 4, "float32", model=model,
            )
            for model, names in (("a", ("p1", "d1")), ("b", ("p2", "d2")))
            for name in names
        ]  # fmt: skip
        for model, nodes in (("a", "p1,d1"), ("b", "p2,d2")):
            body = {"model": model, "messages": [{"role": "user", "content": "hello"}]}
            first, *_ = await it.post(body, path="/v1/chat/completions?x=1")
            assert headers_of(first)["x-baton-nodes"] == nodes
        status, error = refusal_of(await it.post({"model": "c", "prompt": "x"}))
        assert (status, error["code"]) == (404, "model_not_found")


async def test_keys_are_checked_before_any_work() -> None:
    async with gateway(api_key=("secret",)) as it:
        it.nodes.now = made_up(random.Random(1), (1, 2, 3))
        body = {"prompt": [1, 2, 3]}
        for given in ("", "Bearer wrong"):
            status, _ = refusal_of(await it.post(body, authorization=given))
            assert status == 401
        assert headers_of((await it.post(body, authorization="Bearer secret"))[0])


async def test_its_health_is_the_protocols() -> None:
    async with gateway() as it:
        stub: Any = health_pb2_grpc.HealthStub(it.channel)
        served = health_pb2.HealthCheckResponse
        for name, status in (
            ("liveness", served.SERVING),
            ("readiness", served.NOT_SERVING),
            ("envoy.service.ext_proc.v3.ExternalProcessor", served.NOT_SERVING),
        ):
            told = await stub.Check(health_pb2.HealthCheckRequest(service=name))
            assert told.status == status, "no node is there"


def test_a_picker_needs_an_address_to_name() -> None:
    with pytest.raises(ConfigError, match="picker-router"):
        RouterConfig(picker_port=0, host="0.0.0.0", api_key=("k",), insecure=True).check()
    RouterConfig(picker_port=0, picker_router=ROUTERS, uds="x").check()


async def test_a_router_follows_the_nodes_that_a_request_names() -> None:
    settings = PolicySettings(named_nodes=True)
    async with (
        fake_nodes("p1", "p2", "d1", "d2") as nodes,
        running_router(nodes, settings=settings) as router,
    ):
        by_name = {node.record.node_id: node for node in nodes}
        for number, names in enumerate((("p1", "d2"), ("p2", "d1"), ("p2", "d2"), ("p1", "d1"))):
            client = Client(router, make_request(f"r{number}"), Terms(nodes=names))
            prefill, decode = (by_name[name] for name in names)
            request = (await prefill.hear(SubmitPrefill)).request
            assert request.id == f"r{number}"
            prefill.export(request)
            assert (await decode.hear(SubmitDecode)).request.id == f"r{number}"
            decode.finish(request, 0, *range(10, 18))
            assert await client.done() == list(range(10, 18))
        await by_name["p1"].stop()
        await router.until(lambda: len(router.registry.records()) == 3)
        client = Client(router, make_request("gone"), Terms(nodes=("p1", "d1")))
        request = (await by_name["p2"].hear(SubmitPrefill)).request
        by_name["p2"].export(request)
        assert (await by_name["d1"].hear(SubmitDecode)).request.id == "gone"
        by_name["d1"].finish(request, 0, *range(10, 18))
        await client.done()


async def test_without_the_flag_a_request_cannot_name_nodes() -> None:
    async with fake_nodes("d1", "d2") as nodes, running_router(nodes) as router:
        full = NodeLoad(running=50, free_blocks=1, total_blocks=64)
        nodes[0].say(load=full)

        async def told() -> bool:
            return any(node.load.running == 50 for node in router.registry.snapshots())

        await eventually(told)
        client = Client(router, make_request(), Terms(nodes=("d1",)))
        request = (await nodes[1].hear(SubmitDecode)).request
        nodes[1].finish(request, 0, *range(10, 18))
        await client.done()


def test_a_header_names_a_node_of_each_role_at_most() -> None:
    found = read_terms(lambda name: " p1 , d2 " if name == "x-baton-nodes" else "")
    assert found.nodes == ("p1", "d2")
    for bad in ("a,b,c", "x" * 1000):
        with pytest.raises(InvalidRequest, match="x-baton-nodes"):
            read_terms(lambda name, bad=bad: bad if name == "x-baton-nodes" else "")
