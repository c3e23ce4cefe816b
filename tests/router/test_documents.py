"""One contract, two stores: documents are their owner's, for a time, up to a number of bytes."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from baton.protocol.errors import StoreUnavailable
from baton.runtime.redis.connections import connect
from baton.runtime.redis.keys import ONLY
from baton.runtime.timing import Timing
from router.store.documents import DocumentTable, Keeping, MemoryDocuments
from router.store.redis_links import RedisServers
from router.store.redis_store import RedisStore
from tests.router.conftest import StoreMaker
from tests.router.fakes import FakeClock

LONG = Keeping(3600.0, 100)


async def test_what_is_kept_is_read_by_every_router(make_store: StoreMaker) -> None:
    one, two = make_store("r1").documents, make_store("r2").documents
    assert await one.get("owner", "a") is None
    assert await one.put("owner", "a", b"\x00text\xff", LONG)
    assert await two.get("owner", "a") == b"\x00text\xff"
    assert await two.put("owner", "a", b"newer", LONG)
    assert await one.get("owner", "a") == b"newer"


async def test_another_owners_name_is_another_document(make_store: StoreMaker) -> None:
    documents = make_store("r1").documents
    await documents.put("one", "a", b"1", LONG)
    assert await documents.get("two", "a") is None
    assert not await documents.drop("two", "a")
    assert not await documents.put("two", "a", b"2", LONG, replace=True)
    assert await documents.get("one", "a") == b"1"


async def test_what_is_dropped_is_gone_once(make_store: StoreMaker) -> None:
    documents = make_store("r1").documents
    await documents.put("owner", "a", b"1", LONG)
    assert await documents.drop("owner", "a")
    assert not await documents.drop("owner", "a")
    assert await documents.get("owner", "a") is None


async def test_only_what_is_there_is_replaced(make_store: StoreMaker) -> None:
    documents = make_store("r1").documents
    assert not await documents.put("owner", "a", b"1", LONG, replace=True)
    assert await documents.get("owner", "a") is None
    await documents.put("owner", "a", b"1", LONG)
    assert await documents.put("owner", "a", b"2", LONG, replace=True)
    assert await documents.get("owner", "a") == b"2"


async def test_the_oldest_give_way(make_store: StoreMaker) -> None:
    documents = make_store("r1").documents
    for name in "abc":
        assert await documents.put("owner", name, bytes(40), LONG)
    assert [await documents.get("owner", name) is None for name in "abc"] == [True, False, False]
    assert await documents.put("owner", "b", bytes(50), LONG, replace=True)  # it is the newest now
    assert await documents.put("owner", "d", bytes(40), LONG)
    found = [await documents.get("owner", name) is None for name in "bcd"]
    assert found == [False, True, False]
    assert await documents.put("another", "a", bytes(100), LONG)
    assert await documents.get("owner", "d") is not None


async def test_what_no_owner_has_room_for_changes_nothing(make_store: StoreMaker) -> None:
    documents = make_store("r1").documents
    await documents.put("owner", "a", bytes(40), LONG)
    assert not await documents.put("owner", "b", bytes(101), LONG)
    assert not await documents.put("owner", "a", bytes(101), LONG)
    assert await documents.get("owner", "a") == bytes(40)
    assert await documents.put("owner", "b", bytes(100), LONG)


async def test_room_that_was_dropped_is_room_again(make_store: StoreMaker) -> None:
    """Whatever was done before: what is there is never too much, and nothing is lost early."""
    documents = make_store("r1").documents
    drawn, held = random.Random(5), dict[str, int]()
    for _ in range(200):
        name, size = drawn.choice("abcdefgh"), drawn.randint(1, 60)
        held.pop(name, None)
        if drawn.random() < 0.3:
            await documents.drop("owner", name)
            continue
        assert await documents.put("owner", name, bytes(size), LONG)
        while sum(held.values()) + size > LONG.max_bytes:
            del held[next(iter(held))]
        held[name] = size
        there = {each: await documents.get("owner", each) for each in "abcdefgh"}
        assert {each: len(text) for each, text in there.items() if text is not None} == held


async def test_documents_in_memory_end_with_their_time() -> None:
    clock, table = FakeClock(), DocumentTable()
    documents = MemoryDocuments(table, clock)
    await documents.put("owner", "a", b"1", Keeping(10.0, 100))
    await documents.put("other", "b", b"1", Keeping(20.0, 100))
    clock.advance(10.0)
    assert await documents.get("owner", "a") is None
    assert await documents.get("other", "b") == b"1"
    assert list(table.owners) == ["other"]
    await documents.put(
        "owner", "short", b"1", Keeping(1.0, 100)
    )  # ends before one that came first
    clock.advance(1.0)
    assert await documents.get("owner", "short") is None
    assert list(table.owners) == list(table.sizes) == ["other"]


@pytest.mark.redis
async def test_documents_in_redis_end_with_their_time(empty_redis: str) -> None:
    client = connect(empty_redis, 2.0)
    documents = RedisStore(RedisServers([client]), "r1", Timing(), FakeClock(), 2.0).documents
    await documents.put("owner", "a", bytes(60), LONG)
    keys = await client.keys("*")
    assert len(keys) == 3
    assert all([0 < await client.pttl(key) <= LONG.ttl_s * 1000 for key in keys])
    # One that has ended is no longer counted, though others of its owner are there.
    await documents.put("owner", "b", bytes(40), LONG)
    await client.delete(ONLY.document_key("owner", "a"))
    await client.zadd(ONLY.document_index_key("owner"), {"a": 0})
    await documents.put("owner", "c", bytes(60), LONG)
    assert await documents.get("owner", "b") is not None
    await client.aclose()


async def test_a_store_that_is_away_says_so(tmp_path: Path) -> None:
    client = connect(f"unix://{tmp_path}/nobody", 0.5)
    documents = RedisStore(RedisServers([client]), "r1", Timing(), FakeClock(), 0.5).documents
    for ask in (
        documents.get("owner", "a"),
        documents.drop("owner", "a"),
        documents.put("owner", "a", b"1", LONG),
    ):
        with pytest.raises(StoreUnavailable):
            await ask
    await client.aclose()
