"""RouterConfig: every option of the router. Flags, environment and file keys come from it."""

from __future__ import annotations

from dataclasses import dataclass, field

from baton.addresses import is_loopback
from baton.config import option
from baton.errors import ConfigError
from baton.redis_keys import check_redis_url
from baton.timing import Timing
from router.parsers.registry import REASONING_FORMATS, TOOL_FORMATS


@dataclass(frozen=True, slots=True)
class RouterConfig:
    model: str = option(
        "", "model directory: the router reads tokenizer and chat template only", short="-m"
    )
    served_model_name: str | None = option(None, "name in the API; default: what the nodes say")
    chat_template: str | None = option(
        None, "file with a Jinja chat template, instead of the model's"
    )
    enable_auto_tool_choice: bool = option(
        False, "let the model decide to call tools (needs --tool-call-parser)"
    )
    tool_call_parser: str | None = option(
        None, "how the model writes its tool calls", choices=tuple(TOOL_FORMATS)
    )
    reasoning_parser: str | None = option(
        None, "how the model marks its reasoning", choices=tuple(REASONING_FORMATS)
    )
    generation_config: str = option(
        "auto",
        "sampling defaults: the model's generation_config.json, or vLLM's neutral values",
        choices=("auto", "vllm"),
    )
    host: str = option("127.0.0.1", "address to listen on (HTTP and gRPC)")
    port: int = option(8000, "HTTP port, 0 = any free one")
    grpc_port: int = option(50051, "gRPC port, 0 = any free one")
    redis_url: str | None = option(
        None, "redis://..., rediss://... or unix://...; none = in memory"
    )
    prefill_node: tuple[str, ...] = option((), "HOST:PORT of a prefill node (repeatable)")
    decode_node: tuple[str, ...] = option((), "HOST:PORT of a decode node (repeatable)")
    api_key: tuple[str, ...] = option((), "key that clients must present (repeatable)")
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
    max_live_requests: int = option(1024, "requests in flight; more are refused with 429")
    request_timeout_s: float = option(600.0, "deadline of a request that brings none, seconds")
    store_timeout_s: float = option(
        0.5, "longest wait for Redis before a plain request goes on, seconds"
    )
    drain_s: float = option(5.0, "after SIGTERM: serve on for so long with /ready at 503, seconds")
    shutdown_s: float = option(10.0, "then: wait for running requests for so long, seconds")
    cpu_cores: str | None = option(None, 'cores of this process, e.g. "0,1"')
    log_level: str = option(
        "info", "logging threshold", choices=("debug", "info", "warning", "error")
    )
    secret: str = option("", "secret of the deployment (BATON_SECRET)", secret=True)
    timing: Timing = field(default_factory=Timing)

    def check(self) -> None:
        """Raise ConfigError, naming the option, for values that no router may start with."""
        for name, lowest in (
            ("port", 0), ("grpc_port", 0), ("max_live_requests", 1), ("local_prefill_tokens", 0),
            ("drain_s", 0), ("shutdown_s", 0),
        ):  # fmt: skip
            if getattr(self, name) < lowest:
                raise ConfigError(f"{name} must be at least {lowest}", field=name)
        for name in ("request_timeout_s", "store_timeout_s"):
            if getattr(self, name) <= 0:
                raise ConfigError(f"{name} must be positive", field=name)
        if self.enable_auto_tool_choice and self.tool_call_parser is None:
            message = "--enable-auto-tool-choice requires --tool-call-parser"
            raise ConfigError(message, field="tool_call_parser")
        if self.redis_url is not None:
            check_redis_url(self.redis_url)
        if is_loopback(self.host):
            return
        if not self.api_key:
            raise ConfigError(f"listening on {self.host} needs --api-key", field="api_key")
        if not self.insecure:
            raise ConfigError(
                f"listening on {self.host} without TLS needs --insecure", field="insecure"
            )
