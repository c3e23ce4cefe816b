"""RouterConfig: every option of the router. Flags, environment and file keys come from it."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Final, get_args

from baton.parsers.registry import REASONING_PARSERS, TOOL_PARSERS
from baton.protocol.errors import ConfigError
from baton.protocol.handles import Role
from baton.protocol.request import Resume
from baton.runtime.addresses import is_loopback
from baton.runtime.config import option
from baton.runtime.log import FORMATS, LEVELS
from baton.runtime.redis.urls import RedisKind, check_redis_url, parse_redis_url
from baton.runtime.rotation.deployment_secret import (
    SECRET_FILE_HELP,
    Secrets,
    check_secret,
    secrets_of,
)
from baton.runtime.timing import Timing
from baton.runtime.tls import TlsFiles
from baton.runtime.tracing.sender import PROTOCOLS, check_endpoint
from router.images.limits import MAX_IMAGES, ImageLimits, check_domains, images_per_request
from router.tenants.keys import KeyFile, KeyRing, key_file

MAX_LOGPROBS: Final = 20  # OpenAI's
# Options that change what an answer contains. The others say how and where it is computed.
API_OPTIONS: Final = frozenset({
    "chat_template", "enable_auto_tool_choice", "generation_config", "matryoshka_dimensions",
    "max_logprobs", "pooling_type", "reasoning_parser", "reranker", "response_role",
    "responses_drop_builtin_tools", "return_tokens_as_token_ids", "tool_call_parser",
    "trust_request_chat_template",
})  # fmt: skip
MAX_KEPT_MB: Final = 256
_WILDCARDS: Final = ("0.0.0.0", "::")


@dataclass(frozen=True, slots=True)
class RouterConfig:
    model: str = option(
        "", "model directory: the router reads tokenizer and chat template only", also=("-m",)
    )
    models: str | None = option(
        None, "YAML or TOML file of several models behind this router, instead of --model"
    )
    served_model_name: tuple[str, ...] = option(
        (),
        "names in the API (several: answers say the first; default: what the nodes say)",
        several=True,
    )
    chat_template: str | None = option(
        None, "file with a Jinja chat template, instead of the model's"
    )
    trust_request_chat_template: bool = option(
        False, "render chats by the `chat_template` that a request brings"
    )
    enable_tokenizer_info_endpoint: bool = option(
        False, "serve /tokenizer_info: the tokenizer's configuration and the chat template"
    )
    response_role: str = option("assistant", "role that answers chats")
    max_logprobs: int = option(
        MAX_LOGPROBS,
        "most log-probabilities that a request may ask for per token; -1 = the whole vocabulary",
    )
    return_tokens_as_token_ids: bool = option(
        False, "name tokens `token_id:42` in log-probabilities, unless a request says"
    )
    enable_auto_tool_choice: bool = option(
        False, "let the model decide to call tools (needs --tool-call-parser)"
    )
    tool_call_parser: str | None = option(
        None,
        "how the model writes its tool calls (docs/parsers.md); auto: by its chat template",
        choices=TOOL_PARSERS,
    )
    strict_fields: bool = option(
        False, "refuse bodies with fields that nothing here reads, naming the field"
    )
    reasoning_parser: str | None = option(
        None,
        "how the model marks its reasoning (docs/parsers.md); auto: by its chat template",
        choices=REASONING_PARSERS,
    )
    responses_drop_builtin_tools: bool = option(
        True, "leave OpenAI's own tools (web_search, ...) of /v1/responses out, and say so there"
    )
    tokenizer_cache_mb: int = option(
        32, "MiB of texts and ids of parts of chats that are not encoded again; 0 = none"
    )
    generation_config: str = option(
        "auto",
        "sampling defaults: the model's generation_config.json, or vLLM's neutral values",
        choices=("auto", "vllm"),
    )
    pooling_type: str = option(
        "auto",
        "how /v1/embeddings makes a vector of hidden states; auto: as the model's files say",
        choices=("auto", "last", "mean"),
    )
    matryoshka_dimensions: tuple[int, ...] = option(
        (), "length that embeddings may be cut to (repeatable; default: as config.json says)"
    )
    reranker: str = option(
        "auto",
        "serve /v1/rerank and /v1/score by the model's yes and no; auto: if config.json says so",
        choices=("auto", "qwen3", "none"),
    )
    limit_mm_per_prompt: str = option(
        f'{{"image": {MAX_IMAGES}}}',
        "most images of a request: '{\"image\": 4}' or image=4; 0 = none",
    )
    max_image_mb: int = option(20, "MiB of an image's file at most")
    max_image_megapixels: int = option(
        50, "million pixels of an image at most, by its file's header, before it is decoded"
    )
    allowed_media_domains: tuple[str, ...] = option(
        (),
        "host that images of requests may be fetched from, HOST or HOST:PORT (repeatable; * = any"
        " public one; default: no image is fetched)",
        several=True,
    )
    media_private_addresses: bool = option(
        False, "let hosts of --allowed-media-domains be in private networks, and on this machine"
    )
    media_fetch_s: float = option(5.0, "time for one image to be fetched in, seconds")
    max_live_image_mb: int = option(
        1024, "MiB of images of requests that wait or run; one key may have half of them"
    )
    host: str = option("127.0.0.1", "address to listen on (HTTP and gRPC)")
    port: int = option(8000, "HTTP port, 0 = any free one")
    uds: str | None = option(None, "Unix socket to serve HTTP on, instead of --host and --port")
    root_path: str = option(
        "", "prefix of paths that a proxy in front leaves on, such as /llm; without it, too"
    )
    grpc_port: int = option(50051, "gRPC port, 0 = any free one")
    admin_host: str = option("127.0.0.1", "address of the admin server")
    admin_port: int | None = option(
        None, "port of the admin server: /abort_requests, /drain, /debug, /metrics (default: none)"
    )
    admin_key: tuple[str, ...] = option(
        (), "key of operators, for the admin server and gRPC's ServerInfo (repeatable)"
    )
    admin_keys: str | None = option(None, "file of operators' keys, in the form of --api-keys")
    console_key: str = option(
        "", "key of the admin server alone; `baton up` draws one (BATON_CONSOLE_KEY)", secret=True
    )
    break_socket: str | None = option(
        None, "Unix socket of `baton up --demo`, whose nodes the console may kill and stop"
    )
    health_port: int | None = option(
        None, "port of /livez, /readyz and /startupz, plain HTTP, open to all (default: none)"
    )
    workers: int = option(1, "router processes on these ports; more than one needs --redis-url")
    own_port: int | None = option(
        None,
        "a second HTTP port, of this process alone (with --workers: of the first one, the others"
        " follow; 0 = any free ones): its own /metrics",
    )
    reuse_port: bool = option(False, "share the ports with other router processes (Linux)")
    redis_url: str | None = option(
        None,
        "redis://, rediss://, unix://, redis+sentinel:// or redis+cluster:// (docs/redis.md);"
        " none = in memory",
    )
    prefill_node: tuple[str, ...] = option((), "HOST:PORT of a prefill node (repeatable)")
    decode_node: tuple[str, ...] = option((), "HOST:PORT of a decode node (repeatable)")
    encode_node: tuple[str, ...] = option((), "HOST:PORT of an encode node (repeatable)")
    api_key: tuple[str, ...] = option((), "key that clients must present (repeatable)")
    api_keys: str | None = option(
        None, "file (TOML, or JSON by its name) of keys with tenant, weight and limits of each"
    )
    allowed_origins: tuple[str, ...] = option(
        (), "origin of web pages that may read answers (CORS, repeatable; * = any; default: none)"
    )
    share_prefix_cache: bool = option(
        False, "let the tenants of different API keys hit each other's cached prompts"
    )
    tls_cert: str | None = option(
        None, "PEM certificate chain of the HTTP, gRPC and admin ports", also=("--ssl-certfile",)
    )
    tls_key: str | None = option(None, "PEM key of --tls-cert", also=("--ssl-keyfile",))
    tls_ca: str | None = option(
        None, "PEM certificates of the CAs of clients; with it clients must present a certificate"
    )
    node_tls_cert: str | None = option(None, "PEM certificate chain shown to nodes")
    node_tls_key: str | None = option(None, "PEM key of --node-tls-cert")
    node_tls_ca: str | None = option(None, "PEM certificate of the CA that signed all nodes'")
    insecure: bool = option(False, "allow a non-loopback bind without TLS")
    router_id: str | None = option(None, "name of this router; default: drawn at start")
    policy: str = option(
        "prefix-aware", "how nodes are chosen", choices=("prefix-aware", "least-loaded")
    )
    prefill_placement: str = option(
        "threshold",
        "where prompts are computed: on prefill nodes (remote), short ones on the decode node"
        " (threshold), where it costs less by measured rates (auto)",
        choices=("auto", "remote", "threshold"),
    )
    local_prefill_tokens: int = option(
        0,
        "threshold: prompts with at most so many uncached tokens are prefilled on the decode node;"
        " 0 = off",
    )
    rebalance: bool = option(
        False, "move running requests, with their KV, off decode nodes that have run out of blocks"
    )
    power_of_two: bool = option(
        False, "compare two drawn nodes instead of all: for many routers and slow reports"
    )
    picker_port: int | None = option(
        None,
        "gRPC port of an endpoint picker for gateways (Envoy's ext-proc, docs/gateway.md), 0 = any"
        " free one (default: none)",
    )
    picker_router: tuple[str, ...] = option(
        (), "HOST:PORT of a router that the picker may choose (repeatable; default: this one)"
    )
    named_nodes: bool = option(
        False, "let requests name their nodes by x-baton-nodes, as the picker chose them"
    )
    max_live_requests: int = option(1024, "requests under way; more wait")
    max_queued_requests: int = option(
        512, "requests that wait for room; more are refused with 429; 0 = none waits"
    )
    max_request_tokens: int = option(1 << 20, "most n x (prompt + max_tokens) of one request")
    prefill_window_s: float = option(
        0.5, "work that prefill nodes may have queued before requests wait here, seconds"
    )
    resume: Resume = option(
        "fast",
        "how requests go on after their node was lost: with one prefill of all tokens (fast), or"
        " replayed in the same shapes, bit for bit (exact)",
        choices=get_args(Resume),
    )
    max_resumable_mb: int = option(
        MAX_KEPT_MB, "MiB of resumable requests' bodies that the store keeps for one key"
    )
    batch_dir: str | None = option(
        None, "directory of /v1/files and /v1/batches; routers of a machine may share it"
    )
    batch_mb: int = option(1024, "MiB of files and answers of batches that one key may keep")
    batch_concurrency: int = option(16, "requests of one batch at once")
    stored_responses_mb: int = option(
        64, "MiB of responses (/v1/responses) that are stored for one key; 0 = none is stored"
    )
    stored_responses_ttl_s: float = option(
        86_400.0, "how long a stored response can be asked for, seconds"
    )
    receipts: bool = option(True, "tell clients that ask which nodes served them, and when")
    request_timeout_s: float = option(600.0, "deadline of a request that brings none, seconds")
    store_timeout_s: float = option(
        0.5,
        "wait for Redis before a plain request goes on, seconds; longer while its answers take"
        " longer, up to half a lease (2.5 s)",
    )
    store_replicas: int | None = option(
        None,
        "replicas of Redis that must have the tokens of a resumable request before they are shown,"
        " as far as there are any (default: 1 with Sentinels or a Cluster, else 0)",
    )
    stall_s: float = option(
        60.0, "a node silent for so long with requests of this router hangs: they move, seconds"
    )
    node_wait_s: float = option(
        30.0,
        "without a node that serves: requests wait so long for one that was here, seconds; above"
        " the time that nodes need to start",
    )
    drain_s: float = option(5.0, "after SIGTERM: serve on for so long with /ready at 503, seconds")
    shutdown_s: float = option(10.0, "then: wait for running requests for so long, seconds")
    cpu_cores: str | None = option(None, 'cores of this process, e.g. "0,1"')
    log_level: str = option("info", "logging threshold", choices=LEVELS)
    log_format: str = option("text", "lines of the log: plain text or JSON", choices=FORMATS)
    slow_request_s: float = option(
        0.0, "log a warning with the timeline of a request that took longer, seconds; 0 = never"
    )
    timeline_requests: int = option(
        2000, "keep the timelines of so many ended requests (/v1/requests/ID/timeline); 0 = none"
    )
    timeline_text: bool = option(
        False,
        "keep the prompts and answers of those requests, at most 32 MiB, and show them to the API"
        " key that asked (/v1/requests/ID/timeline?text=true)",
    )
    console_show_text: bool = option(
        False, "keep them, and show them to operators as well, on the admin port"
    )
    otlp_traces_endpoint: str | None = option(
        None, "URL of an OpenTelemetry collector that gets a trace of each request (default: none)"
    )
    otlp_traces_protocol: str | None = option(
        None, "how (default: OTEL_EXPORTER_OTLP_TRACES_PROTOCOL, else grpc)", choices=PROTOCOLS
    )
    otlp_traces_ratio: float = option(
        1.0, "share of the requests that come without a traceparent of which traces are exported"
    )
    secret: str = option("", "secret of the deployment (BATON_SECRET)", secret=True)
    secret_file: str | None = option(None, SECRET_FILE_HELP)
    timing: Timing = field(default_factory=Timing)

    @property
    def node_addresses(self) -> dict[str, Role]:
        """The nodes of the command line, with their roles."""
        given = {
            Role.PREFILL: self.prefill_node,
            Role.DECODE: self.decode_node,
            Role.ENCODE: self.encode_node,
        }
        return {address: role for role, addresses in given.items() for address in addresses}

    def check(self) -> None:
        """Raise ConfigError, naming the option, for values that no router may start with."""
        for name, lowest in (
            ("port", 0), ("grpc_port", 0), ("max_live_requests", 1), ("local_prefill_tokens", 0),
            ("drain_s", 0), ("shutdown_s", 0), ("admin_port", 0), ("max_queued_requests", 0),
            ("max_request_tokens", 1), ("workers", 1), ("max_resumable_mb", 1),
            ("tokenizer_cache_mb", 0), ("max_logprobs", -1), ("health_port", 0), ("batch_mb", 1),
            ("batch_concurrency", 1), ("stored_responses_mb", 0), ("node_wait_s", 0),
            ("slow_request_s", 0), ("timeline_requests", 0), ("max_image_mb", 1),
            ("max_image_megapixels", 1), ("max_live_image_mb", 1), ("store_replicas", 0),
            ("picker_port", 0),
        ):  # fmt: skip
            value = getattr(self, name)
            if value is not None and value < lowest:
                raise ConfigError(f"{name} must be at least {lowest}", field=name)
        self._check_place()
        if self.own_port is not None and self.own_port < 0:
            raise ConfigError("own_port must be at least 0", field="own_port")
        if self.workers > 1 and self.redis_url is None:
            message = "--workers share their requests through Redis: give --redis-url"
            raise ConfigError(message, field="workers")
        for name in (
            "request_timeout_s", "store_timeout_s", "prefill_window_s", "stall_s",
            "stored_responses_ttl_s", "media_fetch_s",
        ):  # fmt: skip
            if getattr(self, name) <= 0:
                raise ConfigError(f"{name} must be positive", field=name)
        if self.enable_auto_tool_choice and self.tool_call_parser is None:
            message = "--enable-auto-tool-choice requires --tool-call-parser"
            raise ConfigError(message, field="tool_call_parser")
        if not all(self.served_model_name):
            raise ConfigError("a served model name must not be empty", field="served_model_name")
        if self.redis_url is not None:
            check_redis_url(self.redis_url)
        check_endpoint(self.otlp_traces_endpoint)
        if not 0 <= self.otlp_traces_ratio <= 1:
            message = "otlp_traces_ratio must be from 0 to 1"
            raise ConfigError(message, field="otlp_traces_ratio")
        check_secret(self.secret, self.secret_file)
        _ = self.tls, self.node_tls  # complete, or refused
        _ = self.image_limits()
        self._check_keys()
        self._check_encrypted(self.host)
        if self.admin_port is not None:
            self._check_encrypted(self.admin_host)

    @property
    def replicas_wanted(self) -> int:
        """How many replicas must have a resumable request's tokens before they are shown."""
        if self.store_replicas is not None or self.redis_url is None:
            return self.store_replicas or 0
        return int(parse_redis_url(self.redis_url).kind is not RedisKind.SINGLE)

    def _check_place(self) -> None:
        own = self.uds is None and self.host not in _WILDCARDS  # a gateway can connect to it
        if self.picker_port is not None and not (self.picker_router or own):
            message = "--picker-port needs --picker-router, addresses that a gateway can connect to"
            raise ConfigError(message, field="picker_router")
        if self.root_path and not re.fullmatch(r"(/[A-Za-z0-9._~-]+)+", self.root_path):
            message = "root_path must be like /llm, without a slash at its end"
            raise ConfigError(message, field="root_path")
        if self.uds is not None and self.workers > 1:
            raise ConfigError("one socket (--uds) serves one worker", field="uds")

    @property
    def tls(self) -> TlsFiles | None:
        """The certificate files of the HTTP, gRPC and admin ports, or None for no TLS.

        Raises ConfigError if one of the options is missing."""
        return TlsFiles.of(self.tls_cert, self.tls_key, self.tls_ca, "tls", mutual=False)

    @property
    def node_tls(self) -> TlsFiles | None:
        """The certificate files for connections to nodes, or None for no TLS. TLS is mutual there.

        Raises ConfigError if one of the options is missing."""
        return TlsFiles.of(self.node_tls_cert, self.node_tls_key, self.node_tls_ca, "node_tls")

    @property
    def secrets(self) -> Secrets:
        """The deployment's secrets, by which nodes let this router in. Raises ConfigError."""
        return secrets_of(self.secret, self.secret_file)

    @property
    def keeps_text(self) -> bool:
        """Whether prompts and answers are kept with the timelines."""
        return self.timeline_text or self.console_show_text

    def image_limits(self) -> ImageLimits:
        """Return the limits of images. Raises ConfigError, naming the option."""
        check_domains(self.allowed_media_domains)
        return ImageLimits(
            num_images=images_per_request(self.limit_mm_per_prompt),
            image_bytes=self.max_image_mb << 20,
            image_pixels=self.max_image_megapixels * 1_000_000,
            domains=self.allowed_media_domains,
            private_addresses=self.media_private_addresses,
            fetch_s=self.media_fetch_s,
        )

    def key_ring(self) -> KeyRing:
        """Return the API keys of clients. Raises ConfigError if --api-keys cannot be read."""
        return KeyRing.load(self.api_key, self.api_keys, share_cache=self.share_prefix_cache)

    def admin_ring(self) -> KeyRing:
        """Return the keys of operators. Without any, nobody can use what needs such a key.

        Raises ConfigError if --admin-keys cannot be read, or if a key is also an API key."""
        ring = KeyRing.load(self.admin_key, self.admin_keys)
        if ring.overlaps(self.key_ring()):
            raise ConfigError("a key of operators is also an API key", field="admin_key")
        return ring

    def console_ring(self) -> KeyRing:
        """Return the keys of the admin server: the operators', and the console's own if it has one.

        Raises ConfigError as `admin_ring`."""
        ring = KeyRing.load((*self.admin_key, self.console_key), self.admin_keys)
        if self.console_key and not ring.overlaps(self.key_ring()):
            return ring
        return self.admin_ring()

    def key_files(self) -> list[KeyFile]:
        """Return the files of keys, of clients and of operators. Raises ConfigError."""
        files = {"api_keys": self.api_keys, "admin_keys": self.admin_keys}
        return [key_file(path, name) for name, path in files.items() if path is not None]

    def _check_keys(self) -> None:
        for name in ("api_key", "admin_key"):
            if not all(key.strip() for key in getattr(self, name)):
                raise ConfigError(f"{name} must not be empty", field=name)
        has_key = self.admin_key or self.admin_keys is not None or self.console_key
        if self.admin_port is not None and not has_key:
            message = "--admin-port needs --admin-key (BATON_ADMIN_KEY) or --admin-keys"
            raise ConfigError(message, field="admin_key")
        if not is_loopback(self.host) and not self.api_key and self.api_keys is None:
            message = f"listening on {self.host} needs --api-key or --api-keys"
            raise ConfigError(message, field="api_key")

    def _check_encrypted(self, host: str) -> None:
        if not is_loopback(host) and self.tls is None and not self.insecure:
            text = f"listening on {host} without TLS (--tls-cert) needs --insecure"
            raise ConfigError(text, field="insecure")
