"""The `stream` lane below the contract: frames, places, certificates, ends."""

from __future__ import annotations

import os
import socket
import ssl
import stat
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest

from baton.protocol.errors import ConfigError, KVError, KVLost, KVRefused
from baton.protocol.handles import LaneAddress
from baton.runtime.timing import Timing
from baton.runtime.tls import TlsFiles
from kv_transfer.lanes.stream import TLS, UNIX, StreamLane, StreamLaneOptions
from kv_transfer.protocol.base import Incoming, ScatterWire
from kv_transfer.protocol.frames import (
    MAX_PAYLOAD,
    Buffer,
    Header,
    Kind,
    decode,
    encode_into,
)
from tests.transfer.certificates import believing
from tests.transfer.pools import BOOT_P, PATIENCE_S
from tests.transfer.stream_bench import TCP_ONLY, UNIX_ONLY, Bench, Caught, ask, dial, echo, frame


@pytest.fixture
def folder() -> Iterator[Path]:
    """Of a short name: a socket's path has its limit."""
    with tempfile.TemporaryDirectory() as name:
        yield Path(name)


def test_what_a_killed_process_left_is_removed_at_the_next_start(
    bench: Bench, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    code = """
import os, signal
from baton.runtime.timing import Timing
from kv_transfer.lanes.stream import StreamLane, StreamLaneOptions
StreamLane(Timing(), StreamLaneOptions(tcp=False)).start("0c" * 16, lambda name, peer: iter(()))
os.kill(os.getpid(), signal.SIGKILL)
"""
    environment = {**os.environ, "TMPDIR": str(folder)}
    subprocess.run([sys.executable, "-c", code], env=environment, check=False, timeout=60)
    (left,) = folder.iterdir()
    assert [each.suffix for each in left.glob("*.sock")] == [".sock"]
    _, first = bench.serve(echo, UNIX_ONLY)
    _, second = bench.serve(echo, UNIX_ONLY)
    paths = {Path(dict(each.attributes)[UNIX]) for each in (first, second)}
    assert set(folder.iterdir()) == {path.parent for path in paths}
    assert all(path.exists() for path in paths), "nobody sweeps away who lives"


# ---- frames there and back ----------------------------------------------------------------------
@pytest.mark.parametrize("kind", ["tcp", "unix", "tls"])
def test_one_connection_carries_many_questions(bench: Bench, tls: TlsFiles, kind: str) -> None:
    options = {"tcp": TCP_ONLY, "unix": UNIX_ONLY, "tls": replace(TCP_ONLY, tls=tls)}[kind]
    threads: set[int] = set()

    def serve(lane: str, peer: Incoming) -> Iterator[Buffer]:
        assert lane == "stream"
        threads.add(threading.get_ident())
        yield from echo(lane, peer)

    lane, address = bench.serve(serve, options)
    wire = bench.wire(address, options)
    assert isinstance(wire, ScatterWire)
    assert bench.lanes[-1].reaches(address)
    for number in range(3):
        for sent in (frame(number), frame(number, b"")):
            wire.send(sent)
            assert wire.receive() == sent
        assert wire.at_rest
    assert len(threads) == 1
    assert lane._server is not None
    assert lane._server.num_connections == 1


@pytest.mark.parametrize("kind", ["tcp", "unix", "tls"])
def test_payloads_go_where_they_belong(bench: Bench, tls: TlsFiles, kind: str) -> None:
    """Big frames, built in the lane's buffer, received into scattered pieces."""
    options = {"tcp": TCP_ONLY, "unix": UNIX_ONLY, "tls": replace(TCP_ONLY, tls=tls)}[kind]
    payloads = [bytes([number]) * (MAX_PAYLOAD - number) for number in range(8)]

    def serve(lane: str, peer: Incoming) -> Iterator[Buffer]:
        assert peer.receive(PATIENCE_S) is not None
        assert peer.buffer is not None
        for number, payload in enumerate(payloads):
            yield encode_into(peer.buffer, Header(Kind.DATA, number), [payload], 0)

    _, address = bench.serve(serve, options)
    wire = bench.wire(address, options)
    wire.send(frame())
    for number, payload in enumerate(payloads):
        header = wire.receive_header()
        assert header is not None
        place = bytearray(len(payload) + 2)
        view = memoryview(place)
        cuts = [0, 0, 1, 70_000, 70_001, len(payload)]
        views = [view[1 + a : 1 + b] for a, b in pairwise(cuts)]
        wire.receive_into(views)
        assert place == b"\0" + payload + b"\0"  # and nothing beside it
        assert decode(header + payload, 0).header == Header(Kind.DATA, number)
    assert wire.receive_header() is None


def test_joined_frames_are_cut_apart(bench: Bench) -> None:
    _, address = bench.serve()
    wire = bench.wire(address)
    wire.send(frame(1) + frame(2, b"") + frame(3))
    assert [wire.receive() for _ in range(3)] == [frame(1), frame(2, b""), frame(3)]


# ---- places -------------------------------------------------------------------------------------
def test_one_host_meets_over_a_private_unix_socket(bench: Bench) -> None:
    lane, address = bench.serve(options=StreamLaneOptions())
    path = Path(dict(address.attributes)[UNIX])
    assert path.name == f"{BOOT_P[:16]}.sock"
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
    nowhere = replace(address, address="127.0.0.1:9")
    wire = bench.wire(nowhere)
    assert bench.lanes[-1].reaches(nowhere)
    assert ask(wire) == frame()
    lane.stop()
    assert not path.parent.exists()
    assert TLS not in dict(address.attributes)


def test_a_given_directory_is_kept(bench: Bench, tmp_path: Path) -> None:
    lane, address = bench.serve(options=StreamLaneOptions(tcp=False, unix_dir=tmp_path / "kv"))
    assert (tmp_path / "kv" / f"{BOOT_P[:16]}.sock").is_socket()
    assert address.address == ""
    lane.stop()
    assert list((tmp_path / "kv").iterdir()) == []


def test_another_host_meets_over_tcp(bench: Bench) -> None:
    """The path does not exist there, or nobody listens on it any more."""
    _, address = bench.serve(options=StreamLaneOptions())
    for path in ("/nowhere/at/all.sock", "/etc/hostname"):
        wire = bench.wire(replace(address, attributes=((UNIX, path),)))
        assert ask(wire) == frame()


def test_a_dead_socket_file_is_passed_over(bench: Bench, tmp_path: Path) -> None:
    dead = tmp_path / "dead.sock"
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(dead))
    _, address = bench.serve(options=StreamLaneOptions())
    wire = bench.wire(replace(address, attributes=((UNIX, str(dead)),)))
    assert ask(wire) == frame()


