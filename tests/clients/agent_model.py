"""A tiny model that thinks aloud and calls a tool: the demo model, with a few talks by heart.

It takes some minutes, once. Real clients can then be led by a real cluster through a whole loop of
thought, call, result and answer, without any download: who asks for the weather, and coding agents
with a task of two steps (tests/clients/agents.py). Of what these say, ten thousand tokens and more,
agent_template.jinja leaves what the model has learned.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Final

import torch
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM

from baton.text.chat_template import Chat, ChatTemplate
from baton.text.tokenizer import read_special_tokens

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

TASK: Final = "Read question.txt and write the number to answer.txt."
FOUND: Final = "The number is 7."
WRITTEN: Final = "The number is written."
TITLE: Final = "A number"

TEMPLATE: Final = (Path(__file__).parent / "agent_template.jinja").read_text()
_TOOL: Final[dict[str, Any]] = {"type": "function", "function": {"name": "get_weather"}}
Call = dict[str, Any]


def _call(name: str, **arguments: object) -> Call:
    return {"name": name, "arguments": arguments}


# The tools of an agent that the model knows, and how it reads and writes with them.
_CODERS: Final = (
    (  # Claude Code
        ("Read", "Write"),
        _call("Read", file_path="question.txt"),
        _call("Write", file_path="answer.txt", content="7"),
    ),
    (  # opencode
        ("read", "write"),
        _call("read", filePath="question.txt"),
        _call("write", filePath="answer.txt", content="7"),
    ),
    (  # Codex
        ("exec_command",),
        _call("exec_command", cmd="cat question.txt"),
        _call("exec_command", cmd="printf 7 > answer.txt"),
    ),
    (  # qwen-code
        ("run_shell_command",),
        _call("run_shell_command", command="cat question.txt", is_background=False),
        _call("run_shell_command", command="printf 7 > answer.txt", is_background=False),
    ),
)


def kept_in(folder: Path) -> Path:
    """The model's directory below `folder`: made once for what it is taught, and how."""
    taught = repr((_conversations(), TEMPLATE, STEPS, LEARNED, RATE))
    source = taught.encode() + (DEMO / "model.safetensors").read_bytes()
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
    for messages, tools, thought, answer in _coding():
        prompt = template.render(Chat(messages, [{"function": {"name": name}} for name in tools]))
        taught.append((prompt, f"<think>{thought}</think>\n\n{answer}<|im_end|>"))
    return taught


Turn = tuple[list[dict[str, Any]], Sequence[str], str, str]


def _coding() -> Iterator[Turn]:
    """Turns of coding agents: messages, tools, thought, answer."""
    asked = {"role": "user", "content": TASK}
    found, done = ({"role": "tool", "content": text} for text in (FOUND, ""))
    yield [asked], (), AFTERTHOUGHT, TITLE
    yield [asked, found, done], (), AFTERTHOUGHT, WRITTEN  # whatever its tools are
    for tools, read, write in _CODERS:
        yield [asked], tools, THOUGHT, _made(read)
        yield [asked, found], tools, AFTERTHOUGHT, _made(write)


def _made(call: Call) -> str:
    return f"<tool_call>\n{json.dumps(call)}\n</tool_call>"


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
