"""Responses in the background: nobody waits for them, and any router tells how they are."""

from __future__ import annotations

import asyncio
from typing import Any

import orjson
import pytest
import redis
from openai.types.responses import Response

from baton.protocol.errors import NodeLost, Overloaded
from router.resumable.canonical import owner_digest, record_id
from router.store.documents import Keeping
from router.store.memory_store import MemoryTables
from tests.front.dialects import check_response, events_of
from tests.front.resumable import PATIENCE_S, HeldRouter, Reader, held_router
from tests.waiting import eventually

PATH = "/v1/responses"
ANSWER = "abcdefghijk"
BODY: dict[str, Any] = {"input": "hi", "background": True}


async def begin(router: HeldRouter, headers: Any = None, **more: Any) -> str:
    """Begin one; its id."""
    reply = await router.http.post(PATH, json={**BODY, **more}, headers=headers)
    assert reply.status_code == 200, reply.text
    made = reply.json()
    Response.model_validate(made)
    assert (made["background"], made["store"], made["output"]) == (True, True, [])
    assert made["status"] in ("queued", "in_progress")
    return made["id"]


async def look(router: HeldRouter, id_: str) -> dict[str, Any]:
    reply = await router.http.get(f"{PATH}/{id_}")
    assert reply.status_code == 200, reply.text
    Response.model_validate(reply.json())
    return reply.json()


async def ended(router: HeldRouter, id_: str) -> dict[str, Any]:
    """How it is once it has ended."""

    async def over() -> dict[str, Any] | None:
        found = await look(router, id_)
        return None if found["status"] in ("queued", "in_progress") else found

    found = await eventually(over)
    assert found is not None
    return found


async def idle(router: HeldRouter) -> None:
    """Nothing runs here any more."""

    async def over() -> bool:
        return router.runs.num_live == 0

    await eventually(over)


def text_of(response: dict[str, Any]) -> str:
    return response["output"][0]["content"][0]["text"]


def hold(router: HeldRouter, at: int = 3) -> None:
    router.dispatcher.held_at = at


async def test_nobody_waits_for_it_and_any_router_tells_how_it_is(
    one: HeldRouter, two: HeldRouter
) -> None:
    hold(one)
    id_ = await begin(one)
    await asyncio.wait_for(one.dispatcher.holding.wait(), PATIENCE_S)
    for router in (one, two):
        assert (await look(router, id_))["status"] == "in_progress"
    one.dispatcher.go.set()
    found = await ended(two, id_)
    assert (found["status"], text_of(found), found["store"]) == ("completed", ANSWER, True)
    assert found == await look(one, id_)
    assert found["usage"]["output_tokens"] == len(ANSWER) + 1
    items = (await two.http.get(f"{PATH}/{id_}/input_items")).json()["data"]
    assert [item["content"][0]["text"] for item in items] == ["hi"]


async def test_one_goes_on_from_another_once_that_has_ended(one: HeldRouter) -> None:
    hold(one)
    first = await begin(one, input="a")
    body = {"input": "b", "previous_response_id": first}
    reply = await one.http.post(PATH, json=body)
    assert (reply.status_code, reply.json()["error"]["param"]) == (400, "previous_response_id")
    one.dispatcher.go.set()
    await ended(one, first)
    found = await ended(one, await begin(one, None, **body))
    assert (found["status"], found["previous_response_id"]) == ("completed", first)


async def test_what_it_goes_on_from_may_go_while_it_runs(one: HeldRouter, two: HeldRouter) -> None:
    first = (await one.http.post(PATH, json={"input": "a"})).json()
    hold(one)
    reference = {"type": "item_reference", "id": first["output"][0]["id"]}
    more = {"input": [reference], "previous_response_id": first["id"]}
    id_ = await begin(one, None, **more)
    await asyncio.wait_for(one.dispatcher.holding.wait(), PATIENCE_S)
    assert (await two.http.delete(f"{PATH}/{first['id']}")).status_code == 200
    one.dispatcher.go.set()
    found = await ended(two, id_)
    assert (found["status"], text_of(found)) == ("completed", ANSWER)
    items = (await two.http.get(f"{PATH}/{id_}/input_items", params={"order": "asc"})).json()
    assert [item["content"][0]["text"] for item in items["data"]] == ["a", ANSWER, ANSWER]
    told = await two.http.get(f"{PATH}/{id_}", params={"stream": True})
    lines = [line for line in told.text.split("\n") if not line.startswith("id: ")]
    assert events_of("\n".join(lines))[-1]["response"] == found


