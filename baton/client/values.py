"""Arguments and results of the Python client's calls, and their forms in protos/serve.proto.

Calls, connections and errors are in baton/client/client.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final

from baton.protocol.errors import UnsupportedFeature, error_from_code
from baton.protocol.events import TokenLogprob
from baton.protocol.sampling import SamplingParams
from baton.protocol.wire_sampling import sampling_message
from baton.protocol.wire_values import logprobs_from_wire
from protos import node_pb2, serve_pb2


@dataclass(frozen=True, slots=True)
class GenerateOptions:
    """Options of a call, besides its prompt and SamplingParams.

    `timeout_s` limits the whole call. With `resumable_s` > 0 routers keep the request for that many
    seconds while nobody reads it, and the client reconnects by itself. `images`: files (PNG, JPEG,
    WebP, GIF); the prompt holds the model's marker of an image once for each.
    """

    stop: tuple[str, ...] = ()
    model: str = ""
    request_id: str = ""
    priority: int = 0
    cache_salt: str = ""
    skip_special_tokens: bool = True
    timeout_s: float = 600.0
    resume: str = ""
    resumable_s: int = 0
    images: tuple[bytes, ...] = field(default=(), repr=False)


@dataclass(frozen=True, slots=True)
class Usage:
    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0
    image_tokens: int = 0  # those of prompt_tokens that stand for images


Logprobs = tuple[tuple[TokenLogprob, ...], ...]  # per token: itself first, then the best others


@dataclass(frozen=True, slots=True)
class GenerateEvent:
    """New tokens and text of one sample.

    `usage` is None except in the last event of the request. `logprobs[i]` belongs to token_ids[i],
    `prompt_logprobs[i]` (in the first event) to prompt token i + 1; both are empty unless the
    request asked for them.
    """

    request_id: str
    sample: int
    position: int
    token_ids: tuple[int, ...]
    text: str
    finish_reason: str | None
    retries: int
    usage: Usage | None
    logprobs: Logprobs = ()
    prompt_logprobs: Logprobs = ()


@dataclass(frozen=True, slots=True)
class Generation:
    """A finished request: its first sample, and the further samples in `others`.

    `usage` is that of the whole request, the same in all samples.
    """

    request_id: str
    token_ids: tuple[int, ...]
    text: str
    finish_reason: str
    retries: int
    usage: Usage
    logprobs: Logprobs = ()
    prompt_logprobs: Logprobs = ()
    others: tuple[Generation, ...] = ()


@dataclass(frozen=True, slots=True)
class Model:
    id: str
    max_model_len: int
    digest: str
    parent: str


@dataclass(frozen=True, slots=True)
class Node:
    node_id: str
    role: str  # "prefill" | "decode"
    address: str
    model: str
    running: int
    waiting: int
    free_blocks: int
    total_blocks: int
    draining: bool
    # Share of the memory's read bandwidth that the last steps used; 0 = not measured.
    mbu: float = 0.0
    mfu: float = 0.0  # share of the rate of matrix products
    precision: str = ""  # dtypes of computing and of KV


@dataclass(frozen=True, slots=True)
class Migrations:
    """Running requests that moved to another decode node with their KV, since the router's start.

    `failed`: node or KV were lost on the way. `seconds`: the sum of the times from the order to
    leave to the new node's first token. `given_back`: requests that moved without KV, because they
    had none worth moving.
    """

    done: int = 0
    failed: int = 0
    tokens: int = 0
    seconds: float = 0.0
    given_back: int = 0


@dataclass(frozen=True, slots=True)
class ServerInfo:
    version: str
    nodes: tuple[Node, ...]
    requests_by_state: dict[str, int]
    migrations: Migrations = Migrations()


DEFAULT_OPTIONS: Final = GenerateOptions()
Prompt = str | Sequence[int]


def generate_request(
    prompt: Prompt, params: SamplingParams | None, options: GenerateOptions
) -> serve_pb2.GenerateRequest:
    """Build the message of a call.

    Without `params` the message has none of their fields, and the server's defaults apply.
    """
    message = serve_pb2.GenerateRequest(
        request_id=options.request_id,
        model=options.model,
        stop=options.stop,
        priority=options.priority,
        cache_salt=options.cache_salt,
        skip_special_tokens=options.skip_special_tokens,
        resume=options.resume,
        resumable_s=options.resumable_s,
        images=options.images,
    )
    if params is not None:
        # The stop texts of `options` and of `params` are joined.
        message.MergeFrom(_sampling_fields(params))
        message.skip_special_tokens &= params.skip_special_tokens
    if isinstance(prompt, str):
        message.text = prompt
    else:
        message.token_ids.CopyFrom(node_pb2.TokenIds(ids=prompt))
    return message


def _sampling_fields(params: SamplingParams) -> serve_pb2.GenerateRequest:
    """Build a message from `params`. Raises UnsupportedFeature for a parameter without a field."""
    if params.include_stop_str_in_output:
        field = "include_stop_str_in_output"
        raise UnsupportedFeature(f"{field} is not served over gRPC", field=field)
    message = sampling_message(params, serve_pb2.GenerateRequest)
    message.stop.extend(params.stop)
    return message


def event_of(message: Any) -> GenerateEvent:
    return GenerateEvent(
        request_id=message.request_id,
        sample=message.sample,
        position=message.position,
        token_ids=tuple(message.token_ids),
        text=message.text,
        finish_reason=message.finish_reason or None,
        retries=message.retries,
        usage=_usage(message.usage) if message.HasField("usage") else None,
        logprobs=logprobs_from_wire(message.logprobs),
        prompt_logprobs=logprobs_from_wire(message.prompt_logprobs),
    )


def _usage(message: Any) -> Usage:
    return Usage(
        message.prompt_tokens,
        message.completion_tokens,
        message.cached_tokens,
        message.image_tokens,
    )


def collect(events: Sequence[GenerateEvent]) -> Generation:
    """Return one Generation of all events. Raises InternalError if none of them was the last."""
    usage = events[-1].usage if events else None
    if usage is None:
        raise error_from_code("internal", "the stream ended without a finish reason")
    samples: dict[int, list[GenerateEvent]] = {}
    for event in events:
        samples.setdefault(event.sample, []).append(event)
    prompt_logprobs = events[0].prompt_logprobs
    first, *others = (
        _collect_sample(samples[index], usage, prompt_logprobs) for index in sorted(samples)
    )
    return replace(first, others=tuple(others))


def _collect_sample(
    events: Sequence[GenerateEvent], usage: Usage, prompt_logprobs: Logprobs
) -> Generation:
    last = events[-1]
    return Generation(
        request_id=last.request_id,
        token_ids=tuple(token for event in events for token in event.token_ids),
        text="".join(event.text for event in events),
        finish_reason=str(last.finish_reason),
        retries=last.retries,
        usage=usage,
        logprobs=tuple(row for event in events for row in event.logprobs),
        prompt_logprobs=prompt_logprobs,
    )


def model_of(message: Any) -> Model:
    return Model(message.id, message.max_model_len, message.digest, message.parent)


def server_info_of(message: Any) -> ServerInfo:
    nodes = tuple(
        Node(
            node_id=node.node_id,
            role="prefill" if node.role == node_pb2.ROLE_PREFILL else "decode",
            address=node.address,
            model=node.model,
            running=node.load.running,
            waiting=node.load.waiting,
            free_blocks=node.load.free_blocks,
            total_blocks=node.load.total_blocks,
            draining=node.load.draining,
            mbu=node.load.mbu,
            mfu=node.load.mfu,
            precision=node.precision,
        )
        for node in message.nodes
    )
    moves = message.migrations
    return ServerInfo(
        version=message.version,
        nodes=nodes,
        requests_by_state=dict(message.requests_by_state),
        migrations=Migrations(
            moves.done, moves.failed, moves.tokens, moves.seconds, moves.given_back
        ),
    )
