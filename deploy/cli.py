"""The `baton` command: parses the command line and calls the command.

A module that only one command needs is imported by that command.

baton up                         everything on this machine
baton router | prefill | decode  one process of a deployment (becomes `python -m ...`)
baton encode                     likewise, for images
baton chat | status              talk to a running router
baton console                    the pages of a router's console, in the browser
baton trace                      where the time of one request went
baton top                        nodes and requests, live, on the whole terminal
baton batch                      a file of requests, for a router or one engine here
baton doctor                     KV lanes between two nodes, and facts about this machine
baton bench serve | engine       measure a server, or the engine in its own process
baton convert                    safetensors for a checkpoint that has none
baton estimate                   what a model needs, and the best that a machine could do with it
baton kernels build              compile the CPU kernels in advance, for images
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import sys
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import httpx
from rich.console import Console

from baton.engine.config import EngineConfig
from baton.node.config import NodeConfig
from baton.protocol.errors import BatonError, ConfigError, Unavailable
from baton.runtime.config import AUTO, add_config, add_options, load, parse
from baton.runtime.config import given as given_options
from baton.runtime.rotation.deployment_secret import secrets_of
from baton.runtime.tls import TlsFiles
from baton.runtime.vllm_flags import add_idle
from baton.text.sentence_files import sentence_files
from bench.sse import StreamError
from deploy.flags import add_flags, given_flags
from deploy.hub import is_gguf, local_model
from deploy.plan import DEMO_MODEL, UpOptions
from deploy.preflight import check_machine, check_options
from deploy.process.fork_server import ForkServer
from deploy.trust import add_trust, client_tls, trust_of
from router.config import API_OPTIONS, RouterConfig

DEFAULT_URL = "http://127.0.0.1:8000"
DEFAULT_GRPC = "127.0.0.1:50051"
DEMO_NAME = "baton-demo"
DEMO_PARSER = "hermes"  # of tool calls
LISTED = 20  # requests that `baton trace` lists if it is not told how many
DEMO_POOL = "256MB"
LANES = ("kv_lanes", "kv_shm_dir", "kv_adopt")  # options that decide which lane two nodes take
POOL_SIZES = {"kv_cache_memory", "num_kv_blocks"}
PROCESSES = {
    "router": "router",
    "prefill": "prefill_node",
    "decode": "decode_node",
    "encode": "encode_node",
    "convert": "baton.engine.checkpoint.convert",
    "estimate": "baton.engine.performance.estimate",
    "kernels": "baton.engine.kernels.cpu",
}
BENCHMARKS = {"serve": "bench.serve", "engine": "bench.engine"}

Handler = Callable[[argparse.Namespace], int]


def build_parser() -> argparse.ArgumentParser:
    """Return a parser of all commands, except those that become another program."""
    parser = argparse.ArgumentParser(
        prog="baton", description="Serves large language models, prefill and decode apart."
    )
    parser.add_argument("--version", action="version", version=f"baton {installed_version()}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    _add_up(
        commands.add_parser("up", help="serve a model on this machine: every process, one command")
    )
    for name in ("router", "prefill", "decode", "encode"):
        text = f"run one {name} process (python -m {PROCESSES[name]})"
        commands.add_parser(name, help=text, add_help=False)
    _add_chat(commands.add_parser("chat", help="chat with a running server in the terminal"))
    text = "answer a file of requests: IN.jsonl OUT.jsonl (OpenAI's batch format), resumable"
    _add_batch(commands.add_parser("batch", help=text))
    _add_status(commands.add_parser("status", help="live table of nodes, load and requests"))
    text = "probe the KV lanes between two nodes, and this machine"
    _add_doctor(commands.add_parser("doctor", help=text))
    _add_top(commands.add_parser("top", help="nodes and requests, live, on the whole terminal"))
    _add_console(commands.add_parser("console", help="open a router's console in the browser"))
    text = "where the time of one request went: by its id, or of the slowest one"
    _add_trace(commands.add_parser("trace", help=text))
    text = "an older checkpoint, or FILE.gguf, as a folder that is served: DIR [--out DIR2]"
    commands.add_parser("convert", help=text, add_help=False)
    text = "memory, concurrency, ideal TTFT and TPOT of a model: --model DIR [--memory 80GB ...]"
    commands.add_parser("estimate", help=text, add_help=False)
    text = "compile the CPU kernels of every instruction set ahead: build [--dir DIR]"
    commands.add_parser("kernels", help=text, add_help=False)
    text = "benchmarks: baton bench serve (any server), baton bench engine (tokens/s, MBU, MFU)"
    commands.add_parser("bench", help=text, add_help=False)
    return parser


def _add_up(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "model", nargs="?", default=argparse.SUPPRESS, metavar="MODEL", help="as --model"
    )
    add_flags(parser, UpOptions)
    add_idle(parser)
    parser.set_defaults(handler=run_up)


def _add_chat(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("question", nargs="?", help="ask this once and exit")
    _add_server(parser)
    add_trust(parser)
    parser.add_argument("--model", help="model name (default: the first that the server lists)")
    parser.add_argument("--max-tokens", type=int, help="longest answer, tokens")
    parser.add_argument("--temperature", type=float, help="0 = greedy")
    parser.add_argument("--seed", type=int, help="the same seed gives the same answer")
    parser.set_defaults(handler=run_chat)


def _add_batch(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("source", type=Path, metavar="IN.jsonl", help="the requests")
    parser.add_argument("target", type=Path, metavar="OUT.jsonl", help="the answers; what is there")
    _add_server(parser)
    parser.add_argument("--concurrency", type=int, default=64, help="requests at once")
    parser.add_argument("--timeout-s", type=float, default=3600.0, help="of one request, seconds")
    add_options(parser, EngineConfig)  # with --model: no server, one engine in this process
    add_options(parser, RouterConfig, API_OPTIONS)
    parser.set_defaults(handler=run_batch)


def _add_status(parser: argparse.ArgumentParser) -> None:
    add_config(parser)
    parser.add_argument(
        "--grpc", default=DEFAULT_GRPC, metavar="HOST:PORT", help="the router's gRPC"
    )
    _add_admin_key(parser)
    parser.add_argument("--tls", action="store_true", help="with TLS, and the system's CAs")
    add_trust(parser)
    parser.add_argument("--once", action="store_true", help="print the table once and exit")
    parser.set_defaults(handler=run_status)


def _add_top(parser: argparse.ArgumentParser) -> None:
    _add_console_address(parser)
    parser.set_defaults(handler=run_top)


def _add_console(parser: argparse.ArgumentParser) -> None:
    _add_console_address(parser)
    parser.add_argument("--no-browser", action="store_true", help="only print the URL")
    parser.set_defaults(handler=run_console)


def _add_console_address(parser: argparse.ArgumentParser) -> None:
    text = "URL of the console: http://HOST:ADMIN_PORT/console (default: of the newest `baton up`)"
    parser.add_argument("console", nargs="?", metavar="URL", help=text)
    _add_admin_key(parser)
    add_trust(parser)


def _add_admin_key(parser: argparse.ArgumentParser) -> None:
    default, text = os.environ.get("BATON_ADMIN_KEY"), "the router's key of operators"
    parser.add_argument("--admin-key", default=default, help=text)


def _add_trace(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("request", nargs="?", help="id of the reply, or its x-request-id")
    parser.add_argument("--slowest", action="store_true", help="of the slowest request")
    parser.add_argument("--list", type=int, metavar="N", help="only list so many requests")
    parser.add_argument("--json", action="store_true", help="print the timeline as JSON")
    text = "write it for ui.perfetto.dev and chrome://tracing"
    parser.add_argument("--chrome", type=Path, metavar="FILE", help=text)
    _add_server(parser, f"the newest `baton up`, as its operator; else {DEFAULT_URL}")
    parser.set_defaults(url=None)
    add_trust(parser)
    parser.set_defaults(handler=run_trace)


def _add_doctor(parser: argparse.ArgumentParser) -> None:
    add_config(parser)
    given = "address of a running {} node (with --{}; default: two probe processes here)"
    parser.add_argument(
        "--from", dest="source", metavar="HOST:PORT", help=given.format("prefill", "to")
    )
    parser.add_argument(
        "--to", dest="target", metavar="HOST:PORT", help=given.format("decode", "from")
    )
    parser.add_argument("--redis-url", default=os.environ.get("BATON_REDIS_URL", ""))
    for part, text in (("cert", "certificate chain shown to nodes"), ("key", "its key"),
                       ("ca", "certificate of the CA that signed all nodes'")):  # fmt: skip
        default = os.environ.get(f"BATON_NODE_TLS_{part.upper()}")
        parser.add_argument(f"--node-tls-{part}", default=default, help=f"PEM {text}")
    group = parser.add_argument_group("of the nodes that the probes stand for")
    add_options(group, NodeConfig, LANES)
    parser.add_argument("--json", action="store_true", help="print JSON instead of tables")
    parser.set_defaults(handler=run_doctor)


def _add_server(parser: argparse.ArgumentParser, default: str = DEFAULT_URL) -> None:
    """`default`: what the help says of it."""
    add_config(parser)
    parser.add_argument("--url", default=DEFAULT_URL, help=f"server (default: {default})")
    parser.add_argument(
        "--api-key", default=os.environ.get("BATON_API_KEY"), help="the server's key"
    )


def installed_version() -> str:
    try:
        return version("baton")
    except PackageNotFoundError:
        return "(not installed)"


def up_settings(arguments: argparse.Namespace) -> tuple[UpOptions, dict[str, object]]:
    """Return the launcher's options, and the other flags that were given. Raises ConfigError."""
    flags = given_flags(arguments, UpOptions)
    options = load(UpOptions, arguments, os.environ)
    if "model" not in flags:
        flags["model"] = os.environ.get("BATON_MODEL") or str(DEMO_MODEL)
    if flags["model"] == str(DEMO_MODEL):
        if not (DEMO_MODEL / "config.json").exists():
            raise ConfigError(
                f"the demo model is missing ({DEMO_MODEL}); give --model", field="model"
            )
        if "BATON_SERVED_MODEL_NAME" not in os.environ:
            flags.setdefault("served_model_name", (DEMO_NAME,))
        if not POOL_SIZES & flags.keys():
            # A quarter of a gigabyte holds 40 thousand tokens of this model and is ready at once.
            flags["kv_cache_memory"] = DEMO_POOL
    else:
        given = str(flags["model"])
        flags["model"] = str(local_model(given))
        # The model's name is that of the file or the hub, not that of the cache's folder.
        if is_gguf(given):
            flags.setdefault("served_model_name", (Path(given).stem,))
        elif "/" in given and not Path(given).expanduser().is_dir():
            flags.setdefault("served_model_name", (given,))
    if "BATON_SHARED_WEIGHTS_CACHE" not in os.environ:
        flags.setdefault("shared_weights_cache", AUTO)  # the next start maps what this one packs
    if options.demo:
        told = {*flags, *given_options(UpOptions, arguments)}
        told |= {name.removeprefix("BATON_").lower() for name in os.environ}
        options = for_demo(options, flags, told)
    encoder = sentence_files(Path(str(flags["model"])))
    options = options.of_model(None if encoder is None else encoder.task)
    check_options(options, flags)
    return options, flags


