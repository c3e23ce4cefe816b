"""vLLM's flags that change nothing here: taken, with one line that says why.

A command line that served a model with vLLM should serve it with Baton. What has the same effect
is an option of the same name, or a second spelling of one (`option(also=...)`, `spelled`). A flag
whose effect is missing here stays unknown, and is refused.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final


@dataclass(frozen=True, slots=True)
class Idle:
    """Why a flag does nothing. `values`: what it may be given; None = it is given nothing, () =
    anything."""

    reason: str
    values: tuple[str, ...] | None = None


_LOG: Final = "the log has one line per request and none of its text (--log-level)"
_GRAPHS: Final = "nothing is captured on a CPU, and on a GPU decode steps are captured either way"
_LORA: Final = "all adapters of --lora-modules are served, of any rank, side by side"
_TOLD: Final = "it is always told"
IDLE: Final[Mapping[str, Idle]] = {
    "trust_remote_code": Idle("code that comes with a checkpoint is never run"),
    "enable_reasoning": Idle("--reasoning-parser alone says it"),
    "enable_chunked_prefill": Idle("prompts are always computed in chunks"),
    "enforce_eager": Idle(_GRAPHS),
    "max_seq_len_to_capture": Idle(_GRAPHS, ()),
    "seed": Idle("there is no random state: a request's own `seed` makes it repeat", ()),
    "swap_space": Idle("swapped KV takes at most as much memory as the pool", ()),
    "load_format": Idle("safetensors are what is read", ("auto", "safetensors")),
    "tokenizer_mode": Idle("tokenizer.json is what is read", ("auto", "hf")),
    "task": Idle(
        "a model serves tokens and vectors alike",
        ("auto", "generate", "embed", "embedding", "score"),
    ),
    "runner": Idle("a model serves tokens and vectors alike", ("auto", "generate", "pooling")),
    "distributed_executor_backend": Idle("a rank is always a process of its own", ("mp", "uni")),
    "disable_custom_all_reduce": Idle("there is one way to reduce over ranks"),
    "pipeline_parallel_size": Idle("a model's layers stay together", ("1",)),
    "data_parallel_size": Idle("more nodes are --prefill N --decode M", ("1",)),
    "cpu_offload_gb": Idle("weights are all in one place", ("0",)),
    "enable_lora": Idle(_LORA),
    "max_loras": Idle(_LORA, ()),
    "max_lora_rank": Idle(_LORA, ()),
    "max_cpu_loras": Idle(_LORA, ()),
    "chat_template_content_format": Idle("parts of text are given as one", ("auto", "string")),
    "enable_prompt_tokens_details": Idle(_TOLD),
    "enable_request_id_headers": Idle(_TOLD),
    "enable_server_load_tracking": Idle("/load always answers"),
    "disable_log_requests": Idle(_LOG),
    "no_enable_log_requests": Idle(_LOG),
    "disable_log_stats": Idle("numbers are at /metrics and never logged"),
    "disable_uvicorn_access_log": Idle(_LOG),
    "max_log_len": Idle(_LOG, ()),
    "uvicorn_log_level": Idle("--log-level holds for all of a process", ()),
    "use_tqdm_on_load": Idle("a load that takes long says how far it is"),
    "use_v2_block_manager": Idle("there is one"),
}


class _Note(argparse.Action):
    """Says why, keeps nothing. Inheritance is argparse's own way."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: str | Sequence[Any] | None,
        option_string: str | None = None,
    ) -> None:
        name = (option_string or "").removeprefix("--").replace("-", "_")
        sys.stderr.write(f"{note(name)}\n")


def note(name: str) -> str:
    """The line about a flag that does nothing."""
    return f"--{name.replace('_', '-')} does nothing here: {IDLE[name].reason}"


def add_idle(parser: argparse.ArgumentParser) -> None:
    """Let `parser` take them; they stand in no help."""
    for name, idle in IDLE.items():
        words: dict[str, Any] = {"nargs": 0} if idle.values is None else {}
        if idle.values:
            words["choices"] = idle.values
        flag = "--" + name.replace("_", "-")
        silent = argparse.SUPPRESS
        parser.add_argument(flag, action=_Note, dest=name, default=silent, help=silent, **words)
