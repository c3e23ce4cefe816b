"""--config FILE: every command reads it, and what it does not know stops the start by name."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from baton.engine.checkpoint import convert
from baton.engine.performance import estimate
from baton.node.main import main as node_main
from bench import engine as bench_engine
from bench import serve as bench_serve
from decode_node.__main__ import PROGRAM as DECODE
from deploy import cli
from deploy.cli import up_settings
from router.main import main as router_main
from tests.tiny_models import make_tiny_model

COMMANDS: dict[str, Callable[[list[str]], object]] = {
    **{name: (lambda flags, name=name: cli.main([name, *flags])) for name in ("up", "chat")},
    "status": lambda flags: cli.main(["status", *flags]),
    "doctor": lambda flags: cli.main(["doctor", *flags]),
    "batch": lambda flags: cli.main(["batch", "in.jsonl", "out.jsonl", *flags]),
    "router": lambda flags: router_main(flags, {}),
    "decode": lambda flags: node_main(DECODE, flags, {}),
    "convert": lambda flags: convert.main(["dir", *flags]),
    "estimate": estimate.main,
    "bench serve": bench_serve.main,
    "bench engine": bench_engine.main,
}


@pytest.mark.parametrize("name", COMMANDS)
def test_a_bad_file_is_one_line(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "baton.yaml"
    file.write_text("no-such-option: 3\n")
    try:
        status = COMMANDS[name](["--config", str(file)])
    except SystemExit as stopped:
        status = stopped.code
    assert status
    told = capsys.readouterr()
    assert "no_such_option" in (told.err + told.out).replace("-", "_")
    assert "Traceback" not in told.err


def test_a_file_speaks_for_up_and_for_its_nodes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("BATON_MODEL", "BATON_SERVED_MODEL_NAME", "BATON_DTYPE"):
        monkeypatch.delenv(name, raising=False)
    model = make_tiny_model("llama", tmp_path / "model")
    file = tmp_path / "baton.yaml"
    names = "served-model-name: [a, b]"
    file.write_text(f"model: {model}\n{names}\nprefill: 2\nmax-num-seqs: 9\ndtype: bfloat16\n")
    flags = ["up", "--config", str(file), "--dtype", "float32"]
    options, engine = up_settings(cli.parse(cli.build_parser(), flags))
    assert options.prefill == 2
    assert engine == {
        "model": str(model), "served_model_name": ["a", "b"], "max_num_seqs": 9, "dtype": "float32",
        "shared_weights_cache": "auto",
    }  # fmt: skip
    monkeypatch.setenv("BATON_MAX_NUM_SEQS", "5")
    _, engine = up_settings(cli.parse(cli.build_parser(), flags))
    assert "max_num_seqs" not in engine, "the nodes read the environment themselves"
