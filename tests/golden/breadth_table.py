"""What a run of tests.golden.breadth found, and the table of docs/models.md that is made of it."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Final, Literal

DOCUMENT: Final = Path(__file__).parents[2] / "docs" / "models.md"
FOUND: Final = Path(__file__).with_name("breadth.jsonl")  # an Outcome per line
BEGIN, END = "<!-- breadth: begin -->", "<!-- breadth: end -->"
# What a served model also does.
FEATURES: Final = ("P/D", "prefix cache", "speculation", "TP", "quantized")


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of one architecture. `detail`: a refusal's reason, or why it was not built."""

    name: str
    result: Literal["identical", "different", "refused", "not built"]
    detail: str = ""
    route: str = ""
    heads: str = ""
    windows: str = ""
    features: dict[str, str] = field(default_factory=dict[str, str])  # by FEATURES
    transformers: str = ""  # the version that it was compared with


def row(outcome: Outcome) -> str:
    """A line of the table of what is served."""
    features = [outcome.features.get(name, "-") for name in FEATURES]
    cells = (outcome.name, outcome.result, outcome.heads, outcome.windows, outcome.route, *features)
    return f"| {' | '.join(cells)} |"


def table(found: Sequence[Outcome]) -> str:
    """The Markdown between the markers of docs/models.md."""
    counts = Counter(outcome.result for outcome in found)
    versions = sorted({outcome.transformers for outcome in found})
    summary = ", ".join(f"{counts[kind]} {kind}" for kind in ("identical", "different", "refused"))
    headings = ("architecture", "tokens", "KV heads x (key, value dims)", "windows", "route")
    return "\n".join(
        [
            f"{summary}; {counts['not built']} not built. transformers {', '.join(versions)}.",
            "",
            f"| {' | '.join((*headings, *FEATURES))} |",
            "|---" * (len(headings) + len(FEATURES)) + "|",
            *(row(each) for each in found if each.result in ("identical", "different")),
            "",
            "| refused | reason |",
            "|---|---|",
            # What would work instead, the refusal itself says behind a semicolon.
            *(_reason(each.name, each.detail.split(";")[0]) for each in _of(found, "refused")),
            "",
            "| not built | why there is nothing to compare |",
            "|---|---|",
            *(_reason(each.name, each.detail) for each in _of(found, "not built")),
        ]
    )


def _of(found: Sequence[Outcome], result: str) -> list[Outcome]:
    return [outcome for outcome in found if outcome.result == result]


def _reason(name: str, text: str) -> str:
    cell = text.replace("|", "\\|").replace("<", "&lt;").replace("\n", " ")[:220]
    return f"| {name} | {cell} |"


def write_table(found: Sequence[Outcome], document: Path = DOCUMENT) -> None:
    """Replace what is between the markers. Raises ValueError without markers."""
    text = document.read_text(encoding="utf-8")
    before, after = text.index(BEGIN) + len(BEGIN), text.index(END)
    document.write_text(f"{text[:before]}\n{table(found)}\n{text[after:]}", encoding="utf-8")


def read_found(path: Path = FOUND) -> dict[str, Outcome]:
    """What earlier runs found, by name."""
    lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else ()
    found = [Outcome(**json.loads(line)) for line in lines]
    return {outcome.name: outcome for outcome in found}


def write_found(found: Sequence[Outcome], path: Path = FOUND) -> None:
    """Keep them for a later run, which may do a part."""
    path.write_text("".join(json.dumps(asdict(each)) + "\n" for each in found), encoding="utf-8")
