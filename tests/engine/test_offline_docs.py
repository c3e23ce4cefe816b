"""Every example of docs/offline.md, and README's of LLM, run as they stand."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.engine.test_models_lora import linear_layers, make_adapter

ROOT = Path(__file__).resolve().parents[2]
TIMEOUT_S = 240.0


def examples(document: str) -> list[str]:
    return re.findall(r"```python\n(.*?)```", (ROOT / document).read_text(), re.DOTALL)


@pytest.mark.slow
def test_the_examples_run_in_their_order(tmp_path: Path) -> None:
    blocks = examples("docs/offline.md")
    assert len(blocks) >= 8
    assert all("print(" in block for block in blocks)
    blocks += [block for block in examples("README.md") if "LLM(" in block]
    adapter = make_adapter(tmp_path, linear_layers(ROOT / "demo_model", ("q_proj",)), 1)
    program = tmp_path / "examples.py"
    program.write_text("\n".join(blocks).replace("path/to/adapter", str(adapter)))
    done = subprocess.run(
        [sys.executable, str(program)],
        check=False,
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
    )
    assert done.returncode == 0, done.stderr
    assert "Prefill is the first phase" in done.stdout, "the demo model knows"
