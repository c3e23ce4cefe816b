"""The formats by the names of vLLM's --tool-call-parser and --reasoning-parser."""

from __future__ import annotations

from typing import Final

from router.parsers import deepseek, hermes, llama3_json, mistral, qwen3_coder, reasoning
from router.parsers.grammar import ToolFormat
from router.parsers.reasoning import ReasoningFormat

TOOL_FORMATS: Final[dict[str, ToolFormat]] = {
    "hermes": hermes.FORMAT,
    "qwen3_coder": qwen3_coder.FORMAT,
    "qwen3_xml": qwen3_coder.FORMAT,
    "llama3_json": llama3_json.FORMAT,
    "llama4_json": llama3_json.FORMAT,
    "mistral": mistral.FORMAT,
    "deepseek_v3": deepseek.FORMAT,
    "deepseek_v31": deepseek.FORMAT,
}
REASONING_FORMATS: Final[dict[str, ReasoningFormat]] = {
    form.name: form for form in (reasoning.QWEN3, reasoning.DEEPSEEK_R1, reasoning.DEEPSEEK_V3)
}
