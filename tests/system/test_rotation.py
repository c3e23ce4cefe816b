"""The secret and all certificates are replaced under load, and no process is restarted.

A router, two prefill and two decode nodes, mutual TLS between all, TLS for clients. Each node is
reached through proxies, which cut its connections after each step: peers come back with what the
files hold by then. No request fails, and every text is that of one engine.
"""

from __future__ import annotations

import asyncio
import logging
import ssl
import time
import urllib.request
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from baton.client import AsyncClient, ClientTls, GenerateOptions
from baton.protocol.sampling import SamplingParams
from baton.runtime.socket_folder import SocketFolder
from baton.runtime.tls import TlsFiles
from tests.chaos.cluster import PORT_FLAGS, free_ports
from tests.chaos.proxy import FaultProxy
from tests.mounted_secret import MountedCertificate, MountedSecret
from tests.system.asking import Asking
from tests.system.processes import Processes, ServerProcess
from tests.system.references import Tokens, one_engine_tokens, prompts
from tests.system.test_rolling_restart import all_free
from tests.tiny_models import make_tiny_model
from tests.transfer.certificates import make_files
from tests.waiting import eventually

pytestmark = [pytest.mark.redis, pytest.mark.slow, pytest.mark.soak, pytest.mark.timeout(600)]

log = logging.getLogger(__name__)
NEAR, FAR = "127.0.0.1", "127.0.0.2"  # where nodes listen, and where they are said to
PROMPTS = prompts((60, 20, 90, 40), seed=24)
PARAMS = SamplingParams(temperature=0.0, max_tokens=60, ignore_eos=True)
FLAGS = ("--num-kv-blocks", "128", "--max-num-seqs", "16", "--metrics-port", "0", "--drain-s", "0")
LANES = {"p0": "stream", "p1": "grpc", "d0": "stream,grpc", "d1": "grpc,stream"}
MODULES = {"p": "prefill_node", "d": "decode_node"}
SCRAPE_S = 60.0
REQUEST_S = 240.0  # of a request, on a crowded machine
ANSWERS = 4  # that clients get after each step before the next one
SECRET_STEPS = ("old-secret", "old-secret\nnew-secret", "new-secret\nold-secret", "new-secret")


@dataclass
class Load:
    """One client per prompt; each request comes over a new connection."""

    address: str
    trusted: Path  # the CAs that clients believe
    expected: list[Tokens]
    finished: int = 0
    asking: Asking = field(default_factory=Asking)

    def start(self) -> None:
        self.asking.start(self._ask(index) for index in range(len(PROMPTS)))

    async def _ask(self, index: int) -> None:
        while not self.asking.stopping:
            tokens: list[int] = []
            async with AsyncClient(self.address, tls=ClientTls(self.trusted)) as client:
                options = GenerateOptions(timeout_s=REQUEST_S)
                async for event in client.stream(PROMPTS[index], PARAMS, options):
                    assert event.position == len(tokens), "a gap or a duplicate"
                    tokens.extend(event.token_ids)
            assert tuple(tokens) == self.expected[index]
            self.finished += 1

    async def goes_on(self) -> None:
        """Until so many requests have ended that all clients have begun new ones."""
        before = self.finished

        async def look() -> bool:
            self.asking.raise_failures()
            return self.finished >= before + ANSWERS

        await eventually(look, REQUEST_S)


@dataclass
class Deployment:
    """`nodes_tls` is what all processes show each other, `public` what the router shows clients;
    `own` is what this test shows nodes.
    """

    secret: MountedSecret
    nodes_tls: MountedCertificate
    public: MountedCertificate
    servers: list[ServerProcess]
    proxies: dict[str, list[FaultProxy]]
    load: Load
    own: TlsFiles
    cuts: int = 0

    @property
    def router(self) -> ServerProcess:
        return self.servers[-1]

    def scrape(self, server: ServerProcess) -> dict[tuple[str, str], float]:
        """(metric, option) -> value, of the metrics of files."""
        context = ssl.create_default_context(cafile=str(self.load.trusted))
        context.check_hostname = False
        context.load_cert_chain(self.own.cert, self.own.key)
        port = server.ready.get("metrics_port")
        place = server.address if port is None else f"{NEAR}:{port}"
        url = f"https://{place}/metrics"
        with urllib.request.urlopen(url, timeout=SCRAPE_S, context=context) as page:
            families = text_string_to_metric_families(page.read().decode())
            return {
                (sample.name, sample.labels["option"]): sample.value
                for family in families
                for sample in family.samples
                if "option" in sample.labels
            }

    async def read_again(self, option: str, since: float) -> None:
        """Until every process that has this option uses its files as they have been since then."""
        name = "baton_file_last_reload_success_timestamp_seconds"
        await self._everywhere(name, option, lambda read_at: read_at >= since)

    async def refused(self, option: str) -> None:
        """Until every process that has this option cannot use its files as they are."""
        await self._everywhere("baton_file_last_reload_successful", option, lambda value: not value)

    async def _everywhere(self, name: str, option: str, wanted: Callable[[float], bool]) -> None:
        async def look() -> bool:
            shown = [await asyncio.to_thread(self.scrape, server) for server in self.servers]
            values = [each[name, option] for each in shown if (name, option) in each]
            return bool(values) and all(map(wanted, values))

        await eventually(look)

    async def cut(self) -> None:
        """End all connections with one node of each role; at the next call with the others."""
        names = (("p0", "d0"), ("p1", "d1"))[self.cuts % 2]
        self.cuts += 1
        proxies = [proxy for name in names for proxy in self.proxies[name]]
        before = sum(proxy.proof.connections for proxy in proxies)
        assert sum(proxy.cut() for proxy in proxies) >= 2, "of each node its session, at least"
        await self.load.goes_on()
        await eventually(self.whole)
        assert sum(proxy.proof.connections for proxy in proxies) >= before + 2

    async def whole(self) -> bool:
        async with AsyncClient(self.load.address, tls=ClientTls(self.load.trusted)) as client:
            return len((await client.server_info()).nodes) == 4


