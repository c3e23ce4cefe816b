"""`baton up` as a person sees it: progress, URL, a curl to paste, the first answer, Ctrl-C.

The processes themselves are deploy/local.py. When stdout is not a terminal, one JSON line follows
the last text ({"ready": true, "url": ...}), for programs that start a cluster.
"""

from __future__ import annotations

import json
import os
import secrets
import signal
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import FrameType, TracebackType

import httpx
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.spinner import Spinner
from rich.text import Text

from baton.client import Client
from baton.errors import BatonError, ConfigError
from baton.node.cores import parse_cores
from bench.sse import StreamError
from deploy.chat import READY_PAUSE_S, ChatClient, ChatSettings, ask_and_show
from deploy.local import Cluster, Report, reachable
from deploy.plan import UpOptions

READY_TIMEOUT_S = 30.0
FIRST_QUESTION = "What is prefill?"
PASTED_QUESTION = "What is PagedAttention?"
FIRST_ANSWER = ChatSettings(max_tokens=120, temperature=0.0)
LOG_WIDTH = 90


class StopRequested(KeyboardInterrupt):
    """SIGINT or SIGTERM arrived."""


class Interrupts:
    """The first signal unwinds the launcher; one that comes while it stops calls `kill`."""

    def __init__(self, kill: Callable[[], None]) -> None:
        self._kill = kill
        self._armed = True
        self._previous = {number: signal.getsignal(number) for number in self._numbers()}

    @staticmethod
    def _numbers() -> tuple[signal.Signals, ...]:
        return (signal.SIGINT, signal.SIGTERM)

    def disarm(self) -> None:
        """From here on a signal kills what is left."""
        self._armed = False

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if not self._armed:
            self._kill()
            return
        self._armed = False
        raise StopRequested

    def __enter__(self) -> Interrupts:
        for number in self._numbers():
            signal.signal(number, self._handle)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)


@dataclass(frozen=True, slots=True)
class StartingView:
    """What is still starting, since when, the last line of its log. Drawn by rich's thread."""

    cluster: Cluster

    def __rich__(self) -> RenderableType:
        lines: list[RenderableType] = []
        now = time.monotonic()
        for member in list(self.cluster.members.values()):
            if member.ready_after is None and member.child is not None:
                text = Text(f" {member.spec.name:<10} {now - member.began:5.1f} s  ")
                last = member.child.last_lines(1)
                text.append(last[0][:LOG_WIDTH] if last else "starting", style="dim")
                lines.append(Spinner("dots", text))
        return Group(*lines)


def up(
    options: UpOptions, engine: Mapping[str, object], environ: Mapping[str, str], console: Console
) -> int:
    """Run a cluster until a signal. Returns the exit status. Raises ConfigError."""
    began = time.monotonic()
    run_dir = options.run_dir or default_run_dir(environ)
    run_dir.mkdir(parents=True, exist_ok=True)
    cores = parse_cores(options.cores) if options.cores else sorted(os.sched_getaffinity(0))

    def tell(report: Report) -> None:
        mark, style = ("!", "yellow") if report.trouble else ("+", "green")
        console.print(Text.assemble((f" {mark} ", style), f"{report.member:<10} {report.text}"))

    cluster = Cluster(options, engine, cores, run_dir, tell)
    status = 0
    with Interrupts(cluster.kill) as interrupts:
        try:
            announce_start(cluster, engine, console)
            with Live(StartingView(cluster), console=console, transient=True):
                cluster.start(child_variables(options))
            introduce(cluster, console, began)
            cluster.supervise()
        except StopRequested:
            pass  # the ordinary end
        except (BatonError, StreamError, httpx.HTTPError) as error:
            console.print(Text(str(error), style="red"), soft_wrap=True)
            status = 1
        finally:
            interrupts.disarm()
            console.print("stopping ...", style="dim")
            cluster.stop()
            console.print("stopped", style="dim")
    return status


