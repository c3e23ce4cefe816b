"""What a benchmark asks, and when: pure and seeded, so two servers get equal requests.

The load is an open loop: arrivals are a Poisson process, which does not wait for answers, as users
do not.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

from baton.protocol.errors import ConfigError

# Short everyday words: about one token each for most tokenizers.
TEXT = """
the a of to and in is it you that he was for on are with as his they be at one have this
from or had by hot word but what some we can out other were all there when up use your how
said an each she which do their time if will way about many then them write would like so
these her long make thing see him two has look more day could go come did number sound no
most people my over know water than call first
"""
WORDS = TEXT.split()


@dataclass(frozen=True, slots=True)
class WorkloadSpec:
    """How many requests of what size; a `length_spread` of 0.5 draws 50 % to 150 % of the mean."""

    num_requests: int
    rate: float  # requests per second; 0 = all at once
    input_words: int
    output_tokens: int
    length_spread: float = 0.5
    shared_prefix_words: int = 0  # the same first words in every prompt
    seed: int = 0

    def __post_init__(self) -> None:
        if self.num_requests < 1 or self.input_words < 1 or self.output_tokens < 1:
            raise ConfigError("requests, input words and output tokens must be at least 1")
        if self.rate < 0 or not 0 <= self.length_spread < 1 or self.shared_prefix_words < 0:
            raise ConfigError("rate and prefix must not be negative, the spread from 0 to below 1")


@dataclass(frozen=True, slots=True)
class PlannedRequest:
    """One request: when to send it (seconds from the start) and what, as text or token ids."""

    index: int
    at_s: float
    prompt: str | tuple[int, ...]
    max_tokens: int


def plan_requests(spec: WorkloadSpec) -> list[PlannedRequest]:
    """Return the whole run, in order of arrival. Equal specs give equal lists."""
    generator = random.Random(spec.seed)
    prefix = " ".join(generator.choices(WORDS, k=spec.shared_prefix_words))
    planned: list[PlannedRequest] = []
    at_s = 0.0
    for index in range(spec.num_requests):
        words = generator.choices(WORDS, k=_draw_length(spec.input_words, spec, generator))
        # The index first: without it, short prompts would share prefixes by chance.
        text = f"{prefix} {index} {' '.join(words)}".strip()
        max_tokens = _draw_length(spec.output_tokens, spec, generator)
        planned.append(PlannedRequest(index, at_s, text, max_tokens))
        if spec.rate > 0:
            at_s += generator.expovariate(spec.rate)
    return planned


def _draw_length(mean: int, spec: WorkloadSpec, generator: random.Random) -> int:
    low, high = mean * (1 - spec.length_spread), mean * (1 + spec.length_spread)
    return max(1, round(generator.uniform(low, high)))