@asynccontextmanager
async def deployment(
    folder: Path, redis_url: str, files: TlsFiles, trusted: Path
) -> AsyncIterator[Deployment]:
    model = make_tiny_model("llama", folder / "model")
    expected = one_engine_tokens(model, PROMPTS, PARAMS)
    secret = MountedSecret(folder / "secret", {"secret": SECRET_STEPS[0]})
    nodes_tls, public = (MountedCertificate(folder / name, files) for name in ("nodes", "public"))
    environ = {"BATON_SECRET_FILE": str(secret.path("secret"))}
    async with AsyncExitStack() as stack:
        sockets = SocketFolder("baton-rotation-")  # a path of the test's own may be too long
        stack.callback(sockets.remove)
        proxies: dict[str, list[FaultProxy]] = {}
        processes = await stack.enter_async_context(Processes(model, folder, redis_url))
        starts = []
        for name, lanes in LANES.items():
            ports = free_ports(len(PORT_FLAGS))
            flags = [*FLAGS, *tls_flags("tls", nodes_tls), "--kv-lanes", lanes]
            flags += ["--advertise-host", FAR, "--kv-unix-dir", str(sockets.path)]
            for flag, port in zip(PORT_FLAGS.values(), ports, strict=True):
                flags += [flag, str(port)]
            made = [FaultProxy((FAR, port), (NEAR, port)) for port in ports]
            proxies[name] = [await stack.enter_async_context(each) for each in made]
            starts.append(processes.start(MODULES[name[0]], name, flags, environ))
        servers = await asyncio.gather(*starts)
        for path in sockets.path.glob("*.sock"):
            path.unlink()  # peers prefer the Unix socket of a node on their host
        flags = [*tls_flags("node-tls", nodes_tls), *tls_flags("tls", public)[:4]]
        ports = ["--port", "0", "--grpc-port", "0", "--drain-s", "0"]
        router = await processes.start("router", "router", [*ports, *flags], environ)
        load = Load(str(router.ready["grpc_address"]), trusted, expected)
        yield Deployment(secret, nodes_tls, public, [*servers, router], proxies, load, files)


def tls_flags(prefix: str, mounted: MountedCertificate) -> list[str]:
    files = mounted.files()
    named = {"cert": files.cert, "key": files.key, "ca": files.ca}
    return [word for part, path in named.items() for word in (f"--{prefix}-{part}", str(path))]


async def test_no_request_fails_while_secret_and_certificates_are_replaced(
    tmp_path: Path, redis_url: str
) -> None:
    old, new = (make_files(tmp_path / name, (NEAR, FAR)) for name in ("old-ca", "new-ca"))
    assert old.ca is not None
    assert new.ca is not None
    trusted = tmp_path / "trusted.pem"
    trusted.write_bytes(old.ca.read_bytes() + new.ca.read_bytes())
    async with deployment(tmp_path, redis_url, old, trusted) as it:
        await eventually(it.whole)
        it.load.start()
        await it.load.goes_on()
        await replace_secret(it)
        await replace_certificates(it, old, new)
        await it.load.asking.stop()
        links = sum(proxy.proof.cut for proxies in it.proxies.values() for proxy in proxies)
        log.info("%d requests, %d connections cut", it.load.finished, links)
        assert [server.process.returncode for server in it.servers] == [None] * 5
        async with AsyncClient(it.load.address, tls=ClientTls(trusted)) as client:
            await eventually(lambda: all_free(client))


async def replace_secret(it: Deployment) -> None:
    for step in SECRET_STEPS[1:]:
        since = time.time()
        it.secret.update({"secret": step})
        await it.read_again("secret_file", since)
        await it.cut()


async def replace_certificates(it: Deployment, old: TlsFiles, new: TlsFiles) -> None:
    """Another CA, as an operator replaces it: first both are trusted, then the new one alone."""
    mounted, options = (it.nodes_tls, it.public), ("tls", "node_tls")
    for files, others in ((old, (new,)), (new, (old,)), (new, ())):
        since = time.time()
        for each in mounted:
            each.renew(files, *others)
        it.own = files
        for option in options:
            await it.read_again(option, since)
        await it.cut()
    host, _, port = it.router.address.rpartition(":")
    shown = await asyncio.to_thread(ssl.get_server_certificate, (host, int(port)))
    assert ssl.PEM_cert_to_DER_cert(shown) == ssl.PEM_cert_to_DER_cert(new.cert.read_text())
    own = {name: it.nodes_tls.path(name).read_bytes() for name in ("tls.crt", "tls.key", "ca.crt")}
    for each in mounted:
        each.update(own | {"tls.key": own["tls.key"][:100]})
    for option in options:
        await it.refused(option)
    await it.cut()
    since = time.time()
    for each in mounted:
        each.update(own)
    for option in options:
        await it.read_again(option, since)
    await it.cut()
