"""SamplingParams: how tokens are chosen and when a sample ends.

It is one frozen value, validated at construction. Its conventions are vLLM's: temperature 0 =
greedy, top_k 0 or -1 = off, min_p 0 = off.

Not here: stop strings, which are matched on text (baton/text/stops.py), and the sampler
(baton/engine/sampling/sampler.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Any, Final, Literal

from baton.protocol.errors import InvalidRequest

# The bounds of every number that a client can send: (minimum, maximum).
BOUNDS: Final[dict[str, tuple[float, float]]] = {
    "n": (1, 128),
    "best_of": (1, 128),
    "beam_width": (0, 64),
    "length_penalty": (-10.0, 10.0),
    "temperature": (0.0, 100.0),
    "top_k": (-1, 2**31 - 1),
    "top_p": (0.0, 1.0),
    "min_p": (0.0, 1.0),
    "seed": (0, 2**64 - 1),
    "max_tokens": (1, 2**31 - 1),
    "min_tokens": (0, 2**31 - 1),
    "presence_penalty": (-2.0, 2.0),
    "frequency_penalty": (-2.0, 2.0),
    "repetition_penalty": (1e-6, 100.0),
    "logprobs": (-1, 2**31 - 1),
    "prompt_logprobs": (-1, 2**31 - 1),
}
MAX_STOP_TOKEN_IDS: Final = 256
MAX_LOGIT_BIAS: Final = 1024
MAX_ALLOWED_TOKEN_IDS: Final = 4096
MAX_LOGPROB_TOKEN_IDS: Final = 128  # vLLM's limit
MAX_BIAS: Final = 100
_NUMBERS: Final = (int, float)
_bounded: Final = attrgetter(*BOUNDS)  # reads all these fields in one call


@dataclass(frozen=True, slots=True)
class GuidedDecoding:
    """A grammar that the output must match; baton/guided/grammar_text.py reads each kind's text.

    `whitespace`: what may stand between the parts of a JSON text, as a regex ("" = nothing, None =
    the default). `starts_after`: the grammar applies after this text; before it the output is free,
    so that a model may think first ("" = the grammar applies at once). `most_thought`: after that
    many tokens of a thought, `starts_after` is written for the model, None = never.
    `thought_start`: the text that begins a thought ("" = the output begins within one). Kind
    "free": the grammar does not restrict the output after `starts_after`.
    """

    kind: Literal["json_schema", "json_object", "regex", "ebnf", "choice", "structural_tag", "free"]
    grammar: str
    backend: str = ""
    whitespace: str | None = None
    starts_after: str = ""
    most_thought: int | None = None
    thought_start: str = ""


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How one request samples.

    Raises InvalidRequest with the field's name for a value outside BOUNDS (NaN included). `seed`:
    None means that the front door draws one; engines need a seed. `allowed_token_ids`: only these
    are drawn, and end-of-sequence tokens only if they are listed; empty = all.
    `skip_reading_prefix_cache`: the whole prompt is computed, even if nodes hold its KV; other
    requests may still use the KV that this request leaves. `logprobs`: how many alternatives are
    reported, -1 = the whole vocabulary; with `logprob_token_ids` those tokens are reported instead.
    The last three fields are for callers that turn tokens into text (`LLM`, `Client`). They are
    never sent to a node, because engines work on tokens. `stop` may be one string.
    """

    n: int = 1
    best_of: int | None = None
    beam_width: int = 0
    length_penalty: float = 1.0
    early_stopping: Literal["false", "true", "never"] = "false"
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int | None = None
    max_tokens: int = 16
    min_tokens: int = 0
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    skip_reading_prefix_cache: bool = False
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    bad_words: tuple[tuple[int, ...], ...] = ()
    allowed_token_ids: tuple[int, ...] = ()
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    logprob_token_ids: tuple[int, ...] = ()
    guided: GuidedDecoding | None = None
    stop: Sequence[str] = ()
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True

    def __post_init__(self) -> None:
        values: tuple[Any, ...] = _bounded(self)
        for value, (name, (low, high)) in zip(values, BOUNDS.items(), strict=True):
            if value is None:
                continue
            if type(value) not in _NUMBERS and (
                isinstance(value, bool) or not isinstance(value, _NUMBERS)
            ):
                raise InvalidRequest(f"{name} must be a number", field=name)
            if not low <= value <= high:  # false for NaN, too
                raise InvalidRequest(
                    f"{name} must be between {low} and {high}, got {value}", field=name
                )
        if self.top_p == 0.0:
            raise InvalidRequest("top_p must be above 0", field="top_p")
        if len(self.stop_token_ids) > MAX_STOP_TOKEN_IDS:
            raise InvalidRequest(
                f"at most {MAX_STOP_TOKEN_IDS} stop_token_ids", field="stop_token_ids"
            )
        if len(self.logit_bias) > MAX_LOGIT_BIAS:
            raise InvalidRequest(f"at most {MAX_LOGIT_BIAS} logit_bias entries", field="logit_bias")
        if not all(abs(bias) <= MAX_BIAS for _, bias in self.logit_bias):  # false for NaN, too
            raise InvalidRequest(
                f"logit_bias values must be between -{MAX_BIAS} and {MAX_BIAS}", field="logit_bias"
            )
        if len(self.allowed_token_ids) > MAX_ALLOWED_TOKEN_IDS:
            raise InvalidRequest(
                f"at most {MAX_ALLOWED_TOKEN_IDS} allowed_token_ids", field="allowed_token_ids"
            )
        if self.allowed_token_ids and self.guided is not None:  # both might together forbid all
            message = (
                "allowed_token_ids and a grammar (also of forced tools, or a limit of thoughts)"
                " exclude each other"
            )
            raise InvalidRequest(message, field="allowed_token_ids")
        self._check_logprob_ids()
        if self.min_tokens > self.max_tokens:
            raise InvalidRequest("min_tokens must not exceed max_tokens", field="min_tokens")
        self._check_stop()

    def _check_stop(self) -> None:
        """Turn `stop` (a string, several, or None) into a tuple. Raises InvalidRequest."""
        given: Any = self.stop
        if given == ():
            return
        texts: tuple[Any, ...] = (given,) if isinstance(given, str) else tuple(given or ())
        if not all(isinstance(text, str) and text for text in texts):
            raise InvalidRequest("stop: texts that are not empty", field="stop")
        object.__setattr__(self, "stop", texts)

    def _check_logprob_ids(self) -> None:
        if not self.logprob_token_ids:
            return
        field = "logprob_token_ids"
        if len(self.logprob_token_ids) > MAX_LOGPROB_TOKEN_IDS:
            raise InvalidRequest(f"at most {MAX_LOGPROB_TOKEN_IDS} {field}", field=field)
        if self.logprobs is None or self.beam_width:
            raise InvalidRequest(f"{field} goes with logprobs, and with no beams", field=field)

    @property
    def greedy(self) -> bool:
        return self.temperature == 0.0

    @property
    def num_samples(self) -> int:
        """The number of samples that run side by side; the beams of a search count as one."""
        return 1 if self.beam_width else max(self.n, self.best_of or 1)

    @property
    def num_outputs(self) -> int:
        """The number of outputs that an engine reports: every sample, or the n best beams."""
        return self.n if self.beam_width else max(self.n, self.best_of or 1)

    @property
    def penalised(self) -> bool:
        """Whether a penalty changes the logits of tokens that occurred before."""
        penalties = (self.frequency_penalty, self.presence_penalty)
        return self.repetition_penalty != 1.0 or any(penalties)

    @property
    def remembers(self) -> bool:
        """Whether a draw depends on the tokens before it, by a penalty or bad words."""
        return self.penalised or bool(self.bad_words)

    @property
    def width(self) -> int:
        """The most sequences that the request runs at once."""
        return self.beam_width or max(self.n, self.best_of or 1)
