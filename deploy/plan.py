"""What `baton up` will start: pure decisions, without processes and sockets.

It turns options into command lines: how the machine's cores are split, and which flags each process
gets. deploy/local.py runs the result.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

from baton.protocol.errors import ConfigError
from baton.runtime.config import option
from baton.runtime.cores import MOST_CORES
from baton.runtime.log import FORMATS, LEVELS
from baton.runtime.redis.urls import check_redis_url
from deploy.flags import to_nodes, to_router
from deploy.process.fork_server import NVIDIA_DRIVER

REPOSITORY = Path(__file__).resolve().parent.parent
DEMO_MODEL = REPOSITORY / "demo_model"
MAX_NODES = 64
MAX_WORKERS = 64
# Most tokens of a step of a decode node, if there are prefill nodes: a prompt that is computed
# there holds up the node's streams for a step at a time. On two cores with the demo model that is
# about 25 ms.
DECODE_STEP_TOKENS = 128
# Most tokens of a step of a prefill node on a CPU. A larger step is no faster there. And prompts
# that come together would all get their token 1 only at the end of the step that computes them all.
PREFILL_STEP_TOKENS = 512
# Prompt tokens at once of a request with `resume=exact`, on both: a decode node's step has room for
# so many. Either may compute the prompt, and must do it in the same chunks.
EXACT_CHUNK_TOKENS = 32
ROUTER_STOP_S = 10.0
NODE_STOP_S = 8.0
STOP_MARGIN_S = 3.0
LOOPBACK = "127.0.0.1"
# Nodes listen on loopback. TLS files in the environment are for the front door only.
NO_TLS = {f"BATON_TLS_{name}": "" for name in ("CERT", "KEY", "CA")}
DEFAULT_PORT = 8000
DEFAULT_GRPC_PORT = 50051


@dataclass(frozen=True, slots=True)
class UpOptions:
    """The launcher's own options: what `baton up` decides itself, or needs to know.

    The other flags go unchanged to router, nodes and engine (flags.py).
    """

    prefill: int = option(1, "number of prefill nodes")
    decode: int = option(1, "number of decode nodes")
    encode: int = option(0, "number of encode nodes, for a model that reads images")
    colocated: bool = option(False, "no prefill node: the decode nodes do prefill and decode")
    prefill_placement: str = option(
        "auto",
        "where prompts are computed: on prefill nodes (remote), short ones on the decode node"
        " (threshold), where it costs less by measured rates (auto)",
        choices=("auto", "remote", "threshold"),
    )
    host: str = option("127.0.0.1", "address of the HTTP and gRPC front door")
    port: int | None = option(None, "HTTP port (default: 8000 when free, else any free one)")
    grpc_port: int | None = option(None, "gRPC port (default: 50051 when free, else any free one)")
    admin_port: int | None = option(None, "port of the router's admin server (default: none)")
    admin_key: tuple[str, ...] = option(
        (), "key of operators, for the admin server and `status` (repeatable)"
    )
    admin_keys: str | None = option(None, "file of operators' keys, in the form of --api-keys")
    workers: int = option(1, "router processes that share the ports, and requests through Redis")
    redis_url: str | None = option(None, "use this Redis instead of starting one")
    prefill_block_size: int | None = option(None, "block size of the prefill nodes, if different")
    kv_lanes: str = option(
        "auto", "KV lanes between the nodes, best first; auto: shm,stream,grpc, if shm has room"
    )
    cores: str | None = option(None, "cores to use, such as 0,1 or 0-3; all when absent")
    lend_cores: bool = option(
        True, "let prefill and decode nodes use each other's cores while those are idle"
    )
    insecure: bool = option(False, "allow a non-loopback --host without TLS")
    tls_cert: str | None = option(
        None, "PEM certificate chain of the HTTP, gRPC and admin ports", also=("--ssl-certfile",)
    )
    tls_key: str | None = option(None, "PEM key of --tls-cert", also=("--ssl-keyfile",))
    tls_ca: str | None = option(
        None, "PEM certificates of the CAs of clients; with it clients must present a certificate"
    )
    node_wait_s: float = option(
        30.0,
        "without a node that serves: requests wait so long for one that was here, seconds; above"
        " the time that nodes need to start",
    )
    demo: bool = option(
        False,
        "let the console kill, stop and slow nodes and KV lanes; prompts go to prefill nodes, and"
        " the model may call tools, unless other flags say how",
    )
    warm_up: bool = option(True, "ask one question at the start, show its answer and its time")
    log_level: str = option("info", "log level of every process", choices=LEVELS)
    log_format: str = option("text", "lines of every process's log", choices=FORMATS)
    run_dir: Path | None = option(
        None, "folder of logs and data; one in ~/.cache/baton when absent"
    )
    drain_s: float | None = option(
        None,
        "after SIGTERM: serve, or wait for requests, for so long, seconds (default: router 0,"
        " nodes 5)",
    )
    shutdown_s: float = option(2.0, "then: router waits for running requests for so long, seconds")
    api_key: tuple[str, ...] = option((), "key that clients must present (repeatable)")
    api_keys: str | None = option(
        None, "file (TOML, or JSON by its name) of keys with tenant, weight and limits of each"
    )
    secret: str | None = option(None, "the deployment's secret; drawn when absent", secret=True)

    def __post_init__(self) -> None:
        if not 0 <= self.decode <= MAX_NODES:
            raise ConfigError(f"--decode must be from 1 to {MAX_NODES}", field="decode")
        if not self.colocated and not 1 <= self.prefill <= MAX_NODES:
            raise ConfigError(f"--prefill must be from 1 to {MAX_NODES}", field="prefill")
        if not 0 <= self.encode <= MAX_NODES:
            raise ConfigError(f"--encode must be from 0 to {MAX_NODES}", field="encode")
        if not 1 <= self.workers <= MAX_WORKERS:
            raise ConfigError(f"--workers must be from 1 to {MAX_WORKERS}", field="workers")
        ports = {"port": self.port, "grpc_port": self.grpc_port, "admin_port": self.admin_port}
        for name, port in ports.items():
            if port is not None and not 0 <= port <= 65535:
                flag = name.replace("_", "-")
                raise ConfigError(f"--{flag} must be from 0 to 65535", field=name)
        if self.port and self.port == self.grpc_port:
            raise ConfigError("--port and --grpc-port must differ", field="grpc_port")
        if self.admin_port and self.admin_port in (self.port, self.grpc_port):
            message = "--admin-port must differ from --port and --grpc-port"
            raise ConfigError(message, field="admin_port")
        if self.redis_url is not None:
            check_redis_url(self.redis_url)

    def of_model(self, task: str | None) -> UpOptions:
        """Return the options for a model. `task`: what an encoder is for (SentenceFiles.task), None
        = the model writes text. An encoder has prefill nodes only. Raises ConfigError."""
        if task is None and self.decode < 1:
            raise ConfigError(f"--decode must be from 1 to {MAX_NODES}", field="decode")
        if task is not None and (self.colocated or self.decode > 1):
            name = "colocated" if self.colocated else "decode"
            message = f"--{name}: an encoder writes no text, so it has prefill nodes only"
            raise ConfigError(message, field=name)
        if task is not None and self.encode:
            raise ConfigError("--encode: this model reads no images", field="encode")
        return self if task is None else replace(self, decode=0)

    @property
    def num_prefill(self) -> int:
        return 0 if self.colocated else self.prefill

    @property
    def keys(self) -> dict[str, tuple[str, ...]]:
        """The keys that processes get in the environment, where `ps` does not show them."""
        return {"api_key": self.api_key, "admin_key": self.admin_key}

    @property
    def own_key(self) -> str | None:
        """The key for the launcher's own question, None without keys."""
        return self.api_key[0] if self.api_key else None

    @property
    def router_stop_s(self) -> float:
        """Seconds that the router may take to stop."""
        return max(ROUTER_STOP_S, (self.drain_s or 0.0) + self.shutdown_s + STOP_MARGIN_S)

    @property
    def node_stop_s(self) -> float:
        """Seconds that a node may take to stop."""
        return max(NODE_STOP_S, (self.drain_s or 0.0) + STOP_MARGIN_S)


