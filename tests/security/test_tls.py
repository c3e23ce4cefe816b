"""TLS of each listener with real certificates: who is let in, who is not, what stops the start."""

from __future__ import annotations

import asyncio
import socket
import ssl
import urllib.error
import urllib.request
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest
from prometheus_client import CollectorRegistry, Counter

from baton.client import AsyncClient, Client
from baton.node.config import NodeConfig
from baton.node.lanes import LaneSettings
from baton.node.metrics_server import MetricsPlace, metrics_token, metrics_tokens, start_metrics
from baton.protocol.clock import SystemClock
from baton.protocol.errors import ConfigError, Unavailable
from baton.protocol.handles import Role
from baton.runtime.rotation.deployment_secret import fixed
from baton.runtime.timing import Timing
from baton.runtime.tls import ClientTls, TlsFiles
from deploy.doctor import NoLog
from kv_transfer.lanes.memory import MemoryFabric
from router.api.grpc.inference import GrpcServer
from router.config import RouterConfig
from router.main import http_server
from router.metrics.metric_list import ROUTER
from router.nodes.registry import NodeRegistry, RegistryParts
from tests.front.fakes import Front
from tests.node.fakes import DECODE, PATIENCE_S, Setup, running_node
from tests.transfer.certificates import make_files

SECRET = "the deployment's secret"
FAST = Timing(heartbeat_s=0.1, connect_s=1.0)


@pytest.fixture(scope="module")
def own(tmp_path_factory: pytest.TempPathFactory) -> TlsFiles:
    return replace(make_files(tmp_path_factory.mktemp("own")), prefix="tls")


@pytest.fixture(scope="module")
def stranger(tmp_path_factory: pytest.TempPathFactory) -> TlsFiles:
    """A certificate of another CA."""
    return replace(make_files(tmp_path_factory.mktemp("stranger")), prefix="tls")


def options_of(files: TlsFiles, prefix: str = "tls", *, mutual: bool = True) -> dict[str, Any]:
    options = {f"{prefix}_cert": str(files.cert), f"{prefix}_key": str(files.key)}
    return options | ({f"{prefix}_ca": str(files.ca)} if mutual else {})


# ---- the public ports ----


@asynccontextmanager
async def http(config: RouterConfig) -> AsyncIterator[str]:
    """A router's HTTP port as router/main.py opens it. Its metrics name one node, decode-0."""
    listener = socket.create_server(("127.0.0.1", 0))
    front = Front(config=config)
    live = {("decode", "decode-0"): 0.0}
    ROUTER.watch(front.metrics.registry, lambda: {"baton_node_live_requests": live})
    server = http_server(config, front.app())
    serving = asyncio.create_task(server.serve([listener]))
    try:
        async with asyncio.timeout(PATIENCE_S):
            await server.began.wait()
        yield f"https://127.0.0.1:{listener.getsockname()[1]}"
    finally:
        server.should_exit = server.force_exit = True
        await serving


def believing(files: TlsFiles, shown: TlsFiles | None = None) -> ssl.SSLContext:
    context = ssl.create_default_context(cafile=str(files.ca))
    if shown is not None:
        context.load_cert_chain(shown.cert, shown.key)
    return context


async def test_https_for_whoever_believes_the_certificate(
    own: TlsFiles, stranger: TlsFiles
) -> None:
    async with http(RouterConfig(**options_of(own, mutual=False))) as url:
        async with httpx.AsyncClient(verify=believing(own)) as client:
            assert (await client.get(f"{url}/health")).status_code == 200
            body = {"prompt": "hello", "stream": True, "max_tokens": 4}
            answer = await client.post(f"{url}/v1/completions", json=body)
            assert answer.text.endswith("data: [DONE]\n\n")
        async with httpx.AsyncClient(verify=believing(stranger)) as client:
            with pytest.raises(httpx.ConnectError):
                await client.get(f"{url}/health")
        async with httpx.AsyncClient() as client:
            with pytest.raises(httpx.TransportError):
                await client.get(f"{url.replace('https', 'http')}/health")


async def test_old_tls_is_refused(own: TlsFiles) -> None:
    context = believing(own)
    context.set_ciphers("ALL:@SECLEVEL=0")
    context.minimum_version = ssl.TLSVersion.MINIMUM_SUPPORTED
    with pytest.warns(DeprecationWarning, match="TLSv1_1"):
        context.maximum_version = ssl.TLSVersion.TLSv1_1
    async with (
        http(RouterConfig(**options_of(own, mutual=False))) as url,
        httpx.AsyncClient(verify=context) as client,
    ):
        with pytest.raises(httpx.TransportError):
            await client.get(f"{url}/health")


