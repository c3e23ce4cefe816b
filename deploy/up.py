"""`baton up` as a person sees it: progress, URL, a curl to paste, the first answer, Ctrl-C.

deploy/local.py runs the processes. If stdout is not a terminal, one JSON line follows the last text
({"ready": true, "url": ...}), for programs that start a cluster.
"""

from __future__ import annotations

import json
import os
import re
import secrets
import shlex
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from types import TracebackType
from typing import Final

import httpx
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.spinner import Spinner
from rich.text import Text

from baton.protocol.errors import BatonError, ConfigError
from baton.runtime.cache_folder import cache_folder
from baton.runtime.cores import check_cores, parse_cores
from bench.sse import StreamError
from deploy.chat import READY_PAUSE_S, ChatClient, ChatSettings, ask_and_show
from deploy.console_feed import URL_FILE, still_runs
from deploy.local import Cluster, Report, StopRequested
from deploy.plan import UpOptions
from deploy.process.child import anew
from deploy.process.fork_server import ForkServer
from deploy.redis_server import require_answer
from deploy.trust import trusting

READY_TIMEOUT_S = 30.0
CONSOLE_KEY = "BATON_CONSOLE_KEY"
YOUR_CERT, YOUR_KEY = "CLIENT.pem", "CLIENT.key"  # placeholders: only the user knows the paths
FIRST_QUESTION = "What is prefill?"
PASTED_QUESTION = "What is PagedAttention?"
FIRST_ANSWER = ChatSettings(max_tokens=120, temperature=0.0)
LOG_WIDTH = 90
LOG_PREFIX = re.compile(
    r"\S+ [A-Z]+ +\S+ \[[^]]*\] \S+: "
)  # baton/runtime/log.py: when, who, where
ONE_REQUEST_S = 1.0  # signals closer than this count once: terminal and supervisor may both send
INTRODUCTION_STOP_S = 2.0


class Interrupts:
    """The first signal calls `ask`; a signal that comes while the launcher stops calls `kill`.

    A thread of its own calls them; it reads what the C handler writes (set_wakeup_fd). Python's
    handlers would not do: they run only when the main thread next runs Python. If a signal came
    just before the main thread waits for its queue, the handler would never run, because the wait
    would never end.
    """

    def __init__(
        self,
        ask: Callable[[], None],
        kill: Callable[[], None],
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        """Prepare the handlers. `now` returns the seconds of any monotonic clock."""
        self._ask = ask
        self._kill = kill
        self._now = now
        self._stops_since: float | None = None
        self._reader, self._writer = socket.socketpair()
        self._writer.setblocking(False)
        self._thread = threading.Thread(target=self._listen, name="signals", daemon=True)
        self._previous = {number: signal.getsignal(number) for number in self._numbers()}
        self._previous_descriptor = -1

    @staticmethod
    def _numbers() -> tuple[signal.Signals, ...]:
        return (signal.SIGINT, signal.SIGTERM)

    def begin_stop(self) -> None:
        """Note that the launcher stops by itself: from now on a signal kills what is left."""
        if self._stops_since is None:
            self._stops_since = self._now()

    def _listen(self) -> None:
        while received := self._reader.recv(64):  # one byte per signal; empty at the end
            for number in received:
                if number in self._numbers():
                    self._heard()

    def _heard(self) -> None:
        if self._stops_since is None:
            self._stops_since = self._now()
            self._ask()
        elif self._now() - self._stops_since > ONE_REQUEST_S:
            self._kill()

    def __enter__(self) -> Interrupts:
        self._thread.start()
        self._previous_descriptor = signal.set_wakeup_fd(self._writer.fileno())
        for number in self._numbers():
            signal.signal(number, lambda number, frame: None)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)
        signal.set_wakeup_fd(self._previous_descriptor)
        self._writer.close()
        self._thread.join()
        self._reader.close()


@dataclass(frozen=True, slots=True)
class StartingView:
    """Shows which members are starting, for how long, and the last line of each log.

    rich's thread draws it.
    """

    cluster: Cluster

    def __rich__(self) -> RenderableType:
        lines: list[RenderableType] = []
        now = time.monotonic()
        for member in list(self.cluster.members.values()):
            if member.ready_after is None and member.child is not None:
                text = Text(f" {member.spec.name:<10} {now - member.began:5.1f} s  ")
                last = member.child.last_lines(1)
                said = LOG_PREFIX.sub("", last[0], count=1) if last else "starting"
                text.append(said[:LOG_WIDTH], style="dim")
                lines.append(Spinner("dots", text))
        return Group(*lines)


