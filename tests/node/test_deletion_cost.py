"""The pod-deletion-cost that a node keeps: what it is, when it is told, and that it never matters.

The API server is a stand-in that speaks HTTPS on loopback and knows one pod: what a real one makes
of the request, only a cluster shows (docs/operations.md#kubernetes).
"""

from __future__ import annotations

import asyncio
import json
import logging
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.node.kubernetes.deletion_cost import (
    ANNOTATION,
    HIGHEST,
    INTERVAL_S,
    LEAVING,
    LONGEST_INTERVAL_S,
    CostNews,
    Pod,
    deletion_cost,
)
from baton.node.kubernetes.pod_annotation import DeletionCost
from baton.protocol.handles import NodeLoad
from baton.runtime.tls import TlsFiles
from kv_transfer.lanes.memory import MemoryFabric
from tests.fakes import FakeClock, request
from tests.mounted_secret import MountedSecret
from tests.node.fakes import PATIENCE_S, PREFILL, Setup, connected, running_node
from tests.transfer.certificates import make_files
from tests.waiting import eventually

IDLE = NodeLoad(free_blocks=100, total_blocks=100)

# ---- what it is ----


def test_the_pod_that_loses_least_costs_least() -> None:
    """In this order a scale-down removes them."""
    loads = [
        (replace(IDLE, draining=True, free_blocks=50), 9),
        (IDLE, 0),
        (replace(IDLE, cached_blocks=40), 0),
        (replace(IDLE, free_blocks=99), 1),
        (replace(IDLE, free_blocks=80), 1),
        (replace(IDLE, free_blocks=80), 3),
        (replace(IDLE, free_blocks=80, waiting_tokens=900), 4),
    ]
    costs = [deletion_cost(load, requests, 16) for load, requests in loads]
    assert costs == sorted(set(costs))
    assert costs[:2] == [LEAVING, 0]
    assert deletion_cost(replace(IDLE, asleep=True), 0, 16) == LEAVING


@given(st.integers(0, 1 << 30), st.integers(0, 1 << 30), st.integers(0, 1 << 20), st.integers(1, 8))
def test_a_cost_is_what_kubernetes_takes(blocks: int, free: int, requests: int, ranks: int) -> None:
    load = NodeLoad(free_blocks=min(free, blocks), total_blocks=blocks)
    cost = deletion_cost(load, requests, 16, ranks)
    assert 0 <= cost <= HIGHEST == 2147483647
    assert cost >= deletion_cost(load, requests, 16)


# ---- when it is told ----


def test_only_what_changes_much_is_told_and_not_often() -> None:
    news = CostNews()
    assert news.due(0, 0.0), "an earlier run of this container may have left one"
    news.told(0, 0.0)
    assert not news.due(50_000, INTERVAL_S - 0.1)
    assert news.due(50_000, INTERVAL_S)
    news.told(50_000, INTERVAL_S)
    later = 1e6
    assert not news.due(50_000, later)
    assert not news.due(60_000, later), "less than a quarter"
    assert not news.due(40_000, later)
    assert news.due(63_000, later)
    assert news.due(0, later)
    assert news.due(LEAVING, later)
    news.told(0, later)
    assert not news.due(200, later + INTERVAL_S), "less than a request"
    assert news.due(LEAVING, later + INTERVAL_S)


def test_who_refuses_is_asked_less_and_less_often() -> None:
    news, now, waits = CostNews(), 0.0, []
    for _ in range(7):
        assert news.due(5, now)
        news.failed(now)
        wait = 1.0
        while not news.due(5, now + wait):
            wait += 1.0
        waits.append(wait)
        now += wait
    assert waits == [30.0, 60.0, 120.0, 240.0, 480.0, LONGEST_INTERVAL_S, LONGEST_INTERVAL_S]
    news.told(5, now)
    news.failed(now + INTERVAL_S)
    assert news.due(5, now + 2 * INTERVAL_S), "after a success from the start; it may not be there"


@given(st.lists(st.tuples(st.integers(0, 10**6), st.floats(0, 10)), min_size=1, max_size=300))
def test_no_load_makes_it_tell_more_often_than_the_interval(
    beats: list[tuple[int, float]],
) -> None:
    news, now, told = CostNews(), 0.0, list[float]()
    for cost, seconds in beats:
        now += seconds
        if news.due(cost, now):
            news.told(cost, now)
            told.append(now)
    assert all(after - before >= INTERVAL_S for before, after in pairwise(told))


# ---- the API server ----


@dataclass
class Heard:
    path: str
    token: str
    headers: dict[str, str]
    body: Any


