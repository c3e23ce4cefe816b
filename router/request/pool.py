"""PoolDispatcher: computes a vector for each prompt of a call (embeddings, scores), on nodes.

A call's prompts go out in groups, each to the node with the least to compute, so that several nodes
share a large call. A group is about GROUP_S of a node's work and waits for its turn, which is fair
between tenants. So a large call never keeps another prompt waiting for long.
The work runs on prefill nodes, and on decode nodes only if there is no prefill node. When a node is
lost, its groups are computed again on another node. Nothing is kept in the store. Event loop only.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Iterator, Sequence
from contextlib import AbstractAsyncContextManager, nullcontext
from dataclasses import dataclass, replace
from itertools import chain
from typing import Final, Protocol

from baton.protocol.clock import Clock
from baton.protocol.errors import (
    DeadlineExceeded,
    InternalError,
    NodeLost,
    Overloaded,
    Unavailable,
    error_from_code,
)
from baton.protocol.events import Pooled, RequestFailed
from baton.protocol.handles import Role
from baton.protocol.messages import PoolKind, SubmitPool
from baton.protocol.request import Request
from baton.protocol.sampling import SamplingParams
from baton.runtime.concurrency import together
from router.nodes.attachments import Attempt, NodeEvent, SessionLost
from router.nodes.placement import queued_tokens
from router.nodes.policy import Ask, NodeSnapshot, is_usable
from router.nodes.registry import NodeRegistry
from router.nodes.session import NodeSession
from router.request.choice import is_guilty
from router.request.trace import RequestTrace
from router.tenants.keys import EVERYBODY, Grant
from router.tenants.turns import Turns

log = logging.getLogger(__name__)
GROUP_PROMPTS: Final = 32
GROUP_TOKENS: Final = 1 << 16
GROUP_S: Final = 0.1  # seconds of a node's work in one group
FIRST_TOKENS: Final = 2048  # tokens of a group before any node has measured its rate
LEAST_TOKENS: Final = 512
GROUPS_PER_NODE: Final = 2  # groups on a node at once: one is computed, the next is there
MAX_ATTEMPTS: Final = 8
_PARAMS: Final = SamplingParams(max_tokens=1, temperature=0.0, seed=0)  # nothing is sampled

Prompts = Sequence[tuple[int, ...]]


@dataclass(frozen=True, slots=True)
class PoolAsk:
    """One pooling call: which vectors are wanted of which prompts.

    `deadline`: monotonic seconds. `answers`: token ids of "yes" and "no", for scores by their
    probability. `field`: the name of the client's field with the prompts, for errors.
    `second_from`: where the second text of each prompt begins, see SubmitPool. `model`: the key of
    the model.
    """

    id: str = ""
    prompts: Prompts = ()
    deadline: float = 0.0
    kind: PoolKind = "last"
    normalize: bool = True
    dimensions: int = 0
    answers: tuple[int, int] = (0, 0)
    adapter: str = ""
    model: str = ""
    traceparent: str = ""
    priority: int | None = None
    field: str = "input"
    grant: Grant = EVERYBODY
    second_from: Sequence[int] = ()

    @property
    def tokens(self) -> int:
        return sum(map(len, self.prompts))

    def counted(self) -> Request:
        """Return the whole call as one request for the gate, with as many tokens, all of them 0.

        The gate only counts tokens. Copying half a million of them would keep all streams waiting.
        """
        return self._request(self.id, (0,) * self.tokens)

    def parts(self, most_tokens: int) -> Iterator[PoolAsk]:
        """Yield the orders of the call's groups, see groups()."""
        end = 0
        for prompts in groups(self.prompts, most_tokens):
            begin, end = end, end + len(prompts)
            yield replace(self, prompts=prompts, second_from=self.second_from[begin:end])

    def request(self, id_: str) -> Request:
        """Return one request whose prompt is all prompts, concatenated."""
        return self._request(id_, tuple(chain.from_iterable(self.prompts)))

    def _request(self, id_: str, prompt_ids: tuple[int, ...]) -> Request:
        return Request(
            id=id_,
            prompt_ids=prompt_ids,
            params=_PARAMS,
            adapter=self.adapter,
            priority=self.priority or 0,
            deadline=self.deadline,
            traceparent=self.traceparent,
        )

    def task(self, request: Request) -> SubmitPool:
        """Return the message that asks a node for the vectors. `request`: made by request()."""
        return SubmitPool(
            request,
            tuple(map(len, self.prompts)),
            self.kind,
            self.normalize,
            self.dimensions,
            self.answers,
            tuple(self.second_from),
        )


