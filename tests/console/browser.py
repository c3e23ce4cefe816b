"""A real browser without a head, for tests of the console: Debian's Chromium, driven by playwright.

`async with browser() as chromium` skips the test where either is missing. `Visit` is one tab: it
keeps what the page said on its console, what it asked of other hosts, and how it was answered.
"""

from __future__ import annotations

import asyncio
import importlib.util
import shutil
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import urlsplit

import pytest
import uvicorn

from tests.waiting import WAIT_S

if TYPE_CHECKING:
    from playwright.async_api import Browser, ConsoleMessage, Page, Request
    from starlette.types import ASGIApp

CHROMIUM: Final = shutil.which("chromium") or shutil.which("chromium-browser")
FLAGS: Final = (
    "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
    "--disable-background-networking", "--disable-component-update", "--disable-sync",
)  # fmt: skip
DESKTOP: Final = {"width": 1280, "height": 800}
PHONE: Final = {"width": 390, "height": 844}
READY: Final = "main[data-ready=true]"
WAIT_MS: Final = WAIT_S * 1000


@asynccontextmanager
async def browser() -> AsyncIterator[Browser]:
    """Yield a Chromium; skip the test if there is none."""
    if importlib.util.find_spec("playwright") is None:
        pytest.skip("playwright is not installed: pip install playwright")
    if CHROMIUM is None:
        pytest.skip("no chromium on PATH: apt-get install chromium")
    from playwright.async_api import async_playwright

    async with async_playwright() as playwright:
        chromium = await playwright.chromium.launch(executable_path=CHROMIUM, args=list(FLAGS))
        try:
            yield chromium
        finally:
            await chromium.close()


@dataclass  # playwright hangs its wrappers on what it calls, so no slots
class Visit:
    """One tab on one console. `faults`: errors and warnings of the page; `outside`: addresses of
    other hosts that it asked."""

    page: Page
    origin: str
    faults: list[str] = field(default_factory=list[str])
    outside: list[str] = field(default_factory=list[str])

    def listen(self) -> None:
        self.page.set_default_timeout(WAIT_MS)
        self.page.on("console", self._said)
        self.page.on("pageerror", lambda error: self.faults.append(str(error)))
        self.page.on("request", self._asked)

    def _said(self, message: ConsoleMessage) -> None:
        if message.type in ("error", "warning"):
            self.faults.append(message.text)

    def _asked(self, request: Request) -> None:
        parts = urlsplit(request.url)
        if parts.scheme not in ("data", "blob") and f"{parts.scheme}://{parts.netloc}" != (
            self.origin
        ):
            self.outside.append(request.url)

    async def open(self, key: str, view: str = "cluster") -> None:
        """Open the console with a key, and wait until the view has its data."""
        await self.page.goto("about:blank")  # else a page that is open already would stay
        reply = await self.page.goto(f"{self.origin}/console#key={key}")
        assert reply is not None
        assert reply.status == 200
        policy = reply.headers["content-security-policy"]
        assert "default-src 'none'" in policy
        assert "unsafe" not in policy
        await self.page.wait_for_selector(READY)
        await self.show(view)

    async def show(self, view: str) -> None:
        """Go to a view by its address: "cluster", "requests/ID", ..."""
        await self.page.evaluate("view => { location.hash = `#/${view}`; }", view)
        name = view.split("/")[0]
        await self.page.wait_for_selector(f"main[data-view={name}][data-ready=true]")

    async def text(self) -> str:
        return await self.page.inner_text("main")

    def clean(self) -> None:
        """Raise AssertionError if the page complained, or asked another host."""
        assert self.faults == []
        assert self.outside == []


@asynccontextmanager
async def visit(
    chromium: Browser, origin: str, viewport: dict[str, int] = DESKTOP, **options: Any
) -> AsyncIterator[Visit]:
    """A fresh tab, without anything kept from others."""
    context = await chromium.new_context(viewport=viewport, **options)  # pyright: ignore[reportArgumentType]
    try:
        tab = Visit(await context.new_page(), origin)
        tab.listen()
        yield tab
    finally:
        await context.close()


@asynccontextmanager
async def served(app: ASGIApp) -> AsyncIterator[str]:
    """Serve an app on a free port of loopback; yields http://HOST:PORT."""
    config = uvicorn.Config(app, log_level="error", lifespan="off", timeout_graceful_shutdown=1)
    server = uvicorn.Server(config)
    with socket.create_server(("127.0.0.1", 0)) as listening:  # it queues who comes early
        task = asyncio.create_task(server._serve(sockets=[listening]))  # leaves signals alone
        try:
            yield f"http://127.0.0.1:{listening.getsockname()[1]}"
        finally:
            server.should_exit = True
            server.force_exit = True
            await task