def for_demo(options: UpOptions, flags: dict[str, object], told: Collection[str]) -> UpOptions:
    """Return the options of a demo: with each request KV is on its way, and the playground can call
    tools. What the user has `told` stays. Mutates `flags`."""
    if not {"enable_auto_tool_choice", "tool_call_parser"}.intersection(told):
        flags |= {"enable_auto_tool_choice": True, "tool_call_parser": DEMO_PARSER}
    if "prefill_placement" in told:
        return options
    return replace(options, prefill_placement="remote")


def run_up(arguments: argparse.Namespace) -> int:
    from deploy.up import up

    options, flags = up_settings(arguments)
    check_machine(options, flags)
    return up(options, flags, os.environ, Console(), arguments.fork_server)


def run_chat(arguments: argparse.Namespace) -> int:
    from deploy.chat import ChatClient, ChatSettings, ask_and_show, chat

    console = Console()
    settings = ChatSettings(
        arguments.model, arguments.max_tokens, arguments.temperature, arguments.seed
    )
    with ChatClient(arguments.url, arguments.api_key, trust_of(arguments)) as client:
        if arguments.question is None:
            chat(client, settings, console)
        else:
            messages = [{"role": "user", "content": arguments.question}]
            ask_and_show(client, messages, settings, console)
    return 0