@dataclass(frozen=True, slots=True)
class NodePlan:
    """One node process. A port is 0 (any free one) until the node has announced it."""

    name: str
    role: str  # "prefill" | "decode" | "encode"
    cores: tuple[int, ...]
    port: int = 0
    metrics_port: int = 0
    spare_cores: tuple[int, ...] = ()  # cores of other nodes that it may use while they are idle

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"


@dataclass(frozen=True, slots=True)
class ClusterPlan:
    """All processes except Redis."""

    nodes: tuple[NodePlan, ...]
    router_cores: tuple[int, ...]
    router_port: int
    grpc_port: int

    def node(self, name: str) -> NodePlan:
        return next(node for node in self.nodes if node.name == name)

    def with_node(self, changed: NodePlan) -> ClusterPlan:
        """Return the plan with the node of this name replaced."""
        nodes = tuple(changed if node.name == changed.name else node for node in self.nodes)
        return replace(self, nodes=nodes)


def split_cores(cores: Sequence[int], num_nodes: int) -> list[tuple[int, ...]]:
    """Give each node its own cores, as evenly as possible; share cores only if there are too few.

    OpenMP teams with more threads than cores stall for 10-16 ms at every barrier. So no two nodes
    share a core while there is one for each.
    """
    if len(cores) < num_nodes:
        return [(cores[index % len(cores)],) for index in range(num_nodes)]
    share, rest = divmod(len(cores), num_nodes)
    split: list[tuple[int, ...]] = []
    start = 0
    for index in range(num_nodes):
        end = start + share + (1 if index < rest else 0)
        split.append(tuple(cores[start:end]))
        start = end
    return split


