"""The front door on uvloop, which the router runs on: streams, disconnects, deadlines."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from tests.front import test_half_close as half_close
from tests.front import test_http_guard as guard
from tests.front import test_openai_sdk as sdk

uvloop = pytest.importorskip("uvloop")

CHECKS: list[Callable[[], Coroutine[Any, Any, None]]] = [
    sdk.test_streamed_chat,
    sdk.test_32_concurrent_streams,
    sdk.test_a_client_that_leaves_closes_the_dispatcher,
    sdk.test_a_client_that_leaves_a_whole_reply_closes_the_dispatcher,
    guard.test_a_drip_does_not_extend_the_deadline,
    guard.test_a_second_slow_request_on_the_same_connection_is_closed_too,
    guard.test_length_with_chunked_cannot_smuggle_a_second_request,
    half_close.test_several_requests_in_one_go_are_all_answered,
    half_close.test_a_stream_with_comments_is_read_as_one_without,
]


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_on_uvloop(check: Callable[[], Coroutine[Any, Any, None]]) -> None:
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(asyncio.wait_for(check(), 30))
        assert type(runner.get_loop()).__module__.startswith("uvloop")
