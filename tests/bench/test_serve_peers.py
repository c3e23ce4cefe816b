"""Other systems' servers in `baton bench serve`: started, asked until ready, compared, ended."""

from __future__ import annotations

import sys
from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager

import httpx
import pytest
from rich.console import Console

from baton.protocol.errors import ConfigError
from bench import serve
from bench.load import LoadTarget
from bench.serve import ServeOptions, compare, parse, show, systems
from bench.serve_peers import label_of, peer_server
from tests.bench.test_load import FakeModel, serving

SERVER = f"{sys.executable} -m tests.bench.fake_server {{port}}"


async def test_a_server_is_started_and_ended() -> None:
    async with peer_server(SERVER, LoadTarget("")) as url, httpx.AsyncClient() as client:
        assert (await client.get(f"{url}/ready")).is_success
    async with httpx.AsyncClient() as client:
        with pytest.raises(httpx.ConnectError):
            await client.get(f"{url}/ready")


@pytest.mark.parametrize(
    ("command", "said"),
    [("no-such-program {port}", "no-such-program"), (f"{sys.executable} -c ''", "status 0")],
)
async def test_a_server_that_does_not_start(command: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        async with peer_server(command, LoadTarget("")):
            pass


async def test_every_system_has_its_turn_in_each_round(monkeypatch: pytest.MonkeyPatch) -> None:
    model, other = FakeModel(), FakeModel()
    started: list[Sequence[str]] = []
    async with serving(model) as url, serving(other) as beside:

        @asynccontextmanager
        async def cluster(flags: Sequence[str]) -> AsyncGenerator[dict[str, str], None]:
            started.append(flags)
            yield {"url": url}

        monkeypatch.setattr(serve, "cluster", cluster)
        options = ServeOptions(
            peer_url=(beside,), requests=2, rate=0.0, rounds=2, warm_up=0, output_tokens=4
        )
        console = Console(width=200)
        with console.capture() as captured:
            runs = await compare(options, ["--model", "m"], console)
            result = show(runs, options, console)
    label = label_of(beside)
    assert [run.label for run in runs] == ["apart", "colocated", label] * 2
    assert started == [["--model", "m"], ["--colocated", "--model", "m"]] * 2
    assert (len(model.requests), len(other.requests)) == (8, 4)
    ratio = result[f"apart_over_{label}"]["tokens/s"]
    first = runs[0].token_rate / runs[2].token_rate
    assert min(first, ratio["median"]) >= ratio["min"] > 0
    assert f"colocated / {label}" in captured.get()


def test_two_systems_of_one_name_are_refused() -> None:
    both = ("llama-server --port {port}", "/usr/bin/llama-server -p {port}")
    with pytest.raises(ConfigError, match="called alike"):
        systems(ServeOptions(peer=both), [])
    assert list(systems(ServeOptions(peer=both[:1]), [])) == ["apart", "colocated", "llama-server"]


def test_a_peer_compares() -> None:
    options, passed_on = parse(
        ["--peer", "x {port}", "--peer-url", "http://h:1/v1", "--", "--demo"]
    )
    assert options.compares
    assert options.peers == ("x", "h:1")
    assert passed_on == ["--demo"]
