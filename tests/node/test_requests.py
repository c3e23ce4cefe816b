"""RequestTable: the newest epoch of a request is the one that is here; others are nobody's."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from baton.node.requests import NodeRequest, RequestTable
from baton.protocol.errors import Fenced
from tests.fakes import request

NO_SESSION: Any = None  # whose it is does not matter here


def entry(epoch: int, name: str = "r") -> NodeRequest:
    return NodeRequest(replace(request(name), epoch=epoch), None, NO_SESSION)


async def test_what_is_said_of_another_epoch_finds_nobody() -> None:
    table = RequestTable()
    here = entry(5)
    assert table.add(here) is None
    assert table.find("r") is here
    assert table.find("r", 5) is here
    assert [table.find("r", epoch) for epoch in (4, 6)] == [None, None]
    assert table.find("s", 5) is None
    assert [table.find_upto("r", epoch) for epoch in (4, 5, 6)] == [None, here, here]


async def test_a_newer_epoch_takes_the_place_and_the_older_one_s_end_leaves_it() -> None:
    table = RequestTable()
    old, new = entry(1), entry(2)
    table.add(old)
    assert table.add(new) is old
    for late in (entry(1), entry(2)):
        with pytest.raises(Fenced, match="under epoch 2"):
            table.add(late)
    table.remove(old)
    assert table.find("r", 2) is new
    assert table.find("r", 1) is None
    assert len(table) == 1
    table.remove(new)
    assert list(table) == []
