"""Several answers to one prompt, as clients ask for them: n, best_of, beams. Pure.

vLLM's names: with `use_beam_search` n is the width of the search (or best_of, if that is larger),
and its n best beams are the answers.
"""

from __future__ import annotations

from typing import Any, Protocol

from baton.protocol.errors import InvalidRequest


class FanOut(Protocol):
    """What is read of a body (router/api/openai/bodies.py)."""

    @property
    def n(self) -> int | None: ...
    @property
    def best_of(self) -> int | None: ...
    @property
    def stream(self) -> bool | None: ...
    @property
    def use_beam_search(self) -> bool | None: ...
    @property
    def early_stopping(self) -> bool | str | None: ...


def fan_out(body: FanOut) -> dict[str, Any]:
    """SamplingParams' fields for the sequences of one prompt; empty if one is asked for.

    Raises InvalidRequest, naming the field, for what cannot be streamed or contradicts itself.
    """
    count, best_of = body.n or 1, body.best_of
    if best_of is not None and best_of < count:
        message = f"best_of ({best_of}) must not be below n ({count})"
        raise InvalidRequest(message, field="best_of")
    if body.use_beam_search:
        if body.stream:
            message = "use_beam_search: which beams are best is known at their end: no stream"
            raise InvalidRequest(message, field="use_beam_search")
        return {
            "beam_width": max(count, best_of or 1),
            "best_of": None,
            "early_stopping": _early_stopping(body.early_stopping),
        }
    if body.early_stopping is not None:
        message = "early_stopping is only allowed with use_beam_search"
        raise InvalidRequest(message, field="early_stopping")
    if best_of is not None and best_of > count and body.stream:
        message = "best_of: which samples are best is known at their end: no stream"
        raise InvalidRequest(message, field="best_of")
    return {}


def _early_stopping(given: bool | str | None) -> str:
    if given in (None, True, False, "never"):
        return given if isinstance(given, str) else str(bool(given)).lower()
    raise InvalidRequest('early_stopping must be true, false or "never"', field="early_stopping")
