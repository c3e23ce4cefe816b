"""What cannot work is refused before anything starts, in one line that names the flag."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path

import pytest

from baton.engine.checkpoint.checkpoint import open_checkpoint
from baton.engine.config import EngineConfig
from baton.protocol.errors import ConfigError
from deploy import cli, local, preflight
from deploy.plan import DEMO_MODEL
from deploy.preflight import check_memory, weight_bytes
from tests.tiny_models import make_tiny_model

GB = 10**9


@pytest.fixture(autouse=True)
def nothing_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith("BATON_")]:
        monkeypatch.delenv(name)

    def refuse(*_: object) -> None:
        raise AssertionError("a process was started")

    monkeypatch.setattr(local, "Child", refuse)


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--run-dir", "/proc/x"], "logs cannot be written to /proc/x (No such file or directory)"),
        (["--model", "/nope"], "--model /nope is neither a directory nor"),
        (["--chat-template", "/nope"], "/nope cannot be read"),
        (["--lora-modules", "a=/nope"], "adapter a: there is no /nope/adapter_config.json"),
        (["--lora-modules", "nope"], "'nope' is not NAME=PATH"),
        (
            ["--speculative-method", "draft", "--speculative-model", "/nope"],
            "/nope is neither a directory nor a hub id",
        ),
        (["--quantization", "gptq"], "is not quantized"),
        (["--kv-lanes", "shm,grpc", "--kv-shm-dir", "/nope"], "--kv-shm-dir /nope is no folder"),
        (["--kv-unix-dir", "/nope"], "--kv-unix-dir /nope is no folder"),
        (["--api-keys", "/nope"], "cannot read /nope"),
        (["--tls-cert", "/nope", "--tls-key", "/nope"], "cannot use the certificate /nope"),
        (
            ["--device", "cpu", "--kv-cache-memory", "400TB"],
            "of weights + 400000.00 GB of KV) = 8000",
        ),
    ],
)
def test_up_refuses_in_one_line(
    words: list[str], told: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    given = [] if "--run-dir" in words else ["--run-dir", str(tmp_path)]
    assert cli.main(["up", "--model", str(DEMO_MODEL), *given, *words]) in (1, 2)
    written = capsys.readouterr()
    assert written.err.startswith("baton: ")
    assert told in written.err
    assert written.err.count("\n") == 1
    assert not written.out


def test_a_file_that_is_not_there_is_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    assert cli.main(["batch", str(source), str(target)]) == 1
    assert capsys.readouterr().err == f"baton: {source}: No such file or directory\n"
    source.touch()
    assert cli.main(["batch", str(source), str(tmp_path / "nope" / "out.jsonl")]) == 2
    assert capsys.readouterr().err == f"baton: there is no folder {tmp_path / 'nope'}\n"


def test_memory_is_counted_for_every_node(tmp_path: Path) -> None:
    model = str(make_tiny_model("llama", tmp_path))
    weights = weight_bytes(open_checkpoint(model), EngineConfig(model))
    asked = EngineConfig(model, kv_cache_memory="1GB")
    check_memory(asked, 2, 2 * (weights + GB))
    with pytest.raises(ConfigError, match=r"2 x \(0.00 GB of weights \+ 1.00 GB of KV\)") as caught:
        check_memory(asked, 2, 2 * (weights + GB) - 1)
    assert caught.value.field == "kv_cache_memory"
    check_memory(EngineConfig(model), 3, 3 * weights)
    with pytest.raises(ConfigError, match=r"try fewer nodes, --quantization int8$") as caught:
        check_memory(EngineConfig(model), 3, 3 * weights - 1)
    assert caught.value.field == "model"


def test_weights_that_nodes_share_are_counted_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = str(make_tiny_model("llama", tmp_path))
    monkeypatch.setattr(preflight, "LEAST_BYTES", 0)
    monkeypatch.setattr(preflight, "FOLDER", tmp_path)
    shared = EngineConfig(model, kv_cache_memory="1GB")
    weights = weight_bytes(open_checkpoint(model), shared)
    check_memory(shared, 2, weights + 2 * GB)
    told = r"GB of weights, held once, \+ 2 x 1.00 GB of KV = 2.00 GB.*; try fewer nodes"
    with pytest.raises(ConfigError, match=told):
        check_memory(shared, 2, weights + 2 * GB - 1)
    for alone in (replace(shared, shared_weights=False), shared):
        with pytest.raises(ConfigError, match=r"2 x \("):
            check_memory(alone, 2, weights + 2 * GB)
        monkeypatch.setattr(preflight, "FOLDER", tmp_path / "nowhere")  # no room to share in


@pytest.mark.parametrize(
    ("stored", "options", "share"),
    [
        ("float32", {}, 1),
        ("float32", {"dtype": "bfloat16"}, 0.5),
        ("bfloat16", {"dtype": "float32"}, 2),
        ("bfloat16", {"quantization": "int8"}, 0.5),
        ("float32", {"quantization": "int4"}, 0.125),
        ("int9", {}, 1),
        ("int9", {"quantization": "int4"}, 0),
    ],
)
def test_weights_are_never_counted_too_high(
    stored: str, options: dict[str, str], share: float, tmp_path: Path
) -> None:
    model = make_tiny_model("llama", tmp_path)
    file = model / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "torch_dtype": stored}))
    size = sum(path.stat().st_size for path in model.glob("*.safetensors"))
    engine = EngineConfig(str(model), **options)  # type: ignore[arg-type]
    assert weight_bytes(open_checkpoint(str(model)), engine) == int(size * share)
