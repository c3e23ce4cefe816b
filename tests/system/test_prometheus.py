"""A real Prometheus scrapes a real cluster, with one router and with three.

What must be seen: each sample under the name that its page has; the sum of each counter over all
targets is what the clients know; gauges of nodes once; every expression of the boards and of vLLM's
own board has data; alerts fire once a node is killed.
"""

from __future__ import annotations

import asyncio
import math
import random
import re
import shutil
import socket
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from tests.system.processes import Processes, ServerProcess
from tests.system.test_endpoints import BOARD
from tests.tiny_models import make_tiny_model
from tests.waiting import WAIT_S, eventually
from tools.boards import BOARDS

pytestmark = [
    pytest.mark.slow,
    pytest.mark.long,
    pytest.mark.skipif(shutil.which("prometheus") is None, reason="needs Debian's prometheus"),
]
FILES = Path(__file__).resolve().parents[2] / "deploy/observability"
SERVED = "house-name"
NUM_REQUESTS = 24
FLAGS = ("--served-model-name", SERVED)
NODE_FLAGS = (*FLAGS, "--metrics-port", "0", "--num-kv-blocks", "128", "--no-measure-limits")
NAME = re.compile(r"^([\w:]+)(?:\{| )", re.MULTILINE)


@dataclass
class Truth:
    """What clients know of their own requests."""

    answers: Counter[str] = field(default_factory=Counter[str])  # by status
    reasons: Counter[str] = field(default_factory=Counter[str])
    prompt_tokens: int = 0
    tokens: int = 0

    def sums(self) -> dict[str, float]:
        """Return what each expression must be."""
        found: dict[str, float] = {
            "sum(vllm:prompt_tokens_total)": self.prompt_tokens,
            "sum(vllm:prompt_tokens_by_source_total)": self.prompt_tokens,
            "sum(baton_prompt_tokens_total)": self.prompt_tokens,
            "sum(vllm:generation_tokens_total)": self.tokens,
            "sum(vllm:request_generation_tokens_sum)": self.tokens,
            "sum(vllm:e2e_request_latency_seconds_count)": self.answers["200"],
            "sum(vllm:time_to_first_token_seconds_count)": self.answers["200"],
            "sum(baton_admission_admitted_total)": self.answers["200"],
            'sum(baton_node_requests_total{role="decode"})': self.answers["200"],
            "sum(baton_request_failure_total)": 0,
            "sum(baton_live_requests)": 0,
            "sum(baton_node_live_requests)": 0,
            "sum(vllm:num_requests_running)": 0,
            "count(vllm:kv_cache_usage_perc)": 2,
            "sum(baton_kv_blocks)": 256,
            'sum(max by (role) (baton_router_nodes{state="ready"}))': 2,
        }
        for reason in ("stop", "length"):
            name = f'vllm:request_success_total{{finished_reason="{reason}"}}'
            found[f"sum({name})"] = self.reasons[reason]
        for status, count in self.answers.items():
            name = f'baton_http_requests_total{{route="/v1/completions",status="{status}"}}'
            found[f"sum({name})"] = count
        return found


@dataclass
class Scraped:
    """A Prometheus, and the processes that it scrapes."""

    http: httpx.AsyncClient
    routers: Sequence[ServerProcess]
    nodes: Sequence[ServerProcess]
    prometheus: str

    @property
    def pages(self) -> list[str]:
        own = [f"http://{router.address}/metrics" for router in self.routers]
        return own + [f"http://127.0.0.1:{n.ready['metrics_port']}/metrics" for n in self.nodes]

    async def get(self, path: str, **params: str) -> Any:
        reply = await self.http.get(f"{self.prometheus}/api/v1/{path}", params=params)
        assert reply.status_code == 200, reply.text
        return reply.json()["data"]

    async def query(self, expression: str) -> list[float]:
        found = await self.get("query", query=expression)
        return [float(each["value"][1]) for each in found["result"]]

    async def firing(self) -> set[str]:
        alerts = (await self.get("alerts"))["alerts"]
        return {each["labels"]["alertname"] for each in alerts if each["state"] == "firing"}


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def config(
    routers: Sequence[ServerProcess], nodes: Sequence[ServerProcess], rules: Path = FILES / "rules"
) -> str:
    """The file of deploy/observability with these targets, scraped every second."""
    described = yaml.safe_load((FILES / "prometheus.yml").read_text())
    described["global"] = {"scrape_interval": "1s", "evaluation_interval": "1s"}
    described["rule_files"] = [str(rules / Path(name).name) for name in described["rule_files"]]
    targets = {
        "baton-router": [each.address for each in routers],
        "baton-node": [f"127.0.0.1:{each.ready['metrics_port']}" for each in nodes],
    }
    for job in described["scrape_configs"]:
        job["static_configs"] = [{"targets": targets[job["job_name"]]}]
    return yaml.safe_dump(described)


