"""Rates and percentiles of the last 30 s, from differences of a router's counters.

The counters are read once a second, less often while nobody watches; no request does anything.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from baton.protocol.errors import BatonError, InternalError, error_from_code
from router.console.views import LatencyPercentiles, LoadTotals
from router.metrics.router import RouterMetrics
from router.request.dispatcher import Dispatcher

WINDOW_S: Final = 30.0
MOST_SAMPLES: Final = 40


@dataclass(frozen=True, slots=True)
class CounterSample:
    """The counters at one moment. `at`: seconds of the router's clock. The last two are counts by
    bucket of the two histograms."""

    at: float
    requests: float
    prompt_tokens: float
    output_tokens: float
    refused: float
    retried: float
    failed: float
    first_tokens: Sequence[int]
    inter_tokens: Sequence[int]


class LoadRates:
    """The counters of the last 30 s. Call `sample` every few seconds, at most once a second."""

    def __init__(self, metrics: RouterMetrics, dispatcher: Dispatcher) -> None:
        self._metrics = metrics
        self._dispatcher = dispatcher
        self._samples: deque[CounterSample] = deque(maxlen=MOST_SAMPLES)

    def sample(self, now: float) -> None:
        """Read the counters; `now`: seconds of the router's clock."""
        by, live = self._metrics.instruments, self._dispatcher.live()
        prompts = sum(len(it.prompt_ids) for it, t in live if t.first_token_at is not None)
        self._samples.append(
            CounterSample(
                at=now,
                requests=by.success.total() + by.failure.total(),
                prompt_tokens=by.prompt_tokens.total() + prompts,
                output_tokens=by.generation_tokens.total() + sum(t.output_tokens for _, t in live),
                refused=sum(self._dispatcher.gate.queue.stats.refused.values()),
                retried=by.retries.total(),
                failed=by.failure.total(_by_server),
                first_tokens=by.first_token.total(),
                inter_tokens=by.inter_token.total(),
            )
        )
        while len(self._samples) > 2 and now - self._samples[1].at >= WINDOW_S:
            self._samples.popleft()

    def totals(self, now: float) -> LoadTotals:
        """Return rates over the samples; a first sample is taken if there is none."""
        if not self._samples or now - self._samples[-1].at >= 1.0:
            self.sample(now)
        first, last = self._samples[0], self._samples[-1]
        seconds = last.at - first.at

        def rate(after: float, before: float) -> float:
            # A request's tokens leave the sum over live ones just before they are counted.
            return round(max(0.0, after - before) / seconds, 2) if seconds > 0 else 0.0

        by = self._metrics.instruments
        return LoadTotals(
            running=self._dispatcher.num_live,
            waiting=self._dispatcher.gate.queue.num_queued,
            requests_per_s=rate(last.requests, first.requests),
            prompt_tokens_per_s=rate(last.prompt_tokens, first.prompt_tokens),
            output_tokens_per_s=rate(last.output_tokens, first.output_tokens),
            refused_per_s=rate(last.refused, first.refused),
            retried_per_s=rate(last.retried, first.retried),
            failed_per_s=rate(last.failed, first.failed),
            ttft_ms=percentiles(by.first_token.bounds, first.first_tokens, last.first_tokens),
            tpot_ms=percentiles(by.inter_token.bounds, first.inter_tokens, last.inter_tokens),
        )


def percentiles(
    bounds: Sequence[float], before: Sequence[int], now: Sequence[int]
) -> LatencyPercentiles:
    """Return percentiles, in ms, of what a histogram has observed since `before`.

    `before`, `now`: counts by bucket, one more than `bounds` (seconds); empty: nothing yet.
    """
    counts = [a - b for a, b in zip(now, before or [0] * len(now), strict=True)]
    return LatencyPercentiles(*(_quantile(bounds, counts, share) for share in (0.5, 0.95, 0.99)))


def _quantile(bounds: Sequence[float], counts: Sequence[int], share: float) -> float | None:
    """Return the value, in ms, below which `share` of the observations lie, as Prometheus'
    histogram_quantile: linear within a bucket, the last bound beyond all bounds."""
    rank, below = share * sum(counts), 0
    if not sum(counts):
        return None
    for index, count in enumerate(counts[:-1]):
        if count and below + count >= rank:
            low = bounds[index - 1] if index else 0.0
            return round((low + (bounds[index] - low) * (rank - below) / count) * 1000, 2)
        below += count
    return round(bounds[-1] * 1000, 2)


def _by_server(labels: tuple[str, ...]) -> bool:
    """Whether a failure with these labels (model, code) is a server's fault."""
    error: BatonError = error_from_code(labels[1], "", None)
    return error.http_status >= InternalError.http_status and error.code == labels[1]
