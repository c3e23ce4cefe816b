"""Resumable requests over HTTP: what a reader gets is the log's, whoever serves it and when."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from baton.protocol.errors import NodeLost
from baton.protocol.request import RequestState
from router.resumable.canonical import MAX_CANONICAL_BYTES, owner_digest, record_id
from router.store.base import WriteStatus
from router.store.memory_store import MemoryTables
from tests.front.resumable import (
    PATIENCE_S,
    DyingStore,
    HeldRouter,
    Reader,
    RestartingStore,
    held_router,
)
from tests.waiting import eventually

NAME = "abc"
ANSWER = "abcdefghijk"  # a token each
HEADERS = {"x-baton-resumable": "30", "x-request-id": NAME}
CHAT: dict[str, Any] = {
    "messages": [{"role": "user", "content": "hi"}],
    "stream": True,
    "max_tokens": 40,
    "seed": 5,
    "stream_options": {"include_usage": True},
}
BODIES = {
    "/v1/chat/completions": CHAT,
    "/v1/completions": {**CHAT, "messages": None, "prompt": "hi"},
    "/v1/responses": {"input": "hi", "stream": True, "max_output_tokens": 40},
    "/v1/messages": {"messages": CHAT["messages"], "stream": True, "max_tokens": 40},
}
AGAIN = f"/v1/requests/{NAME}/stream"


def post(router: HeldRouter, path: str, body: Any = None, **headers: str) -> Reader:
    sent = {**HEADERS, **headers}
    return Reader(router.http, "POST", path, json=body or BODIES[path], headers=sent)


def again(router: HeldRouter, after: str | None = None, name: str = NAME) -> Reader:
    params = {} if after is None else {"starting_after": after}
    return Reader(router.http, "GET", f"/v1/requests/{name}/stream", params=params)


async def state_of(router: HeldRouter, name: str = NAME, key: list[bytes] | None = None) -> str:
    record = await router.store.read(record_id(owner_digest(key or []), name))
    return "" if record is None else record.state.value


async def text_of(reader: Reader) -> str:
    chunks = [json.loads(data) for _, _, data in await reader.done() if data != "[DONE]"]
    assert "error" not in chunks[-1], chunks[-1]
    return "".join(c["delta"].get("content", "") for x in chunks for c in x["choices"])


@pytest.mark.parametrize("path", BODIES)
async def test_any_router_tells_every_event_again_byte_for_byte(
    one: HeldRouter, two: HeldRouter, path: str
) -> None:
    first = post(one, path)
    events = await first.done()
    assert first.status == 200
    assert first.headers["x-baton-request-id"] == NAME
    ids = [id_ for id_, _, _ in events]
    assert all(ids), "every event has an id"
    assert len(set(ids)) == len(ids)
    for router in (one, two):
        replay = again(router)
        await replay.done()
        assert replay.body == first.body
    for index, id_ in enumerate(ids[:-1]):
        rest = await again(two, id_).done()
        assert rest == events[index + 1 :], f"after {id_}"
    assert len(one.dispatcher.steps) == len(ANSWER) + 1, "computed once"
    assert two.dispatcher.steps == []


async def test_chunks_name_the_request_and_usage_is_the_logs_length(one: HeldRouter) -> None:
    events = await post(one, "/v1/chat/completions").done()
    chunks = [json.loads(data) for _, _, data in events[:-1]]
    assert {chunk["id"] for chunk in chunks} == {f"chatcmpl-{NAME}"}
    assert len({chunk["created"] for chunk in chunks}) == 1
    log = await one.store.read_log(record_id(owner_digest([]), NAME))
    logged = sum(len(entry.token_ids) for entry in log)
    assert chunks[-1]["usage"]["completion_tokens"] == logged == 12
    assert await state_of(one) == "finished"


async def test_a_disconnect_costs_nothing_within_the_grace(
    one: HeldRouter, two: HeldRouter
) -> None:
    one.dispatcher.held_at = 4
    first = post(one, "/v1/chat/completions")
    await first.at_least(5)
    await first.leave()
    seen = list(first.events)
    followed = again(two, seen[-1][0])  # on the other router, while the first one runs it
    one.dispatcher.go.set()
    rest = await followed.done()
    whole = await again(one).done()
    assert seen + rest == whole
    assert one.dispatcher.epochs == [1]
    assert two.dispatcher.steps == []


async def test_last_event_id_with_the_same_request_goes_on(one: HeldRouter) -> None:
    one.dispatcher.held_at = 3
    first = post(one, "/v1/chat/completions")
    await first.at_least(4)
    await first.leave()
    one.dispatcher.go.set()
    second = post(one, "/v1/chat/completions", **{"last-event-id": first.events[-1][0]})
    rest = await second.done()
    assert first.events + rest == await again(one).done()
    assert one.dispatcher.epochs == [1], "it was computed once"


async def test_nobody_within_the_grace_ends_it(one: HeldRouter) -> None:
    one.dispatcher.held_at = 3
    first = post(one, "/v1/chat/completions", **{"x-baton-resumable": "1"})
    await first.at_least(3)
    await first.leave()
    await eventually(lambda: _is(one, "cancelled"))
    await eventually(lambda: _at_rest(one))
    assert one.runs.stats.abandoned == 1
    reader = again(one)
    events = await reader.done()
    assert json.loads(events[-3][2])["choices"][0]["finish_reason"] == "abort"


async def _is(router: HeldRouter, state: str) -> bool:
    return await state_of(router) == state


async def _at_rest(router: HeldRouter) -> bool:
    return router.runs.num_live == 0


async def test_a_follower_elsewhere_counts_as_a_reader(one: HeldRouter, two: HeldRouter) -> None:
    one.dispatcher.held_at = 3
    first = post(one, "/v1/chat/completions", **{"x-baton-resumable": "1"})
    await first.at_least(3)
    followed = again(two)
    await followed.at_least(3)
    await first.leave()
    with pytest.raises(TimeoutError):
        await eventually(lambda: _is(one, "cancelled"), timeout_s=1.6)
    one.dispatcher.go.set()
    assert await text_of(followed) == ANSWER


async def test_a_dead_routers_request_is_adopted_and_the_stream_is_the_same(
    one: HeldRouter, two: HeldRouter
) -> None:
    plain = await post(two, "/v1/chat/completions", **{"x-request-id": "undisturbed"}).done()
    two.dispatcher.steps.clear()
    one.dispatcher.held_at = 5
    first = post(one, "/v1/chat/completions")
    await first.at_least(6)
    await one.die()
    await first.leave()
    rest = await again(two, first.events[-1][0]).done()
    assert two.adopter.adopted == 1
    assert two.dispatcher.epochs == [1, 2]
    assert [trace.adopted_at is not None for trace in two.dispatcher.traces] == [False, True]
    assert [position for _, position in two.dispatcher.steps] == list(range(5, 12))
    whole = first.events + rest
    assert [_normal(data, NAME) for _, _, data in whole] == [
        _normal(data, "undisturbed") for _, _, data in plain
    ]
    assert [id_ for id_, _, _ in whole] == [id_ for id_, _, _ in plain]
    assert await state_of(two) == "finished"


def _normal(data: str, name: str) -> Any:
    if data == "[DONE]":
        return data
    chunk = json.loads(data.replace(name, "X"))
    chunk["created"] = 0
    return chunk


async def test_one_router_adopts_of_several(one: HeldRouter, tables: MemoryTables | str) -> None:
    one.dispatcher.held_at = 5
    first = post(one, "/v1/chat/completions")
    await first.at_least(6)
    async with held_router("a", tables) as a, held_router("b", tables) as b:
        await one.die()
        events = await again(a, first.events[-1][0]).done()
        assert events[-1][2] == "[DONE]"
        assert a.adopter.adopted + b.adopter.adopted == 1
        assert sorted(a.dispatcher.epochs + b.dispatcher.epochs) == [2]
    await first.leave()


async def test_a_router_cut_off_shows_nothing_more_and_closes_without_an_end(
    one: HeldRouter, two: HeldRouter
) -> None:
    """Two routers, one cut off, one history."""
    one.dispatcher.held_at = 5
    first = post(one, "/v1/chat/completions")
    await first.at_least(6)
    shown = len(first.events)
    await one.lapse()
    one.dispatcher.go.set()  # its nodes go on: it may not tell
    await first.done()
    assert first.cut, "closed without an end"
    assert len(first.events) == shown, "nothing that is not in the log"
    refused = await one.http.get(AGAIN)
    assert refused.status_code == 503
    rest = await again(two, first.events[-1][0]).done()
    assert two.adopter.adopted == 1
    one.store.away = False
    await eventually(lambda: _gone(one))
    assert first.events + rest == await again(one).done() == await again(two).done()
    log = await two.store.read_log(record_id(owner_digest([]), NAME))
    positions = [entry.position for entry in log for _ in entry.token_ids]
    assert sorted(positions) == list(range(12)), "one history"
    record = await two.store.read(record_id(owner_digest([]), NAME))
    assert record is not None
    assert (record.state, record.epoch, record.owner) == (RequestState.FINISHED, 2, "two")


async def _gone(router: HeldRouter) -> bool:
    return router.runs.num_live == 0


async def test_a_short_outage_delays_and_changes_nothing(one: HeldRouter) -> None:
    one.dispatcher.held_at = 5
    first = post(one, "/v1/chat/completions")
    await first.at_least(6)
    shown = len(first.events)
    one.store.away = True
    one.dispatcher.go.set()
    await eventually(lambda: _at_end(one))
    assert len(first.events) == shown
    refused = await one.http.post(
        "/v1/chat/completions", json=CHAT, headers={**HEADERS, "x-request-id": "new"}
    )
    assert refused.status_code == 503
    plain = await one.http.post("/v1/chat/completions", json={**CHAT, "stream_options": None})
    assert plain.status_code == 200, "plain requests go on"
    one.store.away = False
    assert await text_of(first) == ANSWER
    await eventually(lambda: _is(one, "finished"))
    assert one.dispatcher.epochs[0] == 1
    assert one.adopter.adopted == 0


async def _at_end(router: HeldRouter) -> bool:
    return router.dispatcher.script.exhausted == 1


async def test_another_key_sees_nothing(tables: MemoryTables | str) -> None:
    async with held_router("one", tables, api_key=("k1", "k2")) as one:
        mine, other = {"authorization": "Bearer k1"}, {"authorization": "Bearer k2"}
        whole = await post(one, "/v1/chat/completions", **mine).done()
        reply = await one.http.get(AGAIN, headers=other)
        assert reply.status_code == 404
        unknown = await one.http.get("/v1/requests/never/stream", headers=other)
        assert unknown.status_code == 404
        assert (
            reply.json()["error"]["message"].replace(NAME, "never")
            == (unknown.json()["error"]["message"])
        )
        own = Reader(one.http, "GET", AGAIN, headers=mine)
        assert await own.done() == whole
        as_key = Reader(one.http, "GET", AGAIN, headers={"x-api-key": "k1"})
        assert await as_key.done() == whole
        theirs = await post(one, "/v1/chat/completions", **other).done()  # the same name, free
        assert len(theirs) == len(whole)
        assert len(one.dispatcher.epochs) == 2
        assert (await one.http.get(AGAIN)).status_code == 401


async def test_a_body_may_name_it(one: HeldRouter, two: HeldRouter) -> None:
    body = {**CHAT, "request_id": "by-body"}
    head = {"x-baton-resumable": "30"}
    first = await one.http.post("/v1/chat/completions", json=body, headers=head)
    assert first.headers["x-baton-request-id"] == first.headers["x-request-id"] == "by-body"
    again = await two.http.get("/v1/requests/by-body/stream")
    assert again.text == first.text
    assert two.dispatcher.epochs == []


async def test_the_same_name_with_another_body_is_refused(one: HeldRouter) -> None:
    await post(one, "/v1/chat/completions").done()
    other = await one.http.post("/v1/chat/completions", json={**CHAT, "seed": 6}, headers=HEADERS)
    assert other.status_code == 422
    assert other.json()["error"]["param"] == "x-request-id"


@pytest.mark.parametrize("path", BODIES)
async def test_whole_answers_are_kept_too(one: HeldRouter, two: HeldRouter, path: str) -> None:
    body = {k: v for k, v in BODIES[path].items() if k not in ("stream", "stream_options")}
    one.dispatcher.held_at = 4
    first = asyncio.create_task(one.http.post(path, json=body, headers=HEADERS))
    async with asyncio.timeout(PATIENCE_S):
        await one.dispatcher.holding.wait()
    first.cancel()  # its client goes away
    await asyncio.gather(first, return_exceptions=True)
    waiting = asyncio.create_task(two.http.post(path, json=body, headers=HEADERS))
    one.dispatcher.go.set()
    replies = [await waiting, await one.http.get(AGAIN), await two.http.get(AGAIN)]
    assert [reply.status_code for reply in replies] == [200, 200, 200]
    assert len({reply.content for reply in replies}) == 1
    assert one.dispatcher.epochs == [1]


async def test_several_samples_and_a_stop_string(one: HeldRouter, two: HeldRouter) -> None:
    body = {**CHAT, "n": 2, "stop": ["ef"], "logprobs": True, "top_logprobs": 1}
    for router in (one, two):
        router.dispatcher.script.samples = (ANSWER, "other things")
    one.dispatcher.held_at = 7
    first = post(one, "/v1/chat/completions", body)
    async with asyncio.timeout(PATIENCE_S):
        await one.dispatcher.holding.wait()
    await first.at_least(12)
    assert "," in first.events[-1][0]
    await one.die()
    await first.leave()
    rest = await again(two, first.events[-1][0]).done()
    whole = await again(two).done()
    assert first.events + rest == whole
    chunks = [json.loads(data) for _, _, data in whole if data != "[DONE]"]
    texts = ["", ""]
    ends: list[str | None] = [None, None]
    for choice in (c for chunk in chunks for c in chunk["choices"]):
        texts[choice["index"]] += choice["delta"].get("content", "")
        ends[choice["index"]] = choice["finish_reason"] or ends[choice["index"]]
    assert texts == ["abcd", "other things"]
    assert ends == ["stop", "stop"]
    assert not [step for step in two.dispatcher.steps if step[0] == 0], "its text had ended it"


async def test_what_was_logged_whole_needs_no_node(
    tables: MemoryTables | str, two: HeldRouter
) -> None:
    """The router dies between the last token and the record of the end."""
    async with held_router("one", tables, DyingStore) as one:
        reader = post(one, "/v1/chat/completions")
        assert await text_of(reader) == ANSWER
        await one.die()
        await eventually(lambda: _is(two, "finished"))
    assert two.adopter.adopted == 1
    assert two.dispatcher.epochs == [], "nothing was left to compute"
    assert await again(two).done() == reader.events


@pytest.mark.parametrize("forgets", [1, 5])
async def test_a_store_that_forgot_the_last_of_a_log_records_no_end_of_it(forgets: int) -> None:
    """Redis writes its file once a second: kill -9 may take what it confirmed. Whoever asks again
    must not be told less than the first reader was."""
    tables = MemoryTables()
    async with held_router("one", tables, RestartingStore) as one:
        assert isinstance(one.store, RestartingStore)
        reader = post(one, "/v1/chat/completions")
        await eventually(lambda: _is_away(one))
        one.guard.lease_until = 0.0  # its reader is cut: another router may have the request
        first = await reader.done()
        [row] = tables.rows.values()
        for entry in row.log[-forgets:]:
            row.lengths[entry.sample] -= len(entry.token_ids)
            row.ended.discard(entry.sample)
        del row.log[-forgets:]
        one.store.away = False
        await eventually(lambda: _ended_with(one, WriteStatus.GAP))
        await one.store.lapse()  # it has left the request
        await eventually(lambda: _is(one, "finished"))
        assert one.store.ends == [WriteStatus.GAP, WriteStatus.OK]
        assert one.dispatcher.epochs == [1, 2]
        told = await again(one).done()
        assert [(id_, _normal(data, NAME)) for id_, _, data in told] == [
            (id_, _normal(data, NAME)) for id_, _, data in first
        ]


async def _is_away(router: HeldRouter) -> bool:
    return router.store.away


async def _ended_with(router: HeldRouter, status: WriteStatus) -> bool:
    assert isinstance(router.store, RestartingStore)
    return status in router.store.ends


async def test_a_failure_is_told_again(one: HeldRouter, two: HeldRouter) -> None:
    one.dispatcher.script.fail_at, one.dispatcher.script.failure = 4, NodeLost("gone")
    events = await post(one, "/v1/chat/completions").done()
    assert json.loads(events[-2][2])["error"]["code"] == "node_lost"
    assert await state_of(one) == "failed"
    assert await again(two).done() == events


@pytest.mark.parametrize(
    ("headers", "body", "status", "param"),
    [
        ({"x-baton-resumable": "-1"}, CHAT, 400, "x-baton-resumable"),
        ({"x-baton-resumable": "4000"}, CHAT, 400, "x-baton-resumable"),
        ({"x-baton-resumable": "1.5"}, CHAT, 400, "x-baton-resumable"),
        ({"idempotency-key": "k" * 257}, CHAT, 400, "idempotency-key"),
        ({"last-event-id": "3"}, CHAT, 404, "request_id"),
        ({}, {**CHAT, "stream": False, "stream_options": None, "max_tokens": 0}, 400, "max_tokens"),
        ({}, {**CHAT, "user": "u" * MAX_CANONICAL_BYTES}, 400, None),
        ({}, {**CHAT, "metadata": {"m": "u" * MAX_CANONICAL_BYTES}}, 400, "messages"),
    ],
)  # fmt: skip
async def test_refusals_name_the_field(
    one: HeldRouter, headers: dict[str, str], body: Any, status: int, param: str | None
) -> None:
    reply = await one.http.post("/v1/chat/completions", json=body, headers={**HEADERS, **headers})
    assert reply.status_code == status, reply.text
    assert param is None or reply.json()["error"]["param"] == param
    assert one.runs.num_live == 0
    assert await state_of(one) == "", "nothing was kept"


async def test_what_cannot_be_kept_is_refused(one: HeldRouter) -> None:
    body = {"prompt": ["a", "b"]}
    reply = await one.http.post("/v1/completions", json=body, headers=HEADERS)
    assert (reply.status_code, reply.json()["error"]["param"]) == (400, "prompt")
    body = {"prompt": "a", "prompt_logprobs": 1}
    reply = await one.http.post("/v1/completions", json=body, headers=HEADERS)
    assert (reply.status_code, reply.json()["error"]["param"]) == (400, "prompt_logprobs")
    ids = {"token_ids": [1], "sampling_params": {}}
    reply = await one.http.post("/inference/v1/generate", json=ids, headers=HEADERS)
    assert (reply.status_code, reply.json()["error"]["param"]) == (400, "x-baton-resumable")
    await post(one, "/v1/chat/completions").done()
    for after in ("x", "1,2", "1.2.3", "-1"):
        reply = await one.http.get(AGAIN, params={"starting_after": after})
        assert (reply.status_code, reply.json()["error"]["param"]) == (400, "starting_after")


async def test_a_router_that_stops_gives_its_requests_up(one: HeldRouter, two: HeldRouter) -> None:
    one.dispatcher.held_at = 5
    first = post(one, "/v1/chat/completions")
    await first.at_least(6)
    await one.adopter.stop()
    await one.runs.stop()
    await first.done()
    assert first.cut
    rest = await again(two, first.events[-1][0]).done()
    assert rest[-1][2] == "[DONE]"
    assert two.adopter.adopted == 1