def default_run_dir(environ: Mapping[str, str]) -> Path:
    """A new folder per run below the user's cache."""
    cache = Path(environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return cache / "baton" / "runs" / f"{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}"


def child_variables(options: UpOptions) -> dict[str, str]:
    """Secrets travel in the environment, where `ps` does not show them."""
    if options.api_key is not None and "," in options.api_key:
        raise ConfigError("--api-key must not contain a comma", field="api_key")
    variables = {"BATON_SECRET": options.secret or secrets.token_hex(32)}
    if options.api_key is not None:
        variables["BATON_API_KEY"] = options.api_key
    return variables


def announce_start(cluster: Cluster, engine: Mapping[str, object], console: Console) -> None:
    """What is about to start, on which cores, and where the logs are."""
    plan = cluster.plan
    console.print(f"[bold]baton[/bold] serves {engine['model']}", highlight=False, soft_wrap=True)
    for node in plan.nodes:
        cores = ",".join(str(core) for core in node.cores)
        console.print(f"   {node.name:<10} cores {cores}", style="dim", highlight=False)
    console.print(f"   logs       {cluster.run_dir}", style="dim", highlight=False, soft_wrap=True)


def introduce(cluster: Cluster, console: Console, began: float) -> None:
    """Wait until the router serves, ask the first question, print how to go on.

    Raises StreamError when the router never becomes ready.
    """
    grpc = f"{reachable(cluster.options.host)}:{cluster.plan.grpc_port}"
    with ChatClient(cluster.url, cluster.options.api_key) as client:
        client.wait_ready(READY_TIMEOUT_S)
        wait_for_nodes(grpc, cluster)
        model = client.first_model()
        first_answer_s = None
        if cluster.options.warm_up:
            first_answer_s = warm_up(client, console, began)
    seconds = time.monotonic() - began
    console.print()
    console.print(f"[bold green]ready[/bold green]  {cluster.url}   gRPC {grpc}", highlight=False)
    if first_answer_s is not None:
        text = f"first token of the first answer {first_answer_s:.1f} s after the start"
        console.print(text, highlight=False)
    console.print("\nAsk it:\n", highlight=False)
    command = curl_command(cluster.url, model, cluster.options.api_key is not None)
    console.print(command, soft_wrap=True, highlight=False, markup=False)
    console.print("\nor `baton chat`, `baton status`. Ctrl-C stops everything.", style="dim")
    if not console.is_terminal:
        fields = {"ready": True, "url": cluster.url, "grpc": grpc, "model": model,
                  "seconds": round(seconds, 3), "first_answer_s": first_answer_s,
                  "logs": str(cluster.run_dir)}  # fmt: skip
        console.file.write(json.dumps(fields) + "\n")
        console.file.flush()


def wait_for_nodes(grpc: str, cluster: Cluster) -> None:
    """Until the router knows every node: `/ready` says yes at the first one that can serve.

    Raises StreamError. Asked again every 100 ms, as `/ready` is.
    """
    wanted = {node.name for node in cluster.plan.nodes}
    deadline = time.monotonic() + READY_TIMEOUT_S
    with Client(grpc, cluster.options.api_key or "") as client:
        while missing := wanted - {node.node_id for node in client.server_info().nodes}:
            if time.monotonic() >= deadline:
                raise StreamError(f"the router does not see {', '.join(sorted(missing))}")
            time.sleep(READY_PAUSE_S)


def warm_up(client: ChatClient, console: Console, began: float) -> float | None:
    """One real question; its answer is shown. Returns seconds from `began` to its first token.

    None when the model cannot chat (a base model without a template is served all the same).
    """
    console.print(f"\n[bold]> {FIRST_QUESTION}[/bold]", highlight=False)
    asked = time.monotonic()
    try:
        messages = [{"role": "user", "content": FIRST_QUESTION}]
        answer = ask_and_show(client, messages, FIRST_ANSWER, console)
    except (httpx.HTTPError, StreamError) as error:
        console.print(Text(f"the first question failed: {error}", style="yellow"))
        return None
    return round(asked - began + answer.first_token_s, 3)


def curl_command(url: str, model: str, with_key: bool) -> str:
    """A streaming chat request, ready to paste into a shell."""
    body = {
        "model": model,
        "messages": [{"role": "user", "content": PASTED_QUESTION}],
        "stream": True,
    }
    quoted = json.dumps(body).replace("'", "'\\''")
    key = ' \\\n  -H "Authorization: Bearer $BATON_API_KEY"' if with_key else ""
    return (
        f"curl -N {url}/v1/chat/completions \\\n"
        f"  -H 'Content-Type: application/json'{key} \\\n"
        f"  -d '{quoted}'"
    )
