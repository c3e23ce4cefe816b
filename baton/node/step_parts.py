"""Splits a step into several messages if one would be too long. Pure.

gRPC refuses messages of more than 64 MB (baton/runtime/timing.py) and then breaks the session. A
step becomes that long by log-probabilities of prompts (router/prompts/reader.py limits them to 20
MB a request) and by the snapshot of a large prefix map. A step is split between events, never
inside a token event. Together the parts equal the step, in this order: handles, subscriptions,
timings, tokens, failures, block events.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Final, TypeVar

from baton.protocol.events import (
    BlockEvent,
    HandleReady,
    NodeStep,
    NodeTimings,
    RequestFailed,
    Subscribed,
    TokenEvent,
)

T = TypeVar("T")
MESSAGE_BYTES: Final = 32 << 20  # half of what gRPC takes, as the sizes here are estimates

# Upper bounds of encoded sizes, in bytes.
_LOGPROB: Final = 26
_ROW: Final = 6
_TOKEN: Final = 6
_EVENT: Final = 512  # ids and numbers of an event of any kind
_HANDLE: Final = 16 << 10
_HASH: Final = 4  # overhead of each hash


def in_parts(step: NodeStep, limit: int = MESSAGE_BYTES) -> Sequence[NodeStep]:
    """Return `step` itself if it is short enough, which it usually is, else its parts in order.

    A long block event may become several. The session numbers the block events of parts.
    """
    if _size(step) <= limit:
        return (step,)
    parts = [
        NodeStep(
            load=step.load, controlled=step.controlled, adapters=step.adapters, flows=step.flows
        )
    ]
    parts += [NodeStep(handles=some) for some in _groups(step.handles, _handle, limit)]
    parts += [NodeStep(subscribed=some) for some in _groups(step.subscribed, _plain, limit)]
    parts += [NodeStep(timings=some) for some in _groups(step.timings, _plain, limit)]
    parts += [NodeStep(tokens=some) for some in _groups(step.tokens, _tokens, limit)]
    parts += [NodeStep(failed=some) for some in _groups(step.failed, _failure, limit)]
    cut = [piece for event in step.block_events for piece in _cut(event, limit)]
    parts += [NodeStep(block_events=some) for some in _groups(cut, _blocks, limit)]
    parts[-1] = replace(parts[-1], last=step.last)
    return parts


def _size(step: NodeStep) -> int:
    """Return an upper bound of the step's encoded size, good enough for short steps."""
    plain = len(step.tokens) + len(step.subscribed) + len(step.timings)
    size = _EVENT * plain + _HANDLE * len(step.handles) + sum(map(_failure, step.failed))
    size += sum(map(_blocks, step.block_events))
    # Most events are one token and nothing else, and there may be hundreds: the loop finds the
    # others.
    for event in step.tokens:
        if event.logprobs or event.prompt_logprobs or len(event.token_ids) > 8:
            size += _tokens(event)
    return size


def _groups(
    events: Iterable[T], size_of: Callable[[T], int], limit: int
) -> Iterator[tuple[T, ...]]:
    """Yield groups of neighbouring events that fit `limit`; an event too large for it is alone."""
    group: list[T] = []
    size = 0
    for event in events:
        own = size_of(event)
        if group and size + own > limit:
            yield tuple(group)
            group, size = [], 0
        group.append(event)
        size += own
    if group:
        yield tuple(group)


def _tokens(event: TokenEvent) -> int:
    rows = (*event.logprobs, *event.prompt_logprobs)
    logprobs = _ROW * len(rows) + _LOGPROB * sum(map(len, rows))
    return _EVENT + _TOKEN * len(event.token_ids) + logprobs


def _handle(_: HandleReady) -> int:
    return _HANDLE


def _plain(_: Subscribed | NodeTimings) -> int:
    return _EVENT


def _failure(event: RequestFailed) -> int:
    return _EVENT + 4 * len(event.message)  # UTF-8


def _blocks(event: BlockEvent) -> int:
    return _EVENT + sum(map(len, event.hashes)) + _HASH * len(event.hashes)


def _cut(event: BlockEvent, limit: int) -> Iterator[BlockEvent]:
    """Yield the event, or several with fewer hashes that together equal it.

    Each of them continues the one before: its parent is that one's last hash.
    """
    if _blocks(event) <= limit or not event.hashes:
        yield event
        return
    count = max(1, (limit - _EVENT) // (max(map(len, event.hashes)) + _HASH))
    parent = event.parent
    for start in range(0, len(event.hashes), count):
        hashes = event.hashes[start : start + count]
        yield replace(event, hashes=hashes, parent=parent)
        parent = hashes[-1]
