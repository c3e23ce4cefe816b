"""What a router sends to a node on their session. Frozen values.

Their wire form is in baton/protocol/wire.py.
"""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Literal

from baton.protocol.handles import EncodedImage, KVHandle
from baton.protocol.kv_spec import PROTOCOL_VERSION
from baton.protocol.request import Request

SECRET_METADATA: Final = "baton-secret-mac"  # gRPC metadata key of `session_mac`
# gRPC metadata key of the router's id in UTF-8, which `session_mac` proves.
ROUTER_METADATA: Final = "baton-router-id-bin"


@dataclass(frozen=True, slots=True)
class SessionHello:
    """First message of a session; the node answers with its NodeRecord."""

    router_id: str
    protocol_version: int = PROTOCOL_VERSION
    nonce: bytes = b""


@dataclass(frozen=True, slots=True)
class SubmitPrefill:
    """Compute the prompt (and the tokens of earlier epochs), sample one token, export the KV.

    `encoded`: images of the request whose rows an encode node holds; the node encodes others."""

    request: Request
    encoded: tuple[EncodedImage, ...] = ()


@dataclass(frozen=True, slots=True)
class SubmitDecode:
    """Decode from the KV behind `handle`; None = compute the prompt here (local prefill).

    `prefilling`: token 1 is not computed yet; a Prefilled follows when it is. `encoded`: as in
    SubmitPrefill.
    """

    request: Request
    handle: KVHandle | None = None
    prefilling: bool = False
    encoded: tuple[EncodedImage, ...] = ()


@dataclass(frozen=True, slots=True)
class SubmitEncode:
    """Export the rows of the request's images, each file once; the answer is Encoded."""

    request: Request


@dataclass(frozen=True, slots=True)
class Prefilled:
    """Token 1 is computed: a decode node that has not contacted the prefill node yet may fetch now.

    Ignored when the request is not here under `epoch`.
    """

    request_id: str
    epoch: int


PoolKind = Literal["last", "mean", "yes_no", "classify", "own"]


@dataclass(frozen=True, slots=True)
class SubmitPool:
    """Compute vectors of some prompts; the answer is Pooled.

    `kind`: the last token's hidden state, the mean of all hidden states, the probability of "yes"
    against "no" as the next token, a classifier's logits, or ("own") what an encoder's checkpoint
    makes of the hidden states. The request's prompt ids are all
    prompts, one after another; `lengths` are the prompts' lengths. `dimensions`: how many leading
    dimensions to keep, 0 = all. `answers`: the token ids of yes and no. `second_from`: where the
    second text of each prompt begins; () = the prompts are single texts, or the model is not told.
    """

    request: Request
    lengths: tuple[int, ...]
    kind: PoolKind = "last"
    normalize: bool = True
    dimensions: int = 0
    answers: tuple[int, int] = (0, 0)
    second_from: tuple[int, ...] = ()

    @property
    def prompts(self) -> list[tuple[int, ...]]:
        ids, end, found = self.request.prompt_ids, 0, list[tuple[int, ...]]()
        for length in self.lengths:
            found.append(ids[end : end + length])
            end += length
        return found


@dataclass(frozen=True, slots=True)
class AbortRequest:
    """Stop the request if it still runs under `epoch` or an older one. There is no answer."""

    request_id: str
    epoch: int


@dataclass(frozen=True, slots=True)
class RenewExport:
    handle: KVHandle


@dataclass(frozen=True, slots=True)
class ReleaseExport:
    handle: KVHandle
    why: str


@dataclass(frozen=True, slots=True)
class DrainNode:
    """Take no new requests. Mode "finish": let the running ones end on this node."""

    mode: str = "finish"


@dataclass(frozen=True, slots=True)
class Migrate:
    """Give up a request so that another node may continue it.

    The answer is the request's last event here: HandleReady if it left with its KV under a lease,
    else RequestFailed with code `given_back` (too little was computed to be worth moving). Ignored
    when the request is not here under `epoch`.
    """

    request_id: str
    epoch: int


@dataclass(frozen=True, slots=True)
class StopSample:
    """Stop computing one sample of a request; the other samples go on. There is no answer.

    To stop the last sample, an AbortRequest is sent instead.
    """

    request_id: str
    epoch: int
    sample: int


ControlAction = Literal[
    "reset_prefix_cache", "pause", "resume", "sleep", "wake", "load_adapter", "unload_adapter",
    "inspect",
]  # fmt: skip


@dataclass(frozen=True, slots=True)
class ControlNode:
    """An operator's order. The answer is a Controlled with this `number`.

    `name` and `path` are those of a LoRA adapter. `in_place`: the adapter may replace one of the
    same name. `tags`: what to wake, empty = all. `mode`: the kind of a pause, "refuse" or "hold".
    """

    number: int
    action: ControlAction
    name: str = ""
    path: str = ""
    in_place: bool = False
    tags: tuple[str, ...] = ()
    mode: str = ""


Submission = SubmitPrefill | SubmitDecode | SubmitPool | SubmitEncode
RouterMessage = (
    SessionHello
    | Submission
    | Prefilled
    | AbortRequest
    | RenewExport
    | ReleaseExport
    | DrainNode
    | Migrate
    | StopSample
    | ControlNode
)


def session_metadata(secret: str, router_id: str) -> tuple[tuple[str, str | bytes], ...]:
    """Return the gRPC metadata by which a router proves to a node that it knows the secret."""
    proof = (SECRET_METADATA, session_mac(secret, router_id))
    return ((ROUTER_METADATA, router_id.encode()), proof)


def session_proven(secrets: Sequence[str], router_id: str, proof: str) -> bool:
    """Whether `proof` is the `session_mac` of one of the secrets; each is compared in constant
    time.
    """
    macs = [session_mac(secret, router_id).encode() for secret in secrets]
    return any(hmac.compare_digest(proof.encode(), mac) for mac in macs)


def session_mac(secret: str, router_id: str) -> str:
    """Return the hex HMAC-SHA256 that proves that the router knows the deployment's secret.

    It is sent as SECRET_METADATA.
    """
    return hmac.new(secret.encode(), b"session|" + router_id.encode(), hashlib.sha256).hexdigest()
