"""lm-eval's log-likelihoods through the whole system are transformers' own: `./run clients`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.clients.agent_model import DEMO
from tests.clients.conftest import Cluster, Install, run_script

pytestmark = pytest.mark.asyncio(loop_scope="session")

TOLERANCE = 1e-3
QUESTIONS = (
    ("The prefill phase", ("computes the KV cache", "sings", "decodes one token at a time"), 0),
    ("A block table maps", ("logical blocks to physical blocks", "cats to dogs"), 0),
    ("TTFT is the time", ("to first token", "of the day", "to the last token"), 0),
    ("Ein Token", ("ist ein Stück Text", "schläft"), 0),
)


async def test_log_likelihoods_equal_transformers(
    install: Install, demo: Cluster, tmp_path: Path
) -> None:
    data = tmp_path / "glossary.jsonl"
    rows = [{"question": q, "choices": c, "label": label} for q, c, label in QUESTIONS]
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    # Of transformers lm-eval takes the tokenizer alone, which needs no torch.
    python = install(["lm-eval[api]", "transformers"])
    said = await run_script(python, "lm_eval_likelihoods.py", demo, str(DEMO), str(data))
    told = json.loads(said.splitlines()[-1])
    assert [len(each) for each in told] == [len(choices) for _, choices, _ in QUESTIONS]
    expected = _expected()
    for row, wanted in zip(told, expected, strict=True):
        for (likelihood, is_greedy), (reference, greedy) in zip(row, wanted, strict=True):
            assert float(likelihood) == pytest.approx(reference, abs=TOLERANCE)
            assert str(is_greedy) == str(greedy)


def _expected() -> list[list[tuple[float, bool]]]:
    """Sums of log-softmax over each choice's tokens, and whether all of them are the best ones."""
    tokenizer: Any = AutoTokenizer.from_pretrained(DEMO)
    model = AutoModelForCausalLM.from_pretrained(DEMO, dtype=torch.float32).eval()
    rows: list[list[tuple[float, bool]]] = []
    for question, choices, _ in QUESTIONS:
        start = len(tokenizer(question, add_special_tokens=False)["input_ids"])
        row: list[tuple[float, bool]] = []
        for choice in choices:
            ids = tokenizer(f"{question} {choice}", add_special_tokens=False)["input_ids"]
            with torch.no_grad():
                told = model(torch.tensor([ids])).logits[0, :-1].log_softmax(-1)[start - 1 :]
            own = told.gather(1, torch.tensor(ids[start:])[:, None])[:, 0]
            greedy = told.argmax(-1).tolist() == ids[start:]
            row.append((own.sum().item(), greedy))
        rows.append(row)
    return rows