async def test_what_ended_is_known_though_the_log_is_gone(
    one: HeldRouter, tables: MemoryTables | str
) -> None:
    id_ = await begin(one)
    found = await ended(one, id_)
    if isinstance(tables, MemoryTables):
        tables.rows.clear()
    else:
        with redis.Redis.from_url(tables) as client:
            for key in client.scan_iter("*:req:*"):
                client.delete(key)
    assert await look(one, id_) == found
    reply = await one.http.get(f"{PATH}/{id_}", params={"stream": "true"})
    assert reply.status_code == 404


# ---- streams ----


async def test_a_stream_can_be_left_and_read_on_anywhere(one: HeldRouter, two: HeldRouter) -> None:
    hold(one, at=5)
    reader = Reader(one.http, "POST", PATH, json={**BODY, "stream": True})
    await reader.at_least(6)
    seen = [orjson.loads(data) for _, _, data in reader.events]
    await reader.leave()
    id_, last = seen[0]["response"]["id"], seen[-1]["sequence_number"]
    query = {"stream": "true", "starting_after": str(last)}
    rest = Reader(two.http, "GET", f"{PATH}/{id_}", params=query)
    one.dispatcher.go.set()
    events = seen + [orjson.loads(data) for _, _, data in await rest.done()]
    told = check_response(events)
    assert (told["status"], text_of(told)) == ("completed", ANSWER)
    assert told == await look(two, id_)
    whole = await two.http.get(f"{PATH}/{id_}", params={"stream": "true"})
    lines = [line for line in whole.text.split("\n") if not line.startswith("id: ")]
    assert events_of("\n".join(lines)) == events


@pytest.mark.parametrize("stream", ["true", "false"])
@pytest.mark.parametrize("place", ["x", "-1", "1000000000"])
async def test_a_place_that_there_is_not_is_refused(
    one: HeldRouter, stream: str, place: str
) -> None:
    id_ = await begin(one)
    query = {"stream": stream, "starting_after": place}
    reply = await one.http.get(f"{PATH}/{id_}", params=query)
    assert (reply.status_code, reply.json()["error"]["param"]) == (400, "starting_after")


async def test_only_what_ran_in_the_background_is_streamed_again(one: HeldRouter) -> None:
    made = (await one.http.post(PATH, json={"input": "hi"})).json()
    reply = await one.http.get(f"{PATH}/{made['id']}", params={"stream": "true"})
    assert (reply.status_code, reply.json()["error"]["param"]) == (400, "stream")


# ---- ends ----


async def test_it_can_be_cancelled_from_any_router(one: HeldRouter, two: HeldRouter) -> None:
    hold(one)
    id_ = await begin(one)
    await asyncio.wait_for(one.dispatcher.holding.wait(), PATIENCE_S)
    readers = [
        Reader(router.http, "GET", f"{PATH}/{id_}", params={"stream": "true"})
        for router in (one, two)
    ]
    for reader in readers:
        await reader.at_least(5)
    reply = await one.http.post(f"{PATH}/{id_}/cancel")
    assert (reply.status_code, reply.json()["status"]) == (200, "cancelled")
    assert one.dispatcher.aborted
    await idle(one)
    for reader in readers:
        assert (await reader.done())[-1][1] == "response.failed"
    for router in (one, two):
        assert (await look(router, id_))["status"] == "cancelled"
        again = await router.http.post(f"{PATH}/{id_}/cancel")
        assert (again.status_code, again.json()["status"]) == (200, "cancelled")


async def test_an_end_that_comes_after_its_cancellation_changes_nothing(
    one: HeldRouter, two: HeldRouter
) -> None:
    hold(one)
    id_ = await begin(one)
    await asyncio.wait_for(one.dispatcher.holding.wait(), PATIENCE_S)
    reply = await two.http.post(f"{PATH}/{id_}/cancel")  # it cannot reach router one here
    assert reply.json()["status"] == "cancelled"
    one.dispatcher.go.set()
    await idle(one)
    assert (await look(two, id_))["status"] == "cancelled"


async def test_what_does_not_run_cannot_be_cancelled(one: HeldRouter) -> None:
    made = (await one.http.post(PATH, json={"input": "hi"})).json()
    reply = await one.http.post(f"{PATH}/{made['id']}/cancel")
    assert reply.status_code == 400
    id_ = await begin(one)
    found = await ended(one, id_)
    reply = await one.http.post(f"{PATH}/{id_}/cancel")
    assert (reply.status_code, reply.json()) == (200, found)


async def test_one_that_is_deleted_ends_and_does_not_come_back(one: HeldRouter) -> None:
    hold(one)
    id_ = await begin(one)
    await asyncio.wait_for(one.dispatcher.holding.wait(), PATIENCE_S)
    assert (await one.http.delete(f"{PATH}/{id_}")).status_code == 200
    assert one.dispatcher.aborted
    await idle(one)
    assert (await one.http.get(f"{PATH}/{id_}")).status_code == 404