def run_batch(arguments: argparse.Namespace) -> int:
    """Run `baton batch`. Return 0 if every request was answered well, else 1."""
    from deploy.batch import BatchPlan, batch

    with arguments.source.open("rb"):  # raises before a model is loaded
        pass
    if not arguments.target.absolute().parent.is_dir():
        raise ConfigError(f"there is no folder {arguments.target.parent}", field="target")
    # Only a --model decides. BATON_MODEL may have been set for other commands.
    engine = None
    model = given_options(EngineConfig, arguments).get("model")
    if model is not None:
        given = given_options(RouterConfig, arguments)
        given = {name: value for name, value in given.items() if name in API_OPTIONS}
        given |= {"model": model, "request_timeout_s": arguments.timeout_s}
        engine = load(EngineConfig, arguments, os.environ), load(RouterConfig, given)
        engine[1].check()
    if arguments.concurrency < 1:
        raise ConfigError("concurrency must be at least 1", field="concurrency")
    plan = BatchPlan(arguments.source, arguments.target, arguments.concurrency, arguments.timeout_s)
    return batch(plan, engine, arguments.url, arguments.api_key, Console(stderr=True))


def run_status(arguments: argparse.Namespace) -> int:
    from deploy.status import status

    tls = client_tls(arguments, wanted=arguments.tls)
    return status(arguments.grpc, arguments.admin_key, arguments.once, Console(), tls)


def run_top(arguments: argparse.Namespace) -> int:
    """Run `baton top` until the user leaves it."""
    from deploy.console_feed import ConsoleFeed, console_address
    from deploy.top import TopApp

    address = console_address(arguments.console, arguments.admin_key, os.environ)
    trust = trust_of(arguments)

    async def show() -> None:
        async with ConsoleFeed(address, trust) as feed:
            await TopApp(feed).run_async()

    asyncio.run(show())
    return 0


