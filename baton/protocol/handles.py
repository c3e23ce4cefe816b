"""Values that name things between processes: KV handles, endpoints, node records, loads. Frozen."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Final

from baton.protocol.kv_spec import PROTOCOL_VERSION, PoolFormat


@dataclass(frozen=True, slots=True)
class LaneAddress:
    name: str
    address: str
    attributes: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True, slots=True)
class Endpoint:
    """Where and how a node process exchanges KV.

    `boot_id`: new at every start of the process. `ranks`: the endpoints of a tensor-parallel
    group's ranks; empty without one.
    """

    boot_id: str
    layout_fingerprint: str
    format: PoolFormat
    lanes: tuple[LaneAddress, ...]
    protocol_version: int = PROTOCOL_VERSION
    ranks: tuple[Endpoint, ...] = ()


@dataclass(frozen=True, slots=True)
class KVHandle:
    """Names one export.

    (boot_id, export_seq) fences the exporter's memory; `secret` proves the right to fetch.
    """

    boot_id: str
    export_seq: int
    request_id: str
    epoch: int
    num_tokens: int
    secret: bytes = field(repr=False)
    endpoint: Endpoint
    lease_ms: int
    sample: int = 0
    # Empty, or its message: a router needs it for the record and for the decode node (wire.py).
    encoded: list[bytes] = field(default_factory=list[bytes], init=False, repr=False, compare=False)


@dataclass(frozen=True, slots=True)
class EncodedImage:
    """The rows of one image, exported by an encode node: `handle` has `height * width` tokens, each
    of them a row of the model's input. `digest`: of the file."""

    digest: bytes
    height: int
    width: int
    handle: KVHandle


class Role(enum.Enum):
    PREFILL = "prefill"
    DECODE = "decode"
    ENCODE = "encode"


# A load's mean of steps moves with every step; less than this share of what was told is no news.
STEP_NEWS: Final = 0.1
# The part of a load that routers hear of at once, but for step_seconds.
_state = attrgetter(
    "running", "waiting", "swapped", "free_blocks", "total_blocks", "waiting_tokens", "fetching",
    "export_bytes", "prefill_tokens_per_s", "draining", "stalled", "kv_token_bytes", "pause",
    "asleep", "own_prefill_tokens_per_s",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class NodeLoad:
    """A node's state as its routers see it: numbers of requests, blocks and tokens; seconds.

    `kv_token_bytes` is the number of wire bytes of one token's KV. The fields from
    `kv_received_bytes` on are counters since the node's start, unless their comment says "no
    counter".
    """

    running: int = 0
    waiting: int = 0
    swapped: int = 0
    free_blocks: int = 0
    total_blocks: int = 0
    waiting_tokens: int = 0
    fetching: int = 0
    export_bytes: int = 0
    step_seconds: float = 0.0
    prefill_tokens_per_s: float = 0.0
    draining: bool = False
    stalled: bool = False  # the node's engine makes no progress
    kv_token_bytes: int = 0
    kv_received_bytes: int = 0  # of verified KV
    kv_sent_bytes: int = 0
    kv_adopted_bytes: int = 0  # read where it lies: neither sent nor received
    kv_fetches: int = 0  # fetches that succeeded
    kv_fetch_failures: int = 0
    preemptions: int = 0
    prefix_query_tokens: int = 0  # tokens looked up in the prefix map
    prefix_hit_tokens: int = 0  # tokens found there
    steps: int = 0  # steps of the node's engine
    step_tokens: int = 0  # prompt and output tokens that these steps computed
    # The sum of the times between the end of a prefill and its receiver's ACK.
    kv_tail_seconds: float = 0.0
    mbu: float = 0.0  # no counter: share of the memory's read bandwidth that the last steps used
    mfu: float = 0.0  # no counter: share of the rate of matrix products that the last steps used
    pause: str = ""  # no counter: "refuse" or "hold" while an operator has paused the node
    asleep: bool = False  # no counter: without weights and KV
    cached_blocks: int = 0  # no counter: of free_blocks, those that hold a known prefix
    # No counter: prefill_tokens_per_s by the own cores, without those that idle nodes lend.
    own_prefill_tokens_per_s: float = 0.0

    def is_news_after(self, told: NodeLoad) -> bool:
        """Whether a router that knows `told` must hear of this load before the next heartbeat.

        Not of counters, nor of a mean of the steps that has moved by less than STEP_NEWS.
        """
        moved = abs(self.step_seconds - told.step_seconds)
        return moved > STEP_NEWS * told.step_seconds or _state(self) != _state(told)


@dataclass(frozen=True, slots=True)
class NodeRecord:
    """What a node reports about itself: in its session's first message and in the registry."""

    node_id: str
    boot_id: str
    role: Role
    address: str
    model: str
    model_digest: str
    block_size: int
    max_model_len: int
    vocab_size: int
    endpoint: Endpoint
    load: NodeLoad = NodeLoad()
    version: str = ""
    adapters: tuple[str, ...] = ()
    eos_token_ids: tuple[int, ...] = ()
    leaving_adapters: tuple[str, ...] = ()  # those of `adapters` that new requests cannot use
    max_num_seqs: int = 0  # the most sequences that run at once; 0 = not reported
    # Dtypes of computing and of KV, "bfloat16, KV int8", and the chunk of exact requests if it is
    # not the usual one; "" = not reported.
    precision: str = ""
    deterministic: bool = False
    group: str = ""  # of data-parallel ranks, which end together; "" = it is in none
    rank: int = 0  # among them
    encodes: bool = False  # it computes vectors and classes, and no tokens
    needs_rows: bool = False  # it has no vision tower: images come from encode nodes alone
