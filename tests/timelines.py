"""What is true of every timeline, whatever happened to its request."""

from __future__ import annotations

from itertools import pairwise

from baton.protocol.events import SpanName, layers_came
from router.request.timeline import BEFORE, STAGES, TimelineEntry

SLACK_S = 1e-6  # nodes tell microseconds


def assert_whole(entry: TimelineEntry) -> None:
    """Its stages lie end to end from the arrival to the end, and nothing lies outside."""
    stages = entry.stages
    assert (stages[0].start, stages[-1].end) == (entry.arrival, entry.end), entry
    assert [each.end for each in stages[:-1]] == [each.start for each in stages[1:]], entry
    assert all(each.start <= each.end for each in stages), entry
    tokens = [token for each in stages for token in (each.first_token, each.last_token)]
    assert tokens == sorted(tokens), entry
    assert (tokens[0], tokens[-1]) == (0, entry.trace.output_tokens), entry
    assert {each.stage for each in stages} <= {*BEFORE.values(), *STAGES.values()}, entry
    for each in entry.transfers:
        assert entry.arrival <= each.start <= each.end <= entry.end, entry
    work = entry.trace.work
    for each in entry.appends:
        assert entry.arrival <= each.start <= each.end <= entry.end, entry
    for each in (each for each in work if each.span.layers):
        came = layers_came(each.span.layers)
        assert each.span.name == SpanName.FETCH, entry
        assert sum(it.kv_bytes for it in came) <= each.span.kv_bytes, entry
        assert all(it.first <= it.last and it.start_us <= it.end_us for it in came), entry
        took_us = each.span.end_us - each.span.start_us
        assert all(it.end_us <= took_us + 1 for it in came), entry
        assert all(one.last < other.first for one, other in pairwise(came)), entry
    for each in work:
        assert entry.arrival - SLACK_S <= each.start <= each.end <= each.told_at + SLACK_S, entry
        assert each.told_at <= entry.end, entry
    assert [stage for stage, _ in entry.work] == stages, entry
    of_stages = [each for _, parts in entry.work for each in parts]
    spans = [[id(each.span) for each in found] for found in (of_stages, work)]
    assert sorted(spans[0]) == sorted(spans[1]), "each belongs to one stage"
