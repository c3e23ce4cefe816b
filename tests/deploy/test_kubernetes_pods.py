"""The pods of the kustomize base as processes of this machine: they serve, and end in good order.

Each container's command runs, by the image's entry point, with the chart's environment and file of
options. Only what one machine cannot have is replaced: ports, paths of volumes, and what a Secret
or the cluster's DNS gives. So Kubernetes is not here, but all that Baton reads is.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.chaos.cluster import free_ports
from tests.deploy.rendered_chart import (
    ROOT,
    main_container,
    of_kind,
    options_file,
    pods,
    rendered,
    role_of,
)
from tests.deploy.test_containers import image_environment

# On a busy machine three nodes need minutes to start.
pytestmark = [pytest.mark.redis, pytest.mark.slow, pytest.mark.long, pytest.mark.timeout(600)]

PATIENCE_S = 240.0
NUM_TOKENS = 1000
PROMPT = "PagedAttention keeps the keys and values of each token in blocks of a fixed size"
SECRET = {"secret": "the-secret", "api-key": "the-key", "redis-password": "the-password"}
SCRIPT = (ROOT / "deploy" / "try_kubernetes.sh").read_text()
MODULES = {"router": "router", "prefill": "prefill_node", "decode": "decode_node"}
PODS = {"router-0": "router", "prefill-0": "prefill", "decode-0": "decode", "decode-1": "decode"}


def until(what: str, true: Callable[[], object]) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not true():
        assert time.monotonic() < deadline, f"not in time: {what}"
        time.sleep(0.2)


def get(url: str, key: str = "") -> tuple[int, str]:
    """(status, body) of a page; status 0 if nobody listens."""
    request = urllib.request.Request(url, headers={"Authorization": f"Bearer {key}"})
    try:
        with urllib.request.urlopen(request, timeout=30) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, ""
    except OSError:
        return 0, ""


def shell_function(name: str) -> str:
    """A function of deploy/try_kubernetes.sh, of one line or of several."""
    found = re.search(rf"^{name}\(\) {{(?: [^\n]*}}|\n.*?\n}})$", SCRIPT, re.MULTILINE | re.DOTALL)
    assert found is not None
    return found[0]


class Machine:
    """Processes in place of the base's pods. Life: with the object: start() each -> stop()."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.environments: dict[str, dict[str, str]] = {}
        self.running: dict[str, subprocess.Popen[Any]] = {}
        self._objects = rendered("base")
        self._redis_port = free_ports(1)[0]
        self._own = {
            "PATH": f"{Path(sys.executable).parent}:/usr/bin:/bin",
            "HOME": str(folder), "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1",
            "XDG_CACHE_HOME": os.environ.get("XDG_CACHE_HOME", str(Path.home() / ".cache")),
            "HF_HOME": str(folder / "hub"), "TRITON_CACHE_DIR": str(folder / "triton"),
        }  # fmt: skip

    def start_redis(self) -> None:
        (container,) = [main_container(pod) for role, pod in pods(self._objects) if role == "redis"]
        (users,) = [
            each["data"]["redis_users.acl"] for each in of_kind(self._objects, "ConfigMap")
            if role_of(each) == "redis"
        ]  # fmt: skip
        (self.folder / "redis_users.acl").write_text(users)
        (script,) = container["args"]
        for place, here in (("/etc/redis", ""), ("/tmp/users.acl", "users.acl"), ("/data", "")):
            script = script.replace(place, str(self.folder / here))
        script = script.replace("redis-server ", f"redis-server --port {self._redis_port} ")
        environment = self._own | {"REDISCLI_AUTH": SECRET["redis-password"]}
        self._run("redis", [*container["command"], script], environment)

    def start(self, name: str) -> None:
        role = PODS[name]
        (container,) = [main_container(pod) for its, pod in pods(self._objects) if its == role]
        made = image_environment(role) | self._own
        made.pop("BATON_KERNELS_DIR", None)  # only images have it
        for each in container["env"]:
            source = each.get("valueFrom", {})
            if "fieldRef" in source:
                field = source["fieldRef"]["fieldPath"]
                value = {"status.podIP": "127.0.0.1", "metadata.name": name}[field]
            else:
                value = each.get("value") or SECRET[source["secretKeyRef"]["key"]]
            for known in made:
                value = value.replace(f"$({known})", made[known])
            made[each["name"]] = value
        secret = self.folder / "secret"
        secret.write_text(SECRET["secret"])
        made["BATON_SECRET_FILE"] = str(secret)
        redis = f"127.0.0.1:{self._redis_port}"
        made["BATON_REDIS_URL"] = made["BATON_REDIS_URL"].replace("baton-redis:6379", redis)
        numbers = [each for each in made if each.endswith("_PORT")]
        made |= dict(zip(numbers, map(str, free_ports(len(numbers))), strict=True))
        if role != "router":
            made["BATON_KV_STREAM_PORT"] = "0"  # the lanes' ports follow it
        options = self.folder / f"{name}.yaml"
        text = options_file(self._objects, role)
        options.write_text(text.replace("/model", str(ROOT / "demo_model")))
        entry = str(ROOT / "deploy" / "image" / "entrypoint.sh")
        self._run(name, ["sh", entry, MODULES[role], "--config", str(options)], made)

    def _run(self, name: str, command: list[str], environment: dict[str, str]) -> None:
        self.environments[name] = environment
        with (self.folder / f"{name}.log").open("w") as log:
            self.running[name] = subprocess.Popen(
                command, env=environment, stdout=log, stderr=log, cwd=self.folder
            )

    def health(self, name: str, page: str) -> int:
        port = self.environments[name]["BATON_HEALTH_PORT"]
        return get(f"http://127.0.0.1:{port}{page}")[0]

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.environments['router-0']['BATON_PORT']}"

    def stop(self) -> None:
        for process in self.running.values():
            process.terminate()
        for process in self.running.values():
            try:
                process.wait(60)
            except subprocess.TimeoutExpired:
                process.kill()

    def by_script(self, function: str) -> subprocess.CompletedProcess[str]:
        """Run a function of deploy/try_kubernetes.sh on this router's metrics."""
        status, page = get(f"{self.url}/metrics", SECRET["api-key"])
        assert status == 200
        told = self.folder / "metrics"
        told.write_text("".join(f"router-0 {line}\n" for line in page.splitlines()))
        own = [shell_function(name) for name in ("connected", "busy", "asks")]
        text = "\n".join([f"metrics() {{ cat '{told}'; }}", *own, function])
        return subprocess.run(["sh", "-c", text], capture_output=True, text=True, check=False)

    def ask(self) -> subprocess.Popen[str]:
        """The script's own client, asking the router that is here."""
        _, _, rest = SCRIPT.partition("<<'PYTHON' >\"$1\"\n")
        program = rest.partition("\nPYTHON\n")[0]
        url = f"{self.url}/v1/completions"
        asking = subprocess.Popen(
            [sys.executable, "-c", program, url, str(NUM_TOKENS), PROMPT, "1", ""],
            env=self.environments["router-0"], stdout=subprocess.PIPE, text=True,
        )  # fmt: skip
        self.running["client"] = asking
        return asking


