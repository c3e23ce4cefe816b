"""`baton batch in.jsonl out.jsonl`: answers a file of requests into a file, and can be resumed.

The requests go to a running router, or to one engine in this process (deploy/batch_engine.py); here
both are an httpx.AsyncClient. A second run with the same files continues where the first one ended.
"""

from __future__ import annotations

import asyncio

import httpx
from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

from baton.engine.config import EngineConfig
from router.batches.run import BatchPlan, Outcome, run_batch
from router.config import RouterConfig


def server_client(url: str, api_key: str | None, concurrency: int) -> httpx.AsyncClient:
    """Return a client of a running server, with a connection for each worker."""
    headers = {"authorization": f"Bearer {api_key}"} if api_key else {}
    limits = httpx.Limits(max_connections=concurrency, max_keepalive_connections=concurrency)
    return httpx.AsyncClient(base_url=url, headers=headers, limits=limits)


async def show_batch(plan: BatchPlan, client: httpx.AsyncClient, console: Console) -> Outcome:
    """Call `run_batch` and show a progress bar."""
    columns = (
        TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(),
        TimeElapsedColumn(), TimeRemainingColumn(),
    )  # fmt: skip
    with Progress(*columns, console=console) as progress:
        bar = progress.add_task("batch", total=None)

        def told(outcome: Outcome) -> None:
            text = f"batch, {outcome.failed} failed" if outcome.failed else "batch"
            done = outcome.skipped + outcome.answered
            progress.update(bar, total=outcome.total, completed=done, description=text)

        outcome = await run_batch(plan, client, told)
    console.print(
        f"{outcome.answered} answered ({outcome.failed} failed, {outcome.retries} retries),"
        f" {outcome.skipped} were there already ({outcome.failed_before} failed): {plan.target}"
    )
    return outcome


def batch(
    plan: BatchPlan,
    engine: tuple[EngineConfig, RouterConfig] | None,
    url: str,
    api_key: str | None,
    console: Console,
) -> int:
    """Run the command and return its exit status.

    The requests go to `url`, or to an `engine` of our own; `engine` has its options and those of
    its API.
    """

    async def run() -> Outcome:
        if engine is None:
            async with server_client(url, api_key, plan.concurrency) as client:
                return await show_batch(plan, client, console)
        from deploy.batch_engine import engine_app  # a late import: only this way needs torch

        async with engine_app(*engine) as app:
            transport = httpx.ASGITransport(app)
            async with httpx.AsyncClient(transport=transport, base_url="http://engine") as client:
                return await show_batch(plan, client, console)

    outcome = asyncio.run(run())
    return 1 if outcome.failed or outcome.failed_before else 0
