"""What drafts gain: `python -m bench.speculation [--mtp DIR] [--eagle3 DIR] [--draft DIR]`.

One engine per method answers the demo corpus' held-out questions, one after the other, each in
turn, greedy and at temperature 1 with seeds:
    accepted        of the drafted tokens
    tokens a step   in steps behind the prompt
    CPU time        over that without drafts, the median of the rounds and their range
    equal           answers that are, token for token, those without drafts
`python tools/train_draft_head.py` makes heads for the demo model.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from baton.engine.state.stats import EngineStats
from baton.llm import LLM
from baton.protocol.sampling import SamplingParams
from baton.runtime.config import parse
from bench.engine_kit import TimedPart, arguments_parser, prepare, tell

QUESTIONS: Final = Path(__file__).parent.parent / "tools" / "demo_corpus" / "en.md"
MAX_TOKENS: Final = 96
TEMPERATURES: Final = (0.0, 1.0)


@dataclass(slots=True)
class MethodRun:
    """One method: its engine, and what it did at the present temperature."""

    name: str
    llm: LLM
    seconds: list[float] = field(default_factory=list[float])
    answers: list[tuple[int, ...]] = field(default_factory=list[tuple[int, ...]])
    before: EngineStats = field(default_factory=EngineStats)

    def begin(self) -> None:
        """Forget what was measured."""
        self.seconds, self.answers = [], []
        self.before = self.llm.engine.stats.copy()

    def answer(self, questions: list[str], temperature: float) -> None:
        """Answer all questions one after the other, and note the CPU time of this process."""
        started = time.process_time()
        answers: list[tuple[int, ...]] = []
        for seed, question in enumerate(questions):
            params = SamplingParams(temperature=temperature, seed=seed, max_tokens=MAX_TOKENS)
            conversation = [{"role": "user", "content": question}]
            answers.append(self.llm.chat(conversation, params)[0].outputs[0].token_ids)
        self.seconds.append(time.process_time() - started)
        self.answers = answers

    def row(self, temperature: float, base: MethodRun) -> dict[str, Any]:
        """Return the row of the table; `base`: the side without drafts."""
        now, before = self.llm.engine.stats, self.before
        drafted = now.num_drafted_tokens - before.num_drafted_tokens
        accepted = now.num_accepted_tokens - before.num_accepted_tokens
        requests = now.num_requests - before.num_requests
        steps = now.num_steps - before.num_steps - requests
        tokens = now.num_generated_tokens - before.num_generated_tokens - requests
        ratios = [mine / its for mine, its in zip(self.seconds, base.seconds, strict=True)]
        equal = sum(mine == its for mine, its in zip(self.answers, base.answers, strict=True))
        return {
            "method": self.name,
            "temperature": f"{temperature:g}",
            "accepted": f"{accepted / drafted:.3f}" if drafted else "-",
            "tokens a step": f"{tokens / steps:.2f}",
            "CPU time": f"{statistics.median(ratios):.2f} ({min(ratios):.2f}-{max(ratios):.2f})",
            "equal": f"{equal}/{len(self.answers)}",
        }


def held_out(count: int) -> list[str]:
    """Return up to `count` questions of the corpus that the demo model was never trained on."""
    lines = QUESTIONS.read_text("utf-8").splitlines()
    found = [line.removeprefix("??").strip() for line in lines if line.startswith("?? ")]
    return found[:: max(1, len(found) // count)][:count]


def main(arguments: Sequence[str]) -> int:
    """Run the benchmark; return its exit status."""
    parser = arguments_parser("speculation", __doc__)
    parser.add_argument("--model", default="demo_model")
    parser.add_argument("--mtp", help="the model with one more layer")
    parser.add_argument("--eagle3", help="an EAGLE-3 head")
    parser.add_argument("--draft", help="a draft model")
    parser.add_argument("--drafts", type=int, default=3, help="most drafts in a step")
    parser.add_argument("--questions", type=int, default=24)
    parser.add_argument("--rounds", type=int, default=5)
    given = parse(parser, arguments)
    prepare(given)
    common: dict[str, Any] = {
        "num_speculative_tokens": given.drafts, "enable_prefix_caching": False, "max_num_seqs": 1,
    }  # fmt: skip
    asked: dict[str, dict[str, Any]] = {"none": {}, "ngram": {}}
    for method in ("draft", "mtp", "eagle3"):
        if path := getattr(given, method):
            asked[method] = {"speculative_model": path} if method != "mtp" else {"model": path}
    sides: list[MethodRun] = []
    for name, own in asked.items():
        options: dict[str, Any] = {
            "model": given.model,
            **common,
            "speculative_method": name,
            **own,
        }
        sides.append(MethodRun(name, LLM(**options)))
    questions = held_out(given.questions)
    rows: list[dict[str, Any]] = []
    for temperature in TEMPERATURES:
        for side in sides:
            side.answer(questions[:2], temperature)  # warm
            side.begin()
        for _ in range(given.rounds):
            for side in sides:
                side.answer(questions, temperature)
        rows += [side.row(temperature, sides[0]) for side in sides]
    title = f"{len(questions)} questions, up to {given.drafts} drafts a step"
    tell([TimedPart(title, rows)], given.json)
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
