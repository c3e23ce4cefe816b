"""Strategies for everything that routers and nodes exchange, for tests/test_wire.py."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, TypeVar

from hypothesis import strategies as st

from baton.protocol import messages, wire, wire_control, wire_values
from baton.protocol.events import (
    GROUP_NUMBERS,
    AdapterList,
    BlockEvent,
    BlockEventKind,
    Controlled,
    Encoded,
    HandleReady,
    KVFlow,
    NodeSpan,
    NodeStep,
    NodeTimings,
    Pooled,
    RequestFailed,
    Subscribed,
    TokenEvent,
    TokenLogprob,
)
from baton.protocol.handles import (
    EncodedImage,
    Endpoint,
    KVHandle,
    LaneAddress,
    NodeLoad,
    NodeRecord,
    Role,
)
from baton.protocol.images import ImageInput, digest_of
from baton.protocol.kv_spec import PoolFormat
from baton.protocol.request import FinishReason, Request
from baton.protocol.sampling import GuidedDecoding, SamplingParams
from baton.protocol.wire_sampling import EARLY_STOPPING, GUIDED_KINDS

T = TypeVar("T")


class StoppedClock:
    """A clock whose hand the test moves."""

    def __init__(self, now: float = 100.0) -> None:
        self.now = now

    def monotonic(self) -> float:
        return self.now


CLOCK = StoppedClock()
names = st.text("abcdef0123456789-é", min_size=1, max_size=20)
texts = st.text(max_size=20)
tokens = st.integers(0, 2**32 - 1)
token_lists = st.lists(tokens, max_size=8).map(tuple)
counts = st.integers(0, 2**32 - 1)
epochs = st.integers(1, 2**32 - 1)
positive = st.integers(1, 2**31 - 1)
singles = st.floats(-(2.0**90), 0, width=32)


def decimals(low: int, high: int) -> st.SearchStrategy[float]:
    """Numbers as people write them: at most six significant digits."""
    return st.integers(low * 1000, high * 1000).map(lambda n: n / 1000)


DRAWN: dict[type, set[str]] = {}  # fields that its strategy draws
# Fields of values that never travel, or that another strategy adds.
NOT_DRAWN: dict[type, set[str]] = {
    SamplingParams: {"stop", "include_stop_str_in_output", "skip_special_tokens"},
    Request: {"arrival"},
    Endpoint: {"ranks"},
    TokenEvent: {"candidates", "drafts"},
}


def struct(
    kind: type[T], make: Callable[..., T] | None = None, /, **drawn: st.SearchStrategy[Any]
) -> st.SearchStrategy[T]:
    """`st.builds` that notes which fields of `kind` are drawn."""
    DRAWN[kind] = set(drawn)
    return st.builds(make or kind, **drawn)


guided = struct(
    GuidedDecoding,
    kind=st.sampled_from(GUIDED_KINDS),
    grammar=texts,
    backend=texts,
    whitespace=st.none() | texts,
    starts_after=texts,
    most_thought=st.none() | counts,
    thought_start=texts,
)


def sampling(
    guided: GuidedDecoding | None,
    allowed_token_ids: tuple[int, ...],
    logprob_token_ids: tuple[int, ...],
    **others: Any,
) -> SamplingParams:
    """Without those that the others exclude."""
    listed = others["logprobs"] is not None and not others["beam_width"]
    return SamplingParams(
        guided=guided,
        allowed_token_ids=() if guided else allowed_token_ids,
        logprob_token_ids=logprob_token_ids if listed else (),
        **others,
    )


params = struct(
    SamplingParams,
    sampling,
    n=st.integers(1, 128),
    best_of=st.none() | st.integers(1, 128),
    beam_width=st.integers(0, 64),
    length_penalty=decimals(-10, 10),
    early_stopping=st.sampled_from(EARLY_STOPPING),
    temperature=decimals(0, 100),
    top_k=st.integers(-1, 2**31 - 1),
    top_p=st.integers(1, 1000).map(lambda n: n / 1000),
    min_p=decimals(0, 1),
    seed=st.integers(0, 2**64 - 1),
    max_tokens=st.integers(50, 2**31 - 1),
    min_tokens=st.integers(0, 50),
    stop_token_ids=token_lists,
    allowed_token_ids=token_lists,
    ignore_eos=st.booleans(),
    skip_reading_prefix_cache=st.booleans(),
    presence_penalty=decimals(-2, 2),
    frequency_penalty=decimals(-2, 2),
    repetition_penalty=st.integers(1, 100000).map(lambda n: n / 1000),
    logit_bias=st.dictionaries(tokens, decimals(-100, 100), max_size=4).map(
        lambda bias: tuple(sorted(bias.items()))
    ),
    bad_words=st.lists(token_lists, max_size=3).map(tuple),
    logprobs=st.none() | st.integers(0, 20),
    prompt_logprobs=st.none() | st.integers(0, 20),
    logprob_token_ids=token_lists,
    guided=st.none() | guided,
)


def _request(
    prompt_ids: tuple[int, ...], images: list[tuple[int, int, bytes]], **others: Any
) -> Request:
    """With as many images, (tokens before it, its tokens, file), as the prompt has room for."""
    placed, at = list[ImageInput](), 0
    for gap, count, data in images:
        if at + gap + count <= len(prompt_ids):
            placed.append(ImageInput(digest_of(data), at + gap, count, data))
            at += gap + count
    return Request(prompt_ids=prompt_ids, images=tuple(placed), **others)


requests = struct(
    Request,
    _request,
    id=names,
    prompt_ids=st.lists(tokens, min_size=1, max_size=20).map(tuple),
    params=params,
    output_ids=st.lists(token_lists, min_size=1, max_size=3).map(tuple),
    adapter=texts,
    priority=st.integers(-(2**31), 2**31 - 1),
    tenant_salt=texts,
    deadline=st.none() | st.integers(1, 2**31).map(lambda ms: CLOCK.now + ms / 1000),
    epoch=epochs,
    traceparent=texts,
    resume=st.sampled_from(wire.RESUME),
    ended=st.lists(st.integers(0, 127), max_size=3).map(tuple),
    images=st.lists(st.tuples(st.integers(0, 9), st.integers(1, 9), st.binary(max_size=8))),
)
formats = struct(
    PoolFormat,
    block_size=positive,
    dtype=names,
    tp_size=positive,
    tp_rank=counts,
    codecs=st.lists(names, max_size=3).map(tuple),
)
lanes = struct(
    LaneAddress,
    name=names,
    address=texts,
    attributes=st.dictionaries(names, texts, max_size=3).map(lambda d: tuple(sorted(d.items()))),
)
leaf_endpoints = struct(
    Endpoint,
    boot_id=names,
    layout_fingerprint=names,
    format=formats,
    lanes=st.lists(lanes, max_size=3).map(tuple),
    protocol_version=counts,
)
endpoints = st.builds(
    replace, leaf_endpoints, ranks=st.lists(leaf_endpoints, max_size=2).map(tuple)
)
handles = struct(
    KVHandle,
    boot_id=names,
    export_seq=st.integers(0, 2**64 - 1),
    request_id=names,
    epoch=epochs,
    num_tokens=positive,
    secret=st.binary(min_size=1, max_size=16),
    endpoint=endpoints,
    lease_ms=positive,
    sample=counts,
)
encoded = st.lists(
    st.builds(
        lambda digest, height, width, handle: EncodedImage(
            digest, height, width, replace(handle, num_tokens=height * width)
        ),
        st.binary(min_size=16, max_size=16),
        st.integers(1, 100),
        st.integers(1, 100),
        handles,
    ),
    max_size=2,
).map(tuple)
floats = st.floats(0, 1e9)
loads = struct(
    NodeLoad,
    running=counts,
    waiting=counts,
    swapped=counts,
    free_blocks=counts,
    total_blocks=counts,
    cached_blocks=counts,
    waiting_tokens=st.integers(0, 2**64 - 1),
    fetching=counts,
    export_bytes=st.integers(0, 2**64 - 1),
    step_seconds=floats,
    prefill_tokens_per_s=floats,
    own_prefill_tokens_per_s=floats,
    draining=st.booleans(),
    stalled=st.booleans(),
    kv_token_bytes=counts,
    kv_received_bytes=st.integers(0, 2**64 - 1),
    kv_sent_bytes=st.integers(0, 2**64 - 1),
    kv_adopted_bytes=st.integers(0, 2**64 - 1),
    kv_fetches=st.integers(0, 2**64 - 1),
    kv_fetch_failures=st.integers(0, 2**64 - 1),
    preemptions=st.integers(0, 2**64 - 1),
    prefix_query_tokens=st.integers(0, 2**64 - 1),
    prefix_hit_tokens=st.integers(0, 2**64 - 1),
    steps=st.integers(0, 2**64 - 1),
    step_tokens=st.integers(0, 2**64 - 1),
    kv_tail_seconds=floats,
    mbu=floats,
    mfu=floats,
    pause=st.sampled_from(("", "refuse", "hold")),
    asleep=st.booleans(),
)
records = struct(
    NodeRecord,
    node_id=names,
    boot_id=names,
    role=st.sampled_from(Role),
    address=names,
    model=names,
    model_digest=names,
    block_size=positive,
    max_model_len=positive,
    vocab_size=counts,
    endpoint=endpoints,
    load=loads,
    version=texts,
    adapters=st.lists(texts, max_size=3).map(tuple),
    eos_token_ids=token_lists,
    max_num_seqs=counts,
    precision=texts,
    deterministic=st.booleans(),
    leaving_adapters=st.lists(texts, max_size=3).map(tuple),
    group=texts,
    rank=st.integers(0, 2**31),
    encodes=st.booleans(),
    needs_rows=st.booleans(),
)
logprob_rows = st.lists(
    st.lists(st.builds(TokenLogprob, tokens, singles, counts), max_size=3).map(tuple), max_size=3
).map(tuple)
token_events = struct(
    TokenEvent,
    request_id=names,
    epoch=epochs,
    position=counts,
    token_ids=token_lists,
    sample=counts,
    finish_reason=st.none() | st.sampled_from(FinishReason),
    stop_token_id=st.none() | tokens,
    num_cached_tokens=counts,
    logprobs=logprob_rows,
    prompt_logprobs=logprob_rows,
    preemptions=counts,
)
vectors = st.integers(1, 4).flatmap(lambda n: st.binary(min_size=4 * n, max_size=4 * n))
hashes = st.lists(st.binary(min_size=16, max_size=16), max_size=4).map(tuple)
node_spans = st.builds(
    lambda name, start, took, more: NodeSpan(name, start, start + took, *more),
    names,
    st.integers(0, 2**40),
    st.integers(0, 2**40),
    st.tuples(
        counts,
        st.integers(0, 2**64 - 1),
        texts,
        st.lists(st.tuples(*[st.integers(0, 2**64 - 1)] * GROUP_NUMBERS), max_size=3).map(
            lambda groups: tuple(number for group in groups for number in group)
        ),
    ),
)
timings = st.builds(
    lambda name, epoch, spans: NodeTimings(
        name, epoch, max((span.end_us for span in spans), default=0), spans
    ),
    names,
    epochs,
    st.lists(node_spans, max_size=3).map(tuple),
)
steps = struct(
    NodeStep,
    tokens=st.lists(token_events, max_size=3).map(tuple),
    handles=st.lists(st.builds(HandleReady, names, epochs, handles), max_size=2).map(tuple),
    subscribed=st.lists(st.builds(Subscribed, names, epochs), max_size=2).map(tuple),
    failed=st.lists(
        struct(
            RequestFailed,
            request_id=names,
            epoch=counts,
            code=names,
            message=texts,
            retryable=st.booleans(),
            field=st.none() | names,
        ),
        max_size=2,
    ).map(tuple),
    load=st.none() | loads,
    block_events_seq=st.integers(0, 2**64 - 1),
    block_events=st.lists(
        st.builds(
            BlockEvent,
            st.sampled_from(BlockEventKind),
            hashes,
            st.binary(max_size=16),
            states=st.booleans(),
        ),
        max_size=3,
    ).map(tuple),
    pooled=st.lists(
        st.builds(Pooled, names, epochs, st.lists(vectors, max_size=3).map(tuple)), max_size=2
    ).map(tuple),
    controlled=st.lists(
        st.builds(
            Controlled,
            st.integers(0, 2**64 - 1),
            texts,
            texts,
            st.none() | names,
            st.binary(max_size=9),
        ),
        max_size=2,
    ).map(tuple),
    adapters=st.none()
    | st.builds(
        AdapterList, st.lists(names, max_size=3).map(tuple), st.lists(names, max_size=3).map(tuple)
    ),
    last=st.booleans(),
    flows=st.lists(
        st.builds(KVFlow, names, names, counts, counts, counts, floats, floats), max_size=2
    ).map(tuple),
    timings=st.lists(timings, max_size=2).map(tuple),
    encoded=st.lists(st.builds(Encoded, names, epochs, encoded), max_size=2).map(tuple),
)
SUBMISSIONS = (
    messages.SubmitPrefill, messages.SubmitDecode, messages.SubmitPool, messages.SubmitEncode,
)  # fmt: skip


@st.composite
def pool_submission(draw: st.DrawFn) -> messages.SubmitPool:
    prompts = draw(st.lists(st.lists(tokens, min_size=1, max_size=4), min_size=1, max_size=4))
    request = replace(
        draw(requests), prompt_ids=tuple(t for ids in prompts for t in ids), images=()
    )
    value = messages.SubmitPool(
        request,
        tuple(map(len, prompts)),
        draw(st.sampled_from(wire_values.POOL_KINDS)),  # type: ignore[arg-type]
        draw(st.booleans()),
        draw(counts),
        (draw(counts), draw(counts)),
        draw(st.sampled_from(((), tuple(len(ids) - 1 for ids in prompts)))),
    )
    assert value.prompts == [tuple(ids) for ids in prompts]
    return value


pool_submissions = pool_submission()
router_messages = st.one_of(
    st.builds(messages.SessionHello, names, counts, st.binary(max_size=16)),
    st.builds(messages.SubmitPrefill, requests, encoded),
    st.builds(messages.SubmitDecode, requests, encoded=encoded),
    st.builds(messages.SubmitDecode, requests, handles, st.booleans()),
    st.builds(messages.SubmitEncode, requests),
    st.builds(messages.Prefilled, names, epochs),
    pool_submissions,
    st.builds(messages.AbortRequest, names, epochs),
    st.builds(messages.RenewExport, handles),
    st.builds(messages.ReleaseExport, handles, texts),
    st.builds(messages.DrainNode, names),
    st.builds(messages.Migrate, names, epochs),
    st.builds(messages.StopSample, names, epochs, st.integers(0, 127)),
    struct(
        messages.ControlNode,
        number=st.integers(0, 2**64 - 1),
        action=st.sampled_from(wire_control.ACTIONS),
        name=names,
        path=texts,
        in_place=st.booleans(),
        tags=st.lists(st.sampled_from(wire_control.TAGS), max_size=2).map(tuple),
        mode=st.sampled_from(wire_control.MODES),
    ),
)
