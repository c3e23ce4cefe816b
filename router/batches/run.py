"""Send the requests of a batch file through an HTTP client, a fixed number at once.

A request that gets 429, 503 or a broken connection is sent again, no earlier than the server asks
for. Called again with the same files, `run_batch` sends only what has no answer yet. `baton batch`
and the router's /v1/batches use this file.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import httpx
import orjson

from router.batches.lines import BatchTask, Output, Response, check_tasks, read_tasks

RETRIED: Final = frozenset({429, 503})
CONNECT_S: Final = 10.0


@dataclass(frozen=True, slots=True)
class RetryPatience:
    """How often a request is tried, and how long to wait in between.

    Without a Retry-After the wait doubles from `first_s`. No wait is longer than `longest_s`."""

    tries: int = 8
    first_s: float = 0.5
    longest_s: float = 60.0

    def wait_s(self, attempt: int, asked: str | None) -> float:
        """Return the seconds to wait after try number `attempt`, which counts from 1. `asked`: the
        value of Retry-After, or None."""
        if asked is not None:
            try:
                return min(max(0.0, float(asked)), self.longest_s)
            except ValueError:
                pass  # a date: treated like no Retry-After
        # Random, so that the workers do not all come back in the same instant.
        return min(self.first_s * 2 ** (attempt - 1), self.longest_s) * (0.5 + random.random() / 2)


@dataclass(frozen=True, slots=True)
class BatchPlan:
    source: Path
    target: Path
    concurrency: int = 64
    timeout_s: float = 3600.0  # of one request
    patience: RetryPatience = RetryPatience()


@dataclass(slots=True)
class Outcome:
    """Counts of requests. `total`: all of the file; `answered`: got an answer or an error in this
    run; `failed`: those of `answered` with an error or a status from 400 on; `skipped`: the output
    had them already; `failed_before`: those of `skipped` that had failed."""

    total: int = 0
    skipped: int = 0
    answered: int = 0
    failed: int = 0
    failed_before: int = 0
    retries: int = 0


async def run_batch(
    plan: BatchPlan, client: httpx.AsyncClient, told: Callable[[Outcome], None]
) -> Outcome:
    """Send every request that has no answer yet; call `told` at the start and after each answer.

    Raises InvalidRequest for a bad file, before any request is sent.
    """
    output = Output(plan.target)
    outcome = await asyncio.to_thread(_begin, plan, output)
    before = frozenset(output.done)
    tasks = (task for task in read_tasks(plan.source) if task.custom_id not in before)
    told(outcome)
    try:
        async with asyncio.TaskGroup() as group:
            for _ in range(plan.concurrency):
                group.create_task(_Worker(plan, client, output, outcome, told).run(tasks))
    finally:
        output.close()
    return outcome


def _begin(plan: BatchPlan, output: Output) -> Outcome:
    """Check the source, open the output and count what is there. Raises InvalidRequest."""
    total = check_tasks(plan.source)
    output.open()
    done = output.done
    skipped = [done[task.custom_id] for task in read_tasks(plan.source) if task.custom_id in done]
    return Outcome(total, len(skipped), failed_before=skipped.count(False))


@dataclass(frozen=True, slots=True)
class _Worker:
    plan: BatchPlan
    client: httpx.AsyncClient
    output: Output
    outcome: Outcome
    told: Callable[[Outcome], None]

    async def run(self, tasks: Iterator[BatchTask]) -> None:
        for task in tasks:  # shared by all workers
            response, error = await self._answer(task)
            self.output.write(task, response, error)
            self.outcome.answered += 1
            self.outcome.failed += not self.output.done[task.custom_id]
            self.told(self.outcome)

    async def _answer(self, task: BatchTask) -> tuple[Response | None, tuple[str, str] | None]:
        """Send a request until its answer is final or the tries are used up.

        Return (answer, None), or (None, (code, message)) if the last try got no answer."""
        patience, attempt = self.plan.patience, 1
        while True:
            response, error, asked = await self._try(task)
            final = response is not None and response.status_code not in RETRIED
            if final or attempt == patience.tries or (error is not None and error[0] == "timeout"):
                return response, error
            self.outcome.retries += 1
            await asyncio.sleep(patience.wait_s(attempt, asked))
            attempt += 1

    async def _try(
        self, task: BatchTask
    ) -> tuple[Response | None, tuple[str, str] | None, str | None]:
        """Send a request once. Return the answer or None, (code, message) or None, and the value of
        Retry-After or None."""
        try:
            reply = await self.client.post(task.url, json=task.body, timeout=self._timeout)
        except httpx.ReadTimeout:
            return None, ("timeout", f"no answer within {self.plan.timeout_s:g} s"), None
        except httpx.TransportError as failure:
            message = f"{type(failure).__name__}: {failure}"
            return None, ("connection_error", message), None
        return _response(reply), None, reply.headers.get("retry-after")

    @property
    def _timeout(self) -> httpx.Timeout:
        return httpx.Timeout(self.plan.timeout_s, connect=CONNECT_S)


def _response(reply: httpx.Response) -> Response:
    try:
        body = orjson.loads(reply.content)
    except orjson.JSONDecodeError:
        body = reply.text  # not JSON, such as the error page of a proxy
    return Response(reply.status_code, reply.headers.get("x-request-id", ""), body)
