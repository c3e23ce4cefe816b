"""The same resumable request asked for by many in one moment, here and at another router."""

from __future__ import annotations

import asyncio

import pytest
import redis

from baton.runtime.timing import Timing
from tests.front.resumable import held_router

BODY = {"messages": [{"role": "user", "content": "hi"}], "stream": True, "max_tokens": 40}


@pytest.mark.redis  # the store in memory answers at once: nobody comes between
async def test_an_idempotency_key_used_many_times_at_once_is_one_request(
    redis_url: str,
) -> None:
    with redis.Redis.from_url(redis_url) as client:
        client.flushall()
    timing = Timing(heartbeat_s=0.1, router_lease_s=30.0)  # no router is to seem dead here
    async with (
        held_router("one", redis_url, timing=timing) as one,
        held_router("two", redis_url, timing=timing) as two,
    ):
        for round_ in range(8):
            key = {"x-baton-resumable": "30", "idempotency-key": f"race {round_}"}
            replies = await asyncio.gather(
                *(
                    router.http.post("/v1/chat/completions", json=BODY, headers=key)
                    for router in (one, two) * 6
                )
            )
            assert {reply.status_code for reply in replies} == {200}, {r.text for r in replies}
            assert len({reply.text for reply in replies}) == 1
            assert len(one.dispatcher.epochs) + len(two.dispatcher.epochs) == round_ + 1
        assert one.runs.stats.begun + two.runs.stats.begun == 8
