"""`baton up` with TLS, keys of a file and several workers, and the commands that talk TLS."""

from __future__ import annotations

import argparse
import asyncio
import hashlib
import json
import ssl
from dataclasses import replace
from pathlib import Path

import httpx
import pytest

from baton.client import Client
from baton.protocol.errors import ConfigError, NodeLost, Unavailable
from baton.runtime.tls import TlsFiles
from deploy import cli, up
from deploy.chat import ChatClient
from deploy.doctor import NodeAccess, ProbedNode
from deploy.local import Cluster, Member, StartFailed, says_ready
from deploy.plan import UpOptions, plan_cluster, router_command
from deploy.process.child import ProcessSpec
from deploy.trust import add_trust, client_tls, trust_of, trusting
from kv_transfer.lanes.memory import MemoryFabric
from router.config import RouterConfig
from tests.deploy.test_plan import flags_of
from tests.deploy.test_up import running
from tests.node.fakes import DECODE, Setup, running_node
from tests.security.test_tls import SECRET, http, options_of
from tests.transfer.certificates import make_files

MODEL = {"model": "m"}
KEYS = '[[keys]]\nname = "alice"\nsha256 = "{}"\n'


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> TlsFiles:
    return replace(make_files(tmp_path_factory.mktemp("door")), prefix="tls")


@pytest.fixture(scope="module")
def stranger(tmp_path_factory: pytest.TempPathFactory) -> TlsFiles:
    return replace(make_files(tmp_path_factory.mktemp("stranger")), prefix="tls")


def key_file(folder: Path, key: str, name: str = "keys.toml") -> Path:
    path = folder / name
    path.write_text(KEYS.format(hashlib.sha256(key.encode()).hexdigest()))
    return path


def settings(*flags: str) -> UpOptions:
    return cli.up_settings(cli.build_parser().parse_args(["up", *flags]))[0]