def with_spare_cores(nodes: Sequence[NodePlan]) -> tuple[NodePlan, ...]:
    """Return the nodes with the cores of others that they may use: a decode node those of prefill
    nodes, and the other way round.

    Each core has one such user at most, so no two nodes take it at once. Nodes that share cores
    have none, nor have any where a core's number has no place on the board.
    """
    all_cores = [core for node in nodes for core in node.cores]
    if len(set(all_cores)) < len(all_cores) or max(all_cores) >= MOST_CORES:
        return tuple(nodes)
    sides = [[node for node in nodes if node.role == role] for role in ("prefill", "decode")]
    found = {node.name: node for node in nodes}
    for users, owners in (sides, sides[::-1]):
        for index, node in enumerate(users):
            lent = [core for owner in owners[index :: len(users)] for core in owner.cores]
            found[node.name] = replace(node, spare_cores=tuple(lent))
    return tuple(found.values())


def plan_cluster(
    options: UpOptions, cores: Sequence[int], router_port: int, grpc_port: int
) -> ClusterPlan:
    """Plan the nodes and their cores. The ports are those of the router; 0 = any free one."""
    counts = {"prefill": options.num_prefill, "decode": options.decode, "encode": options.encode}
    names = [(role, index) for role, count in counts.items() for index in range(count)]
    shares = split_cores(cores, len(names))
    nodes = tuple(
        NodePlan(f"{role}-{index}", role, share)
        for (role, index), share in zip(names, shares, strict=True)
    )
    # The router works most while prompts arrive. So it shares the cores of the prefill nodes, and
    # not those of the decode nodes, whose steps are the clients' inter-token latency.
    beside = [core for node in nodes if node.role == "prefill" for core in node.cores]
    router_cores = tuple(sorted(set(beside or cores)))
    return ClusterPlan(with_spare_cores(nodes), router_cores, router_port, grpc_port)


FOR_ROUTER: Final = to_router(UpOptions)
FOR_NODES: Final = to_nodes(UpOptions)


def to_flags(values: Mapping[str, object]) -> list[str]:
    """Return option values as command line flags; None is left out."""
    flags: list[str] = []
    for name, value in values.items():
        flag = name.replace("_", "-")
        if isinstance(value, bool):
            flags.append(f"--{flag}" if value else f"--no-{flag}")
        elif isinstance(value, list | tuple):
            for each in value:
                flags += [f"--{flag}", str(each)]
        elif value is not None:
            flags += [f"--{flag}", str(value)]
    return flags


def computes_on_cpu(flags: Mapping[str, object], driver: Path = NVIDIA_DRIVER) -> bool:
    """Whether the model runs on the CPU, as far as can be told without torch.

    It does if that was asked for, or if there is no GPU driver.
    """
    device = flags.get("device") or "auto"
    return device == "cpu" or (device == "auto" and not driver.exists())