def test_what_cannot_be_bound_stops_the_start(bench: Bench, tmp_path: Path) -> None:
    _, address = bench.serve()
    port = int(address.address.rpartition(":")[2])
    with pytest.raises(ConfigError, match="cannot bind the KV port"):
        bench.lane(StreamLaneOptions(port=port)).start(BOOT_P, echo)
    with pytest.raises(ConfigError, match="Unix socket") as caught:
        bench.lane(StreamLaneOptions(unix_dir=tmp_path / ("x" * 100))).start(BOOT_P, echo)
    assert caught.value.field == "kv_unix_dir"


def test_the_advertised_host_is_what_peers_are_told(bench: Bench) -> None:
    _, address = bench.serve(options=StreamLaneOptions(unix=False, advertise_host="kv.example"))
    assert address.address.startswith("kv.example:")
    _, six = bench.serve(options=StreamLaneOptions(unix=False, advertise_host="::1"))
    assert six.address.startswith("[::1]:")


@pytest.mark.parametrize("address", ["", "127.0.0.1:9", "nonsense", "host.invalid:80", "[::1]:9"])
def test_nobody_there(bench: Bench, address: str) -> None:
    wire = bench.wire(LaneAddress("stream", address))
    with pytest.raises(KVLost):
        wire.send(frame())
    with pytest.raises(KVLost):
        wire.receive()


# ---- certificates -------------------------------------------------------------------------------
def test_strangers_are_refused_both_ways(bench: Bench, tls: TlsFiles, stranger: TlsFiles) -> None:
    caught = Caught()
    _, address = bench.serve(caught, replace(TCP_ONLY, tls=tls))
    # Does not believe the exporter; is not believed by it.
    for files in (stranger, believing(stranger, tls)):
        wire = bench.wire(address, replace(TCP_ONLY, tls=files))
        with pytest.raises(KVRefused):
            ask(wire)
    assert caught.calls == 0