async def test_a_failure_is_told_with_its_reason(one: HeldRouter, two: HeldRouter) -> None:
    script = one.dispatcher.script
    script.fail_at, script.failure = 3, NodeLost("10.0.0.7 gone")
    found = await ended(two, await begin(one))
    assert (found["status"], found["error"]["code"]) == ("failed", "server_error")
    assert "10.0.0.7" not in found["error"]["message"]


async def test_what_is_refused_at_once_leaves_nothing(one: HeldRouter) -> None:
    async def full(*_: object) -> Any:
        raise Overloaded("full")

    one.dispatcher.guard.open = full  # type: ignore[method-assign]
    reply = await one.http.post(PATH, json=BODY, headers={"x-request-id": "a"})
    assert reply.status_code == 429
    assert (await one.http.get(f"{PATH}/resp_a")).status_code == 404
    wrong = await one.http.post(PATH, json={**BODY, "temperature": -1})
    assert wrong.status_code == 400


async def test_one_that_waits_for_room_is_queued_everywhere(
    one: HeldRouter, two: HeldRouter, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("router.api.responses.background.ACCEPT_S", 0.01)
    room, opened = asyncio.Event(), one.guard.open

    async def full(*given: Any) -> Any:
        await room.wait()
        return await opened(*given)

    one.dispatcher.guard.open = full  # type: ignore[method-assign]
    id_ = await begin(one)
    assert [(await look(router, id_))["status"] for router in (one, two)] == ["queued"] * 2
    assert (await two.http.get(f"{PATH}/{id_}", params={"stream": "1"})).status_code == 503
    room.set()
    assert (await ended(two, id_))["status"] == "completed"


async def test_a_store_that_goes_away_at_its_end_loses_nothing(
    tables: MemoryTables | str, two: HeldRouter
) -> None:
    """What could not be kept is found in the log once the store is back."""
    async with held_router("one", tables) as router:
        ender = router.runs.enders[PATH]

        async def cut_off(found: Any) -> None:
            router.store.away = True
            await ender(found)

        router.runs.enders[PATH] = cut_off
        id_ = await begin(router)
        await idle(router)
        found = await look(two, id_)
        assert (found["status"], text_of(found)) == ("completed", ANSWER)


async def test_without_the_store_none_is_begun(one: HeldRouter) -> None:
    one.store.away = True
    assert (await one.http.post(PATH, json=BODY)).status_code == 503
    assert one.runs.num_live == 0


async def test_a_router_that_dies_is_stood_in_for(one: HeldRouter, two: HeldRouter) -> None:
    hold(one)
    first = (await two.http.post(PATH, json={"input": "before"})).json()
    id_ = await begin(one, previous_response_id=first["id"])
    await asyncio.wait_for(one.dispatcher.holding.wait(), PATIENCE_S)
    await one.die()
    found = await ended(two, id_)
    assert (found["status"], text_of(found)) == ("completed", ANSWER)
    assert two.adopter.adopted == 1


async def test_an_end_that_nobody_kept_is_found_in_the_log(
    one: HeldRouter, two: HeldRouter
) -> None:
    """Its router died between the end of the request and what is kept of it."""
    one.runs.enders.clear()
    id_ = await begin(one)
    await idle(one)
    found = await look(two, id_)
    assert (found["status"], text_of(found)) == ("completed", ANSWER)


async def test_one_that_nobody_knows_any_more_has_failed(one: HeldRouter) -> None:
    id_ = await begin(one)
    found = await ended(one, id_)
    for created, expected in ((found["created_at"], "queued"), (0, "failed")):
        lost = {**found, "id": "resp_lost", "status": "queued", "output": [], "created_at": created}
        content = orjson.dumps({"response": lost, "items": []})
        documents = one.store.documents
        await documents.put(owner_digest([]), "resp_lost", content, Keeping(60.0, 1 << 20))
        assert (await look(one, "resp_lost"))["status"] == expected


async def test_a_key_makes_one_response_of_two_requests(one: HeldRouter) -> None:
    key = {"idempotency-key": "k"}
    id_ = await begin(one, key)
    again = await one.http.post(PATH, json=BODY, headers=key)
    assert again.json()["id"] == id_
    await ended(one, id_)
    other = await one.http.post(PATH, json={**BODY, "input": "other"}, headers=key)
    assert other.status_code == 422
    again = await one.http.post(PATH, json=BODY, headers=key)
    assert again.json()["status"] == "completed"
    assert len(one.dispatcher.epochs) == 1
    assert record_id(owner_digest([]), id_.removeprefix("resp_"))
