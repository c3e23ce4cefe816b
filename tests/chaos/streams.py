"""Requests, their undisturbed streams, and clients that write down what they see.

References are computed once, by one engine in this process. A salt of its own keeps each request
from finding the prompt of an earlier one in a prefix cache, so that every case prefills and moves
KV, whatever ran before it.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from baton.client import AsyncClient, GenerateEvent, GenerateOptions, Usage
from baton.llm import LLM
from baton.protocol.errors import BatonError
from baton.protocol.sampling import SamplingParams
from router.resumable.canonical import owner_digest, record_id
from tests.chaos.http_calls import HttpCall, http_events
from tests.system.references import Tokens, prompts
from tests.tiny_models import make_tiny_model

DEADLINE_S = 90.0
GRACE_S = 60  # that a resumable request is kept for while its client looks for a router
PROMPT_TOKENS = 300
MAX_TOKENS = 96


@dataclass(frozen=True)
class Spec:
    """A request and what it yields when nothing happens: tokens and end of each sample."""

    name: str
    prompt: Tokens
    params: SamplingParams
    expected: tuple[Tokens, ...] = ()
    reasons: tuple[str, ...] = ()


def chaos_model(path: Path) -> Path:
    """About 1.7 MB of random weights; 2 KiB of KV per token in fp32."""
    return make_tiny_model(
        "llama",
        path,
        hidden_size=128,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=1024,
    )


def make_specs(model: Path, max_tokens: int = MAX_TOKENS) -> dict[str, Spec]:
    """One request of each kind, with its reference."""
    asked = {
        "greedy": SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True),
        "seeded": SamplingParams(
            temperature=0.9, top_p=0.95, seed=11, max_tokens=max_tokens, ignore_eos=True
        ),
        "samples": SamplingParams(
            n=3, temperature=0.9, seed=3, max_tokens=max_tokens // 2, ignore_eos=True
        ),
        "penalties": SamplingParams(
            temperature=0.7,
            top_k=40,
            seed=5,
            presence_penalty=0.5,
            frequency_penalty=0.3,
            repetition_penalty=1.1,
            max_tokens=max_tokens,
            ignore_eos=True,
        ),
        "logprobs": SamplingParams(
            temperature=0.8, seed=9, logprobs=2, max_tokens=max_tokens, ignore_eos=True
        ),
        # Long enough to be under way whatever happens to another request.
        "beside": SamplingParams(
            temperature=0.8, seed=21, max_tokens=3 * max_tokens, ignore_eos=True
        ),
    }
    texts = prompts([PROMPT_TOKENS] * len(asked), seed=17)
    llm = LLM(model=str(model), num_kv_blocks=256, threads=1)
    specs: dict[str, Spec] = {}
    for (name, params), prompt in zip(asked.items(), texts, strict=True):
        [output] = llm.generate([list(prompt)], params)
        tokens = tuple(tuple(sample.token_ids) for sample in output.outputs)
        reasons = tuple(str(sample.finish_reason) for sample in output.outputs)
        specs[name] = Spec(name, prompt, params, tokens, reasons)
    return specs


@dataclass(slots=True)
class Seen:
    """One event as it arrived, at monotonic second `at`."""

    at: float
    sample: int
    position: int
    token_ids: Tokens


@dataclass
class Stream:
    """One request, read in the background. What contradicts the rules goes to `faults`.

    A `resumable` one has a client of its own, which goes on at another router when one has died: it
    reads one stream, whatever happens.
    """

    spec: Spec
    request_id: str
    seen: list[Seen] = field(default_factory=list[Seen])
    faults: list[str] = field(default_factory=list[str])
    ends: dict[int, str] = field(default_factory=dict[int, str])
    error: BatonError | None = None
    retries: int = 0
    deadline_s: float = DEADLINE_S
    resumable: bool = False
    http: HttpCall | None = None  # what it was begun with, if that was HTTP
    plain_id: str = ""  # of a plain request over HTTP: a router draws a part of it
    usage: Usage | None = None
    started: float = 0.0
    ended: float = 0.0

    def __post_init__(self) -> None:
        self._changed = asyncio.Condition()
        self._task: asyncio.Task[None] | None = None
        self._closing: asyncio.Task[None] | None = None

    @property
    def stored_id(self) -> str:
        """What the request is called in Redis."""
        return self.plain_id or record_id(owner_digest([]), self.request_id)

    def start(self, client: AsyncClient) -> Stream:
        options = GenerateOptions(
            request_id=self.request_id,
            timeout_s=self.deadline_s,
            cache_salt=self.request_id,
            resumable_s=GRACE_S if self.resumable else 0,
        )
        return self._begin(client.stream(self.spec.prompt, self.spec.params, options))

    def start_http(self, routers: Sequence[str], *, streamed: bool) -> Stream:
        """At the first of these routers (base URLs)."""
        spec, grace_s = self.spec, GRACE_S if self.resumable else 0
        self.http = HttpCall(
            self.request_id, spec.prompt, spec.params, routers, streamed, self.deadline_s, grace_s
        )
        return self._begin(http_events(self.http))

    def _begin(self, events: AsyncGenerator[GenerateEvent, None]) -> Stream:
        self.started = time.monotonic()
        self._task = asyncio.create_task(self._read(events), name=self.request_id)
        return self

    def start_at(self, addresses: Sequence[str]) -> Stream:
        """At the first of these routers, with a client of its own, which is closed at the end."""
        client = AsyncClient(addresses)
        self.start(client)
        assert self._task is not None, "it was started just now"
        self._closing = asyncio.create_task(_close_after(self._task, client))
        return self

    async def _read(self, events: AsyncGenerator[GenerateEvent, None]) -> None:
        try:
            async for event in events:
                self._take(event)
                async with self._changed:
                    self._changed.notify_all()
        except BatonError as error:
            self.error = error
        finally:
            self.ended = time.monotonic()
            async with self._changed:
                self._changed.notify_all()

    def _take(self, event: GenerateEvent) -> None:
        if event.sample in self.ends:
            self.faults.append(f"sample {event.sample}: an event after its end")
        known = len(self.tokens(event.sample))
        if event.token_ids and event.position != known:
            self.faults.append(f"sample {event.sample}: position {event.position} after {known}")
        now = time.monotonic()
        self.seen.append(Seen(now, event.sample, event.position, tuple(event.token_ids)))
        self.retries = max(self.retries, event.retries)
        if event.finish_reason is not None:
            self.ends[event.sample] = event.finish_reason
        if event.usage is not None:
            if self.usage is not None:
                self.faults.append("a second usage")
            self.usage = event.usage

    def tokens(self, sample: int = 0) -> Tokens:
        return tuple(t for seen in self.seen if seen.sample == sample for t in seen.token_ids)

    @property
    def num_tokens(self) -> int:
        return sum(len(seen.token_ids) for seen in self.seen)

    @property
    def over(self) -> bool:
        return self._task is not None and self._task.done()

    async def at_least(self, count: int, timeout_s: float = 60.0) -> None:
        """Until so many tokens were seen, or nothing more will be."""
        async with asyncio.timeout(timeout_s), self._changed:
            await self._changed.wait_for(lambda: self.num_tokens >= count or self.ended > 0)

    async def finish(self) -> None:
        assert self._task is not None, "it was started"
        await asyncio.wait_for(asyncio.shield(self._task), self.deadline_s + 10)
        if self._closing is not None:
            await self._closing

    async def leave(self) -> None:
        """The client goes away."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)


async def _close_after(task: asyncio.Task[None], client: AsyncClient) -> None:
    await asyncio.wait({task})
    await client.close()


async def finish_all(streams: Sequence[Stream]) -> None:
    """All to their ends; the first that misses its deadline raises TimeoutError."""
    await asyncio.gather(*(stream.finish() for stream in streams))