def up(
    options: UpOptions,
    flags: Mapping[str, object],
    environ: Mapping[str, str],
    console: Console,
    fork_server: ForkServer | None = None,
) -> int:
    """Run a cluster until a signal. Return the exit status. Raises ConfigError.

    `fork_server` starts the nodes; it is closed when they serve.
    """
    began = time.monotonic()
    cores = wanted_cores(options)
    options = with_own_key(options)
    if options.admin_port is None:
        options = replace(options, admin_port=0)  # any: for the console
    variables = child_variables(options)
    if options.redis_url is not None:
        require_answer(options.redis_url)
    run_dir = made_run_dir(options, environ)
    link = None if options.run_dir is None else linked(run_dir, environ)

    def tell(report: Report) -> None:
        mark, style = ("!", "yellow") if report.trouble else ("+", "green")
        console.print(Text.assemble((f" {mark} ", style), f"{report.member:<10} {report.text}"))

    start_node = anew if fork_server is None else fork_server.start
    cluster = Cluster(options, flags, cores, run_dir, tell, start_node)
    status = 0
    introduction = Introduction(cluster, console, began, variables[CONSOLE_KEY])
    with Interrupts(cluster.request_stop, cluster.kill) as interrupts:
        try:
            announce_start(cluster, flags, console)
            with Live(StartingView(cluster), console=console, transient=True):
                cluster.start(variables)
            if fork_server is not None:
                fork_server.close()
            introduction.start()
            cluster.supervise()
        except StopRequested:
            pass  # the ordinary end
        except (BatonError, StreamError, httpx.HTTPError) as error:
            console.print(Text(str(error), style="red"), soft_wrap=True)
            status = 2 if isinstance(error, ConfigError) else 1
        finally:
            interrupts.begin_stop()
            console.print("stopping ...", style="dim")
            cluster.stop()
            introduction.join()
            (run_dir / URL_FILE).unlink(missing_ok=True)
            if link is not None:
                link.unlink(missing_ok=True)
            console.print("stopped", style="dim")
    return status


def wanted_cores(options: UpOptions) -> list[int]:
    """Return the cores to split among the nodes. Raises ConfigError."""
    if not options.cores:
        return sorted(os.sched_getaffinity(0))
    cores = parse_cores(options.cores, "--cores")
    check_cores(cores, "--cores")
    return list(cores)


def default_run_dir(environ: Mapping[str, str]) -> Path:
    """Return a new folder per run below the user's cache. Raises OSError."""
    return cache_folder("runs", environ) / f"{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}"


def made_run_dir(options: UpOptions, environ: Mapping[str, str]) -> Path:
    """Return the folder for logs and data, and make it if it is missing. Raises ConfigError."""
    try:
        folder = options.run_dir or default_run_dir(environ)
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        place = error.filename or options.run_dir or "the user's cache"
        text = f"logs cannot be written to {place} ({error.strerror or error}); give --run-dir"
        raise ConfigError(text, field="run_dir") from error
    return folder


def linked(run_dir: Path, environ: Mapping[str, str]) -> Path | None:
    """Return a link to a folder that the user has named, where `baton console` and `baton top` look
    for runs; None if it cannot be made."""
    try:
        link = default_run_dir(environ)
        link.parent.mkdir(parents=True, exist_ok=True)
        for old in link.parent.iterdir():  # of launchers that were killed
            if old.is_symlink() and not still_runs(old):
                old.unlink()
        link.symlink_to(run_dir.resolve(), target_is_directory=True)
    except OSError:
        return None
    return link


def child_variables(options: UpOptions) -> dict[str, str]:
    """Return the secrets for the environment of processes, where `ps` does not show them."""
    variables = {
        "BATON_SECRET": options.secret or secrets.token_hex(32),
        "BATON_SECRET_FILE": "",  # of another deployment
        CONSOLE_KEY: secrets.token_urlsafe(32),
    }
    for name, keys in options.keys.items():
        if any("," in key for key in keys):
            flag = name.replace("_", "-")
            raise ConfigError(f"--{flag} must not contain a comma", field=name)
        if keys:
            variables[f"BATON_{name.upper()}"] = ",".join(keys)
    return variables


