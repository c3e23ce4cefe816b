"""What a router says to a node on their session. Frozen values; wire form:
baton/protocol/wire.py."""

from __future__ import annotations

import hashlib
import hmac
from dataclasses import dataclass
from typing import Final, Literal

from baton.protocol.handles import KVHandle
from baton.protocol.kv_spec import PROTOCOL_VERSION
from baton.protocol.request import Request

SECRET_METADATA: Final = "baton-secret-mac"  # gRPC metadata key of `session_mac`
ROUTER_METADATA: Final = "baton-router-id-bin"  # and of the router's id in UTF-8, whose proof it is


@dataclass(frozen=True, slots=True)
class SessionHello:
    """First message of a session; the node answers with its NodeRecord."""

    router_id: str
    protocol_version: int = PROTOCOL_VERSION
    nonce: bytes = b""


@dataclass(frozen=True, slots=True)
class SubmitPrefill:
    """Compute the prompt (and what earlier epochs emitted), sample one token, export the KV."""

    request: Request


@dataclass(frozen=True, slots=True)
class SubmitDecode:
    """Decode from the KV behind `handle`; None = compute the prompt here (local prefill).

    `prefilling`: token 1 is still to come, and Prefilled will follow it."""

    request: Request
    handle: KVHandle | None = None
    prefilling: bool = False


@dataclass(frozen=True, slots=True)
class Prefilled:
    """Token 1 is there: a decode node that wanted nothing from the prefill node before may fetch
    now. Ignored when the request is not here under `epoch`."""

    request_id: str
    epoch: int


PoolKind = Literal["last", "mean", "yes_no", "classify"]


@dataclass(frozen=True, slots=True)
class SubmitPool:
    """Compute vectors of some prompts: hidden states (last token's, or the mean), how probably the
    next token is "yes" and not "no", or a classifier's logits. The answer is Pooled.

    The request's prompt ids are all prompts, one after another; `lengths` says where each ends.
    `dimensions`: so many leading ones are kept, 0 = all. `answers`: the ids of yes and no.
    """

    request: Request
    lengths: tuple[int, ...]
    kind: PoolKind = "last"
    normalize: bool = True
    dimensions: int = 0
    answers: tuple[int, int] = (0, 0)

    @property
    def prompts(self) -> list[tuple[int, ...]]:
        ids, end, found = self.request.prompt_ids, 0, list[tuple[int, ...]]()
        for length in self.lengths:
            found.append(ids[end : end + length])
            end += length
        return found


@dataclass(frozen=True, slots=True)
class AbortRequest:
    """Stop the request if it still runs under `epoch` or an older one. No answer follows."""

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
    """Take no new requests; mode "finish" lets those that run end here."""

    mode: str = "finish"


@dataclass(frozen=True, slots=True)
class Migrate:
    """Let go of a request so that another node may go on with it.

    The answer is its last event here: HandleReady if it left with its KV under a lease, else
    RequestFailed with code `given_back` (nothing was computed that is worth moving). Ignored when
    the request is not here under `epoch`.
    """

    request_id: str
    epoch: int


@dataclass(frozen=True, slots=True)
class StopSample:
    """Compute one sample of a request no further; the others go on. No answer follows.

    Of the last one an AbortRequest says the same.
    """

    request_id: str
    epoch: int
    sample: int


ControlAction = Literal[
    "reset_prefix_cache", "pause", "resume", "sleep", "wake", "load_adapter", "unload_adapter"
]


@dataclass(frozen=True, slots=True)
class ControlNode:
    """An operator's order. The answer is a Controlled of this `number`.

    `name`, `path`: of a LoRA adapter; `in_place`: it may take the place of one of that name.
    `tags`: what is to wake, none = all. `mode` of a pause: "refuse" or "hold".
    """

    number: int
    action: ControlAction
    name: str = ""
    path: str = ""
    in_place: bool = False
    tags: tuple[str, ...] = ()
    mode: str = ""


RouterMessage = (
    SessionHello
    | SubmitPrefill
    | SubmitDecode
    | Prefilled
    | SubmitPool
    | AbortRequest
    | RenewExport
    | ReleaseExport
    | DrainNode
    | Migrate
    | StopSample
    | ControlNode
)


def session_metadata(secret: str, router_id: str) -> tuple[tuple[str, str | bytes], ...]:
    """gRPC metadata by which a router proves to a node that it knows the secret."""
    proof = (SECRET_METADATA, session_mac(secret, router_id))
    return ((ROUTER_METADATA, router_id.encode()), proof)


def session_mac(secret: str, router_id: str) -> str:
    """Hex HMAC-SHA256, sent as SECRET_METADATA: the router knows the deployment's secret."""
    return hmac.new(secret.encode(), b"session|" + router_id.encode(), hashlib.sha256).hexdigest()