async def test_https_with_certificates_of_clients(own: TlsFiles, stranger: TlsFiles) -> None:
    async with http(RouterConfig(**options_of(own))) as url:
        async with httpx.AsyncClient(verify=believing(own, own)) as client:
            assert (await client.get(f"{url}/health")).status_code == 200
        for shown in (None, stranger):
            async with httpx.AsyncClient(verify=believing(own, shown)) as client:
                with pytest.raises(httpx.TransportError):
                    await client.get(f"{url}/health")


@asynccontextmanager
async def grpc_door(config: RouterConfig) -> AsyncIterator[str]:
    server = GrpcServer(Front(config=config).services)
    port = server.bind()
    await server.start()
    try:
        yield f"127.0.0.1:{port}"
    finally:
        await server.stop(0)


async def test_grpc_for_whoever_believes_the_certificate(own: TlsFiles, stranger: TlsFiles) -> None:
    config = RouterConfig(grpc_port=0, api_key=("k",), **options_of(own, mutual=False))
    async with grpc_door(config) as address:
        async with AsyncClient(address, "k", tls=ClientTls(own.ca)) as client:
            assert [model.id for model in await client.models()] == ["tiny"]
        for tls in (None, ClientTls(stranger.ca), ClientTls()):
            async with AsyncClient(address, "k", timeout_s=2.0, tls=tls) as client:
                with pytest.raises(Unavailable):
                    await client.models()

        def blocking() -> int:
            with Client(address, "k", tls=ClientTls(own.ca)) as client:
                return len(client.models())

        assert await asyncio.to_thread(blocking) == 1


async def test_grpc_with_certificates_of_clients(own: TlsFiles, stranger: TlsFiles) -> None:
    async with grpc_door(RouterConfig(grpc_port=0, **options_of(own))) as address:
        async with AsyncClient(address, tls=ClientTls(own.ca, own.cert, own.key)) as client:
            assert len(await client.models()) == 1
        for tls in (ClientTls(own.ca), ClientTls(own.ca, stranger.cert, stranger.key)):
            async with AsyncClient(address, timeout_s=2.0, tls=tls) as client:
                with pytest.raises(Unavailable):
                    await client.models()


def test_files_of_a_client_are_read_or_named(own: TlsFiles, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"none\.pem"):
        ClientTls(tmp_path / "none.pem").channel_credentials()
    with pytest.raises(ConfigError, match="key"):
        ClientTls(own.ca, own.cert).channel_credentials()


# ---- between router and nodes ----


@asynccontextmanager
async def registry_of(address: str, tls: TlsFiles | None) -> AsyncIterator[NodeRegistry]:
    clock, secrets = SystemClock(), fixed(SECRET)
    addresses = {address: Role.DECODE}
    parts = RegistryParts("router", secrets, FAST, clock, NoLog(), addresses, tls=tls)
    registry = NodeRegistry(parts)
    await registry.start()
    try:
        yield registry
    finally:
        await registry.stop()


async def test_sessions_under_mutual_tls(own: TlsFiles, stranger: TlsFiles) -> None:
    setup = Setup(options={"secret": SECRET, **options_of(own)})
    async with running_node(DECODE, MemoryFabric(), setup) as node:
        address = node.node.address
        async with registry_of(address, own) as registry, asyncio.timeout(PATIENCE_S):
            await registry.wait_until(lambda: len(registry.records()) == 1)
        for wrong in (None, stranger, replace(stranger, ca=own.ca), replace(own, ca=stranger.ca)):
            async with registry_of(address, wrong) as registry:
                with pytest.raises(TimeoutError):
                    async with asyncio.timeout(0.7):
                        await registry.wait_until(lambda: bool(registry.records()))


async def test_tls_does_not_replace_the_secret(own: TlsFiles) -> None:
    setup = Setup(options={"secret": "another secret", **options_of(own)})
    async with (
        running_node(DECODE, MemoryFabric(), setup) as node,
        registry_of(node.node.address, own) as registry,
    ):
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.7):
                await registry.wait_until(lambda: bool(registry.records()))


# ---- a node's metrics ----