@asynccontextmanager
async def scraped(model: Path, folder: Path, num_routers: int) -> AsyncIterator[Scraped]:
    async with Processes(model, folder) as processes:
        prefill, decode = await processes.nodes(1, 1, NODE_FLAGS)
        starts = [processes.router(prefill, decode, FLAGS) for _ in range(num_routers)]
        routers, nodes = await asyncio.gather(*starts), [*prefill, *decode]
        async with prometheus(folder, routers, nodes, config(routers, nodes)) as found:
            yield found


@asynccontextmanager
async def prometheus(
    folder: Path, routers: Sequence[ServerProcess], nodes: Sequence[ServerProcess], described: str
) -> AsyncIterator[Scraped]:
    """Run a Prometheus with the config `described` until the end of the block."""
    place = folder / "prometheus.yml"
    place.write_text(described)
    port = free_port()
    with (folder / "prometheus.log").open("wb") as log:
        process = await asyncio.create_subprocess_exec(
            "prometheus",
            f"--config.file={place}",
            f"--storage.tsdb.path={folder / 'tsdb'}",
            f"--web.listen-address=127.0.0.1:{port}",
            stderr=log,
            stdout=log,
        )
    try:
        async with httpx.AsyncClient(timeout=WAIT_S) as http:
            found = Scraped(http, routers, nodes, f"http://127.0.0.1:{port}")

            async def up() -> bool:
                try:
                    return await found.query("sum(up)") == [len(routers) + len(nodes)]
                except (httpx.HTTPError, AssertionError):
                    return False

            await eventually(up)
            yield found
    finally:
        process.terminate()
        await process.wait()


async def load(http: httpx.AsyncClient, routers: Sequence[ServerProcess]) -> Truth:
    """Ask each router in turn: answers to their end, answers that stop at once, bad requests."""
    truth, chance = Truth(), random.Random(0)
    for index in range(NUM_REQUESTS):
        prompt = [chance.randrange(5, 200) for _ in range(chance.randrange(40, 80))]
        body: dict[str, Any] = {"prompt": prompt, "max_tokens": 3 + index % 5, "temperature": 0}
        if index % 4 == 1:
            body |= {"allowed_token_ids": [7], "stop_token_ids": [7]}
        elif index % 4 == 2:
            body |= {"max_tokens": 0 if index == 2 else -1}
        else:
            body |= {"ignore_eos": True}
        url = f"http://{routers[index % len(routers)].address}/v1/completions"
        reply = await http.post(url, json=body)
        truth.answers[str(reply.status_code)] += 1
        if reply.status_code == 200:
            told = reply.json()
            truth.reasons[told["choices"][0]["finish_reason"]] += 1
            truth.prompt_tokens += told["usage"]["prompt_tokens"]
            truth.tokens += told["usage"]["completion_tokens"]
    assert set(truth.reasons) == {"stop", "length"}, truth
    assert len(truth.answers) > 1, truth
    return truth


async def sums_are_true(here: Scraped, truth: Truth) -> None:
    wanted = truth.sums()

    async def seen() -> dict[str, float]:
        return {name: sum(await here.query(name)) for name in wanted}

    async def all_seen() -> bool:
        return await seen() == wanted

    try:
        await eventually(all_seen)
    except TimeoutError:
        assert await seen() == wanted


async def names_are_kept(here: Scraped) -> None:
    """A node's last scrape may be older than its page, so names that lack are asked for again."""
    pages = [(await here.http.get(url)).text for url in here.pages]
    shown = {name for page in pages for name in NAME.findall(page)}
    assert any(name.startswith("vllm:") for name in shown)

    async def known() -> set[str]:
        return set(await here.get("label/__name__/values"))

    async def all_known() -> bool:
        return shown <= await known()

    try:
        await eventually(all_known)
    except TimeoutError:
        assert shown <= await known()
    assert not [name for name in await known() if name.startswith("vllm_")]


async def boards_are_full(here: Scraped) -> None:
    """A scrape that comes too late leaves a gap, so what is empty is asked again."""
    ours = [line for board in BOARDS for panel in board.panels for line, _ in panel.lines]
    empty = [*ours, *BOARD]

    async def all_full() -> bool:
        for expression in list(empty):
            asked = expression.replace("$__rate_interval", "5m").replace("$node", ".*")
            values = await here.query(asked.replace("$model_name", SERVED))
            if values and not all(map(math.isnan, values)):
                empty.remove(expression)
        return not empty

    try:
        await eventually(all_full)
    except TimeoutError:
        assert empty == []


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model("llama", tmp_path_factory.mktemp("model"))


@pytest.mark.parametrize("num_routers", [1, 3])
async def test_prometheus_sees_the_truth(model: Path, tmp_path: Path, num_routers: int) -> None:
    async with scraped(model, tmp_path, num_routers) as here:
        truth = await load(here.http, here.routers)
        await sums_are_true(here, truth)
        await names_are_kept(here)
        await boards_are_full(here)
        assert await here.firing() == set()
        await here.nodes[1].kill()

        async def told() -> bool:
            deaths = await here.query("sum(baton_node_deaths_total)")  # each router sees it
            wanted = {"BatonNodesDie", "BatonTargetDown", "BatonNoNodes"}
            return deaths == [num_routers] and wanted <= await here.firing()

        await eventually(told, 2 * WAIT_S)
