"""/v1/files and /v1/batches over HTTP, in one process: OpenAI's objects, keys apart, bounds."""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest

from router.batches import runner as running
from router.batches.objects import ENDED, BatchObject
from router.batches.runner import BatchRunner
from router.batches.store import BatchStore
from router.config import RouterConfig
from router.server.app import create_app
from tests.front.fakes import MODEL, Front

URL = "/v1/completions"
KEYS = ("alices", "bobs")


def line(custom_id: str, url: str = URL, **body: Any) -> str:
    body = {"prompt": "hi", "max_tokens": 4, **body}
    return json.dumps({"custom_id": custom_id, "method": "POST", "url": url, "body": body})


@pytest.fixture
def front(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Front:
    monkeypatch.setattr(running, "TELL_S", 0.01)
    config = RouterConfig(api_key=KEYS, batch_dir=str(tmp_path / "batches"), batch_mb=1)
    return Front(config=config)


class Client(httpx.AsyncClient):
    """A client of one key."""

    async def sent(self, text: str, **more: str) -> httpx.Response:
        form = {"purpose": "batch", **more}
        return await self.post("/v1/files", data=form, files={"file": ("in.jsonl", text.encode())})

    async def batched(self, text: str, endpoint: str = URL, **more: Any) -> dict[str, Any]:
        file = (await self.sent(text)).json()
        body = {"input_file_id": file["id"], "endpoint": endpoint, "completion_window": "24h"}
        reply = await self.post("/v1/batches", json={**body, **more})
        assert reply.status_code == 200, reply.text
        return reply.json()

    async def ended(self, id_: str) -> dict[str, Any]:
        async with asyncio.timeout(20):
            while True:
                batch = (await self.get(f"/v1/batches/{id_}")).json()
                if batch["status"] in ENDED:
                    return batch

    async def rows(self, file_id: str) -> dict[str, Any]:
        content = (await self.get(f"/v1/files/{file_id}/content")).text
        return {row["custom_id"]: row for row in map(json.loads, content.splitlines())}


@asynccontextmanager
async def clients(front: Front, runs: bool = True) -> AsyncIterator[tuple[Client, ...]]:
    """A client of each key; `runs`: batches do."""
    runner = BatchRunner.of(front.config)
    assert runner is not None
    transport = httpx.ASGITransport(create_app(with_batches(front, runner)))
    task = asyncio.create_task(runner.run()) if runs else None
    async with contextlib.AsyncExitStack() as stack:
        yield tuple(
            [
                await stack.enter_async_context(
                    Client(
                        transport=transport,
                        base_url="http://baton",
                        headers={"authorization": f"Bearer {key}"},
                    )
                )
                for key in KEYS
            ]
        )
    if task is not None:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


def with_batches(front: Front, runner: BatchRunner) -> Any:
    return replace(front.services, batches=runner)


async def test_a_batch_runs_to_its_files(front: Front) -> None:
    async with clients(front) as (alice, bob):
        lines = [line("a"), line("b", prompt="ho"), line("bad", max_tokens=-1)]
        made = await alice.batched("\n".join(lines), metadata={"job": "7"})
        assert (made["object"], made["status"]) == ("batch", "validating")
        assert made["expires_at"] == made["created_at"] + 24 * 3600
        batch = await alice.ended(made["id"])
        assert batch["status"] == "completed"
        assert batch["request_counts"] == {"total": 3, "completed": 2, "failed": 1}
        assert batch["metadata"] == {"job": "7"}
        assert batch["in_progress_at"] <= batch["finalizing_at"] <= batch["completed_at"]
        good, bad = (
            await alice.rows(batch["output_file_id"]),
            await alice.rows(batch["error_file_id"]),
        )
        assert set(good) == {"a", "b"}
        answer = good["a"]["response"]
        assert (answer["status_code"], answer["body"]["model"]) == (200, MODEL)
        assert answer["body"]["choices"][0]["text"] == "hello world"
        assert bad["bad"]["response"]["body"]["error"]["param"] == "max_tokens"
        # Its requests were the key's own, and gave way to others.
        assert {trace.terms.priority for trace in front.dispatcher.traces} == {100}
        listed = (await alice.get("/v1/batches")).json()
        assert [one["id"] for one in listed["data"]] == [batch["id"]]
        # To another key nothing of this exists.
        assert (await bob.get("/v1/batches")).json()["data"] == []
        assert (await bob.get("/v1/files")).json()["data"] == []
        for path in (f"/v1/batches/{batch['id']}", f"/v1/files/{batch['output_file_id']}/content"):
            assert (await bob.get(path)).status_code == 404
        body = {**_asked(batch["input_file_id"]), "endpoint": URL}
        refused = await bob.post("/v1/batches", json=body)
        assert (refused.status_code, refused.json()["error"]["param"]) == (404, "input_file_id")


def _asked(file_id: str) -> dict[str, Any]:
    return {"input_file_id": file_id, "endpoint": URL, "completion_window": "24h"}


async def test_bad_lines_fail_a_batch_by_their_number(front: Front) -> None:
    async with clients(front) as (alice, _):
        text = "\n".join(["{", line("a"), line("a"), line("c", "/v1/chat/completions")])
        batch = await alice.ended((await alice.batched(text))["id"])
        assert batch["status"] == "failed"
        told = [(error["line"], error["param"]) for error in batch["errors"]["data"]]
        assert told == [(1, None), (3, "custom_id"), (4, "url")]
        empty = await alice.ended((await alice.batched("\n"))["id"])
        assert empty["errors"]["data"][0]["code"] == "empty_file"
        assert front.dispatcher.requests == []


async def test_a_cancelled_batch_keeps_what_was_answered(front: Front) -> None:
    front.dispatcher.stall_at = 0
    async with clients(front) as (alice, _):
        made = await alice.batched("\n".join([line("a"), line("b")]))
        await asyncio.wait_for(front.dispatcher.stalled.wait(), 20)
        told = (await alice.post(f"/v1/batches/{made['id']}/cancel")).json()
        assert told["status"] == "cancelling"
        batch = await alice.ended(made["id"])
        assert (batch["status"], batch["output_file_id"]) == ("cancelled", None)
        assert batch["cancelling_at"] <= batch["cancelled_at"]
        rows = await alice.rows(batch["error_file_id"])
        assert {row["error"]["code"] for row in rows.values()} == {"batch_cancelled"}
        assert front.dispatcher.closed == len(front.dispatcher.requests)
        again = await alice.post(f"/v1/batches/{made['id']}/cancel")
        assert (again.status_code, again.json()["error"]["param"]) == (400, "batch_id")
        missing = await alice.post("/v1/batches/batch_0/cancel")
        assert missing.status_code == 404


async def test_another_process_goes_on_where_one_was(front: Front, tmp_path: Path) -> None:
    async with clients(front, runs=False) as (alice, _):
        made = await alice.batched("\n".join([line("a"), line("b")]))
    store = BatchStore(tmp_path / "batches", 1 << 20)
    (place,) = store.open_batches()
    done = {"id": "x", "custom_id": "a", "response": {"status_code": 200, "body": 7}, "error": None}
    place.answers.write_text(json.dumps(done) + '\n{"id": "torn')
    with place.locked() as mine, place.locked() as theirs:
        assert (mine, theirs) == (True, False)
    async with clients(front) as (alice, _):
        batch = await alice.ended(made["id"])
        rows = await alice.rows(batch["output_file_id"])
    assert rows["a"]["response"]["body"] == 7
    assert len(front.dispatcher.requests) == 1
    assert batch["request_counts"]["completed"] == 2


async def test_a_window_that_is_over_ends_it(front: Front, tmp_path: Path) -> None:
    async with clients(front, runs=False) as (alice, _):
        made = await alice.batched(line("a"))
    store = BatchStore(tmp_path / "batches", 1 << 20)
    (place,) = store.open_batches()
    late = msgspec.json.decode(place.record.read_bytes(), type=BatchObject)
    store.put(place, msgspec.structs.replace(late, expires_at=int(time.time()) - 1))
    front.dispatcher.stall_at = 0
    async with clients(front) as (alice, _):
        batch = await alice.ended(made["id"])
        rows = await alice.rows(batch["error_file_id"])
    assert batch["status"] == "expired"
    assert rows["a"]["error"]["code"] == "batch_expired"


async def test_files_are_listed_read_deleted_and_expire(front: Front, tmp_path: Path) -> None:
    async with clients(front, runs=False) as (alice, _):
        files = [
            (await alice.sent("x" * size, **{"expires_after[seconds]": "3600"})).json()
            for size in (1, 2, 3)
        ]
        assert [file["bytes"] for file in files] == [1, 2, 3]
        assert files[0]["expires_at"] == files[0]["created_at"] + 3600
        first = (await alice.get("/v1/files?limit=2&order=asc")).json()
        assert (len(first["data"]), first["has_more"]) == (2, True)
        rest = (await alice.get(f"/v1/files?order=asc&after={first['last_id']}")).json()
        assert len(rest["data"]) == 1
        assert (await alice.get("/v1/files?purpose=other")).json()["data"] == []
        path = f"/v1/files/{files[1]['id']}"
        assert (await alice.get(f"{path}/content")).text == "xx"
        assert (await alice.delete(path)).json()["deleted"] is True
        assert (await alice.get(path)).status_code == 404
        assert (await alice.get("/v1/files/file-..%2f..%2fx")).status_code == 404
        for query in ("limit=0", "limit=x", "after=nobody", "order=up"):
            reply = await alice.get(f"/v1/files?{query}")
            assert (reply.status_code, reply.json()["error"]["param"]) == (
                400, query.partition("=")[0],
            )  # fmt: skip
        batch = await alice.batched(line("a"))
        held = await alice.delete(f"/v1/files/{batch['input_file_id']}")
        assert (held.status_code, held.json()["error"]["param"]) == (400, "file_id")
        for record in (tmp_path / "batches").glob(f"*/files/{files[0]['id']}.json"):
            record.write_text(record.read_text().replace(str(files[0]["expires_at"]), "1"))
        assert (await alice.get(f"/v1/files/{files[0]['id']}")).status_code == 404
        BatchStore(tmp_path / "batches", 1 << 20).sweep()
        assert not list((tmp_path / "batches").glob(f"*/files/{files[0]['id']}*"))


async def test_uploads_are_bounded_and_checked(front: Front) -> None:
    async with clients(front, runs=False) as (alice, bob):
        half = "x" * (600 << 10)
        assert (await alice.sent(half)).status_code == 200
        refused = await alice.sent(half)
        assert (refused.status_code, refused.json()["error"]["param"]) == (413, "file")
        assert (await bob.sent(half)).status_code == 200  # each key has its own room
        for form, field in (
            ({"purpose": "fine-tune"}, "purpose"),
            ({"expires_after[seconds]": "5"}, "expires_after[seconds]"),
            ({"expires_after[seconds]": "soon"}, "expires_after[seconds]"),
        ):
            reply = await alice.sent("x", **form)
            assert (reply.status_code, reply.json()["error"]["param"]) == (400, field)
        bare = await alice.post("/v1/files", data={"purpose": "batch"}, files={"f": b""})
        assert (bare.status_code, bare.json()["error"]["param"]) == (400, "file")
        assert (await alice.post("/v1/files", json={})).status_code == 415
        foreign = {"origin": "https://elsewhere.example"}
        page = await alice.post("/v1/files", files={"file": b"x"}, headers=foreign)
        assert page.status_code == 403
        assert len((await alice.get("/v1/files")).json()["data"]) == 1


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"endpoint": "/v1/responses"}, "endpoint"),
        ({"completion_window": "soon"}, "completion_window"),
        ({"completion_window": "999h"}, "completion_window"),
        ({"input_file_id": 7}, "input_file_id"),
        ({"metadata": {"a": "x" * 513}}, "metadata"),
        ({"output_expires_after": {"anchor": "created_at", "seconds": 1}},
         "output_expires_after.seconds"),
    ],
)  # fmt: skip
async def test_a_bad_field_of_a_batch_is_named(
    front: Front, change: dict[str, Any], field: str
) -> None:
    async with clients(front, runs=False) as (alice, _):
        file = (await alice.sent(line("a"))).json()
        reply = await alice.post("/v1/batches", json={**_asked(file["id"]), **change})
        assert (reply.status_code, reply.json()["error"]["param"]) == (400, field)


async def test_without_a_directory_there_are_no_such_routes() -> None:
    async with Front().client() as client:
        assert (await client.get("/v1/files")).status_code == 404
        assert (await client.post("/v1/batches", json={})).status_code == 404
