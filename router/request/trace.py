"""RequestTrace: what one request went through, for metrics, logs and tests.

Times are seconds of the router's Clock (monotonic), None until it happened.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from baton.protocol.errors import BatonError
from baton.protocol.events import TokenEvent
from baton.protocol.request import Request
from router.request.scores import NodeScore
from router.request.terms import STANDARD, Terms

SERVERS_FAULT: Final = 500  # HTTP statuses from here on


@dataclass(slots=True)
class RequestTrace:
    """One request's journey; `Dispatcher.run` writes it, its caller reads it.

    `terms`: its caller's, set before the start.
    """

    terms: Terms = STANDARD
    pooled: str = ""  # field with what vectors are wanted of; empty: tokens are
    admitted_at: float | None = None  # let in by the gate
    queued_at: float | None = None  # recorded in the store
    dispatched_at: float | None = None  # first submitted to a node
    handle_at: float | None = None  # the KV handle of the (last) prefill arrived
    first_token_at: float | None = None  # token 1 handed to the caller
    subscribed_at: float | None = None  # the decode node fetches
    handover_at: float | None = None  # first event of the decode node after a transfer
    finished_at: float | None = None  # terminal, whatever the outcome
    prefill_node: str | None = None  # node ids; None for prefill: local on the decode node
    decode_node: str | None = None
    local_prefill: bool = False
    retries: int = 0
    node_deaths: int = 0
    migrations: int = 0  # to another decode node, with its KV
    preemptions: int = 0  # on the node where it ended
    cached_tokens: int = 0  # prompt tokens that the computing node found in its prefix map
    output_tokens: int = 0  # over all samples
    outcome: str = ""  # RequestState value at the end
    text_stop: bool = False
    aborted: bool = False  # by an operator: its client still waits for an end
    told_at: int | None = None  # wall clock, of a token that is replayed from its log
    scores: tuple[NodeScore, ...] = ()  # of the last choice of nodes, if the terms want a receipt

    def count(self, event: TokenEvent) -> None:
        """What a node tells of the request: how much of the prompt it found in its prefix map, how
        often the request lost its place."""
        self.cached_tokens = max(self.cached_tokens, event.num_cached_tokens)
        self.preemptions = max(self.preemptions, event.preemptions)

    def stopped_by_text(self) -> None:
        """A stop string was found: the caller closes the stream, the request is FINISHED."""
        self.text_stop = True

    @property
    def handover_s(self) -> float | None:
        """Seconds from token 1 to the decode node's first event; None without a hand-over."""
        if self.first_token_at is None or self.handover_at is None:
            return None
        return max(0.0, self.handover_at - self.first_token_at)

    def told(self, request: Request, failure: BatonError | None) -> str:
        """What it came to and where the time went, for the log: why was it slow.

        A stage that the request did not survive is told with the time until its end. The hand-over
        is a part of the decode stage: from token 1 to the decode node's first event.
        """
        why = "" if failure is None else f"; {failure.code}"
        if failure is not None and failure.http_status >= SERVERS_FAULT:
            why += f": {failure.message}"  # of a client's fault it may quote what the client sent
        end = self.finished_at or request.arrival
        prefill_node = self.decode_node if self.local_prefill else self.prefill_node
        stages = [f"queue {_ms(request.arrival, self.dispatched_at or end)}"]
        if self.dispatched_at is not None:
            took = _ms(self.dispatched_at, self.first_token_at or end)
            stages.append(f"prefill {took} on {prefill_node}")
        if self.handover_s is not None:
            stages.append(f"hand-over {round(self.handover_s * 1000)} ms")
        if self.first_token_at is not None:
            stages.append(f"decode {_ms(self.first_token_at, end)} on {self.decode_node}")
        return (
            f"{self.outcome} in {_ms(request.arrival, end)}: {', '.join(stages)};"
            f" {len(request.prompt_ids)} prompt tokens ({self.cached_tokens} cached),"
            f" {self.output_tokens} output tokens, {self.retries} retries{why}"
        )

    def tpot_s(self, samples: int) -> float | None:
        """Mean seconds per token after the first; None without a second one."""
        tokens = self.output_tokens / samples - 1
        if self.first_token_at is None or self.finished_at is None or tokens <= 0:
            return None
        return (self.finished_at - self.first_token_at) / tokens


def _ms(start: float, end: float) -> str:
    return f"{max(0, round((end - start) * 1000))} ms"
