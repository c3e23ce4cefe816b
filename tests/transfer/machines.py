"""Both session machines' identities, messages and short cuts, for their tests."""

from __future__ import annotations

from dataclasses import replace

from baton.protocol.events import FirstToken
from baton.protocol.handles import Endpoint, KVHandle
from baton.protocol.kv_spec import LayerSpec, PoolFormat
from baton.runtime.rotation.deployment_secret import fixed
from kv_transfer.protocol.base import KVSpan
from kv_transfer.protocol.bodies import kind_of
from kv_transfer.protocol.frames import Header, Kind
from kv_transfer.protocol.identity import Identity, Side
from kv_transfer.protocol.messages import (
    Ack,
    Confirm,
    Data,
    End,
    Failure,
    FailureCode,
    Fetch,
    Message,
    Renew,
    SharedBlockTables,
    State,
)
from kv_transfer.protocol.session import (
    data_header,
    header_of,
)
from kv_transfer.protocol.steps import (
    Arrived,
    Send,
    SendData,
)

LAYERS = (LayerSpec(2, 4, 4), LayerSpec(1, 8, 0, kind="mla"))
BF16 = PoolFormat(8, "bfloat16")
P = Identity("0a" * 16, "layout", BF16, fixed("secret"))
D = Identity("0d" * 16, "layout", replace(BF16, block_size=32), fixed("secret"))
NP, ND = b"P" * 16, b"D" * 16
SEQ, EPOCH, TOKENS = 7, 2, 20
HANDLE = KVHandle(
    P.boot_id, SEQ, "r", 1, TOKENS, b"k" * 16, Endpoint(P.boot_id, "layout", BF16, ()), 10_000
)
FIRST = (FirstToken(3, 42),)
STALE = Failure(FailureCode.STALE, "released")


def control(message: Message, seq: int = SEQ, epoch: int = EPOCH) -> Arrived:
    return Arrived(header_of(kind_of(message), seq, epoch), message)


def span(layer: int, start: int, end: int) -> KVSpan:
    return KVSpan(layer, start, end, range(LAYERS[layer].kv_heads))


def send(layer: int, start: int, end: int) -> SendData:
    return SendData(span(layer, start, end), "bfloat16")


def sent(actions: list) -> list[Message]:
    return [action.message for action in actions if isinstance(action, Send)]


PEER_MESSAGES: list[Message] = [
    D.hello(Side.FETCHER, ND, None),
    Fetch(SEQ, b"k", "r", EPOCH),
    SharedBlockTables(8, ()),
    Data(memoryview(b"")),
    State(memoryview(b"")),
    End(TOKENS, True, (), 0),
    Ack(SEQ),
    Renew(SEQ, b"k", EPOCH),
    Confirm(SEQ, b"k", EPOCH, held=True),
    STALE,
]
HELD = control(Confirm(SEQ, b"", EPOCH, held=True))


def data(layer: int, start: int, end: int, **header: int) -> Arrived:
    spec = LAYERS[min(layer, 1)]
    fields = {"export_seq": SEQ, "epoch": EPOCH, "num_heads": spec.kv_heads} | header
    payload = memoryview(bytes((end - start) * spec.token_bytes("bfloat16")))
    return Arrived(
        Header(Kind.DATA, layer=layer, token0=start, num_tokens=end - start, **fields),
        Data(payload),
    )


def notice(layer: int, start: int, end: int) -> Arrived:
    """DATA of a direct lane."""
    return Arrived(data_header(span(layer, start, end), SEQ, EPOCH), Data(memoryview(b"")))
