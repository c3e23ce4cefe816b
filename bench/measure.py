"""From the times of single requests to a summary: percentiles, throughput, goodput. Pure.

TTFT counts from the planned arrival, not from the moment of sending: a client that falls behind
must not flatter the server. TPOT = (last - first) / (tokens - 1). ITL are the gaps between the
pieces of a stream.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any


@dataclass(slots=True)
class Sample:
    """One finished or failed request. Times are seconds from the start of the run."""

    planned_s: float
    sent_s: float
    piece_s: list[float] = field(default_factory=list[float])  # arrival of each piece with text
    ended_s: float = 0.0
    input_tokens: int = 0
    output_tokens: int = 0
    error: str | None = None

    @property
    def ok(self) -> bool:
        return self.error is None and bool(self.piece_s)

    @property
    def ttft_s(self) -> float:
        return self.piece_s[0] - self.planned_s

    @property
    def tpot_s(self) -> float | None:
        """The time per output token; None for answers of one token."""
        if self.output_tokens < 2:
            return None
        return (self.piece_s[-1] - self.piece_s[0]) / (self.output_tokens - 1)

    @property
    def itl_s(self) -> list[float]:
        return [
            after - before for before, after in zip(self.piece_s, self.piece_s[1:], strict=False)
        ]

    @property
    def e2e_s(self) -> float:
        return self.ended_s - self.planned_s


@dataclass(frozen=True, slots=True)
class SloLimits:
    """The limits of the SLO in seconds. A request is good if it meets both."""

    ttft_s: float
    tpot_s: float

    def met_by(self, sample: Sample) -> bool:
        if not sample.ok or sample.ttft_s > self.ttft_s:
            return False
        return sample.tpot_s is None or sample.tpot_s <= self.tpot_s


@dataclass(frozen=True, slots=True)
class Percentiles:
    """The distribution of one quantity, in milliseconds."""

    mean: float
    p50: float
    p90: float
    p99: float
    count: int

    @property
    def ranks(self) -> tuple[float, float, float]:
        return (self.p50, self.p90, self.p99)


@dataclass(frozen=True, slots=True)
class Summary:
    """The result of one run against one server."""

    label: str
    requests: int
    failed: int
    duration_s: float
    input_tokens: int
    output_tokens: int
    ttft: Percentiles | None
    tpot: Percentiles | None
    itl: Percentiles | None
    e2e: Percentiles | None
    good: int
    max_lateness_ms: float  # how far the client itself fell behind its plan
    handover_ms: float | None = None  # mean; only Baton reports it

    @property
    def request_rate(self) -> float:
        return (self.requests - self.failed) / self.duration_s

    @property
    def token_rate(self) -> float:
        return self.output_tokens / self.duration_s

    @property
    def goodput(self) -> float:
        """The requests per second that met the SLO."""
        return self.good / self.duration_s

    def as_json(self) -> dict[str, Any]:
        rates = {"request_rate": self.request_rate, "token_rate": self.token_rate}
        return {**asdict(self), **rates, "goodput": self.goodput}


def percentile(ordered: Sequence[float], share: float) -> float:
    """Return a percentile by linear interpolation; `ordered` is sorted and not empty."""
    position = (len(ordered) - 1) * share
    low = int(position)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (position - low)


def distribution(seconds: Sequence[float]) -> Percentiles | None:
    """Return the percentiles of `seconds`, None without values."""
    if not seconds:
        return None
    ordered = sorted(value * 1000 for value in seconds)
    mean = sum(ordered) / len(ordered)
    p50, p90, p99 = (percentile(ordered, share) for share in (0.5, 0.9, 0.99))
    return Percentiles(mean, p50, p90, p99, len(ordered))


def summarize(
    label: str,
    samples: Sequence[Sample],
    slo: SloLimits,
    handover_s: float | None = None,
) -> Summary:
    """Summarize all samples of one run, failed ones included."""
    good = [sample for sample in samples if sample.ok]
    begin = min((sample.planned_s for sample in samples), default=0.0)
    end = max((sample.ended_s for sample in samples), default=0.0)
    tpots = [sample.tpot_s for sample in good]
    return Summary(
        label=label,
        requests=len(samples),
        failed=len(samples) - len(good),
        duration_s=max(end - begin, 1e-9),
        input_tokens=sum(sample.input_tokens for sample in good),
        output_tokens=sum(sample.output_tokens for sample in good),
        ttft=distribution([sample.ttft_s for sample in good]),
        tpot=distribution([value for value in tpots if value is not None]),
        itl=distribution([gap for sample in good for gap in sample.itl_s]),
        e2e=distribution([sample.e2e_s for sample in good]),
        good=sum(slo.met_by(sample) for sample in good),
        max_lateness_ms=max((s.sent_s - s.planned_s for s in samples), default=0.0) * 1000,
        handover_ms=None if handover_s is None else handover_s * 1000,
    )


def median_and_range(values: Sequence[float], digits: int) -> str:
    """Return "median (least-most)" with so many decimal digits."""
    low, middle, high = min(values), statistics.median(values), max(values)
    return f"{middle:.{digits}f} ({low:.{digits}f}-{high:.{digits}f})"
