"""Both cores of the prototype router take the same steps: bench/router_core/."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from baton.protocol.clock import SystemClock
from baton.protocol.events import HandleReady, NodeStep, TokenEvent
from baton.protocol.handles import Endpoint, KVHandle
from baton.protocol.kv_spec import PoolFormat
from baton.protocol.messages import SubmitDecode, SubmitPrefill
from baton.protocol.request import FinishReason
from baton.protocol.wire import node_message_to_wire, router_message_from_wire
from bench.router_core.core import PythonCore
from bench.router_core.server import RouterCore, build, sampling_bytes
from protos import node_pb2

TEXTS = ["a", ' "b"', "\n", "ü"]
ANSWER = 'a "b"\nü'
ID = "chatcmpl-1-0.core"


@pytest.fixture(scope="module")
def cores(tmp_path_factory: pytest.TempPathFactory) -> dict[str, RouterCore]:
    module = build(Path(tmp_path_factory.mktemp("core")))
    encoded = [text.encode() for text in TEXTS]
    return {
        "compiled": module.Core(encoded, sampling_bytes(), b"demo", b"sha", 1, 1),
        "python": PythonCore(TEXTS, sampling_bytes(), "sha"),
    }


def handle() -> KVHandle:
    endpoint = Endpoint("boot", "layout", PoolFormat(16, "bfloat16"), ())
    return KVHandle("boot", 1, ID, 1, 3, b"secret", endpoint, lease_ms=1000)


def sent(core: RouterCore, stage: int) -> object:
    batch = node_pb2.RouterMessage.FromString(core.take(stage, 0)).batch
    (message,) = batch.messages
    return router_message_from_wire(message, SystemClock())


@pytest.mark.parametrize("name", ["compiled", "python"])
def test_an_answer_goes_over_both_nodes_and_redis(cores: dict[str, RouterCore], name: str) -> None:
    core = cores[name]
    assert core.begin([3, 300, 70_000], 4) == 1
    submit = sent(core, 0)
    assert isinstance(submit, SubmitPrefill)
    assert submit.request.id == ID
    assert submit.request.prompt_ids == (3, 300, 70_000)
    assert submit.request.params.max_tokens == 4

    first = TokenEvent(ID, 1, 0, (0,))
    told = NodeStep(handles=(HandleReady(ID, 1, handle()),), tokens=(first,))
    assert core.receive(node_message_to_wire(told).SerializeToString()) == []
    submit = sent(core, 1)
    assert isinstance(submit, SubmitDecode)
    assert submit.handle == handle()
    assert (core.take(0, 0), core.take(1, 0)) == (b"", b"")

    rest = TokenEvent(ID, 1, 0, (0, 1, 2, 3), finish_reason=FinishReason.LENGTH)
    told = NodeStep(tokens=(rest,))
    assert core.receive(node_message_to_wire(told).SerializeToString()) == [], "Redis has no record"
    commands = core.take_redis()
    assert commands.count(b"EVALSHA") == 4  # the record, the log of each message, the end
    assert core.receive_redis(b":1\r\n:1\r\n:1\r\n") == []
    ((number, answer),) = core.receive_redis(b":1\r\n")
    assert number == 1
    told = json.loads(answer)
    assert told["choices"][0]["message"]["content"] == ANSWER
    assert told["usage"] == {"prompt_tokens": 3, "completion_tokens": 4, "total_tokens": 7}
    with pytest.raises(RuntimeError):
        core.receive_redis(b"-ERR no\r\n")
