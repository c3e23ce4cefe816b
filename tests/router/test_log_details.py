"""Entries of the log and back: whatever the cuts, the same tokens, ends and log-probabilities."""

from __future__ import annotations

import contextlib
import math

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from baton.protocol.errors import InvalidRequest
from baton.protocol.events import TokenEvent, TokenLogprob
from baton.protocol.request import FinishReason
from router.api.resumable.numbered import Numbers
from router.resumable.replay import Told
from router.resumable.terms import START, read_position
from router.store.base import LogEntry
from router.store.log_details import LoggedToken, entry_of, output_ids_of, tokens_of

LOGPROBS = st.floats(max_value=0.0, allow_nan=False) | st.just(-math.inf)


@st.composite
def events(draw: st.DrawFn) -> list[TokenEvent]:
    """One sample's tokens in any pieces, the end with the last token or after it."""
    ids = draw(st.lists(st.integers(0, 99), min_size=1, max_size=12))
    rows = [
        (TokenLogprob(token, draw(LOGPROBS), 1), TokenLogprob(token + 1, draw(LOGPROBS), 2))
        for token in ids
    ]
    cuts = sorted(draw(st.sets(st.integers(1, len(ids) - 1)))) if len(ids) > 1 else []
    found = [
        TokenEvent("r", 1, a, tuple(ids[a:b]), num_cached_tokens=3, logprobs=tuple(rows[a:b]))
        for a, b in zip([0, *cuts], [*cuts, len(ids)], strict=True)
    ]
    end = {"finish_reason": FinishReason.STOP, "stop_token_id": 7}
    if draw(st.booleans()):
        return [*found[:-1], msgspec.structs.replace(found[-1], **end)]
    return [*found, TokenEvent("r", 1, len(ids), (), num_cached_tokens=3, **end)]  # type: ignore[arg-type]


def trimmed(entry: LogEntry, known: int) -> LogEntry:
    """As a store keeps one whose first tokens it has."""
    return msgspec.structs.replace(
        entry, position=entry.position + known, token_ids=entry.token_ids[known:]
    )


@given(events(), st.data())
def test_what_comes_back_depends_on_no_cut_and_no_repetition(
    told: list[TokenEvent], data: st.DataObject
) -> None:
    entries = [entry_of(event, 1, told_at=9) for event in told]
    again = data.draw(st.lists(st.sampled_from(entries), max_size=3))
    first = entries[0]
    known = data.draw(st.integers(0, max(0, len(first.token_ids) - 1)))
    reader = Told(1)
    reader.add(
        [msgspec.structs.replace(first, token_ids=first.token_ids[:known], more="")]
        if known
        else []
    )
    reader.add([trimmed(first, known), *entries[1:]])
    reader.add(again)
    tokens = [token.event for token in reader.tokens]
    ids = [token for event in told for token in event.token_ids]
    assert [token for event in tokens for token in event.token_ids] == ids
    assert [event.position for event in tokens if event.token_ids] == list(range(len(ids)))
    rows = [row for event in told for row in event.logprobs]
    assert [row for event in tokens for row in event.logprobs] == rows[known:]
    assert [event.finish_reason for event in tokens].count(FinishReason.STOP) == 1
    assert tokens[-1].stop_token_id == 7
    assert reader.all_ended
    assert output_ids_of(reader.tokens, 1) == (tuple(ids),)


def test_one_token_each_with_its_time() -> None:
    event = TokenEvent("r", 2, 4, (8, 9), sample=1)
    assert list(tokens_of(entry_of(event, 3, told_at=77))) == [
        LoggedToken(TokenEvent("r", 3, 4, (8,), sample=1), 77),
        LoggedToken(TokenEvent("r", 3, 5, (9,), sample=1), 77),
    ]


@given(
    st.lists(st.tuples(st.integers(0, 2), st.integers(0, 3)), min_size=1, max_size=12),
    st.integers(0, 40),
)
def test_any_event_is_a_place_to_go_on(steps: list[tuple[int, int]], cut: int) -> None:
    """Whatever a token makes of events, a reader that saw the first so many gets the others."""

    def stream(seen: str | None) -> list[bytes]:
        numbers = Numbers(3, read_position(seen, 3, "f") if seen else START)
        out = b""
        for index, (choice, count) in enumerate(steps):
            data = b"".join(b"data: %d.%d\n\n" % (index, event) for event in range(count))
            out += numbers.step(choice, data)
        out += numbers.tail(b"data: usage\n\ndata: [DONE]\n\n")
        return [event for event in out.split(b"\n\n") if event]

    whole = stream(None)
    assert len({event.split(b"\n")[0] for event in whole}) == len(whole), "ids are unique"
    cut = min(cut, len(whole) - 1)
    last = whole[cut - 1].split(b"\n")[0].removeprefix(b"id: ").decode() if cut else None
    assert stream(last) == whole[cut:]


@given(st.text(max_size=20))
def test_no_position_breaks_anything(text: str) -> None:
    with contextlib.suppress(InvalidRequest):
        assert len(read_position(text, 2, "last-event-id").steps) in (0, 2)