def run_console(arguments: argparse.Namespace) -> int:
    """Run `baton console`: print the URL of the pages, and open them. Raises Unavailable if nothing
    answers there."""
    import webbrowser

    from deploy.console_feed import console_address

    address = console_address(arguments.console, arguments.admin_key, os.environ)
    try:
        trust = trust_of(arguments) or True
        reply = httpx.get(f"{address.origin}/console", trust_env=False, verify=trust)
    except httpx.HTTPError as error:
        raise Unavailable(f"no router answers at {address.origin}: {error}") from error
    if not reply.is_success:
        raise Unavailable(f"{address.origin} has no console: it answered {reply.status_code}")
    print(address.page)
    if not arguments.no_browser:
        webbrowser.open(address.page)
    return 0


def run_trace(arguments: argparse.Namespace) -> int:
    """Run `baton trace`. Without an id, list the requests that ended last, or the slowest.

    Without --url, of the newest `baton up`."""
    from deploy.console_feed import console_address, newest_console
    from deploy.trace import TimelineSource, requests_table, view

    url, key = arguments.url or DEFAULT_URL, arguments.api_key
    if arguments.url is None and (page := newest_console(os.environ)) is not None:
        address = console_address(page, None, os.environ)
        url, key = address.origin, address.key
    source = TimelineSource(url, key, trust_of(arguments))
    console, name = Console(), arguments.request
    if name is None and (arguments.list is not None or not arguments.slowest):
        listed = source.requests(arguments.slowest, arguments.list or LISTED)
        console.print(requests_table(listed, console.width))
        return 0
    timeline = source.timeline(name or source.slowest())
    if arguments.json:
        print(json.dumps(timeline, indent=2))
    else:
        console.print(view(timeline, console.width))
    if arguments.chrome is not None:
        trace = source.perfetto(timeline["request_id"])
        arguments.chrome.write_text(json.dumps(trace))
    return 0


def run_doctor(arguments: argparse.Namespace) -> int:
    """Run `baton doctor`. Return 0 if the two nodes can hand over by some lane, else 1."""
    from deploy.doctor import NodeAccess, doctor, show

    files = (arguments.node_tls_cert, arguments.node_tls_key, arguments.node_tls_ca)
    secret, secret_file = (os.environ.get(f"BATON_SECRET{end}") for end in ("", "_FILE"))
    secrets = secrets_of(secret or "", secret_file or None)
    access = NodeAccess(secrets()[0], TlsFiles.of(*files, "node_tls"))
    # Options that are not given have the values of `baton up`.
    told = {"BATON_KV_LANES": UpOptions().kv_lanes, **os.environ}
    given = {name: value for name, value in vars(arguments).items() if name in LANES}
    flags = load(NodeConfig, given, told)
    found = doctor(arguments.source, arguments.target, access, arguments.redis_url, flags)
    if arguments.json:
        print(json.dumps(found.as_json(), indent=2))
    else:
        show(found, Console())
    return 0 if found.healthy else 1


def split_passed_on(arguments: Sequence[str]) -> list[str] | None:
    """Return the program that this command line becomes, or None if `baton` itself handles it."""
    if not arguments:
        return None
    command, rest = arguments[0], list(arguments[1:])
    if command in PROCESSES:
        return [sys.executable, "-m", PROCESSES[command], *rest]
    if command == "bench" and rest and rest[0] in BENCHMARKS:
        return [sys.executable, "-m", BENCHMARKS[rest[0]], *rest[1:]]
    if command == "bench":
        print(f"usage: baton bench {'|'.join(BENCHMARKS)} [OPTIONS]", file=sys.stderr)
        raise SystemExit(0 if rest and rest[0] in ("-h", "--help") else 2)
    return None


def main(arguments: Sequence[str] | None = None, fork_server: ForkServer | None = None) -> int:
    """Run the `baton` script. Return the exit status. `fork_server` is for `up`."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    program = split_passed_on(given)
    if program is not None:
        os.execv(program[0], program)  # so the program itself gets signals and sets the status
    try:
        parsed = parse(build_parser(), given)
        parsed.fork_server = fork_server
        return parsed.handler(parsed)
    except ConfigError as error:
        print(f"baton: {error}", file=sys.stderr)
        return 2
    except (BatonError, StreamError, httpx.HTTPError) as error:
        print(f"baton: {error}", file=sys.stderr)
        return 1
    except OSError as error:  # a file that is not there, a folder that cannot be written
        place = f"{error.filename}: " if error.filename else ""
        print(f"baton: {place}{error.strerror or error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130


if __name__ == "__main__":
    raise SystemExit(main())
