"""A mailbox keeps order, wakes its reader, and loses nothing of a reader that was cancelled."""

from __future__ import annotations

import asyncio

import pytest

from router.nodes.mailbox import Mailbox


async def test_order_and_what_waits() -> None:
    box: Mailbox[int] = Mailbox()
    for item in range(3):
        box.put(item)
    assert [await box.get(), *box.waiting] == [0, 1, 2]
    assert box.waiting.popleft() == 1
    assert await box.get() == 2
    assert not box.waiting


async def test_a_reader_that_waits_is_woken_once_for_several() -> None:
    box: Mailbox[int] = Mailbox()
    reader = asyncio.create_task(box.get())
    await asyncio.sleep(0)
    box.put(1)
    box.put(2)
    assert await reader == 1
    assert list(box.waiting) == [2]


async def test_a_cancelled_reader_takes_nothing_along() -> None:
    box: Mailbox[int] = Mailbox()
    reader = asyncio.create_task(box.get())
    await asyncio.sleep(0)
    box.put(1)
    reader.cancel()  # in the turn in which it was woken
    with pytest.raises(asyncio.CancelledError):
        await reader
    box.put(2)
    assert [await box.get(), await box.get()] == [1, 2]