def trust_flags(*given: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    add_trust(parser)
    return parser.parse_args(given)


# ---- options ----


def test_options_of_the_front_door_reach_the_router() -> None:
    files = {"api_keys": "k.toml", "tls_cert": "c.pem", "tls_key": "k.pem", "tls_ca": "ca.pem"}
    options = UpOptions(workers=3, **files)  # type: ignore[arg-type]
    plan = plan_cluster(options, [0, 1], 0, 0)
    flags = flags_of(router_command(plan, options, MODEL, "unix:///r"))
    assert flags["--workers"] == ["3"]
    assert {name: flags["--" + name.replace("_", "-")] for name in files} == {
        name: [value] for name, value in files.items()
    }
    alone = router_command(plan, UpOptions(), MODEL, None)
    assert not {"--workers", "--api-keys", "--tls-cert"} & set(alone)


@pytest.mark.parametrize("count", [0, 65])
def test_workers_are_bounded(count: int) -> None:
    with pytest.raises(ConfigError) as caught:
        UpOptions(workers=count)
    assert caught.value.field == "workers"


def test_what_the_router_would_refuse_stops_before_anything_starts(
    tmp_path: Path, files: TlsFiles
) -> None:
    good = key_file(tmp_path, "k")
    pair = ["--tls-cert", str(files.cert), "--tls-key", str(files.key)]
    assert settings("--api-keys", str(good), *pair).api_keys == str(good)
    assert settings("--host", "10.0.0.9", "--api-keys", str(good), *pair).tls_key == pair[3]
    bad = tmp_path / "bad.toml"
    bad.write_text("keys = 3")
    for flags, field in (
        (["--api-keys", str(bad)], "api_keys"),
        (["--api-keys", str(tmp_path / "none")], "api_keys"),
        (pair[:2], "tls_key"),
        ([*pair, "--tls-ca", str(tmp_path / "none")], "tls_ca"),
        (["--tls-cert", str(bad), *pair[2:]], "tls_cert"),
        (["--host", "10.0.0.9", *pair], "api_key"),
    ):
        with pytest.raises(ConfigError) as caught:
            settings(*flags)
        assert caught.value.field == field


def test_workers_want_redis(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("deploy.local.find_redis_binary", lambda: None)
    options = UpOptions(workers=2, port=0, grpc_port=0)
    with (
        Cluster(options, MODEL, [0], tmp_path, lambda _: None) as cluster,
        pytest.raises(StartFailed, match="Redis"),
    ):
        cluster.start({})
    assert cluster.members == {}


def test_each_worker_has_metrics_of_its_own(tmp_path: Path) -> None:
    options = UpOptions(workers=2, port=0, grpc_port=0, colocated=True, tls_cert="c", tls_key="k")
    cluster = Cluster(options, MODEL, [0], tmp_path, lambda _: None)
    assert set(cluster.metrics) == {"decode-0", "router"}
    own = {"workers": ["127.0.0.1:71", "127.0.0.1:72"]}
    spec = ProcessSpec("router", ["true"], tmp_path / "log", says_ready)
    cluster.members["router"] = Member(spec, 1.0, details=own)
    assert {name: url for name, url in cluster.metrics.items() if name != "decode-0"} == {
        "router-w0": "https://127.0.0.1:71/metrics",
        "router-w1": "https://127.0.0.1:72/metrics",
    }


def test_the_launcher_has_a_key_of_its_own_beside_a_file() -> None:
    assert up.with_own_key(UpOptions()).own_key is None
    assert up.with_own_key(UpOptions(api_key=("k",), api_keys="f")).own_key == "k"
    drawn = {up.with_own_key(UpOptions(api_keys="f")).own_key for _ in range(2)}
    assert len(drawn) == 2
    assert all(key is not None and len(key) > 30 for key in drawn)
    assert up.child_variables(UpOptions(api_key=("k", "j")))["BATON_API_KEY"] == "k,j"


def test_the_printed_curl_trusts_and_presents() -> None:
    command = up.curl_command("https://h", "m", with_key=False)
    assert up.with_tls(command, UpOptions()) == command
    options = UpOptions(tls_cert="a b.pem", tls_key="k")
    assert up.with_tls(command, options).startswith("curl -N --cacert 'a b.pem' https://h/v1")
    both = up.with_tls(command, replace(options, tls_ca="ca.pem"))
    assert "--cert CLIENT.pem --key CLIENT.key" in both
    assert "model" not in up.curl_command("https://h", None, with_key=False)


# ---- trust ----


async def test_the_launcher_believes_its_own_certificate_alone(
    files: TlsFiles, stranger: TlsFiles
) -> None:
    async with http(RouterConfig(**options_of(files, mutual=False))) as url:

        def nodes(trust: ssl.SSLContext | None) -> set[str]:
            with ChatClient(url, trust=trust) as client:
                client.wait_ready(5.0)
                return client.nodes()

        assert await asyncio.to_thread(nodes, trusting(str(files.cert))) == {"decode-0"}
        given = trust_of(trust_flags("--tls-ca", str(files.ca)))
        assert await asyncio.to_thread(nodes, given) == {"decode-0"}
        for trust in (trusting(str(stranger.cert)), None):
            with pytest.raises(httpx.ConnectError), ChatClient(url, trust=trust) as client:
                await asyncio.to_thread(client.nodes)


async def test_a_client_certificate_is_presented(files: TlsFiles) -> None:
    flags = ["--tls-ca", str(files.ca)]
    mine = [*flags, "--tls-cert", str(files.cert), "--tls-key", str(files.key)]
    async with http(RouterConfig(**options_of(files))) as url:
        with ChatClient(url, trust=trust_of(trust_flags(*mine))) as client:
            assert await asyncio.to_thread(client.nodes) == {"decode-0"}
        with (
            ChatClient(url, trust=trust_of(trust_flags(*flags))) as client,
            pytest.raises(httpx.TransportError),
        ):
            await asyncio.to_thread(client.nodes)


def test_flags_of_trust(files: TlsFiles, tmp_path: Path) -> None:
    assert trust_of(trust_flags()) is None
    assert client_tls(trust_flags()) is None
    system = client_tls(trust_flags(), wanted=True)
    assert system is not None
    assert system.ca is None
    given = client_tls(trust_flags("--tls-ca", str(files.ca)))
    assert given is not None
    assert given.ca == files.ca
    for flags in (["--tls-cert", "c"], ["--tls-key", "k"]):
        for read in (trust_of, client_tls):
            with pytest.raises(ConfigError, match="come together"):
                read(trust_flags(*flags))
    with pytest.raises(ConfigError) as caught:
        trust_of(trust_flags("--tls-ca", str(tmp_path / "none")))
    assert caught.value.field == "tls_ca"
    with pytest.raises(ConfigError) as caught:
        trust_of(trust_flags("--tls-cert", str(files.ca), "--tls-key", str(files.key)))
    assert caught.value.field == "tls_cert"


# ---- doctor ----


async def test_the_doctor_is_let_in_with_the_routers_certificate(
    files: TlsFiles, stranger: TlsFiles
) -> None:
    setup = Setup(options={"secret": SECRET, **options_of(files)})
    async with running_node(DECODE, MemoryFabric(), setup) as node:
        address = node.node.address
        async with ProbedNode.connect(address, NodeAccess(SECRET, files)) as probed:
            assert probed.record.role.value == "decode"
        for access in (NodeAccess(SECRET), NodeAccess(SECRET, stranger)):
            with pytest.raises(NodeLost, match="TLS"):
                async with ProbedNode.connect(address, access, patience_s=0.5):
                    pass


def test_the_doctors_files_are_complete_or_refused(
    files: TlsFiles, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    asked: list[NodeAccess] = []

    def doctor(source: str, target: str, access: NodeAccess, redis: str, *_: object) -> None:
        asked.append(access)
        raise Unavailable("enough")

    monkeypatch.setattr("deploy.doctor.doctor", doctor)
    nodes = ["doctor", "--from", "a:1", "--to", "b:2"]
    assert cli.main([*nodes, "--node-tls-cert", "c"]) == 2
    assert "--node-tls-key" in capsys.readouterr().err
    for name, path in options_of(files, "node_tls").items():
        monkeypatch.setenv(f"BATON_{name.upper()}", path)
    assert cli.main(nodes) == 1
    assert asked[0].tls == replace(files, prefix="node_tls")
    assert asked[0].credentials() is not None


# ---- all of it ----


@pytest.fixture
def secured(tmp_path: Path, files: TlsFiles) -> list[str]:
    keys = key_file(tmp_path, "alices")
    pair = ["--tls-cert", str(files.cert), "--tls-key", str(files.key)]
    operators = key_file(tmp_path, "olgas", "operators.toml")
    known = ["--api-keys", str(keys), "--admin-keys", str(operators)]
    return ["--colocated", "--workers", "2", *known, *pair]


@pytest.mark.long
@pytest.mark.redis
def test_up_with_workers_keys_and_tls(tmp_path: Path, files: TlsFiles, secured: list[str]) -> None:
    with running(tmp_path, secured) as started:
        ready = json.loads(started.wait_line('"ready": true'))
        assert ready["url"].startswith("https://")
        assert ready["first_answer_s"], "".join(started.shown)
        trust = ssl.create_default_context(cafile=str(files.ca))
        with httpx.Client(verify=trust, base_url=ready["url"], timeout=60.0) as web:
            assert web.get("/v1/models").status_code == 401
            alice = {"authorization": "Bearer alices"}
            body = {"prompt": "abc", "max_tokens": 4}
            assert web.post("/v1/completions", json=body, headers=alice).status_code == 200
        for name, url in ready["metrics"].items():  # each worker knows the node
            if name.startswith("router"):
                page = httpx.get(url, headers=alice, verify=trust).text
                assert 'node="decode-0"' in page, name
        arguments = trust_flags("--tls-ca", str(files.ca))
        with Client(ready["grpc"], "olgas", tls=client_tls(arguments)) as client:
            assert [node.node_id for node in client.server_info().nodes] == ["decode-0"]
