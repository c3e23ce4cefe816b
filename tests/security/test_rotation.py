"""Secrets and certificates that are replaced while a process runs: who is let in at each step."""

from __future__ import annotations

import asyncio
import contextlib
import re
import ssl
import subprocess
from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import grpc
import grpc.aio
import pytest
from prometheus_client import CollectorRegistry

from baton.client import AsyncClient
from baton.node.metrics_server import metrics_token, metrics_tokens
from baton.protocol import wire
from baton.protocol.clock import SystemClock
from baton.protocol.errors import ConfigError, KVError, Unavailable
from baton.protocol.handles import LaneAddress
from baton.protocol.kv_spec import PoolFormat
from baton.protocol.messages import SessionHello, session_metadata
from baton.runtime.rotation.certificates import expires_at
from baton.runtime.rotation.deployment_secret import fixed, secrets_of
from baton.runtime.rotation.file_metrics import watch_files
from baton.runtime.timing import Timing
from baton.runtime.tls import ClientTls, TlsFiles
from kv_transfer.lanes.grpc_stream import GrpcLane
from kv_transfer.lanes.memory import MemoryFabric
from kv_transfer.lanes.stream import StreamLane, StreamLaneOptions
from kv_transfer.protocol.base import Lane
from kv_transfer.protocol.identity import Identity, Side
from protos import node_pb2
from router.config import RouterConfig
from tests.mounted_secret import MountedCertificate, MountedSecret
from tests.node.fakes import DECODE, PATIENCE_S, Setup, connected, open_call, request, running_node
from tests.security.test_tls import believing, grpc_door, http, options_of
from tests.transfer.certificates import make_files
from tests.transfer.stream_bench import ask, echo
from tests.waiting import eventually

STEPS = ("old", "old\nnew", "new\nold", "new")  # what the file of secrets has in a rotation
KV_FORMAT = PoolFormat(16, "float32")


@pytest.fixture(scope="module")
def old(tmp_path_factory: pytest.TempPathFactory) -> TlsFiles:
    return replace(make_files(tmp_path_factory.mktemp("old")), prefix="tls")


@pytest.fixture(scope="module")
def new(tmp_path_factory: pytest.TempPathFactory) -> TlsFiles:
    """A certificate of another CA."""
    return replace(make_files(tmp_path_factory.mktemp("new"), days=30), prefix="tls")


# ---- the secret ----


def test_kv_peers_of_neighbouring_steps_know_each_other() -> None:
    """Whichever of the two has seen the next step first."""
    for before, after in pairwise(STEPS):
        for one, other in ((before, after), (after, before), (after, after)):
            p, d = (
                Identity(boot, "f", KV_FORMAT, lambda text=text: tuple(text.split()))
                for boot, text in (("0p", one), ("0d", other))
            )
            assert d.proven(p.hello(Side.EXPORTER, b"p", b"d"), Side.EXPORTER, b"d")
            assert p.proven(d.hello(Side.FETCHER, b"d", b"p"), Side.FETCHER, b"p")
    first, last = (Identity("0p", "f", KV_FORMAT, fixed(text)) for text in ("old", "new"))
    assert not last.proven(first.hello(Side.EXPORTER, b"p", b"d"), Side.EXPORTER, b"d")


async def let_in(address: str, secret: str) -> bool:
    """Whether a node answers the hello of a router that proves `secret`."""
    channel, call = await open_call(address, session_metadata(secret, "router-1"))
    try:
        async with asyncio.timeout(PATIENCE_S):
            await call.write(wire.router_message_to_wire(SessionHello("router-1"), SystemClock()))
            return isinstance(await call.read(), node_pb2.NodeMessage)
    except grpc.aio.AioRpcError as error:
        if error.code() is not grpc.StatusCode.UNAUTHENTICATED:
            raise
        return False
    finally:
        call.cancel()
        await channel.close()


async def test_a_node_lets_routers_of_each_step_in(tmp_path: Path) -> None:
    mounted = MountedSecret(tmp_path / "secret", {"secret": STEPS[0]})
    setup = Setup(options={"secret_file": str(mounted.path("secret"))})
    async with running_node(DECODE, MemoryFabric(), setup) as node:
        address = node.node.address
        async with connected(node, "router-0", STEPS[0]) as first:
            assert not await let_in(address, "new")
            for before, after in pairwise(STEPS):
                mounted.update({"secret": after})
                for step in (before, after):
                    await eventually(lambda step=step: let_in(address, step.split()[0]))
            await eventually(lambda: turned_away(address, "old"))
            await first.decode(request("r", max_tokens=4))
            await first.until(lambda: first.finished("r"))


