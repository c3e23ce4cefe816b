"""What clients are told of failures on our side: a kind, an id for the log, and no insides."""

from __future__ import annotations

import inspect
import json
from typing import Any

import grpc
import grpc.aio
import pytest

from baton.client import AsyncClient
from baton.protocol import errors
from baton.protocol.errors import BatonError, InvalidRequest
from baton.protocol.sampling import SamplingParams
from router.api.grpc.inference import GrpcServer
from router.api.http.web_errors import _SPOKEN
from router.config import RouterConfig
from tests.front.fakes import Front

INSIDES = "/srv/baton/model.safetensors 10.0.3.7:50061 prefill-0a1b shm_0f7c hunter2"
CLASSES = [
    kind
    for _, kind in inspect.getmembers(errors, inspect.isclass)
    if issubclass(kind, BatonError)
    and not issubclass(kind, (*_SPOKEN, errors.Cancelled))  # that one is told nobody: they left
    and kind is not BatonError
]
FOREIGN = [OSError(2, "No such file", "/srv/baton"), ValueError(INSIDES), KeyError(INSIDES),
           RuntimeError(INSIDES), AssertionError(INSIDES), MemoryError(INSIDES),
           UnicodeDecodeError("utf-8", b"hunter2", 0, 1, INSIDES)]  # fmt: skip
FAILURES: list[Exception] = [*(kind(INSIDES) for kind in CLASSES), *FOREIGN]
FAILURES.append(ExceptionGroup(INSIDES, [RuntimeError(INSIDES)]))
BODIES: list[tuple[str, dict[str, Any]]] = [
    ("/v1/completions", {"prompt": "a"}),
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}]}),
    ("/v1/responses", {"input": "a"}),
    ("/v1/messages", {"messages": [{"role": "user", "content": "a"}], "max_tokens": 4}),
    ("/inference/v1/generate", {"token_ids": [5], "sampling_params": {}}),
]


def tells_nothing(text: str) -> None:
    for word in (*INSIDES.split(), "/srv", "Traceback", 'File "', ".py"):
        assert word not in text, word


def named(failure: Exception) -> str:
    return type(failure).__name__


@pytest.mark.parametrize("failure", FAILURES, ids=named)
@pytest.mark.parametrize("stream", [False, True])
async def test_no_dialect_tells_our_insides(failure: Exception, stream: bool) -> None:
    for at in (0, 1):  # before anything was said, and in mid-answer
        front = Front().failing(failure, at)
        async with front.client() as client:
            for path, body in BODIES:
                reply = await client.post(path, json={**body, "stream": stream})
                assert front.dispatcher.requests
                tells_nothing(reply.text)
                tells_nothing(json.dumps(dict(reply.headers)))


@pytest.mark.parametrize("failure", FAILURES, ids=named)
async def test_grpc_tells_our_insides_as_little(failure: Exception) -> None:
    front = Front(config=RouterConfig(grpc_port=0)).failing(failure)
    server = GrpcServer(front.services)
    port = server.bind()
    await server.start()
    try:
        async with AsyncClient(f"127.0.0.1:{port}") as client:
            with pytest.raises(BatonError) as caught:
                await client.generate("a", SamplingParams())
        tells_nothing(str(caught.value))
        cause: Any = caught.value.__cause__
        assert isinstance(cause, grpc.aio.AioRpcError)
        tells_nothing(f"{cause.details()} {cause.trailing_metadata()}")
    finally:
        await server.stop(0)


async def test_a_clients_own_fault_is_told_in_full() -> None:
    front = Front().failing(InvalidRequest("stop: one of yours", field="stop"))
    async with front.client() as client:
        reply = await client.post("/v1/completions", json={"prompt": "a"})
    assert reply.status_code == 400
    assert reply.json()["error"] == {
        "message": "stop: one of yours",
        "type": "invalid_request_error",
        "param": "stop",
        "code": "invalid_request",
    }


@pytest.mark.parametrize(
    "given", ["r\r\nx-injected: 1", "r\nINFO forged", "é", "a b", "x" * 129, "${jndi:ldap://x}", ""]
)
async def test_ids_of_clients_reach_headers_and_log_only_if_plain(
    given: str, caplog: pytest.LogCaptureFixture
) -> None:
    front = Front()
    headers = [(b"x-request-id", given.encode())]
    async with front.client() as client:
        reply = await client.get("/v1/models", headers=headers)  # type: ignore[arg-type]
    known = reply.headers["x-request-id"]
    assert known.isalnum()
    assert "x-injected" not in reply.headers
    assert all("forged" not in record.getMessage() for record in caplog.records)