class Pools(Protocol):
    """Whatever computes vectors of prompts. `num_live`: calls under way."""

    @property
    def num_live(self) -> int: ...

    async def vectors(
        self,
        ask: PoolAsk,
        trace: RequestTrace | None = None,
        passage: AbstractAsyncContextManager[object] | None = None,
    ) -> list[bytes]:
        """Return a vector per prompt, in order, as little-endian float32.

        The work is done within the context `passage`, if one is given. Writes into `trace` which
        node did what. Raises BatonError; cancelling the call aborts the work.
        """
        ...


class PoolDispatcher:
    """All pooling under way on this router."""

    def __init__(self, registry: NodeRegistry, clock: Clock, max_live: int) -> None:
        self._registry = registry
        self._clock = clock
        self._max_live = max_live
        self._turns: dict[str, Turns] = {}  # by the key of the model: each has its own nodes
        self.num_live = 0

    async def vectors(
        self,
        ask: PoolAsk,
        trace: RequestTrace | None = None,
        passage: AbstractAsyncContextManager[object] | None = None,
    ) -> list[bytes]:
        """Return a vector per prompt, in order, as little-endian float32.

        The work is done within the context `passage`, if one is given. Writes into `trace` which
        node did what. Raises BatonError; cancelling the call aborts the work on every node.
        """
        trace = trace or RequestTrace()
        if self.num_live >= self._max_live:
            raise Overloaded(f"{self._max_live} pooling calls are under way already")
        self.num_live += 1
        # One place stays free for other tenants.
        turns = self._turns.setdefault(ask.model, Turns(GROUPS_PER_NODE + 1, self._clock))
        waiting = enumerate(ask.parts(self._group_tokens(ask.model, turns)))
        parts: dict[int, tuple[bytes, ...]] = {}

        async def some() -> None:
            for index, part in waiting:
                place = await turns.take(ask.grant, GROUP_S)
                try:
                    parts[index] = await self._group(f"{ask.id}-{index}", part, trace)
                finally:
                    place.give_back()

        try:
            async with (
                passage or nullcontext(),
                asyncio.timeout(ask.deadline - self._clock.monotonic()),
            ):
                # At most as many groups of one call wait for a turn as there are turns.
                await together([some() for _ in range(turns.places)])
        except TimeoutError as error:
            raise DeadlineExceeded("the request's deadline has passed") from error
        finally:
            self.num_live -= 1
        return [vector for index in sorted(parts) for vector in parts[index]]

    def _group_tokens(self, model: str, turns: Turns) -> int:
        """Return how many tokens make a group now: GROUP_S of the work of the model's slowest node.

        Also sets the places of its `turns` by the number of nodes that share the groups.
        """
        mine = [node for node in self._registry.snapshots() if node.model == model]
        nodes = [node for node in mine if node.takes_requests]
        nodes = [node for node in nodes if node.role is Role.PREFILL] or nodes
        turns.places = GROUPS_PER_NODE * max(1, len(nodes)) + 1
        rate = min((node.load.prefill_tokens_per_s for node in nodes), default=0.0)
        if rate <= 0:
            return FIRST_TOKENS
        return min(GROUP_TOKENS, max(LEAST_TOKENS, int(rate * GROUP_S)))

    async def _group(self, id_: str, ask: PoolAsk, trace: RequestTrace) -> tuple[bytes, ...]:
        """Return the vectors of one group, trying one node after another until it is done."""
        wanted, tries = Ask((), adapter=ask.adapter, model=ask.model), 0
        request = ask.request(id_)
        while True:
            node, session = await self._choose(wanted)
            sent_at = self._clock.monotonic()
            try:
                event = await self._ask(session, ask.task(request))
            except NodeLost as error:  # the node went between the choice and the submission
                event = SessionLost(node.node_id, error.message)
            trace.pooled_on(node.node_id, sent_at, self._clock.monotonic())
            if isinstance(event, Pooled):
                if len(event.vectors) != len(ask.prompts):
                    message = f"{len(event.vectors)} vectors for {len(ask.prompts)} prompts"
                    raise InternalError(message)
                return event.vectors
            tries += 1
            await self._fail_over(node, event, wanted, last=tries >= MAX_ATTEMPTS)
            trace.retries += 1
            request = request.retried(request.output_ids)

    async def _ask(self, session: NodeSession, message: SubmitPool) -> NodeEvent:
        """Submit a group to a node and return the node's answer. Raises NodeLost.

        On every way out the request is detached from the session; it is aborted if unanswered.
        """
        request = message.request
        inbox: asyncio.Queue[NodeEvent] = asyncio.Queue()
        attempt = Attempt(request.id, request.epoch, inbox.put_nowait, pooled=True)
        session.attach(attempt)
        answered = False
        try:
            session.send(message)
            event = await inbox.get()
            answered = True
            return event
        finally:
            attempt.leave(abort=not answered)

    async def _fail_over(
        self, node: NodeSnapshot, event: NodeEvent, wanted: Ask, *, last: bool
    ) -> None:
        """Note the failure of a try. Raises the failure's error if it was the `last` try, or if
        another node would not do better. Mutates `wanted`."""
        if isinstance(event, RequestFailed):
            error = error_from_code(event.code, event.message, event.field)
            wanted.refused(node.boot_id, error)
            if not event.retryable:
                raise error
        elif isinstance(event, SessionLost):
            wanted.avoid(node.boot_id)
            error = wanted.refusal = NodeLost(f"node {event.node_id} was lost: {event.reason}")
            if event.suspect:
                wanted.blame(node.boot_id, hung=event.stalled)
        else:
            raise InternalError(f"{type(event).__name__} is no answer to a pooling request")
        if last or await is_guilty(wanted, self._registry):
            raise error
        log.warning("pooling on %s failed: %s", node.node_id, error.message)

    async def _choose(self, wanted: Ask) -> tuple[NodeSnapshot, NodeSession]:
        """Wait for a usable node; return the one with the least to compute, and its session.

        If no node is expected, raises the error of the last refusal, or Unavailable without one.
        """
        later = wanted.later()
        while True:
            node = self._least_loaded(wanted)
            session = None if node is None else self._registry.session(node.boot_id)
            if node is not None and session is not None:
                return node, session
            error = wanted.refusal or Unavailable("no node is available")
            if not isinstance(error, Unavailable | NodeLost):
                raise error
            if not await self._registry.may_come(
                lambda node: node.role is not Role.ENCODE and is_usable(node, later)
            ):
                raise error

    def _least_loaded(self, wanted: Ask) -> NodeSnapshot | None:
        usable = [node for node in self._registry.snapshots() if is_usable(node, wanted)]
        nodes = [node for node in usable if node.boot_id not in wanted.avoided] or usable
        nodes = [node for node in nodes if node.role is Role.PREFILL] or nodes
        return min(
            nodes,
            key=lambda node: (queued_tokens(node), node.assigned, random.random()),
            default=None,
        )


def groups(prompts: Prompts, most_tokens: int = GROUP_TOKENS) -> Iterator[Prompts]:
    """Divide prompts into groups of neighbours, each of at most `most_tokens` and GROUP_PROMPTS.

    A prompt longer than `most_tokens` is a group of its own.
    """
    group: list[tuple[int, ...]] = []
    tokens = 0
    for prompt in prompts:
        if group and (len(group) == GROUP_PROMPTS or tokens + len(prompt) > most_tokens):
            yield group
            group, tokens = [], 0
        group.append(prompt)
        tokens += len(prompt)
    if group:
        yield group