@dataclass
class ApiServer:
    """Answers PATCH of one pod's status, over TLS. `refusal`: a status in place of 200."""

    certificate: TlsFiles
    token: str = "first"
    refusal: int | None = None
    location: str = ""
    heard: list[Heard] = field(default_factory=list[Heard])
    annotations: dict[str, str] = field(default_factory=dict[str, str])
    gate: threading.Event = field(default_factory=threading.Event)  # closed: it never answers

    def __post_init__(self) -> None:
        self.gate.set()
        api = self

        class Handler(BaseHTTPRequestHandler):
            def do_PATCH(self) -> None:
                length = int(self.headers["Content-Length"])
                api.answer(self, json.loads(self.rfile.read(length)))

            def log_message(self, format: str, *args: object) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.socket = self.certificate.server_context().wrap_socket(
            self._server.socket, server_side=True
        )
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.01,))
        self._thread.start()

    @property
    def url(self) -> str:
        return f"https://127.0.0.1:{self._server.server_address[1]}"

    def answer(self, handler: BaseHTTPRequestHandler, body: Any) -> None:
        token = handler.headers["Authorization"].removeprefix("Bearer ")
        self.heard.append(Heard(handler.path, token, dict(handler.headers), body))
        self.gate.wait(PATIENCE_S)
        status = self.refusal or (200 if token == self.token else 401)
        if status == 200:
            self.annotations |= body["metadata"]["annotations"]
        text = json.dumps({"kind": "Status", "message": f"pods is refused: {status}"}).encode()
        handler.send_response(status)
        if self.location:
            handler.send_header("Location", self.location)
        handler.send_header("Content-Length", str(len(text)))
        handler.end_headers()
        handler.wfile.write(text)

    async def asked(self) -> bool:
        return bool(self.heard)

    async def told(self) -> bool:
        return bool(self.annotations)

    def stop(self) -> None:
        self.gate.set()
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()


@pytest.fixture(scope="module")
def first_ca(tmp_path_factory: pytest.TempPathFactory) -> TlsFiles:
    return make_files(tmp_path_factory.mktemp("first"))


@pytest.fixture(scope="module")
def second_ca(tmp_path_factory: pytest.TempPathFactory) -> TlsFiles:
    return make_files(tmp_path_factory.mktemp("second"))


def server_of(files: TlsFiles, **changes: Any) -> ApiServer:
    return ApiServer(replace(files, ca=None), **changes)


def text_of(files: TlsFiles) -> str:
    assert files.ca is not None
    return files.ca.read_text()


@pytest.fixture
def api(first_ca: TlsFiles) -> Iterator[ApiServer]:
    server = server_of(first_ca)
    yield server
    server.stop()


@pytest.fixture
def account(tmp_path: Path, first_ca: TlsFiles) -> MountedSecret:
    """What the kubelet mounts, with a line's end as some tools leave it."""
    content = {"token": "first\n", "namespace": "serving", "ca.crt": text_of(first_ca)}
    return MountedSecret(tmp_path / "account", content)


class Kept:
    """A DeletionCost under a clock of the test; look() waits until it has told, if it does."""

    def __init__(self, api: str, account: MountedSecret, name: str = "decode-7f-x2") -> None:
        self.clock = FakeClock()
        self.cost = DeletionCost(Pod(name, api, account.folder), 16, self.clock)

    async def look(self, load: NodeLoad = IDLE, requests: int = 0) -> None:
        self.cost.look(load, requests)
        async with asyncio.timeout(PATIENCE_S):
            await asyncio.gather(
                *(task for task in asyncio.all_tasks() if task.get_name() == "pod-deletion-cost")
            )

    async def later(self, load: NodeLoad = IDLE, requests: int = 0) -> None:
        self.clock.advance(LONGEST_INTERVAL_S)
        await self.look(load, requests)


async def test_it_patches_its_own_pods_annotation_alone(
    api: ApiServer, account: MountedSecret
) -> None:
    kept = Kept(api.url, account)
    await kept.look()
    assert api.annotations == {ANNOTATION: "0"}
    await kept.look(replace(IDLE, free_blocks=0), 3)
    assert len(api.heard) == 1, "too soon"
    await kept.later(replace(IDLE, free_blocks=0), 3)
    assert api.annotations == {ANNOTATION: str(100 * 16 + 3 * 256)}
    await kept.later(replace(IDLE, free_blocks=0), 3)
    assert len(api.heard) == 2, "no news"
    heard = api.heard[-1]
    assert heard.path == "/api/v1/namespaces/serving/pods/decode-7f-x2/status"
    assert heard.headers["Content-Type"] == "application/merge-patch+json"
    assert heard.body == {"metadata": {"annotations": api.annotations}}
    await kept.cost.stop()
    await kept.cost.stop()


async def test_a_token_and_a_ca_that_are_replaced_are_read_again(
    api: ApiServer, account: MountedSecret, first_ca: TlsFiles, second_ca: TlsFiles
) -> None:
    kept = Kept(api.url, account)
    await kept.look()
    later = server_of(second_ca, token="second")
    try:
        moved = Kept(later.url, account)
        await moved.look()
        assert later.heard == [], "not even the token, without trust"
        account.update({
            "token": "second", "namespace": "serving",
            "ca.crt": text_of(first_ca) + text_of(second_ca),
        })  # fmt: skip
        await moved.later()
        assert later.annotations == {ANNOTATION: "0"}
        await kept.later(replace(IDLE, free_blocks=0))
        assert [each.token for each in api.heard] == ["first", "second"]
    finally:
        later.stop()


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [each.message for each in caplog.records if each.levelno >= logging.WARNING]


