"""What a node reports to routers: tokens, handles, failures, load, block events. Frozen values.

Those that are made for each token or each request are structs of msgspec: a frozen dataclass of
twelve fields takes 2 us to make, a struct 0.2 us.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

import msgspec

from baton.protocol.handles import EncodedImage, KVHandle, NodeLoad
from baton.protocol.request import FinishReason


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    token_id: int
    logprob: float
    rank: int


class TokenEvent(msgspec.Struct, frozen=True):
    """New tokens of one sample of one request.

    `position` is the absolute output index of token_ids[0]. A finished sample has a finish_reason,
    possibly with no new token. The end-of-sequence or stop token that ended a sample IS the last of
    token_ids and is repeated in `stop_token_id`. `logprobs[i]` belongs to token_ids[i], the token
    itself first. `candidates`: for a beam search that goes on at another node, its first
    candidates, best first, instead of tokens; they are sent in END, never to a router, like
    `drafts`: what the draft head of a prefill node guesses behind token_ids.
    `preemptions`: in a sample's last event, how often the sample was preempted on this node.
    """

    request_id: str
    epoch: int
    position: int
    token_ids: tuple[int, ...]
    sample: int = 0
    finish_reason: FinishReason | None = None
    stop_token_id: int | None = None
    num_cached_tokens: int = 0
    logprobs: tuple[tuple[TokenLogprob, ...], ...] = ()
    prompt_logprobs: tuple[tuple[TokenLogprob, ...], ...] = ()
    candidates: tuple[TokenLogprob, ...] = ()
    preemptions: int = 0
    drafts: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class FirstToken:
    """Token 1 as END carries it: one per sample, or one per candidate of a beam search, best first.

    For a candidate, `sample` is its rank from 0 and `cumulative_logprob` its score. `drafts`: what
    the sender's draft head guesses behind the token; the receiver verifies them in its first step.
    """

    position: int
    token_id: int
    sample: int = 0
    finish_reason: FinishReason | None = None
    logprobs: tuple[TokenLogprob, ...] = ()
    cumulative_logprob: float = 0.0
    drafts: tuple[int, ...] = ()


class HandleReady(msgspec.Struct, frozen=True):
    request_id: str
    epoch: int
    handle: KVHandle


class Subscribed(msgspec.Struct, frozen=True):
    request_id: str
    epoch: int


class SpanName(enum.StrEnum):
    """What a node did with a request. FIRST_STEP: it computed the first token after a fetch.
    PREEMPTED: it took the blocks away; until the next token."""

    QUEUE = "queue"
    COMPUTE = "compute"
    FETCH = "fetch"
    FIRST_STEP = "first step"
    PREEMPTED = "preempted"


class NodeSpan(msgspec.Struct, frozen=True, gc=False):
    """What took a request's time on a node, in microseconds since the request came there.

    `name`: a SpanName, or what a newer node calls it. `chunks`: in how many the prompt was
    computed. `kv_bytes` and `lane`: of a fetch. `layers`: the fields of each LayersCame of a fetch,
    one after another: numbers alone, as most timelines are never looked at.
    """

    name: str
    start_us: int
    end_us: int
    chunks: int = 0
    kv_bytes: int = 0
    lane: str = ""
    layers: tuple[int, ...] = ()


class LayersCame(msgspec.Struct, frozen=True, gc=False):
    """When the KV of layers `first` to `last` came, in microseconds since the fetch began: from the
    first frame's arrival until the last one was written. A prompt of several chunks brings each
    layer several times, so these times overlap. `kv_bytes`: their KV and recurrent state.
    """

    first: int
    last: int
    start_us: int
    end_us: int
    kv_bytes: int


GROUP_NUMBERS: Final = len(LayersCame.__struct_fields__)


def layers_came(numbers: Sequence[int]) -> list[LayersCame]:
    """Return the groups of layers that `NodeSpan.layers` tells. Its length is a multiple of
    GROUP_NUMBERS."""
    return [
        LayersCame(*numbers[at : at + GROUP_NUMBERS])
        for at in range(0, len(numbers), GROUP_NUMBERS)
    ]


class NodeTimings(msgspec.Struct, frozen=True):
    """Where a request's time went on a node, told once, with the first token of that node. After
    each preemption the pause follows, with the next token.

    `age_us`: microseconds from the request's arrival there to this event.
    """

    request_id: str
    epoch: int
    age_us: int
    spans: tuple[NodeSpan, ...]


@dataclass(frozen=True, slots=True)
class Pooled:
    """The vectors of a SubmitPool's prompts, in the prompts' order: float32, little-endian."""

    request_id: str
    epoch: int
    vectors: tuple[bytes, ...]


@dataclass(frozen=True, slots=True)
class Encoded:
    """The rows of a SubmitEncode's images, one for each file, in the order of the files."""

    request_id: str
    epoch: int
    images: tuple[EncodedImage, ...]


@dataclass(frozen=True, slots=True)
class RequestFailed:
    request_id: str
    epoch: int
    code: str
    message: str
    retryable: bool
    field: str | None = None


class BlockEventKind(enum.Enum):
    STORED = "stored"
    EVICTED = "evicted"
    CLEARED = "cleared"


@dataclass(frozen=True, slots=True)
class BlockEvent:
    """A change of a node's prefix map.

    `hashes`: in prefix order. `parent`: the hash before the first one (b"" at the start of a
    prompt). `states`: it is about checkpoints of recurrent state at the ends of the blocks
    `hashes`, not about the blocks; in a CLEARED event it says that the node's model keeps such a
    state, so that its blocks are of use only up to a checkpoint.
    """

    kind: BlockEventKind
    hashes: tuple[bytes, ...] = ()
    parent: bytes = b""
    states: bool = False


@dataclass(frozen=True, slots=True)
class Controlled:
    """The answer to an order. `code` is empty if the order was carried out, else the
    error's code. `detail`: what was asked for, as JSON; empty if nothing was.
    """

    number: int
    code: str = ""
    message: str = ""
    field: str | None = None
    detail: bytes = b""


@dataclass(frozen=True, slots=True)
class KVFlow:
    """What a node has fetched from another one, `peer` (its boot id), by one lane.

    Counters since the node's start; the percentiles are of the last fetches.
    """

    peer: str
    lane: str
    num_bytes: int = 0
    transfers: int = 0
    faults: int = 0
    ms_p50: float = 0.0
    ms_p99: float = 0.0


@dataclass(frozen=True, slots=True)
class AdapterList:
    """The ids of the LoRA adapters that a node holds now.

    `leaving` are those that new requests cannot use.
    """

    held: tuple[str, ...]
    leaving: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class NodeStep:
    """Everything that one engine step, or one control step, yields, in order: one wire message.

    `last`: the node has drained; nothing follows, and the router ends the session.
    """

    tokens: tuple[TokenEvent, ...] = ()
    handles: tuple[HandleReady, ...] = ()
    subscribed: tuple[Subscribed, ...] = ()
    failed: tuple[RequestFailed, ...] = ()
    load: NodeLoad | None = None
    block_events_seq: int = 0
    block_events: tuple[BlockEvent, ...] = field(default=())
    last: bool = False
    pooled: tuple[Pooled, ...] = ()
    controlled: tuple[Controlled, ...] = ()
    adapters: AdapterList | None = None
    flows: tuple[KVFlow, ...] = ()
    timings: tuple[NodeTimings, ...] = ()
    encoded: tuple[Encoded, ...] = ()