@pytest.mark.parametrize("encrypted", [False, True])
async def test_metrics_want_the_token(own: TlsFiles, encrypted: bool) -> None:
    registry = CollectorRegistry()
    Counter("things", "", registry=registry).inc(3)
    token = metrics_token(SECRET)
    assert SECRET not in token
    tls = own if encrypted else None

    server = start_metrics(
        registry, MetricsPlace("127.0.0.1", 0, metrics_tokens(fixed(SECRET)), tls)
    )
    url = f"http{'s' if encrypted else ''}://127.0.0.1:{server.port}"
    context = believing(own, own) if encrypted else None

    def scrape(given: str | None, context: ssl.SSLContext | None = context) -> str:
        headers = {} if given is None else {"authorization": given}
        asked = urllib.request.Request(f"{url}/metrics", headers=headers)
        with urllib.request.urlopen(asked, timeout=PATIENCE_S, context=context) as answer:
            return answer.read().decode()

    try:
        silent = socket.create_connection(("127.0.0.1", server.port))  # stops nobody
        assert "things_total 3.0" in await asyncio.to_thread(scrape, f"Bearer {token}")
        for wrong in (None, "Bearer", f"Bearer {token}x", f"Bearer {SECRET}", token):
            with pytest.raises(urllib.error.HTTPError) as caught:
                await asyncio.to_thread(scrape, wrong)
            assert caught.value.code == 401
            caught.value.close()
        if encrypted:
            with pytest.raises(OSError, match=r"(?i)ssl|reset|eof|certificate"):
                await asyncio.to_thread(scrape, f"Bearer {token}", believing(own))
        silent.close()
    finally:
        server.stop()


# ---- configuration ----

OPEN = {"host": "10.0.0.7", "secret": "s"}
FILES = {"tls_cert": "c", "tls_key": "k", "tls_ca": "a"}
KV_FILES = {f"kv_{name}": "x" for name in FILES}


def test_an_open_node_needs_tls_or_consent() -> None:
    NodeConfig(**OPEN, **FILES).check()  # type: ignore[arg-type]
    for given in ({}, KV_FILES):  # KV alone is not enough
        with pytest.raises(ConfigError) as caught:
            NodeConfig(**OPEN, **given).check()  # type: ignore[arg-type]
        assert caught.value.field == "insecure"


def test_an_open_router_needs_tls_or_consent() -> None:
    both = {"tls_cert": "c", "tls_key": "k"}
    RouterConfig(host="10.0.0.7", api_key=("k",), **both).check()  # type: ignore[arg-type]
    with pytest.raises(ConfigError) as caught:
        RouterConfig(host="10.0.0.7", api_key=("k",)).check()
    assert caught.value.field == "insecure"
    with pytest.raises(ConfigError) as caught:
        RouterConfig(host="10.0.0.7", **both).check()  # type: ignore[arg-type]
    assert caught.value.field == "api_key", "TLS is no key"


def test_kv_transfer_goes_by_the_nodes_files_unless_it_has_its_own() -> None:
    settings = LaneSettings.of(NodeConfig(**FILES), Timing())  # type: ignore[arg-type]
    assert settings.tls == TlsFiles(Path("c"), Path("k"), Path("a"), "tls")
    settings = LaneSettings.of(NodeConfig(**FILES, **KV_FILES), Timing())  # type: ignore[arg-type]
    assert settings.tls is not None
    assert settings.tls.prefix == "kv_tls"


@pytest.mark.parametrize(
    ("config", "given", "field"),
    [
        (NodeConfig, {"tls_cert": "c", "tls_key": "k"}, "tls_ca"),
        (NodeConfig, {"tls_ca": "a"}, "tls_cert"),
        (RouterConfig, {"tls_cert": "c"}, "tls_key"),
        (RouterConfig, {"tls_ca": "a"}, "tls_cert"),
        (RouterConfig, {"node_tls_cert": "c", "node_tls_key": "k"}, "node_tls_ca"),
    ],
)
def test_half_a_set_of_files_stops_the_start(config: Any, given: Any, field: str) -> None:
    with pytest.raises(ConfigError) as caught:
        config(**given).check()
    assert caught.value.field == field


async def test_unusable_files_are_named_by_their_option(own: TlsFiles, tmp_path: Path) -> None:
    missing = tmp_path / "none.pem"
    for files, field in (
        (replace(own, ca=missing), "tls_ca"),
        (replace(own, cert=missing), "tls_cert"),
        (replace(own, key=own.cert), "tls_cert"),
        (replace(own, key=missing, prefix="node_tls"), "node_tls_cert"),
    ):
        for make in (files.server_credentials, files.channel_credentials, files.expiration):
            with pytest.raises(ConfigError) as caught:
                make()
            assert caught.value.field == field
    with pytest.raises(ConfigError) as caught:
        replace(own, ca=None).channel_credentials()
    assert caught.value.field == "tls_ca"
    server = GrpcServer(Front(config=RouterConfig(**options_of(replace(own, ca=missing)))).services)
    with pytest.raises(ConfigError) as caught:
        server.bind()
    assert caught.value.field == "tls_ca"