@pytest.mark.parametrize(
    ("refusal", "hint"),
    [
        (403, "status 403: the service account needs the right to patch pods/status"),
        (401, "status 401: the token is not, or no longer, a service account's"),
        (404, "status 404: there is no such pod: --pod-name must be metadata.name"),
        (429, "status 429 (pods is refused: 429)"),
        (599, "status 599 (pods is refused: 599)"),
    ],
)
async def test_a_refusal_is_said_once_with_what_to_do(
    refusal: int,
    hint: str,
    api: ApiServer,
    account: MountedSecret,
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO, logger="baton.node.kubernetes")
    api.refusal = refusal
    kept = Kept(api.url, account)
    await kept.look()
    for _ in range(3):
        await kept.later()
    assert len(api.heard) == 4
    (warning,) = warnings(caplog)
    assert hint in warning
    api.refusal = None
    await kept.later()
    assert api.annotations == {ANNOTATION: "0"}
    assert caplog.records[-1].message == "the pod's deletion cost is told again"


async def test_an_api_server_that_is_away_costs_one_line(
    account: MountedSecret, first_ca: TlsFiles, caplog: pytest.LogCaptureFixture
) -> None:
    gone = server_of(first_ca)
    gone.stop()
    kept = Kept(gone.url, account)
    await kept.look()
    for _ in range(3):
        await kept.later()
    (warning,) = warnings(caplog)
    assert "this node goes on without" in warning


@pytest.mark.parametrize("missing", ["token", "ca.crt", "namespace"])
async def test_an_account_without_its_files_costs_one_line(
    missing: str, api: ApiServer, account: MountedSecret, caplog: pytest.LogCaptureFixture
) -> None:
    account.path(missing).unlink()
    kept = Kept(api.url, account)
    await kept.look()
    await kept.later()
    (warning,) = warnings(caplog)
    assert missing in warning
    assert api.heard == []


@pytest.mark.parametrize(
    "changes",
    [
        {"token": "se cret\u00e9"}, {"token": ""}, {"namespace": "../kube-system"},
        {"ca.crt": ""}, {"ca.crt": "half a certif"},
    ],
)  # fmt: skip
async def test_files_that_make_no_request_show_nothing(
    changes: dict[str, str], api: ApiServer, account: MountedSecret, first_ca: TlsFiles,
    caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    account.update(
        {"token": "first", "namespace": "serving", "ca.crt": text_of(first_ca)} | changes
    )
    await Kept(api.url, account).look()
    assert api.heard == []
    (warning,) = warnings(caplog)
    assert "se cret" not in warning


async def test_a_redirect_takes_no_token_elsewhere(
    api: ApiServer, account: MountedSecret, first_ca: TlsFiles, caplog: pytest.LogCaptureFixture
) -> None:
    elsewhere = server_of(first_ca)
    try:
        api.refusal, api.location = 307, elsewhere.url
        await Kept(api.url, account).look()
        assert len(api.heard) == 1
        assert elsewhere.heard == []
        assert "status 307" in warnings(caplog)[0]
    finally:
        elsewhere.stop()


async def test_no_proxy_of_the_environment_is_asked(
    api: ApiServer, account: MountedSecret, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HTTPS_PROXY", "http://127.0.0.1:1")
    await Kept(api.url, account).look()
    assert api.annotations == {ANNOTATION: "0"}


async def test_a_server_that_is_slow_is_asked_once_and_given_up_at_the_stop(
    api: ApiServer, account: MountedSecret
) -> None:
    api.gate.clear()
    kept = Kept(api.url, account)
    for _ in range(5):
        kept.clock.advance(LONGEST_INTERVAL_S)
        kept.cost.look(IDLE, 0)
    async with asyncio.timeout(PATIENCE_S):
        await eventually(api.asked)
        await kept.cost.stop()
    assert len(api.heard) == 1
    assert api.annotations == {}


def options(api: ApiServer, account: MountedSecret) -> dict[str, Any]:
    return {
        "pod_name": "decode-7f-x2",
        "kubernetes_api": api.url,
        "service_account": str(account.folder),
    }


async def test_a_node_keeps_its_pods_cost(api: ApiServer, account: MountedSecret) -> None:
    setup = Setup(options=options(api, account))
    async with running_node(PREFILL, MemoryFabric(), setup):
        await eventually(api.told)
        assert api.annotations == {ANNOTATION: "0"}


@pytest.mark.parametrize("what", ["silent", 403])
async def test_no_answer_of_the_api_server_harms_a_node(
    what: int | str, api: ApiServer, account: MountedSecret
) -> None:
    """A request is served, and the node stops, while the server has not answered or has refused."""
    if isinstance(what, int):
        api.refusal = what
    else:
        api.gate.clear()
    setup = Setup(options=options(api, account))
    async with asyncio.timeout(PATIENCE_S):
        async with running_node(PREFILL, MemoryFabric(), setup) as node, connected(node) as router:
            await eventually(api.asked)
            await router.prefill(request("r"))
            await router.release(await router.handle_of("r"))
            await node.until_idle()
            for _ in range(3):
                await router.next_step()
    assert api.annotations == {}
