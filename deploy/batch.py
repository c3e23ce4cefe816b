"""`baton batch in.jsonl out.jsonl`: many requests from a file, answers to a file, resumable.

Against a running router, or one engine in this process (deploy/batch_engine.py); both are an
httpx.AsyncClient here. Run again with the same files, it goes on where it was.
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
    """A client of a running server with a connection for every worker."""
    headers = {"authorization": f"Bearer {api_key}"} if api_key else {}
    limits = httpx.Limits(max_connections=concurrency, max_keepalive_connections=concurrency)
    return httpx.AsyncClient(base_url=url, headers=headers, limits=limits)


async def show_batch(plan: BatchPlan, client: httpx.AsyncClient, console: Console) -> Outcome:
    """`run_batch` with a progress bar."""
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
    """The command: against `url`, or with an `engine` of our own and the API's options for it; the
    exit status."""

    async def run() -> Outcome:
        if engine is None:
            async with server_client(url, api_key, plan.concurrency) as client:
                return await show_batch(plan, client, console)
        from deploy.batch_engine import engine_app  # only this way needs torch

        async with engine_app(*engine) as app:
            transport = httpx.ASGITransport(app)
            async with httpx.AsyncClient(transport=transport, base_url="http://engine") as client:
                return await show_batch(plan, client, console)

    outcome = asyncio.run(run())
    return 1 if outcome.failed or outcome.failed_before else 0
