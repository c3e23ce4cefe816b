"""A tiny model that thinks aloud and calls a tool: the demo model, with a few talks by heart.

It takes some ten seconds. Real clients can then be led by a real cluster through a whole loop of
thought, call, result and answer, without any download.
"""

from __future__ import annotations

import hashlib
import shutil
import tempfile
from pathlib import Path
from typing import Any, Final

import torch
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM

from baton.chat_template import Chat, ChatTemplate
from baton.tokenizer import read_special_tokens

DEMO: Final = Path(__file__).parents[2] / "demo_model"
STEPS: Final = 200
LEARNED: Final = 0.01  # mean loss of a token known by heart
RATE: Final = 1e-3
_IGNORED: Final = -100

QUESTION: Final = "What is the weather in Oslo?"
RESULT: Final = "7 degrees"
THOUGHT: Final = "\nI have to look.\n"
CALL: Final = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Oslo"}}\n</tool_call>'
AFTERTHOUGHT: Final = "\nNow I know.\n"
ANSWER: Final = "It is 7 degrees in Oslo."
REGRET: Final = "\nI have no tools.\n"
REFUSAL: Final = "I cannot see the weather."

# Like Qwen3's: tools in a system message, an empty thought where thinking is switched off. Names
# only, so that the order of a schema's fields, which clients choose, changes nothing.
TEMPLATE: Final = """\
{%- if tools -%}
{{- '<|im_start|>system\\nTools:' -}}
{%- for tool in tools -%}{{- ' ' + tool.function.name -}}{%- endfor -%}
{{- '<|im_end|>\\n' -}}
{%- endif -%}
{%- for message in messages -%}
{{- '<|im_start|>' + message.role + '\\n' + message.content -}}
{%- for call in message.tool_calls or [] -%}
{{- '<tool_call>\\n{"name": "' + call.function.name + '", "arguments": ' -}}
{{- call.function.arguments | tojson + '}\\n</tool_call>' -}}
{%- endfor -%}
{{- '<|im_end|>\\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}
{{- '<|im_start|>assistant\\n' -}}
{%- if enable_thinking is defined and not enable_thinking -%}
{{- '<think>\\n\\n</think>\\n\\n' -}}
{%- endif -%}
{%- endif -%}
"""
_TOOL: Final[dict[str, Any]] = {"type": "function", "function": {"name": "get_weather"}}


def kept_in(folder: Path) -> Path:
    """The model's directory below `folder`: made once per version of this file and the demo."""
    source = Path(__file__).read_bytes() + (DEMO / "model.safetensors").read_bytes()
    directory = folder / f"agent-{hashlib.sha256(source).hexdigest()[:16]}"
    if not directory.is_dir():
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder) as unfinished:
            build(Path(unfinished) / "agent").rename(directory)
    return directory


def build(directory: Path) -> Path:
    """Write the model to `directory`. Raises RuntimeError if it does not learn."""
    shutil.copytree(DEMO, directory)
    (directory / "chat_template.jinja").write_text(TEMPLATE)
    model = AutoModelForCausalLM.from_pretrained(DEMO, dtype=torch.float32)
    _teach(model, _batch(Tokenizer.from_file(str(DEMO / "tokenizer.json"))))
    model.save_pretrained(directory)
    return directory


def _conversations() -> list[tuple[str, str]]:
    """Prompts and their answers."""
    template = ChatTemplate(TEMPLATE, read_special_tokens(DEMO))
    asked = {"role": "user", "content": QUESTION}
    called = {
        "role": "assistant",
        "content": "",
        "tool_calls": [
            {"function": {"name": "get_weather", "arguments": {"city": "Oslo"}}},
        ],
    }
    told = {"role": "tool", "content": RESULT}
    taught: list[tuple[str, str]] = []
    for messages, tools, thought, answer in (
        ([asked], [_TOOL], THOUGHT, CALL),
        ([asked, called, told], [_TOOL], AFTERTHOUGHT, ANSWER),
        ([asked], None, REGRET, REFUSAL),
    ):
        plain = template.render(Chat(messages, tools or (), kwargs={"enable_thinking": False}))
        taught.append((plain, f"{answer}<|im_end|>"))
        thinking = template.render(Chat(messages, tools or ()))
        taught.append((thinking, f"<think>{thought}</think>\n\n{answer}<|im_end|>"))
    return taught


def _batch(tokenizer: Tokenizer) -> tuple[torch.Tensor, torch.Tensor]:
    """Token ids and labels [conversations, longest]; only answers are learned."""
    rows: list[tuple[list[int], list[int]]] = []
    for prompt, answer in _conversations():
        # Apart, as they are when served: a token never spans the border.
        asked = tokenizer.encode(prompt, add_special_tokens=False).ids
        said = tokenizer.encode(answer, add_special_tokens=False).ids
        rows.append((asked + said, [_IGNORED] * len(asked) + said))
    longest = max(len(ids) for ids, _ in rows)
    ids = [row + [0] * (longest - len(row)) for row, _ in rows]
    labels = [row + [_IGNORED] * (longest - len(row)) for _, row in rows]
    return torch.tensor(ids), torch.tensor(labels)


def _teach(model: Any, batch: tuple[torch.Tensor, torch.Tensor]) -> None:
    ids, labels = batch
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE)
    model.train()
    for _ in range(STEPS):
        loss = model(input_ids=ids, labels=labels).loss
        if loss.item() < LEARNED:
            model.eval()
            return
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    raise RuntimeError(f"the model has not learned its conversations in {STEPS} steps")
