"""Grammars tried out in a child, before anybody depends on them.

Building a grammar and its first mask can take minutes or gigabytes (`multipleOf: 9999991`), in one
call that no thread can leave. So it is first done in a process that can be given up
(baton/runtime/children.py; baton/guided/grammar_trial.py is what runs in there). `GrammarTrials` is
for threads.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import asdict
from typing import Final

from baton.guided.grammars import FIELD
from baton.protocol.errors import InvalidRequest, Unavailable, UnsupportedFeature
from baton.protocol.sampling import GuidedDecoding
from baton.runtime.children import ChildBudget, Children, Excess, GivenUp

TRIAL: Final = (sys.executable, "-m", "baton.guided.grammar_trial")
RETRY_S: Final = 5  # after which a machine that was too busy may be asked again
_FAULTS: Final = {
    Excess.CPU: "guided: the grammar takes too long to build",
    Excess.MEMORY: "guided: the grammar needs too much memory to build",
}


class GrammarTrials:
    """`run` from any thread; `close` twice is safe."""

    def __init__(self, command: Sequence[str] = TRIAL, budget: ChildBudget | None = None) -> None:
        self.children = Children(command, budget or ChildBudget())

    def run(self, guided: GuidedDecoding) -> None:
        """Raise InvalidRequest (field `guided`) for what cannot be built within the budget or
        allows nothing, UnsupportedFeature for what only another backend may know, Unavailable if
        this machine was too busy to find out."""
        try:
            answer = self.children.ask(json.dumps(asdict(guided)).encode())
        except GivenUp as error:
            fault = _FAULTS.get(error.excess)
            if fault is None:
                raise too_busy() from error
            raise InvalidRequest(fault, field=FIELD) from error
        if answer:
            told = json.loads(answer)
            kind = UnsupportedFeature if told["unsupported"] else InvalidRequest
            raise kind(told["message"], field=FIELD)

    def close(self) -> None:
        """End the children; those at work end when they are given back."""
        self.children.close()


def too_busy() -> Unavailable:
    """It may be a good grammar: its client is not to blame, and may ask again."""
    message = "guided: the server is too busy to compile the grammar now"
    return Unavailable(message, field=FIELD, retry_after_s=RETRY_S)
