"""Receipts: what happened to a request, for a client that asks (`x-baton-receipt`, `baton_timing`).

A non-streaming answer has the field `baton_timing` and the header `x-baton-receipt`; a stream has
`baton_timing` in one of its last chunks; a gRPC call has trailing metadata. The value is one object
per prompt. Times are milliseconds, or null if the request never came so far.

    arrival ---- queue_ms ---- prefill_ms ---- decode_ms ----> end
                          sent to a node   token 1
    ttft_ms = queue_ms + prefill_ms; transfer_ms: from token 1 to the first event of the decode
    node, a part of decode_ms. Of transfer_ms the decode node spent handover_queue_ms waiting,
    handover_fetch_ms fetching KV, and handover_first_step_ms computing; the rest are messages.
    node_queue_ms: the waiting on all nodes; queue_ms has none of it
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import msgspec
import orjson

from baton.protocol.events import SpanName
from router.request.completion import Completion

HEADER: Final = "x-baton-receipt"
MOST_HEADER_BYTES: Final = 4096  # proxies refuse longer headers; the body has the whole receipt


def receipt_of(completion: Completion) -> dict[str, Any]:
    """Return the receipt of a request that has ended."""
    trace, request = completion.trace, completion.request
    terms, samples = trace.terms, request.params.n
    ttft_s = _between(request.arrival, trace.first_token_at)
    tpot_s, parts = trace.tpot_s(samples), trace.handover_parts_s
    receipt: dict[str, Any] = {
        "request_id": request.id,
        "admission_ms": _ms(_between(request.arrival, trace.admitted_at)),
        "queue_ms": _ms(_between(request.arrival, trace.dispatched_at)),
        "prefill_ms": _ms(_between(trace.dispatched_at, trace.first_token_at)),
        "transfer_ms": _ms(trace.handover_s),
        "handover_queue_ms": _ms(parts.get(SpanName.QUEUE)),
        "handover_fetch_ms": _ms(parts.get(SpanName.FETCH)),
        "handover_first_step_ms": _ms(parts.get(SpanName.FIRST_STEP)),
        "node_queue_ms": _ms(trace.node_queue_s()) if trace.work else None,
        "ttft_ms": _ms(ttft_s),
        "decode_ms": _ms(_between(trace.first_token_at, trace.finished_at)),
        "tpot_ms": _ms(tpot_s),
        "total_ms": _ms(_between(request.arrival, trace.finished_at)),
        "prompt_tokens": len(request.prompt_ids),
        "cached_tokens": trace.cached_tokens,
        "output_tokens": trace.output_tokens,
        "placement": "local" if trace.local_prefill else "remote",
        "prefill_node": trace.prefill_node,
        "decode_node": trace.decode_node,
        "retries": trace.retries,
        "migrations": trace.migrations,
        "priority": request.priority,
        "scores": [msgspec.to_builtins(score) for score in trace.scores],
    }
    if terms.grant.tenant:
        receipt["tenant"] = terms.grant.tenant
    if terms.slo.ttft_s is not None:
        receipt["slo_ttft_met"] = ttft_s is not None and ttft_s <= terms.slo.ttft_s
    if terms.slo.tpot_s is not None:
        receipt["slo_tpot_met"] = tpot_s is None or tpot_s <= terms.slo.tpot_s
    return receipt


def receipts_of(completions: Sequence[Completion]) -> Any:
    """Return the receipt of a call: an object for one prompt, a list of objects for several, None
    if the client did not ask."""
    receipts = [receipt_of(each) for each in completions if each.trace.terms.receipt]
    return receipts[0] if len(receipts) == 1 else receipts or None


def with_receipt(body: bytes, completions: Sequence[Completion]) -> tuple[bytes, dict[str, str]]:
    """Return a JSON answer with `baton_timing` added, and the headers to add. If the client did not
    ask for a receipt, return the answer as it is and no headers."""
    receipts = receipts_of(completions)
    if receipts is None:
        return body, {}
    told = orjson.dumps(receipts)
    assert body.endswith(b"}"), "an answer is an object with fields"
    whole = body[:-1] + b',"baton_timing":' + told + b"}"
    return whole, {HEADER: header_of(receipts)}


def receipt_frame(completions: Sequence[Completion], base: dict[str, Any]) -> bytes:
    """Return a stream's chunk with `baton_timing`, the fields of `base` and no choices; b"" if the
    client did not ask for a receipt."""
    receipts = receipts_of(completions)
    if receipts is None:
        return b""
    content = {**base, "choices": [], "baton_timing": receipts}
    return b"data: " + orjson.dumps(content) + b"\n\n"


def header_of(receipts: Any) -> str:
    """Return the value of the header: the receipts, or the receipts without scores if those are too
    long, or `"in the body"` if that is still too long."""
    told = orjson.dumps(receipts)
    if len(told) > MOST_HEADER_BYTES:
        short = (
            [{**each, "scores": []} for each in receipts]
            if isinstance(receipts, list)
            else {**receipts, "scores": []}
        )
        told = orjson.dumps(short)
    text = told.decode()
    return text if len(text) <= MOST_HEADER_BYTES and text.isascii() else '"in the body"'


def _between(start: float | None, end: float | None) -> float | None:
    return None if start is None or end is None else max(0.0, end - start)


def _ms(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds * 1000, 3)
