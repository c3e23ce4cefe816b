"""vLLM's flags that change nothing here: they are accepted, with one line that says why.

A command line that served a model with vLLM should serve it with Baton. If a flag has the same
effect here, it is an option of the same name, or another spelling of an option (`option(also=...)`,
`spelled`). If its effect does not exist here, the flag is unknown and refused.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final


@dataclass(frozen=True, slots=True)
class IdleFlag:
    """A flag that does nothing, for the given `reason`.

    `values` are the values that it accepts; None = the flag takes no value, () = any value.
    """

    reason: str
    values: tuple[str, ...] | None = None


_LOG: Final = "the log has one line per request and none of its text (--log-level)"
_GRAPHS: Final = "nothing is captured on a CPU, and on a GPU decode steps are captured either way"
_LORA: Final = "all adapters of --lora-modules are served, of any rank, side by side"
_TOLD: Final = "it is always told"
IDLE: Final[Mapping[str, IdleFlag]] = {
    "trust_remote_code": IdleFlag("code that comes with a checkpoint is never run"),
    "enable_reasoning": IdleFlag("--reasoning-parser alone says it"),
    "enable_chunked_prefill": IdleFlag("prompts are always computed in chunks"),
    "enforce_eager": IdleFlag(_GRAPHS),
    "max_seq_len_to_capture": IdleFlag(_GRAPHS, ()),
    "seed": IdleFlag("there is no random state: a request's own `seed` makes it repeat", ()),
    "swap_space": IdleFlag("swapped KV takes at most as much memory as the pool", ()),
    "load_format": IdleFlag("safetensors are what is read", ("auto", "safetensors")),
    "tokenizer_mode": IdleFlag("tokenizer.json is what is read", ("auto", "hf")),
    "task": IdleFlag(
        "a model serves tokens and vectors alike",
        ("auto", "generate", "embed", "embedding", "score"),
    ),
    "runner": IdleFlag("a model serves tokens and vectors alike", ("auto", "generate", "pooling")),
    "distributed_executor_backend": IdleFlag(
        "a rank is always a process of its own", ("mp", "uni")
    ),
    "disable_custom_all_reduce": IdleFlag("there is one way to reduce over ranks"),
    "pipeline_parallel_size": IdleFlag("a model's layers stay together", ("1",)),
    "cpu_offload_gb": IdleFlag("weights are all in one place", ("0",)),
    "enable_lora": IdleFlag(_LORA),
    "max_loras": IdleFlag(_LORA, ()),
    "max_lora_rank": IdleFlag(_LORA, ()),
    "max_cpu_loras": IdleFlag(_LORA, ()),
    "chat_template_content_format": IdleFlag("parts of text are given as one", ("auto", "string")),
    "enable_prompt_tokens_details": IdleFlag(_TOLD),
    "enable_request_id_headers": IdleFlag(_TOLD),
    "enable_server_load_tracking": IdleFlag("/load always answers"),
    "disable_log_requests": IdleFlag(_LOG),
    "no_enable_log_requests": IdleFlag(_LOG),
    "disable_log_stats": IdleFlag("numbers are at /metrics and never logged"),
    "disable_uvicorn_access_log": IdleFlag(_LOG),
    "max_log_len": IdleFlag(_LOG, ()),
    "uvicorn_log_level": IdleFlag("--log-level holds for all of a process", ()),
    "use_tqdm_on_load": IdleFlag("a load that takes long says how far it is"),
    "use_v2_block_manager": IdleFlag("there is one"),
}


class _Note(argparse.Action):
    """argparse action of the flags in IDLE: writes to stderr why the flag does nothing, and stores
    no value. It is a class because argparse takes actions only as subclasses of Action."""

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
    """Return the line about a flag that does nothing."""
    return f"--{name.replace('_', '-')} does nothing here: {IDLE[name].reason}"


def add_idle(parser: argparse.ArgumentParser) -> None:
    """Let `parser` accept these flags; no help text shows them."""
    for name, idle in IDLE.items():
        words: dict[str, Any] = {"nargs": 0} if idle.values is None else {}
        if idle.values:
            words["choices"] = idle.values
        flag = "--" + name.replace("_", "-")
        silent = argparse.SUPPRESS
        parser.add_argument(flag, action=_Note, dest=name, default=silent, help=silent, **words)
