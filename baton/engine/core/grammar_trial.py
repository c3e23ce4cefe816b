"""The child of baton/guided/grammar_trials.py on a node: tries grammars with xgrammar before it
does.

    python -m baton.engine.core.grammar_trial MODEL VOCAB_SIZE EOS,EOS,... CPU_S BYTES

xgrammar has no limits of its own: arrays of arrays, 900 deep, or some thousand properties keep it
busy for minutes, and nothing but the end of its process stops it. What ended here within its budget
does so there, with the same vocabulary. Nothing of what is built comes back. See
baton/guided/grammar_trial.py, which does the same for llguidance at the door.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Final

import numpy as np

from baton.engine.checkpoint.checkpoint import open_checkpoint
from baton.guided.base import load_vocabulary
from baton.guided.grammar_trial import serve
from baton.guided.grammar_trials import GrammarTrials
from baton.guided.xgrammar import XgrammarBackend
from baton.protocol.sampling import GuidedDecoding
from baton.runtime.children import ChildBudget

# A large vocabulary costs it seconds for plain schemas; beside them there is torch in memory.
BUDGET: Final = ChildBudget(cpu_s=8.0, memory_bytes=4 << 30, wall_s=25.0)


def trials_of(model: str, vocab_size: int, eos_token_ids: Sequence[int]) -> GrammarTrials:
    """For a checkpoint's vocabulary. Starts nothing yet."""
    ends = ",".join(map(str, eos_token_ids))
    module = [sys.executable, "-m", "baton.engine.core.grammar_trial"]
    return GrammarTrials([*module, model, str(vocab_size), ends], BUDGET)


def tried(model: str, vocab_size: int, ends: str) -> Callable[[GuidedDecoding], None]:
    """A trial: raises InvalidRequest for a grammar that cannot be followed."""
    eos_token_ids = [int(end) for end in ends.split(",") if end]
    vocabulary = load_vocabulary(open_checkpoint(model).path, vocab_size, eos_token_ids)
    backend = XgrammarBackend(vocabulary)

    def trial(guided: GuidedDecoding) -> None:
        backend.compile(guided).fill(np.zeros(vocabulary.num_words, np.int32))

    return trial


if __name__ == "__main__":
    name, size, eos, cpu_s, memory_bytes = sys.argv[1:]
    serve(tried(name, int(size), eos), float(cpu_s), int(memory_bytes))
