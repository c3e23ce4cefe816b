"""`baton console`: which URL it prints and opens, and what it says if nothing is there."""

from __future__ import annotations

import asyncio
import webbrowser
from pathlib import Path

import pytest

from deploy import cli
from deploy.console_feed import URL_FILE
from tests.console.browser import served
from tests.console.fake_console import KEY, FakeConsole


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What the browser was asked to open."""
    urls: list[str] = []
    monkeypatch.setattr(webbrowser, "open", urls.append)
    monkeypatch.delenv("BATON_ADMIN_KEY", raising=False)
    return urls


async def test_it_opens_what_it_prints(
    opened: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    async with served(FakeConsole().app()) as origin:
        words = ["console", f"{origin}/console", "--admin-key", KEY]
        assert await asyncio.to_thread(cli.main, words) == 0
        page = f"{origin}/console#key={KEY}"
        assert capsys.readouterr().out.strip() == page
        assert opened == [page]
        assert await asyncio.to_thread(cli.main, [*words, "--no-browser"]) == 0
        assert capsys.readouterr().out.strip() == page
        assert opened == [page]


async def test_without_a_url_it_takes_the_newest_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, opened: list[str]
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    async with served(FakeConsole().app()) as origin:
        for run, port in (("2026-01-01", "http://127.0.0.1:1"), ("2026-01-02", origin)):
            folder = tmp_path / "baton" / "runs" / run
            folder.mkdir(parents=True)
            (folder / URL_FILE).write_text(f"{port}/console#key={KEY}\n")
        assert await asyncio.to_thread(cli.main, ["console"]) == 0
    assert opened == [f"{origin}/console#key={KEY}"]


async def test_a_router_without_a_console_is_one_line(
    opened: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    async with served(FakeConsole().app()) as origin:
        pass  # nobody listens there any more
    assert await asyncio.to_thread(cli.main, ["console", origin]) == 1
    assert capsys.readouterr().err.startswith(f"baton: no router answers at {origin}")
    assert opened == []
