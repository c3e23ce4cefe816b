"""`baton console`: which URL it prints and opens, and what it says if nothing is there."""

from __future__ import annotations

import asyncio
import os
import webbrowser
from pathlib import Path

import pytest

from baton.protocol.errors import ConfigError
from deploy import cli
from deploy.console_feed import URL_FILE, console_address
from deploy.up import linked
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
        alive, dead = os.getpid(), 2**22 + 1  # no process has such a number
        for run, port in (
            (f"20260101-{alive}", "http://127.0.0.1:1"), (f"20260102-{alive}", origin),
            (f"20260103-{dead}", "http://127.0.0.1:2"),
        ):  # fmt: skip
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


def test_a_run_in_a_folder_of_its_own_is_found(tmp_path: Path) -> None:
    environ = {"XDG_CACHE_HOME": str(tmp_path / "cache")}
    folder = tmp_path / "mine"
    folder.mkdir()
    dead = tmp_path / "cache" / "baton" / "runs" / f"20990101-{2**22 + 1}"
    dead.parent.mkdir(parents=True)
    dead.symlink_to(folder)
    link = linked(folder, environ)
    assert link is not None
    (folder / URL_FILE).write_text("http://h:1/console#key=a\nhttp://h:2/console#key=a\n")
    assert console_address(None, None, environ).page == "http://h:1/console#key=a"
    assert not dead.is_symlink(), "its launcher was killed"
    link.unlink()
    with pytest.raises(ConfigError, match="no `baton up` runs here"):
        console_address(None, None, environ)


def test_a_certificate_of_ones_own_is_checked_by_its_file(
    opened: list[str], capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    for command in ("console", "top"):
        words = [command, "https://127.0.0.1:1/console", "--tls-ca", str(tmp_path / "none.pem")]
        assert cli.main(words) == 2
        assert "cannot use the certificates" in capsys.readouterr().err
    assert opened == []
