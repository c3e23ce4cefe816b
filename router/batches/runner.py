"""BatchRunner: runs the batches of a BatchStore through this router's own routes.

The life of a batch; the process that holds the batch's lock does each step:
    validating    read the whole input; a bad line fails the batch, with its line number
    in_progress   send requests, a fixed number at once; write answers as they come
    finalizing    make an output file of the answers, and an error file of the failures
    completed | failed | expired (after its window) | cancelled
If a process ends, another one finds its batches at the next look, or the same one at its next
start; requests that have an answer are not sent again. The requests of a batch count with the API
key that made the batch: its limits, its tenant's share and its prefix cache. Other requests of the
same tenant go first (x-request-priority). Runs on the event loop; files are read in threads.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Final

import httpx
import msgspec
import orjson
from starlette.types import ASGIApp, Receive, Scope, Send

from baton.protocol.errors import BatonError, InvalidRequest
from router.batches.lines import check_new, failure_line, read_tasks, task_of
from router.batches.objects import (
    ENDED,
    OUTPUT_PURPOSE,
    BatchError,
    BatchErrors,
    BatchObject,
    RequestCounts,
    Status,
)
from router.batches.run import BatchPlan, Outcome, RetryPatience, run_batch
from router.batches.store import KEPT_S, BatchPlace, BatchStore
from router.config import RouterConfig
from router.request.terms import GRANT_KEY
from router.tenants.keys import EVERYBODY, Grant

log = logging.getLogger(__name__)
LOOK_S: Final = 2.0  # between two looks for batches that no process runs
TELL_S: Final = 1.0  # between two checks whether a running batch was cancelled or has expired
SWEEP_S: Final = 60.0  # between two deletions of expired files
MOST_RUNNING: Final = 4  # batches that this process runs at once; more wait
MOST_REQUESTS: Final = 50_000  # of one batch; OpenAI's limit
MOST_ERRORS: Final = 20  # reported of one input file
PRIORITY: Final = "100"  # a smaller number goes first; a client's default is 0
_STATUS: Final[Mapping[str, Status]] = {
    "": "completed", "cancelled": "cancelled", "expired": "expired", "failed": "failed",
}  # fmt: skip
_ENDED: Final = {"cancelled": "was cancelled", "expired": "expired", "failed": "failed"}
_FULL: Final = BatchError("storage_full", "the files of this key leave no room for its answers")
# Any number of tries: a batch ends by its completion window.
_PATIENCE: Final = RetryPatience(tries=1 << 30)


@dataclass(frozen=True, slots=True)
class RunnerSettings:
    """`grant_of`: digest of a key -> its grant, or None if the key is not known any more.
    `concurrency`: requests of one batch at once."""

    grant_of: Callable[[str], Grant | None]
    concurrency: int


class BatchRunner:
    """Runs the open batches of a store. Call `poke` when there is a new batch.

    The life: made -> serve(app) -> run() until cancelled."""

    def __init__(self, store: BatchStore, settings: RunnerSettings) -> None:
        self.store = store
        self._settings = settings
        self._app: ASGIApp | None = None
        self._news = asyncio.Event()
        self._running: dict[str, asyncio.Task[None]] = {}

    def serve(self, app: ASGIApp) -> None:
        """Set the app that gets the requests: the public routes, without the check of API keys."""
        self._app = app
        self._news.set()

    @classmethod
    def of(cls, config: RouterConfig) -> BatchRunner | None:
        """Return the runner of --batch-dir, or None without that option.

        Raises ConfigError if the directory cannot be used."""
        if config.batch_dir is None:
            return None
        keys = config.key_ring()

        def grant_of(owner: str) -> Grant | None:
            return keys.of_digest(bytes.fromhex(owner)) if len(keys) else EVERYBODY

        store = BatchStore(Path(config.batch_dir).expanduser(), config.batch_mb << 20)
        return cls(store, RunnerSettings(grant_of, config.batch_concurrency))

    def poke(self) -> None:
        self._news.set()

    async def run(self) -> None:
        """Start open batches that no other process runs. When cancelled, stop the batches that run
        here; another process, or the next start, goes on with them."""
        swept = 0.0
        try:
            while True:
                self._news.clear()
                try:
                    if time.monotonic() - swept > SWEEP_S:
                        await asyncio.to_thread(self.store.sweep)
                        swept = time.monotonic()
                    await self._start()
                except OSError:
                    log.exception("the batch directory cannot be read")
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(LOOK_S):
                        await self._news.wait()
        finally:
            tasks = list(self._running.values())
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _start(self) -> None:
        app = self._app
        if app is None or len(self._running) >= MOST_RUNNING:
            return
        for place in await asyncio.to_thread(self.store.open_batches):
            if place.id in self._running or len(self._running) >= MOST_RUNNING:
                continue
            task = asyncio.create_task(self._own(place, app), name=place.id)
            self._running[place.id] = task
            task.add_done_callback(partial(self._ended, place.id))

    def _ended(self, id_: str, task: asyncio.Task[None]) -> None:
        self._running.pop(id_, None)
        if not task.cancelled() and task.exception() is not None:
            log.error("batch %s broke off", id_, exc_info=task.exception())
        else:
            self._news.set()

    async def _own(self, place: BatchPlace, app: ASGIApp) -> None:
        with place.locked() as mine:
            batch = await asyncio.to_thread(self.store.batch, place.owner, place.id)
            if mine and batch.status not in ENDED:
                await _BatchRun(self.store, self._settings, place, batch).run(app)
        if not mine:
            await asyncio.sleep(LOOK_S)  # another process runs it; do not try again at once


class _BatchRun:
    """Runs one batch, while this process holds its lock."""

    def __init__(
        self, store: BatchStore, settings: RunnerSettings, place: BatchPlace, batch: BatchObject
    ) -> None:
        self._store = store
        self._settings = settings
        self._place = place
        self._batch = batch
        self._outcome = Outcome()

    async def run(self, app: ASGIApp) -> None:
        grant = self._settings.grant_of(self._place.owner)
        if grant is None:
            await self._fail([BatchError("key_gone", "its API key is known no more")])
            return
        try:
            source = await asyncio.to_thread(
                self._store.content, self._place.owner, self._batch.input_file_id
            )
        except BatonError as error:
            await self._fail([BatchError("input_file_gone", error.message)])
            return
        total, errors = await asyncio.to_thread(check, source, self._batch.endpoint)
        if errors:
            await self._fail(errors)
            return
        started = self._batch.in_progress_at or _now()
        await self._tell("in_progress", in_progress_at=started, request_counts=RequestCounts(total))
        log.info("batch %s: %d requests", self._batch.id, total)
        why = await self._ask(source, _granted(app, grant))
        await self._tell("finalizing", finalizing_at=_now())
        await self._finish(source, why)

    async def _ask(self, source: Path, app: ASGIApp) -> str:
        """Send the requests. Return "" when all are answered; else "cancelled", "expired", or
        "failed" if the key has no room left for the answers."""
        plan = BatchPlan(
            source, self._place.answers, self._settings.concurrency, patience=_PATIENCE
        )
        headers = {"x-request-priority": PRIORITY}
        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(
            transport=transport, base_url="http://batch", headers=headers
        ) as client:
            asking = asyncio.create_task(run_batch(plan, client, self._note))
            why = ""
            try:
                while not why:
                    await asyncio.wait([asking], timeout=TELL_S)
                    if asking.done():
                        break
                    why = await self._why_not_on()
                    await self._tell(self._batch.status, request_counts=self._progress())
            finally:
                if not asking.done():
                    asking.cancel()
                    await asyncio.gather(asking, return_exceptions=True)
        if not why:
            asking.result()
        return why

    def _note(self, outcome: Outcome) -> None:
        self._outcome = outcome

    async def _why_not_on(self) -> str:
        if self._place.cancel.exists():
            return "cancelled"
        if time.time() >= self._batch.expires_at:
            return "expired"
        room = await asyncio.to_thread(self._store.room, self._place.owner)
        return "" if room >= 0 else "failed"

    async def _finish(self, source: Path, why: str) -> None:
        place, owner = self._place, self._place.owner
        folder = place.folder
        good, bad = folder / f"{place.id}.good", folder / f"{place.id}.bad"
        counts = await asyncio.to_thread(part, source, place.answers, (good, bad), why)
        expires = self._batch.output_expires_after
        kept_s = KEPT_S if expires is None else expires.seconds
        files: list[str | None] = []
        for path, name in ((good, "output"), (bad, "error")):
            if path.stat().st_size == 0:
                path.unlink()
                files.append(None)
                continue
            named = (f"{place.id}_{name}.jsonl", OUTPUT_PURPOSE)
            told = await asyncio.to_thread(self._store.add_file, owner, path, named, kept_s)
            files.append(told.id)
        status: Status = _STATUS[why]
        changes: dict[str, object] = {f"{status}_at": _now(), "request_counts": counts}
        if status == "cancelled":
            changes["cancelling_at"] = int(place.cancel.stat().st_mtime)
        if status == "failed":
            changes["errors"] = BatchErrors([_FULL])
        await self._tell(status, output_file_id=files[0], error_file_id=files[1], **changes)
        place.clear()
        log.info("batch %s: %s", place.id, status)

    async def _fail(self, errors: list[BatchError]) -> None:
        await self._tell("failed", failed_at=_now(), errors=BatchErrors(errors))
        self._place.clear()

    async def _tell(self, status: Status, **changes: object) -> None:
        self._batch = msgspec.structs.replace(self._batch, status=status, **changes)
        await asyncio.to_thread(self._store.put, self._place, self._batch)

    def _progress(self) -> RequestCounts:
        outcome = self._outcome
        failed = outcome.failed + outcome.failed_before
        answered = outcome.answered + outcome.skipped
        return RequestCounts(outcome.total, answered - failed, failed)


def check(source: Path, endpoint: str) -> tuple[int, list[BatchError]]:
    """Read the whole input file. Return the number of requests, and the errors (at most
    MOST_ERRORS). Call it in a thread."""
    errors: list[BatchError] = []
    seen: set[str] = set()
    with source.open("rb") as lines:
        for number, line in enumerate(lines, 1):
            if not line.strip():
                continue
            try:
                task = task_of(line, f"line {number}")
                check_new(task, seen, f"line {number}: ")
                if task.url != endpoint:
                    message = f"line {number}: url is {task.url[:100]!r}, not {endpoint}"
                    raise InvalidRequest(message, field="url")
            except InvalidRequest as error:
                errors.append(BatchError("invalid_line", error.message, number, error.field))
            else:
                seen.add(task.custom_id)
            if len(seen) > MOST_REQUESTS:
                errors.append(BatchError("too_many_requests", f"at most {MOST_REQUESTS} requests"))
            if len(seen) > MOST_REQUESTS or len(errors) >= MOST_ERRORS:
                break
    if not seen and not errors:
        errors.append(BatchError("empty_file", "the input holds no requests"))
    return len(seen), errors


def part(source: Path, answers: Path, targets: tuple[Path, Path], why: str) -> RequestCounts:
    """Split the answers into two files: those with a status below 400, and all others.

    A request without an answer goes to the second file, with `why` as the reason. Return the
    counts."""
    counts, answered = RequestCounts(), set[str]()
    with targets[0].open("wb") as good, targets[1].open("wb") as bad:
        for line in _lines(answers):
            told = orjson.loads(line)
            answered.add(told["custom_id"])
            response = told["response"]
            well = response is not None and response["status_code"] < 400
            (good if well else bad).write(line)
            counts.completed += well
            counts.failed += not well
        for task in read_tasks(source):
            counts.total += 1
            if task.custom_id not in answered:
                words = f"the batch {_ENDED[why]} before this request was answered"
                bad.write(failure_line(task.custom_id, f"batch_{why}", words))
    return counts


def _lines(path: Path) -> Iterator[bytes]:
    """Yield the complete lines of a file; none if the file does not exist."""
    with contextlib.suppress(FileNotFoundError), path.open("rb") as file:
        yield from (line for line in file if line.endswith(b"\n"))


def _granted(app: ASGIApp, grant: Grant) -> ASGIApp:
    """Return `app` with every request let in under `grant`, as if it had brought that key."""

    async def granted(scope: Scope, receive: Receive, send: Send) -> None:
        await app({**scope, GRANT_KEY: grant}, receive, send)

    return granted


def _now() -> int:
    return int(time.time())
