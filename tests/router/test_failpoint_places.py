"""The failpoints around the log: what has happened, and what has not, when a step passes."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest

from baton.protocol.events import TokenEvent
from baton.runtime.failpoints import FAILPOINTS
from router.nodes.attachments import Attempt, NodeEvent
from tests.router.fakes import PATIENCE_S, fake_nodes, running_router


class Diary:
    """What happens to a step, in order: failpoints, the log's append, the request's events."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self.shown = asyncio.Event()

    def hit(self, name: str) -> bool:
        self.lines.append(name)
        return False

    def note(self, event: TokenEvent) -> bool:
        return False

    def shows_logged(self, request_id: str) -> bool:
        return True

    async def append(self, events: Sequence[TokenEvent]) -> None:
        self.lines.append("appending")
        await asyncio.sleep(0)
        self.lines.append(f"logged {[event.token_ids for event in events]}")

    def show(self, event: NodeEvent) -> None:
        assert isinstance(event, TokenEvent)
        self.lines.append(f"shown {event.token_ids}")
        self.shown.set()


async def test_a_resumable_step_is_sampled_then_logged_then_sent(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    diary = Diary()
    async with fake_nodes("d") as (d,), running_router([d], log=diary) as router:
        session = router.registry.session("boot-d")
        assert session is not None
        session.attach(Attempt("a", 2, diary.show))
        monkeypatch.setattr(FAILPOINTS, "_plan", diary)
        d.say(tokens=(TokenEvent("a", 1, 0, (1,)),))  # an older epoch: there is nothing to log
        d.say(tokens=(TokenEvent("a", 2, 0, (4, 5)),))
        async with asyncio.timeout(PATIENCE_S):
            await diary.shown.wait()
    assert diary.lines == [
        "sampled_not_logged",
        "appending",
        "logged [(4, 5)]",
        "logged_not_sent",
        "shown (4, 5)",
    ]
