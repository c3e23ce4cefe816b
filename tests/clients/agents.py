"""Coding agents from npm: how each is told to do a task in a folder, here and nowhere else.

Each has a home of its own, no telemetry and no updates; where it can be told of a proxy, that is a
port at which nobody listens.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from tests.clients.conftest import Cluster

NOBODY: Final = "http://127.0.0.1:9"
# qwen-code sends everything to a proxy, whatever NO_PROXY says. It asks nobody else.
SEALED: Final = {"HTTPS_PROXY": NOBODY, "HTTP_PROXY": NOBODY, "NO_PROXY": "127.0.0.1,localhost"}
MAX_TOKENS: Final = 512  # the model's context is short


@dataclass(frozen=True)
class Agent:
    """`files`: of its settings, below its home; `command`: its arguments, the task comes last."""

    package: str
    binary: str
    command: tuple[str, ...]
    environment: Mapping[str, str]
    files: Mapping[str, str]


def claude_code(at: Cluster) -> Agent:
    """Speaks /v1/messages."""
    switches = (
        "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC", "DISABLE_TELEMETRY", "DISABLE_AUTOUPDATER",
        "DISABLE_ERROR_REPORTING",
    )  # fmt: skip
    models = ("ANTHROPIC_MODEL", "ANTHROPIC_SMALL_FAST_MODEL", "ANTHROPIC_DEFAULT_HAIKU_MODEL")
    told = {"ANTHROPIC_BASE_URL": at.url, "ANTHROPIC_API_KEY": at.key}
    environment = {**told, **dict.fromkeys(switches, "1"), **dict.fromkeys(models, at.model)}
    command = ("--allowedTools", "Read,Write", "-p")
    return Agent("@anthropic-ai/claude-code", "claude", command, {**environment, **SEALED}, {})


def codex(at: Cluster) -> Agent:
    """Speaks /v1/responses."""
    settings = f"""
model = "{at.model}"
model_provider = "baton"
check_for_update_on_startup = false
[analytics]
enabled = false
[model_providers.baton]
name = "baton"
base_url = "{at.url}/v1"
env_key = "BATON_KEY"
wire_api = "responses"
request_max_retries = 0
stream_max_retries = 0
"""
    command = ("exec", "--skip-git-repo-check", "--dangerously-bypass-approvals-and-sandbox")
    environment = {"BATON_KEY": at.key, **SEALED}
    return Agent("@openai/codex", "codex", command, environment, {".codex/config.toml": settings})


def opencode(at: Cluster) -> Agent:
    """Speaks /v1/chat/completions."""
    model = {"name": at.model, "limit": {"context": 2048, "output": MAX_TOKENS}}
    settings: dict[str, Any] = {
        "autoupdate": False,
        "share": "disabled",
        "permission": "allow",
        "model": f"baton/{at.model}",
        "small_model": f"baton/{at.model}",
        "enabled_providers": ["baton"],
        "compaction": {"auto": False},  # it counts what it sends, of which the model sees little
        "provider": {"baton": {
            "npm": "@ai-sdk/openai-compatible",
            "options": {"baseURL": f"{at.url}/v1", "apiKey": at.key},
            "models": {at.model: model},
        }},
    }  # fmt: skip
    switches = (
        "OPENCODE_DISABLE_AUTOUPDATE", "OPENCODE_DISABLE_MODELS_FETCH",
        "OPENCODE_DISABLE_LSP_DOWNLOAD", "OPENCODE_DISABLE_DEFAULT_PLUGINS",
    )  # fmt: skip
    environment = {**dict.fromkeys(switches, "1"), **SEALED}
    files = {".config/opencode/opencode.json": json.dumps(settings)}
    return Agent("opencode-ai", "opencode", ("run",), environment, files)


def qwen_code(at: Cluster) -> Agent:
    """Speaks /v1/chat/completions."""
    settings = {
        "model": {"generationConfig": {"samplingParams": {"max_tokens": MAX_TOKENS}}},
        "telemetry": {"enabled": False},
        "privacy": {"usageStatisticsEnabled": False},
        "general": {"enableAutoUpdate": False},
    }
    told = {"OPENAI_BASE_URL": f"{at.url}/v1", "OPENAI_API_KEY": at.key, "OPENAI_MODEL": at.model}
    command = ("--auth-type", "openai", "--approval-mode", "yolo", "-p")
    files = {".qwen/settings.json": json.dumps(settings)}
    return Agent("@qwen-code/qwen-code", "qwen", command, told, files)


AGENTS: Final[Mapping[str, Callable[[Cluster], Agent]]] = {
    "claude-code": claude_code,
    "codex": codex,
    "opencode": opencode,
    "qwen-code": qwen_code,
}


def settle(agent: Agent, home: Path) -> None:
    """Write its settings."""
    for name, text in agent.files.items():
        (home / name).parent.mkdir(parents=True, exist_ok=True)
        (home / name).write_text(text)
