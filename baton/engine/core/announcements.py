"""Announcements: tells a prefill node's hooks which requests a step admits and which layers it
writes.

Without hooks nothing is reported and every export has room. Layers of prompts are counted
(EngineStats.num_layers) with hooks or without.
"""

from __future__ import annotations

from collections.abc import Callable

from baton.engine.memory.pins import Pins
from baton.engine.state.interface import EngineHooks, Task
from baton.engine.state.sequence import exported_blocks
from baton.engine.state.stats import EngineStats
from baton.engine.state.step_plan import StepPlan


class Announcements:
    def __init__(self, pins: Pins, stats: EngineStats, hooks: EngineHooks | None) -> None:
        self._pins = pins
        self._stats = stats
        self._hooks = hooks

    def admitted(self, plan: StepPlan) -> None:
        """Pin the blocks and states of new PREFILL requests and report them to the hooks.

        This comes before any layer runs, so that their handles are sent at once.
        """
        if self._hooks is None:
            return
        for group in plan.admitted:
            if group.task is not Task.PREFILL:
                continue
            blocks = exported_blocks(group.leader)
            self._pins.pin(blocks)
            try:
                self._hooks.admitted(group.request, blocks, len(group.leader.tokens))
            except Exception:
                self._pins.unpin(blocks)  # no export exists that could return it
                raise

    def may_admit(self, num_tokens: int, num_pending: int) -> bool:
        """See EngineHooks.may_admit."""
        return self._hooks is None or self._hooks.may_admit(num_tokens, num_pending)

    def on_layer(self, plan: StepPlan) -> Callable[[int], None] | None:
        """Return what the runner calls after each layer of `plan`; None for a step of single
        tokens.

        Such a step is short and nobody needs its progress, so it may run as one call for all
        layers.
        """
        progress = tuple(
            (row.group.request.id, row.chunk.start + len(row.chunk.token_ids))
            for row in plan.rows
            if row.group.task is Task.PREFILL
        )
        hooks = self._hooks if progress else None
        if hooks is None and plan.num_tokens <= len(plan.rows):
            return None

        def layer_written(layer: int) -> None:
            self._stats.num_layers += 1
            if hooks is not None:
                hooks.layer_written(layer, progress)

        return layer_written