def test_without_a_certificate_nobody_is_served(bench: Bench, tls: TlsFiles) -> None:
    caught = Caught()
    _, address = bench.serve(caught, replace(TCP_ONLY, tls=tls))
    context = ssl.create_default_context(cafile=str(tls.ca))
    with dial(address) as raw, context.wrap_socket(raw, server_hostname="127.0.0.1") as nobody:
        nobody.sendall(frame())
        with pytest.raises(ssl.SSLError, match="CERTIFICATE_REQUIRED"):
            nobody.recv(1)
    old = ssl.create_default_context(cafile=str(tls.ca))
    old.load_cert_chain(tls.cert, tls.key)
    old.maximum_version = ssl.TLSVersion.TLSv1_2
    with dial(address) as raw, pytest.raises(ssl.SSLError):
        old.wrap_socket(raw, server_hostname="127.0.0.1")
    assert caught.calls == 0


def test_tls_on_one_side_only(bench: Bench, tls: TlsFiles) -> None:
    secured = replace(TCP_ONLY, tls=tls)
    caught = Caught()
    _, guarded = bench.serve(caught, secured)
    _, plain = bench.serve(caught)
    assert not bench.lane(TCP_ONLY).reaches(guarded)
    assert not bench.lane(secured).reaches(plain)
    in_the_clear = bench.wire(guarded)
    in_the_clear.send(frame())
    assert in_the_clear.receive() is None  # hung up on
    with pytest.raises(KVError):
        ask(bench.wire(plain, secured))
    assert len(caught.errors) == caught.calls  # the plain exporter saw a TLS hello, no frame


def test_files_that_cannot_be_used(tls: TlsFiles, stranger: TlsFiles, tmp_path: Path) -> None:
    missing = tmp_path / "missing.pem"
    for wrong, option in (
        (replace(tls, ca=missing), "kv_tls_ca"),
        (replace(tls, cert=missing), "kv_tls_cert"),
        (replace(tls, key=stranger.key), "kv_tls_cert"),
    ):
        for use in (
            lambda files: StreamLane(Timing(), StreamLaneOptions(tls=files)),
            TlsFiles.server_credentials,
            TlsFiles.channel_credentials,
        ):
            with pytest.raises(ConfigError) as caught:
                use(wrong)
            assert caught.value.field == option


# ---- ends ---------------------------------------------------------------------------------------
@pytest.mark.parametrize("options", [TCP_ONLY, UNIX_ONLY], ids=["tcp", "unix"])
def test_cancel_frees_a_blocked_reader(bench: Bench, options: StreamLaneOptions) -> None:
    _, address = bench.serve(options=options)
    wire = bench.wire(address, options)
    wire.send(frame())
    wire.receive()
    raised = run(wire.receive)
    wire.cancel()
    wire.cancel()
    assert isinstance(raised(), KVLost)
    with pytest.raises(KVLost):
        wire.send(frame())
    assert not wire.at_rest


def test_cancel_frees_a_blocked_connect(bench: Bench) -> None:
    """The peer's queue is full: nobody answers."""
    with socket.create_server(("127.0.0.1", 0), backlog=0) as listener:
        host, port = listener.getsockname()
        queued = []
        for _ in range(3):  # until the queue takes no more
            waiting = socket.socket()
            waiting.setblocking(False)
            waiting.connect_ex((host, port))
            queued.append(waiting)
        wire = bench.wire(LaneAddress("stream", f"{host}:{port}"))
        raised = run(lambda: wire.send(frame()))
        wire.cancel()
        assert isinstance(raised(), KVLost)
        for waiting in queued:
            waiting.close()


def test_stopping_breaks_both_directions(bench: Bench) -> None:
    server, address = bench.serve()
    client = bench.lane()
    wire, idle = client.open(address), client.open(address)
    bench.wires += [wire, idle]
    for each in (wire, idle):
        each.send(frame())
        each.receive()
    raised = run(wire.receive)
    client.stop()
    assert isinstance(raised(), KVLost)
    late = client.open(address)
    with pytest.raises(KVLost):
        late.send(frame())
    server.stop()
    server.stop()


def run(blocking: Callable[[], object]) -> Callable[[], BaseException | None]:
    """Call it on a thread; the result waits for its end and says what it raised."""
    raised: list[BaseException] = []
    started = threading.Event()

    def work() -> None:
        started.set()
        try:
            blocking()
        except KVError as error:
            raised.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    started.wait()

    def outcome() -> BaseException | None:
        thread.join(PATIENCE_S)
        assert not thread.is_alive()
        return raised[0] if raised else None

    return outcome