@pytest.fixture
def machine(tmp_path: Path) -> Iterator[Machine]:
    if shutil.which("redis-server") is None:
        pytest.skip("no redis-server on PATH")
    machine = Machine(tmp_path)
    try:
        yield machine
    finally:
        machine.stop()


def test_pods_serve_and_end_in_good_order(machine: Machine) -> None:
    machine.start_redis()
    for name in PODS:
        machine.start(name)
    for name in PODS:
        until(f"{name} is ready", lambda name=name: machine.health(name, "/readyz") == 200)
    until("all nodes", lambda: machine.by_script("connected 3").returncode == 0)
    assert machine.by_script("connected 4").returncode == 1

    environment = machine.environments["router-0"]
    chat = [str(Path(sys.executable).parent / "baton"), "chat", "--url", machine.url]
    told = subprocess.run(
        [*chat, "What is PagedAttention?"], env=environment, capture_output=True, text=True,
        check=True, timeout=PATIENCE_S,
    )  # fmt: skip
    assert "KV cache" in told.stdout

    asking = machine.ask()
    whole = asking.communicate(timeout=PATIENCE_S)[0]
    assert asking.returncode == 0
    assert len(whole) > NUM_TOKENS

    asking = machine.ask()
    seen: list[str] = []
    until(
        "a busy node", lambda: seen.extend(machine.by_script("busy && asks").stdout.split()) or seen
    )
    victim, router = seen
    assert PODS[victim] == "decode", "a node's name is its pod's"
    assert router == "router-0"
    machine.running[victim].send_signal(signal.SIGTERM)
    text = asking.communicate(timeout=PATIENCE_S)[0]
    assert asking.returncode == 0
    assert text == whole
    assert machine.running[victim].wait(PATIENCE_S) == 0

    machine.running[router].send_signal(signal.SIGTERM)
    until("not ready", lambda: machine.health(router, "/readyz") != 200)
    assert machine.health(router, "/livez") in (200, 0), "a probe would restart it"
    assert machine.running[router].wait(PATIENCE_S) == 0
    machine.stop()
    assert {name: process.returncode for name, process in machine.running.items()} == dict.fromkeys(
        machine.running, 0
    )