async def turned_away(address: str, secret: str) -> bool:
    return not await let_in(address, secret)


def test_each_secret_has_its_token_for_metrics(tmp_path: Path) -> None:
    path = tmp_path / "secrets"
    path.write_text("new\nold\n")
    tokens = metrics_tokens(secrets_of("", str(path)))()
    assert list(tokens) == [metrics_token("new"), metrics_token("old")]


# ---- certificates ----


async def shown_at(url: str) -> str:
    """The certificate that a new connection is shown."""
    host, _, port = url.rpartition("/")[2].rpartition(":")
    return await asyncio.to_thread(ssl.get_server_certificate, (host, int(port)))


async def shows(url: str, files: TlsFiles) -> bool:
    return ssl.PEM_cert_to_DER_cert(await shown_at(url)) == ssl.PEM_cert_to_DER_cert(
        files.cert.read_text()
    )


async def test_https_shows_new_connections_the_new_certificate(
    old: TlsFiles, new: TlsFiles, tmp_path: Path
) -> None:
    mounted = MountedCertificate(tmp_path / "tls", old)
    async with http(RouterConfig(**options_of(mounted.files(), mutual=False))) as url:
        host, port = url.removeprefix("https://").split(":")
        kept = await asyncio.open_connection(host, int(port), ssl=believing(old))
        assert await asked(kept) == b"200"
        mounted.renew(new)
        await eventually(lambda: shows(url, new))
        assert await asked(kept) == b"200", "an open connection goes on"
        mounted.update({"tls.crt": old.cert.read_bytes()[:200], "tls.key": "", "ca.crt": ""})
        for _ in range(2):
            assert await shows(url, new), "half-written files are not used"
        mounted.renew(old)
        await eventually(lambda: shows(url, old))
        kept[1].close()
        await kept[1].wait_closed()


async def asked(connection: tuple[asyncio.StreamReader, asyncio.StreamWriter]) -> bytes:
    """The status of GET /health over a connection that stays open."""
    reader, writer = connection
    writer.write(b"GET /health HTTP/1.1\r\nhost: here\r\n\r\n")
    async with asyncio.timeout(PATIENCE_S):
        head = await reader.readuntil(b"\r\n\r\n")
        [length] = re.findall(rb"(?i)content-length: (\d+)", head)
        await reader.readexactly(int(length))
    return head.split()[1]


async def test_grpc_shows_new_connections_the_new_certificate(
    old: TlsFiles, new: TlsFiles, tmp_path: Path
) -> None:
    mounted = MountedCertificate(tmp_path / "tls", old)
    async with grpc_door(RouterConfig(grpc_port=0, **options_of(mounted.files()))) as address:
        shown_old, shown_new = ClientTls(old.ca, old.cert, old.key), None
        async with AsyncClient(address, tls=shown_old) as kept:
            assert len(await kept.models()) == 1
            mounted.renew(new)  # the CA of clients, too
            shown_new = ClientTls(new.ca, new.cert, new.key)
            await eventually(lambda: answers(address, shown_new))
            assert len(await kept.models()) == 1, "an open connection goes on"
            assert not await answers(address, shown_old)
            assert not await answers(address, ClientTls(new.ca, old.cert, old.key))
            mounted.update({"tls.crt": "", "tls.key": "", "ca.crt": ""})
            assert await answers(address, shown_new)


async def answers(address: str, tls: ClientTls) -> bool:
    async with AsyncClient(address, timeout_s=5.0, tls=tls) as client:
        try:
            return len(await client.models()) == 1
        except Unavailable:
            return False


def lane_of(name: str, files: TlsFiles) -> Lane:
    if name == "grpc":
        return GrpcLane(Timing(), tls=files)
    return StreamLane(Timing(), StreamLaneOptions(unix=False, tls=files))


@contextlib.contextmanager
def lanes(name: str, *files: TlsFiles) -> Iterator[list[Lane]]:
    made = [lane_of(name, each) for each in files]
    try:
        yield made
    finally:
        for lane in made:
            lane.stop()


