"""Idempotency keys over HTTP: one key is one request, under whatever ids, at whatever router."""

from __future__ import annotations

import json

from tests.front.resumable import HeldRouter
from tests.front.test_resumable_api import CHAT, NAME, again, post


async def test_an_idempotency_key_is_one_request(one: HeldRouter, two: HeldRouter) -> None:
    one.dispatcher.held_at = 4
    key = {"idempotency-key": "order 66", "x-baton-resumable": ""}
    first = post(one, "/v1/chat/completions", **{**key, "x-request-id": "a"})
    await first.at_least(4)
    running = post(two, "/v1/chat/completions", **{**key, "x-request-id": "b"})
    await running.at_least(4)
    one.dispatcher.go.set()
    assert await running.done() == await first.done()
    finished = post(two, "/v1/chat/completions", **{**key, "x-request-id": "c"})
    assert await finished.done() == first.events
    assert running.headers["x-baton-request-id"] == first.headers["x-baton-request-id"] == "a"
    other = await one.http.post(
        "/v1/chat/completions", json={**CHAT, "seed": 6}, headers={"idempotency-key": "order 66"}
    )
    assert other.status_code == 422
    assert other.json()["error"]["param"] == "idempotency-key"
    assert one.dispatcher.epochs == [1]
    assert two.dispatcher.epochs == []


async def test_a_request_id_beside_an_idempotency_key_is_honoured(
    one: HeldRouter, two: HeldRouter
) -> None:
    """It names the request and its reply, finds it, and is taken; the key does all of that too."""
    one.dispatcher.held_at = 4
    key = {"idempotency-key": "order 66", "x-baton-resumable": ""}
    first = post(one, "/v1/chat/completions", **key)
    await first.at_least(4)
    running = [again(two), again(one), post(two, "/v1/chat/completions")]  # by its id alone
    for each in running:
        await each.at_least(4)
    one.dispatcher.go.set()
    whole = await first.done()
    assert json.loads(whole[0][2])["id"] == f"chatcmpl-{NAME}"
    for each in running:
        assert await each.done() == whole
        assert each.headers["x-baton-request-id"] == NAME
    for router in (one, two):
        assert await again(router).done() == whole
        by_key = await router.http.post(
            "/v1/chat/completions", json=CHAT, headers={"idempotency-key": "order 66"}
        )
        assert by_key.headers["x-baton-request-id"] == NAME
    assert (one.dispatcher.epochs, two.dispatcher.epochs) == ([1], [])
    # Another key with the same id and body is that request; with another body it is refused.
    later = {"idempotency-key": "order 67", "x-request-id": NAME}
    assert await post(two, "/v1/chat/completions", **later).done() == whole
    other = await two.http.post("/v1/chat/completions", json={**CHAT, "seed": 6}, headers=later)
    assert other.status_code == 422


async def test_one_key_under_two_ids_in_one_moment_is_one_request(
    one: HeldRouter, two: HeldRouter
) -> None:
    """A gateway draws an id for each try."""
    key = {"idempotency-key": "order 66", "x-baton-resumable": ""}
    tries = [
        post(router, "/v1/chat/completions", **{**key, "x-request-id": name})
        for router, name in ((one, "a"), (one, "b"), (two, "c"), (two, "d"))
    ]
    told = [await each.done() for each in tries]
    assert [each.status for each in tries] == [200] * 4
    assert told == [told[0]] * 4
    assert len({each.headers["x-baton-request-id"] for each in tries}) == 1
    assert len(one.dispatcher.epochs) + len(two.dispatcher.epochs) == 1
