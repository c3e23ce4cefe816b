"""Write the table of docs/metrics.md from the lists of metrics: `python -m tools.metrics_page`.

The lists are router/metrics/metric_list.py and baton/node/metric_list.py. A test
(tests/front/test_metric_lists.py) fails while the page shows something else.
"""

from __future__ import annotations

from pathlib import Path
from typing import Final

from baton.node.metric_list import NODE
from baton.runtime.metrics import PROCESS, MetricSpec
from router.metrics.metric_list import ROUTER

PAGE: Final = Path(__file__).resolve().parent.parent / "docs" / "metrics.md"
LISTS: Final = {"router": ROUTER, "node": NODE}
BEGIN: Final = "<!-- from here on written by `python -m tools.metrics_page` -->\n"


def page(text: str) -> str:
    """`text` of docs/metrics.md with its table as the lists are now."""
    prose, _, _ = text.partition(BEGIN)
    own = (
        _row(owner, spec)
        for owner, metrics in LISTS.items()
        for spec in metrics
        if spec not in PROCESS
    )
    each = (_row("each process", spec) for spec in PROCESS)
    head = "| name | owner | type | labels | unit | meaning |\n|---|---|---|---|---|---|\n"
    return "".join([prose, BEGIN, "\n## All metrics\n\n", head, *own, *each])


def _row(owner: str, spec: MetricSpec) -> str:
    names, labels = (
        ", ".join(f"`{each}`" for each in words) for words in (spec.names, spec.labels)
    )
    return f"| {names} | {owner} | {spec.kind} | {labels} | {spec.unit} | {spec.meaning} |\n"


if __name__ == "__main__":
    PAGE.write_text(page(PAGE.read_text()))
