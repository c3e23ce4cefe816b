"""A client that knows nothing but an address, as grpcurl: messages are built from reflection."""

from __future__ import annotations

import asyncio
from typing import Any

import grpc
import grpc.aio
import pytest
from google.protobuf import json_format
from google.protobuf.descriptor_pool import DescriptorPool
from google.protobuf.message_factory import GetMessageClass
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import (
    ProtoReflectionDescriptorDatabase,
)

from baton.client import AsyncClient, GenerateOptions
from baton.protocol.errors import DeadlineExceeded
from baton.protocol.messages import AbortRequest, SubmitDecode
from baton.protocol.request import RequestState as S
from tests.front.fakes import EOS, TOKENIZER
from tests.router.fakes import PATIENCE_S
from tests.router.test_grpc_api import GREEDY, open_door
from tests.waiting import eventually

SERVICE = "baton.serve.v1.Inference"


def serialized(message: Any) -> bytes:
    return message.SerializeToString()


class Reflected:
    """All of a server's methods by name, JSON in and out. Blocking, as the reflection library."""

    def __init__(self, address: str) -> None:
        self._channel = grpc.insecure_channel(address)
        database = ProtoReflectionDescriptorDatabase(self._channel)
        self.services = set(database.get_services())
        self._pool = DescriptorPool(database)

    def methods(self, service: str) -> dict[str, tuple[str, bool]]:
        """Method -> (path, does it stream)."""
        found: Any = self._pool.FindServiceByName(service)
        return {m.name: (f"/{service}/{m.name}", bool(m.server_streaming)) for m in found.methods}

    def call(self, service: str, method: str, /, **fields: Any) -> list[dict[str, Any]]:
        found: Any = self._pool.FindServiceByName(service).FindMethodByName(method)
        request = json_format.ParseDict(fields, GetMessageClass(found.input_type)())
        reply = GetMessageClass(found.output_type)
        path, streams = self.methods(service)[method]
        make = self._channel.unary_stream if streams else self._channel.unary_unary
        answer: Any = make(
            path, request_serializer=serialized,
            response_deserializer=reply.FromString,
        )(request, timeout=PATIENCE_S)  # fmt: skip
        return [json_format.MessageToDict(m) for m in (answer if streams else (answer,))]

    def close(self) -> None:
        self._channel.close()


async def test_reflection_alone_is_enough() -> None:
    async with open_door() as door:
        client = await asyncio.to_thread(Reflected, door.address)
        assert {SERVICE, "grpc.health.v1.Health"} <= client.services
        methods = await asyncio.to_thread(client.methods, SERVICE)
        assert {name: streams for name, (_, streams) in methods.items()} == {
            "Generate": True, "Abort": False, "Models": False, "ServerInfo": False
        }  # fmt: skip

        models = await asyncio.to_thread(client.call, SERVICE, "Models")
        assert models == [{"models": [{"id": "tiny", "maxModelLen": 256, "digest": "digest"}]}]
        info = await asyncio.to_thread(client.call, SERVICE, "ServerInfo")
        assert [node["nodeId"] for node in info[0]["nodes"]] == ["d"]
        assert await asyncio.to_thread(client.call, SERVICE, "Abort", requestId="no") == [{}]
        health = await asyncio.to_thread(
            client.call, "grpc.health.v1.Health", "Check", service=SERVICE
        )
        assert health == [{"status": "SERVING"}]

        for prompt in ({"text": "hello"}, {"tokenIds": {"ids": [5, 6]}}):
            reading = asyncio.create_task(
                asyncio.to_thread(
                    client.call, SERVICE, "Generate", temperature=0.0, maxTokens=9, **prompt
                )
            )
            request = (await door.node.hear(SubmitDecode)).request
            assert request.params.max_tokens == 9
            ids = TOKENIZER.encode(" world", add_special_tokens=False)
            door.node.tokens(request, 0, *ids)
            door.node.finish(request, len(ids), EOS)
            events = await reading
            assert "".join(event.get("text", "") for event in events).startswith(" world")
            assert events[-1]["finishReason"] == "length"
            assert events[-1]["usage"]["completionTokens"] == len(ids) + 1
        await asyncio.to_thread(client.close)


async def test_an_error_names_its_code_and_field_in_the_trailing_metadata() -> None:
    async with open_door() as door:
        client = await asyncio.to_thread(Reflected, door.address)
        with pytest.raises(grpc.RpcError) as caught:
            await asyncio.to_thread(
                client.call, SERVICE, "Generate", text="x", temperature=-1.0, maxTokens=3
            )
        error: Any = caught.value
        assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
        trailing = dict(error.trailing_metadata())
        assert trailing["baton-error-code"] == "invalid_request"
        assert trailing["baton-error-field"] == "temperature"
        await asyncio.to_thread(client.close)


async def test_a_callers_deadline_travels_to_the_node_and_ends_the_request_there() -> None:
    async with open_door() as door, door.client() as client:
        options = GenerateOptions(request_id="late", timeout_s=1.0)
        reading = asyncio.create_task(client.generate("hello", GREEDY, options))
        request = (await door.node.hear(SubmitDecode)).request
        assert request.deadline is not None
        assert request.deadline - request.arrival < 2.0  # on this side of the wire
        with pytest.raises(DeadlineExceeded):
            await reading
        assert (await door.node.hear(AbortRequest)).request_id == request.id

        async def ended() -> bool:
            counts = await door.router.store.counts()
            return counts.get(S.FAILED, 0) + counts.get(S.CANCELLED, 0) == 1

        await eventually(ended)
        assert await door.router.store.read(request.id) is None, "nothing of it was shown"


async def test_a_cancelled_call_aborts_on_the_node() -> None:
    async with open_door() as door, AsyncClient(door.address) as client:
        events = client.stream("hello", GREEDY, GenerateOptions(request_id="gone"))
        reading = asyncio.create_task(anext(events))
        request = (await door.node.hear(SubmitDecode)).request
        reading.cancel()
        assert (await door.node.hear(AbortRequest)).request_id == request.id
        await asyncio.wait({reading})
        await events.aclose()