@pytest.mark.parametrize("name", ["stream", "grpc"])
async def test_a_kv_lane_takes_new_certificates(
    name: str, old: TlsFiles, new: TlsFiles, tmp_path: Path
) -> None:
    """As cert-manager and an operator replace a CA: first both are trusted, then the new one."""
    served, shown = (MountedCertificate(tmp_path / each, old) for each in ("p", "d"))
    newer, older = replace(new, ca=old.ca), replace(old, ca=new.ca)  # show one, believe the other
    with lanes(name, served.files(), shown.files()) as (p, d):
        place = p.start("0a" * 16, echo)

        def new_peers_pass(*peers: TlsFiles) -> list[bool]:
            with lanes(name, *peers) as made:
                return [passes(lane, place) for lane in (d, *made)]

        async def pass_(*peers: TlsFiles) -> bool:
            return all(await asyncio.to_thread(new_peers_pass, *peers))

        async def refused(peer: TlsFiles) -> bool:
            return await asyncio.to_thread(new_peers_pass, peer) == [True, False]

        kept = d.open(place)
        await asyncio.to_thread(ask, kept)
        assert await refused(newer)
        for mounted in (served, shown):
            mounted.renew(old, new)
        await eventually(lambda: pass_(old, newer))
        served.renew(new, old)
        await eventually(lambda: pass_(new, older))
        shown.renew(new, old)
        await eventually(lambda: pass_(new, older))
        for mounted in (served, shown):
            mounted.renew(new)
        await eventually(lambda: refused(older))
        assert await pass_(new)
        await asyncio.to_thread(ask, kept)  # the first connection of all goes on
        kept.finish()


def passes(lane: Lane, place: LaneAddress) -> bool:
    """Whether a new connection is made, and carries a frame there and back."""
    opened = lane.open(place)
    try:
        return bool(ask(opened))
    except KVError:
        return False
    finally:
        opened.finish()


# ---- what is shown of it ----


def test_metrics_tell_when_a_certificate_ends_and_whether_the_files_serve(
    old: TlsFiles, new: TlsFiles, tmp_path: Path
) -> None:
    registry, mounted = CollectorRegistry(), MountedCertificate(tmp_path / "tls", old)
    secret = tmp_path / "secret"
    secret.write_text("s")
    watch_files(registry, str(secret), (mounted.files(), mounted.files(), None))

    def shown(name: str) -> dict[str, float]:
        return {
            sample.labels["option"]: sample.value
            for family in registry.collect()
            for sample in family.samples
            if sample.name == f"baton_{name}"
        }

    assert shown("certificate_expiration_timestamp_seconds") == {"tls": end_of(old.cert)}
    assert shown("file_last_reload_successful") == {"secret_file": 1.0, "tls": 1.0}


def end_of(cert: Path) -> float:
    """As openssl reads it: notAfter=Nov 29 05:44:25 2026 GMT."""
    told = subprocess.run(
        ["openssl", "x509", "-noout", "-enddate", "-in", str(cert)],
        capture_output=True, check=True, text=True, timeout=30,
    ).stdout  # fmt: skip
    return float(ssl.cert_time_to_seconds(told.strip().removeprefix("notAfter=")))


def test_the_first_certificate_of_a_chain_to_end_counts(old: TlsFiles, new: TlsFiles) -> None:
    assert end_of(old.cert) < end_of(new.cert)
    for chain in ((old, new), (new, old)):
        text = "text before\n" + "".join(each.cert.read_text() for each in chain)
        assert expires_at(text) == end_of(old.cert)
    assert expires_at(new.cert.read_text()) == end_of(new.cert)


@pytest.mark.parametrize("days", [1, 9_000, 200_000])
def test_dates_beyond_2049_have_another_form(tmp_path: Path, days: int) -> None:
    files = make_files(tmp_path, days=days)
    assert expires_at(files.cert.read_text()) == end_of(files.cert)


@pytest.mark.parametrize("length", [0, 30, 100, 200])
def test_what_is_no_certificate_is_refused(old: TlsFiles, length: int) -> None:
    der = ssl.PEM_cert_to_DER_cert(old.cert.read_text())
    with pytest.raises(ConfigError, match="no valid certificate"):
        expires_at(ssl.DER_cert_to_PEM_cert(der[:length]))
    with pytest.raises(ConfigError, match="no valid certificate"):
        expires_at("")
