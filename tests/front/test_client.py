"""The gRPC client, both flavours, against a scripted servicer on port 0."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import grpc
import pytest

from baton.client.client import (
    _CODE_OF,
    ERROR_CODE_METADATA,
    ERROR_FIELD_METADATA,
    AsyncClient,
    Client,
    GenerateOptions,
)
from baton.protocol import wire_values
from baton.protocol.errors import (
    BatonError,
    ContextLengthExceeded,
    DeadlineExceeded,
    InternalError,
    Unauthenticated,
    Unavailable,
    error_from_code,
)
from baton.protocol.events import TokenLogprob
from baton.protocol.sampling import GuidedDecoding, SamplingParams
from examples import grpc_client
from protos import node_pb2, serve_pb2, serve_pb2_grpc

ROWS = (
    (TokenLogprob(7, -0.5, 1), TokenLogprob(9, -1.5, 2)),
    (TokenLogprob(8, -0.25, 1),),
)  # of two tokens


class Servicer(serve_pb2_grpc.InferenceServicer):  # type: ignore[misc]
    """Two events, or what `error`, `cut` and `hang` ask for."""

    def __init__(self) -> None:
        self.seen: list[Any] = []
        self.error: tuple[grpc.StatusCode, str, tuple[tuple[str, str], ...]] | None = None
        self.hang = False
        self.cut = False
        self.ended = asyncio.Event()

    async def Generate(self, request: Any, context: Any) -> AsyncIterator[Any]:
        self.seen.append((request, dict(context.invocation_metadata())))
        # No `finally` here: a call that is cancelled while an event goes out never comes back here.
        context.add_done_callback(lambda _: self.ended.set())
        if self.error is not None:
            code, message, trailing = self.error
            context.set_trailing_metadata(trailing)
            await context.abort(code, message)
        rows = wire_values.logprobs_to_wire(ROWS)
        yield serve_pb2.GenerateEvent(
            request_id="r", position=0, token_ids=[7], text="he", logprobs=rows[:1],
            prompt_logprobs=rows,
        )  # fmt: skip
        if self.cut:
            return
        if self.hang:
            await asyncio.Event().wait()
        usage = serve_pb2.Usage(prompt_tokens=3, completion_tokens=2, cached_tokens=1)
        yield serve_pb2.GenerateEvent(
            request_id="r", position=1, token_ids=[8], text="y", finish_reason="stop", usage=usage,
            retries=1, logprobs=rows[1:],
        )  # fmt: skip

    async def Abort(self, request: Any, context: Any) -> Any:
        return serve_pb2.AbortReply(found=request.request_id == "r")

    async def Models(self, request: Any, context: Any) -> Any:
        return serve_pb2.ModelsReply(models=[serve_pb2.ModelInfo(id="tiny", max_model_len=8)])

    async def ServerInfo(self, request: Any, context: Any) -> Any:
        node = node_pb2.NodeRecord(node_id="p0", role=node_pb2.ROLE_PREFILL)
        node.load.running = 4
        counts = {"decode": 2}
        return serve_pb2.ServerInfoReply(version="1", nodes=[node], requests_by_state=counts)


@asynccontextmanager
async def serving(servicer: Servicer) -> AsyncIterator[str]:
    server = grpc.aio.server()
    serve_pb2_grpc.add_InferenceServicer_to_server(servicer, server)  # type: ignore[no-untyped-call]
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        yield f"127.0.0.1:{port}"
    finally:
        await server.stop(None)


async def test_generate_and_stream_of_both_clients_agree() -> None:
    async with serving(Servicer()) as address:
        async with AsyncClient(address) as client:
            whole = await client.generate("hi")
            events = [event async for event in client.stream([1, 2])]

        def blocking() -> tuple[Any, Any]:
            with Client(address) as sync:
                return sync.generate("hi"), list(sync.stream([1, 2]))

        assert await asyncio.to_thread(blocking) == (whole, events)
    assert (whole.text, whole.token_ids, whole.finish_reason, whole.retries) == (
        "hey",
        (7, 8),
        "stop",
        1,
    )
    assert whole.usage.cached_tokens == 1
    assert whole.logprobs == whole.prompt_logprobs == ROWS
    assert [event.usage is None for event in events] == [True, False]


async def test_the_example_shows_every_event(capsys: pytest.CaptureFixture[str]) -> None:
    servicer = Servicer()
    async with serving(servicer) as address:
        await asyncio.to_thread(grpc_client.main, address)
    assert list(servicer.seen[0][0].token_ids.ids) == list(grpc_client.PROMPT_IDS)
    shown = capsys.readouterr().out.splitlines()
    assert shown[:2] == ["0: [7] 'he'", "1: [8] 'y'"]
    assert shown[2].startswith("stop, Usage(")


async def test_every_field_travels() -> None:
    servicer = Servicer()
    params = SamplingParams(
        temperature=0.0, seed=5, max_tokens=9, logit_bias=((4, 1.5),), logprobs=0,
        stop_token_ids=(3,), bad_words=((7, 8), (9,)), guided=GuidedDecoding("regex", "a+"),
    )  # fmt: skip
    options = GenerateOptions(stop=("x",), model="tiny", cache_salt="s", priority=-1)
    async with serving(servicer) as address, AsyncClient(address, "key") as client:
        await client.generate([1, 2], params, options)
        await client.generate("hi")
        await client.generate("hi", SamplingParams(allowed_token_ids=(4, 5)))
    sent, metadata = servicer.seen[0]
    assert metadata["authorization"] == "Bearer key"
    assert list(sent.token_ids.ids) == [1, 2]
    assert (sent.temperature, sent.seed, sent.max_tokens) == (0.0, 5, 9)
    assert sent.HasField("temperature")
    assert (list(sent.stop), sent.model, sent.cache_salt, sent.priority) == (["x"], "tiny", "s", -1)
    assert (dict(sent.logit_bias), list(sent.stop_token_ids)) == ({4: 1.5}, [3])
    assert [list(word.ids) for word in sent.bad_words] == [[7, 8], [9]]
    assert sent.HasField("logprobs")
    assert sent.guided.grammar == "a+"
    plain, _ = servicer.seen[1]
    assert plain.text == "hi"
    unset = ("seed", "logprobs", "temperature", "max_tokens", "n", "repetition_penalty")
    assert not any(plain.HasField(name) for name in unset), "the server's defaults hold"
    assert list(servicer.seen[2][0].allowed_token_ids) == [4, 5]


@pytest.mark.parametrize(
    ("status", "trailing", "expected"),
    [
        (
            grpc.StatusCode.INVALID_ARGUMENT,
            ((ERROR_CODE_METADATA, "context_length_exceeded"), (ERROR_FIELD_METADATA, "prompt")),
            ContextLengthExceeded,
        ),
        (grpc.StatusCode.UNAUTHENTICATED, (), Unauthenticated),
        (grpc.StatusCode.UNAVAILABLE, (), Unavailable),
        (grpc.StatusCode.DATA_LOSS, (), InternalError),
        (grpc.StatusCode.UNAVAILABLE, ((ERROR_CODE_METADATA, "of_tomorrow"),), InternalError),
    ],
)
async def test_errors_are_batons(
    status: grpc.StatusCode, trailing: tuple[tuple[str, str], ...], expected: type[BatonError]
) -> None:
    servicer = Servicer()
    servicer.error = (status, "why", trailing)
    async with serving(servicer) as address, AsyncClient(address) as client:
        with pytest.raises(expected, match="why") as caught:
            await client.generate("hi")
        assert type(caught.value) is expected
        assert caught.value.field == dict(trailing).get(ERROR_FIELD_METADATA)

        def blocking() -> None:
            with Client(address) as sync:
                sync.generate("hi")

        with pytest.raises(expected, match="why"):
            await asyncio.to_thread(blocking)


@pytest.mark.parametrize(("status", "code"), _CODE_OF.items())
def test_a_bare_status_becomes_an_error_of_that_status(status: grpc.StatusCode, code: str) -> None:
    assert error_from_code(code, "why").grpc_code == status.name


async def test_deadlines_and_dead_servers() -> None:
    servicer = Servicer()
    servicer.hang = True
    async with serving(servicer) as address, AsyncClient(address) as client:
        with pytest.raises(DeadlineExceeded):
            await client.generate("hi", options=GenerateOptions(timeout_s=0.2))
        servicer.error = (grpc.StatusCode.DEADLINE_EXCEEDED, "", ())
        with pytest.raises(DeadlineExceeded, match="the call ran into its deadline"):
            await client.generate("hi")
    async with AsyncClient("127.0.0.1:1") as client:
        with pytest.raises(Unavailable):
            await client.models()

    def blocking() -> None:
        with Client("127.0.0.1:1") as client, pytest.raises(Unavailable):
            client.models()

    await asyncio.to_thread(blocking)


async def test_closing_the_stream_cancels_the_call() -> None:
    servicer = Servicer()
    servicer.hang = True
    async with serving(servicer) as address, AsyncClient(address) as client:
        stream = client.stream("hi")
        assert (await anext(stream)).text == "he"
        await stream.aclose()
        async with asyncio.timeout(30):
            await servicer.ended.wait()  # it hangs for ever, so by cancellation
    assert servicer.ended.is_set()


async def test_a_stream_cut_short_is_an_error() -> None:
    servicer = Servicer()
    servicer.cut = True
    async with serving(servicer) as address, AsyncClient(address) as client:
        with pytest.raises(InternalError, match="without a finish reason"):
            await client.generate("hi")


async def test_small_calls() -> None:
    async with serving(Servicer()) as address, AsyncClient(address) as client:
        assert (await client.models())[0].id == "tiny"
        info = await client.server_info()
        assert await client.abort("r")
        assert not await client.abort("x")

        def blocking() -> tuple[Any, Any, bool]:
            with Client(address) as sync:
                return sync.models(), sync.server_info(), sync.abort("r")

        models, same, found = await asyncio.to_thread(blocking)
    assert (info.version, info.requests_by_state) == ("1", {"decode": 2})
    assert (info.nodes[0].role, info.nodes[0].running) == ("prefill", 4)
    assert (models[0].max_model_len, same, found) == (8, info, True)


async def test_nobody_there_is_said_in_one_line() -> None:
    words = r"^no router at 127.0.0.1:9; is `./run up` running\?$"
    with Client("127.0.0.1:9") as client:
        with pytest.raises(Unavailable, match=words) as caught:
            client.server_info()
        assert caught.value.__suppress_context__  # no gRPC dump in a traceback
        with pytest.raises(Unavailable, match=words):
            client.generate("hi")
    async with AsyncClient("127.0.0.1:9") as asynchronous:
        with pytest.raises(Unavailable, match=words):
            await asynchronous.models()
        with pytest.raises(Unavailable, match=words):
            await asynchronous.generate("hi")
