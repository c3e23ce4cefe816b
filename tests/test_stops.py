"""Stop strings: cutting the text into pieces never changes the result; no stop is ever shown."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from baton.text.stops import StopMatcher

ALPHABET = st.sampled_from("ab\n#")


def reference(
    text: str, stops: list[str], include: bool, border: int = 0
) -> tuple[str, str | None]:
    """One character at a time, by definition: the first end beyond the border, then the earliest
    start."""
    for end in range(border + 1, len(text) + 1):
        matches = [stop for stop in stops if text[:end].endswith(stop)]
        if matches:
            stop = max(matches, key=len)
            return text[: end if include else end - len(stop)], stop
    return text, None


def run(
    pieces: list[str], stops: list[str], include: bool = False, unlooked: int = 0
) -> tuple[str, str | None]:
    """`unlooked`: the first pieces, in which no stop string ends anything."""
    matcher = StopMatcher(stops, include)
    shown = ""
    for number, piece in enumerate(pieces):
        result = matcher.push(piece, number >= unlooked)
        shown += result.text
        if result.matched is not None:
            return shown, result.matched
    return shown + matcher.flush(), None


@given(
    st.lists(st.text(ALPHABET, max_size=5), max_size=12),
    st.lists(st.text(ALPHABET, min_size=1, max_size=4), max_size=4),
    st.booleans(),
)
def test_any_cutting_gives_the_reference(
    pieces: list[str], stops: list[str], include: bool
) -> None:
    assert run(pieces, stops, include) == reference("".join(pieces), stops, include)


@given(
    st.lists(st.text(ALPHABET, max_size=5), max_size=12),
    st.lists(st.text(ALPHABET, min_size=1, max_size=4), max_size=4),
    st.booleans(),
    st.integers(0, 12),
)
def test_no_stop_ends_before_the_border(
    pieces: list[str], stops: list[str], include: bool, unlooked: int
) -> None:
    """One that begins before it may end beyond, and is not shown either."""
    border = len("".join(pieces[:unlooked]))
    expected = reference("".join(pieces), stops, include, border)
    assert run(pieces, stops, include, unlooked) == expected


@given(
    st.lists(st.text(ALPHABET, max_size=4), max_size=12),
    st.lists(st.text(ALPHABET, min_size=1, max_size=4), min_size=1, max_size=4),
)
def test_nothing_shown_early_is_part_of_the_stop(pieces: list[str], stops: list[str]) -> None:
    matcher = StopMatcher(stops)
    final, _ = reference("".join(pieces), stops, False)
    shown = ""
    for piece in pieces:
        result = matcher.push(piece)
        shown += result.text
        assert final.startswith(shown)
        if result.matched is not None:
            break


def test_text_flows_at_once_when_no_stop_can_begin() -> None:
    matcher = StopMatcher(["\n\n"])
    assert matcher.push("hello").text == "hello"
    assert matcher.push("\n").text == ""
    assert matcher.push("x").text == "\nx"


def test_without_stops_everything_passes() -> None:
    matcher = StopMatcher([])
    assert matcher.push("anything").text == "anything"
    assert matcher.flush() == ""