def with_own_key(options: UpOptions) -> UpOptions:
    """Return the options with a key for the launcher's own question.

    One is drawn if keys are given only in a file.
    """
    if options.api_keys is None or options.api_key:
        return options
    return replace(options, api_key=(secrets.token_urlsafe(32),))


def announce_start(cluster: Cluster, flags: Mapping[str, object], console: Console) -> None:
    """Print what is about to start, on which cores, and where the logs are."""
    plan = cluster.plan
    console.print(f"[bold]baton[/bold] serves {flags['model']}", highlight=False, soft_wrap=True)
    if cluster.task is not None:
        text = f"   an encoder ({cluster.task}): prefill nodes only; it writes no text"
        console.print(text, style="dim", highlight=False)
    for node in plan.nodes:
        cores = ",".join(str(core) for core in node.cores)
        console.print(f"   {node.name:<10} cores {cores}", style="dim", highlight=False)
    console.print(f"   logs       {cluster.run_dir}", style="dim", highlight=False, soft_wrap=True)


class Introduction:
    """Runs `introduce` on a thread, so that the launcher hears signals and sees nodes die
    meanwhile.
    """

    def __init__(self, cluster: Cluster, console: Console, began: float, key: str) -> None:
        """`key`: of the console."""
        self._cluster = cluster
        self._key = key
        self._console = console
        self._began = began
        # A daemon, because it may wait for an answer that never comes.
        self._thread = threading.Thread(target=self._run, name="introduction", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def join(self) -> None:
        """Wait for the thread. Call it after the cluster has stopped, when no question is
        answered.
        """
        if self._thread.ident is not None:
            self._thread.join(INTRODUCTION_STOP_S)

    def _run(self) -> None:
        try:
            introduce(self._cluster, self._console, self._began, self._key)
        except Exception as error:  # noqa: BLE001 - raised by the launcher's thread
            self._cluster.fail(error)


def introduce(cluster: Cluster, console: Console, began: float, key: str) -> None:
    """Wait until the router serves, ask the first question, and print how to go on.

    Raises StreamError if the router never becomes ready.
    """
    grpc, options = cluster.grpc, cluster.options
    model, first_answer_s = None, None
    if options.tls_ca is None:
        model, first_answer_s = first_question(cluster, console, began)
    if cluster.stopping:
        return
    seconds = time.monotonic() - began
    console.print()
    console.print(f"[bold green]ready[/bold green]  {cluster.url}   gRPC {grpc}", highlight=False)
    show_console(cluster, console, key)
    if first_answer_s is not None:
        text = f"first token of the first answer {first_answer_s:.1f} s after the start"
        console.print(text, highlight=False)
    console.print("\nAsk it:\n", highlight=False)
    command = curl_command(cluster.url, model, with_key=bool(options.api_key), task=cluster.task)
    console.print(with_tls(command, options), soft_wrap=True, highlight=False, markup=False)
    console.print(f"\nor, in another terminal{with_keys(options)}:\n", highlight=False)
    for command in next_commands(options, cluster.url, grpc, chats=cluster.task is None):
        line = shlex.join([*baton_command(), *command])
        console.print(line, soft_wrap=True, highlight=False, markup=False)
    console.print("\nCtrl-C stops everything.", style="dim")
    fields = {"ready": True, "url": cluster.url, "grpc": grpc, "model": model,
              "seconds": round(seconds, 3), "first_answer_s": first_answer_s,
              "logs": str(cluster.run_dir), "metrics": cluster.metrics,
              "console": cluster.console}  # fmt: skip
    line = json.dumps(fields) + "\n"
    (cluster.run_dir / "ready.json").write_text(line)
    if not console.is_terminal:
        console.file.write(line)
        console.file.flush()


def show_console(cluster: Cluster, console: Console, key: str) -> None:
    """Print the consoles' URLs with their key; keep them in a file that only this user reads."""
    urls = [f"{url}#key={key}" for url in cluster.consoles]
    if not urls:
        return
    file = cluster.run_dir / URL_FILE
    file.unlink(missing_ok=True)
    file.touch(mode=0o600)
    file.write_text("".join(f"{url}\n" for url in urls))
    for index, url in enumerate(urls):
        worker = f"  (worker {index}, which shows its own requests)" if len(urls) > 1 else ""
        console.print(f"console  {url}{worker}", highlight=False, soft_wrap=True, markup=False)


def next_commands(
    options: UpOptions, url: str, grpc: str, *, chats: bool = True
) -> list[list[str]]:
    """Return commands to paste: `chat`, and `status` if its user can be allowed to ask.

    Both find keys in the environment.
    """
    trust = [] if options.tls_cert is None else ["--tls-ca", options.tls_cert]
    trust += [] if options.tls_ca is None else ["--tls-cert", YOUR_CERT, "--tls-key", YOUR_KEY]
    commands = [["chat", "--url", url, *trust]] if chats else []
    closed = options.api_key or options.api_keys is not None
    if not closed or options.admin_key or options.admin_keys is not None:
        commands.append(["status", "--grpc", grpc, *trust])
    return commands


def with_keys(options: UpOptions) -> str:
    """Return a text about the variables that those commands need; "" if they need none."""
    names = ["BATON_API_KEY"] if options.api_key or options.api_keys is not None else []
    names += ["BATON_ADMIN_KEY"] if options.admin_key or options.admin_keys is not None else []
    return f" that has {' and '.join(names)}" if names else ""


def first_question(cluster: Cluster, console: Console, began: float) -> tuple[str, float | None]:
    """Wait for all routers and nodes, and ask the first question.

    Return the model's name, and the seconds from `began` to the first token (None if nothing was
    asked). Raises StreamError if they never become ready.
    """
    options = cluster.options
    trust = None if options.tls_cert is None else trusting(options.tls_cert)
    for url in cluster.routers.values():
        with ChatClient(url, options.own_key, trust) as client:
            client.wait_ready(READY_TIMEOUT_S)
            wait_for_nodes(client, cluster)
    with ChatClient(cluster.url, options.own_key, trust) as client:
        model = client.first_model()
        asks = options.warm_up and cluster.task is None
        return model, warm_up(client, console, began) if asks else None


def baton_command() -> list[str]:
    """Return how a shell in this folder starts `baton`, which need not be on PATH."""
    python = Path(sys.executable)
    script = python.with_name("baton")
    program, rest = (script, []) if script.exists() else (python, ["-m", "deploy"])
    here = Path.cwd()
    return [str(program.relative_to(here) if program.is_relative_to(here) else program), *rest]


def wait_for_nodes(client: ChatClient, cluster: Cluster) -> None:
    """Wait until the router knows every node; `/ready` says yes when the first node can serve.

    It asks every 30 ms. Raises StreamError.
    """
    wanted = {node.name for node in cluster.plan.nodes}
    deadline = time.monotonic() + READY_TIMEOUT_S
    while missing := wanted - client.nodes():
        if time.monotonic() >= deadline:
            raise StreamError(f"the router does not see {', '.join(sorted(missing))}")
        time.sleep(READY_PAUSE_S)


def warm_up(client: ChatClient, console: Console, began: float) -> float | None:
    """Ask one real question and show its answer; return the seconds from `began` to its first
    token.

    Return None if the model cannot chat (a base model without a template is served all the same).
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


def with_tls(command: str, options: UpOptions) -> str:
    """Return a curl command that trusts the front door's certificate, and presents one if
    needed.
    """
    if options.tls_cert is None:
        return command
    flags = ["--cacert", options.tls_cert]
    flags += [] if options.tls_ca is None else ["--cert", YOUR_CERT, "--key", YOUR_KEY]
    return command.replace("curl -N", f"curl -N {shlex.join(flags)}", 1)


# What an encoder is for -> a request of that kind.
PASTED: Final[dict[str | None, tuple[str, dict[str, object]]]] = {
    None: (
        "/v1/chat/completions",
        {"messages": [{"role": "user", "content": PASTED_QUESTION}], "stream": True},
    ),
    "embed": ("/v1/embeddings", {"input": PASTED_QUESTION}),
    "score": (
        "/v1/rerank",
        {"query": PASTED_QUESTION, "documents": ["Attention over pages.", "A fish."]},
    ),
    "classify": ("/classify", {"input": PASTED_QUESTION}),
}


def curl_command(url: str, model: str | None, with_key: bool, task: str | None = None) -> str:
    """Return a request to paste into a shell: a streaming chat, or one for an encoder's `task`.
    `model` None: the served one."""
    path, asked = PASTED[task]
    body = ({} if model is None else {"model": model}) | asked
    quoted = json.dumps(body).replace("'", "'\\''")
    key = ' \\\n  -H "Authorization: Bearer $BATON_API_KEY"' if with_key else ""
    return f"curl -N {url}{path} \\\n  -H 'Content-Type: application/json'{key} \\\n  -d '{quoted}'"