def node_options(role: str, options: UpOptions, flags: Mapping[str, object]) -> dict[str, object]:
    """Return the options of all nodes of a role. `flags` are those besides the launcher's own."""
    values = {name: value for name, value in flags.items() if name in FOR_NODES}
    if role == "prefill" and options.prefill_block_size is not None:
        values["block_size"] = options.prefill_block_size
    if role != "prefill":  # the others need their vision tower
        values.pop("vision_tower", None)
    given = values.get("max_num_batched_tokens"), values.get("max_num_seqs")
    if given == (None, None) and options.num_prefill:
        if values.get("exact_chunk_tokens") is None:
            values["exact_chunk_tokens"] = EXACT_CHUNK_TOKENS
        if role == "decode":
            values["max_num_batched_tokens"] = DECODE_STEP_TOKENS
        elif computes_on_cpu(flags):
            values["max_num_batched_tokens"] = PREFILL_STEP_TOKENS
    num_nodes = options.num_prefill + options.decode + options.encode
    if options.decode and num_nodes > 1:  # else nothing is handed over
        values["kv_lanes"] = options.kv_lanes
    own = {
        "host": LOOPBACK,
        "drain_s": options.drain_s,
        "log_level": options.log_level,
        "log_format": options.log_format,
    }
    return values | {name: value for name, value in own.items() if value is not None}


def grouped(flags: Mapping[str, object]) -> bool:
    """Whether each node is a group of data-parallel ranks, which are nodes of their own."""
    return int(str(flags.get("data_parallel_size") or 1)) > 1


def lends_cores(options: UpOptions, flags: Mapping[str, object]) -> bool:
    """Whether nodes compute on each other's idle cores: on the CPU, each as one process."""
    several = grouped(flags) or int(str(flags.get("tensor_parallel_size") or 1)) > 1
    chosen = flags.get("deterministic") or flags.get("threads")
    return options.lend_cores and computes_on_cpu(flags) and not several and not chosen


def node_command(
    node: NodePlan,
    options: UpOptions,
    flags: Mapping[str, object],
    redis_url: str | None,
    board: Path | None = None,
) -> list[str]:
    """Return a node's command line. `board`: the file in which nodes tell which cores are idle.

    Ranks take any free ports at each start: rank r of given ones would take the r-th after these,
    which may be others'.
    """
    own = not grouped(flags)
    values = node_options(node.role, options, flags) | {
        "port": node.port if own else 0,
        "metrics_port": node.metrics_port if own else 0,
        "node_id": node.name,
        "redis_url": redis_url,
        "cpu_cores": ",".join(str(core) for core in node.cores),
    }
    if board is not None and node.spare_cores and lends_cores(options, flags):
        values["core_board"] = board
        values["spare_cores"] = ",".join(str(core) for core in node.spare_cores)
    return [sys.executable, "-m", f"{node.role}_node", *to_flags(values)]


def router_options(options: UpOptions, flags: Mapping[str, object]) -> dict[str, object]:
    """Return the router's options besides ports, cores and nodes; keys are in the environment."""
    values = {name: value for name, value in flags.items() if name in FOR_ROUTER}
    own: dict[str, object] = {
        "host": options.host,
        "prefill_placement": options.prefill_placement,
        "admin_port": options.admin_port,
        "admin_keys": options.admin_keys,
        "api_keys": options.api_keys,
        "tls_cert": options.tls_cert,
        "tls_key": options.tls_key,
        "tls_ca": options.tls_ca,
        "insecure": options.insecure or None,
        "node_wait_s": options.node_wait_s,
        # A person who presses Ctrl-C does not wait for a load balancer to notice.
        "drain_s": options.drain_s or 0,
        "shutdown_s": options.shutdown_s,
        "log_format": options.log_format,
        "log_level": options.log_level,
    }
    return values | {name: value for name, value in own.items() if value is not None}


def router_command(
    plan: ClusterPlan,
    options: UpOptions,
    flags: Mapping[str, object],
    redis_url: str | None,
    break_socket: Path | None = None,
) -> list[str]:
    """Return the router's command line. Without Redis it contains the nodes' addresses."""
    values = router_options(options, flags) | {
        "port": plan.router_port,
        "grpc_port": plan.grpc_port,
        "workers": options.workers if options.workers > 1 else None,
        "redis_url": redis_url,
        "break_socket": break_socket,
        "cpu_cores": ",".join(str(core) for core in plan.router_cores),
    }
    if redis_url is None:
        for role in ("prefill", "decode", "encode"):
            values[f"{role}_node"] = [node.address for node in plan.nodes if node.role == role]
    return [sys.executable, "-m", "router", *to_flags(values)]
