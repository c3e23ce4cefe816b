"""`baton convert`: the same greedy tokens after it, refusals by file, nothing half done.

Checkpoints are tiny ones whose safetensors are saved again with torch.save, and whose
tokenizer.json is taken apart into vocab.json and merges.txt.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from baton.engine.checkpoint import convert as converter
from baton.engine.checkpoint.convert import PICKLE_INDEX, SAFETENSORS_INDEX, convert, main
from baton.llm import LLM
from baton.protocol.errors import ConfigError, ModelRefused
from baton.protocol.sampling import SamplingParams
from baton.text.tokenizer import Tokenizer
from tests.tiny_models import SPECIALS, make_tiny_model

GREEDY = SamplingParams(temperature=0, max_tokens=10, ignore_eos=True)
PROMPTS = ("hello there, tiny ones", "<s>neat \N{GREEK SMALL LETTER ALPHA}\N{SNOWMAN} 42")


def pickle_weights(folder: Path, num_files: int = 1, **save_options: Any) -> dict[str, Tensor]:
    """Replace model.safetensors by pytorch_model.bin, or by several and an index."""
    weights = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    save_pickles(folder, weights, num_files, **save_options)
    return weights


def save_pickles(
    folder: Path, weights: dict[str, Tensor], num_files: int = 1, **save_options: Any
) -> None:
    if num_files == 1:
        torch.save(weights, folder / "pytorch_model.bin", **save_options)
        return
    files = [f"pytorch_model-{i + 1:05}-of-{num_files:05}.bin" for i in range(num_files)]
    weight_map = {name: files[i % num_files] for i, name in enumerate(weights)}
    for file in files:
        part = {name: weights[name] for name in weights if weight_map[name] == file}
        torch.save(part, folder / file, **save_options)
    (folder / PICKLE_INDEX).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


def take_tokenizer_apart(folder: Path, tokenizer_class: str = "GPT2Tokenizer") -> None:
    """Replace tokenizer.json by the files of a slow GPT-2 tokenizer."""
    fast = json.loads((folder / "tokenizer.json").read_text())
    (folder / "tokenizer.json").unlink()
    (folder / "vocab.json").write_text(json.dumps(fast["model"]["vocab"]))
    merges = "".join(f"{left} {right}\n" for left, right in fast["model"]["merges"])
    (folder / "merges.txt").write_text("#version: 0.2\n" + merges)
    path = folder / "tokenizer_config.json"
    config = json.loads(path.read_text())
    config |= {
        "tokenizer_class": tokenizer_class,
        "unk_token": "</s>",
        "added_tokens_decoder": {
            str(i): {"content": token, "special": True} for i, token in enumerate(SPECIALS)
        },
    }
    path.write_text(json.dumps(config))


def old_checkpoint(kind: str, folder: Path, **overrides: Any) -> dict[str, Tensor]:
    """A checkpoint with neither safetensors nor tokenizer.json."""
    make_tiny_model(kind, folder, **overrides)
    take_tokenizer_apart(folder)
    return pickle_weights(folder)


def answers(folder: Path) -> list[tuple[Sequence[int], Sequence[int], str | None]]:
    llm = LLM(str(folder), dtype="float32", num_kv_blocks=16)
    outputs = llm.generate(PROMPTS, GREEDY)
    return [(output.prompt_ids, output.token_ids, output.text) for output in outputs]


def contents(folder: Path) -> dict[str, bytes]:
    """Every file, hidden ones too: what must not change."""
    return {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


@pytest.mark.parametrize("kind", ["gpt2", "llama", "qwen2"])
def test_a_converted_checkpoint_gives_the_same_tokens(kind: str, tmp_path: Path) -> None:
    wanted = answers(make_tiny_model(kind, tmp_path / "original"))
    old = tmp_path / "old"
    weights = old_checkpoint(kind, old)
    before = contents(old)
    with pytest.raises(ModelRefused, match="baton convert"):
        LLM(str(old))

    written = convert(old)

    assert [each.path.name for each in written] == ["model.safetensors", "tokenizer.json"]
    assert all(each.num_bytes == each.path.stat().st_size > 0 for each in written)
    found = load_file(old / "model.safetensors")
    assert found.keys() == weights.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in weights.items())
    assert answers(old) == wanted
    after = contents(old)
    assert {name: after[name] for name in before} == before
    assert after.keys() - before.keys() == {"model.safetensors", "tokenizer.json"}
    assert convert(old) == []
    assert contents(old) == after


def test_a_copy_is_complete_and_leaves_the_original_alone(tmp_path: Path) -> None:
    wanted = answers(make_tiny_model("llama", tmp_path / "original"))
    old, new = tmp_path / "old", tmp_path / "deep" / "new"
    old_checkpoint("llama", old)
    (old / "chat_template.jinja").write_text("{{ messages }}")
    before = contents(old)
    convert(old, new)
    assert contents(old) == before
    assert answers(new) == wanted
    copied = {"config.json", "generation_config.json", "chat_template.jinja", "vocab.json"}
    assert {name: (new / name).read_bytes() for name in copied} == {n: before[n] for n in copied}
    assert not any(new.glob("*.bin*"))
    assert convert(old, new) == []  # a second run has nothing to do


def test_safetensors_go_along_when_only_the_tokenizer_is_old(tmp_path: Path) -> None:
    old = make_tiny_model("gpt2", tmp_path / "old")
    wanted = answers(old)
    take_tokenizer_apart(old)
    convert(old, tmp_path / "new")
    assert answers(tmp_path / "new") == wanted


def test_another_model_in_the_way_is_left_alone(tmp_path: Path) -> None:
    old_checkpoint("llama", tmp_path / "old")
    other = make_tiny_model("gpt2", tmp_path / "other")
    before = contents(other)
    with pytest.raises(ConfigError, match=r"other holds another config\.json"):
        convert(tmp_path / "old", other)
    assert contents(other) == before


def test_sharded_in_and_sharded_out(tmp_path: Path) -> None:
    folder = make_tiny_model("llama", tmp_path / "model", torch_dtype="bfloat16")
    wanted = answers(folder)
    weights = pickle_weights(folder, num_files=3)
    written = convert(folder, max_shard_bytes=50_000)
    index = json.loads((folder / SAFETENSORS_INDEX).read_text())
    shards = sorted(folder.glob("*.safetensors"))
    assert len(shards) > 2
    assert shards[0].name == f"model-00001-of-{len(shards):05}.safetensors"
    assert {each.path for each in written} == {*shards, folder / SAFETENSORS_INDEX}
    assert all(path.stat().st_mode == (folder / "config.json").stat().st_mode for path in shards)
    assert index["metadata"]["total_size"] == sum(t.nbytes for t in weights.values())
    found = {path.name: load_file(path) for path in shards}
    assert {n: file for file, part in found.items() for n in part} == index["weight_map"]
    for name, tensor in weights.items():
        assert torch.equal(found[index["weight_map"][name]][name], tensor)
        assert tensor.dtype is torch.bfloat16
    for part in found.values():
        assert len(part) == 1 or sum(tensor.nbytes for tensor in part.values()) <= 50_000
    assert answers(folder) == wanted
    assert convert(folder) == []


@pytest.mark.parametrize("shared", [True, False], ids=["shared memory", "equal copies"])
@pytest.mark.parametrize(
    ("kind", "kept"), [("gpt2", "transformer.wte.weight"), ("qwen2", "model.embed_tokens.weight")]
)
def test_tied_weights_are_stored_once(kind: str, kept: str, shared: bool, tmp_path: Path) -> None:
    folder = make_tiny_model(kind, tmp_path / "model")
    wanted = answers(folder)
    weights = pickle_weights(folder)
    head = weights[kept] if shared else weights[kept].clone()
    save_pickles(folder, {"lm_head.weight": head, **weights})
    convert(folder)
    found = load_file(folder / "model.safetensors")
    assert found.keys() == weights.keys()
    assert answers(folder) == wanted


def test_shared_memory_of_an_untied_model_is_stored_under_each_name(tmp_path: Path) -> None:
    folder = make_tiny_model("llama", tmp_path / "model")
    weights = pickle_weights(folder)
    weights["lm_head.weight"] = weights["model.embed_tokens.weight"]
    key = "model.layers.0.self_attn.o_proj.weight"
    weights[key] = weights[key].t()  # not contiguous
    save_pickles(folder, weights)
    convert(folder)
    found = load_file(folder / "model.safetensors")
    assert all(torch.equal(found[name], tensor) for name, tensor in weights.items())
    assert answers(folder)


def test_tensors_of_before_torch_1_6(tmp_path: Path) -> None:
    folder = make_tiny_model("gpt2", tmp_path / "model")
    weights = pickle_weights(folder, _use_new_zipfile_serialization=False)
    convert(folder)
    found = load_file(folder / "model.safetensors")
    assert all(torch.equal(found[name], tensor) for name, tensor in weights.items())


# ---- refusals ----


class Attack:
    """Unpickled, it would create a file."""

    def __init__(self, canary: Path) -> None:
        self.canary = canary

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self.canary,)


@pytest.mark.parametrize("archive", [True, False])
def test_a_malicious_pickle_is_refused_and_does_not_run(
    archive: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "model"
    weights = old_checkpoint("llama", folder)
    canary = tmp_path / "canary"
    evil: dict[str, Any] = {**weights, "evil": Attack(canary)}
    torch.save(evil, folder / "pytorch_model.bin", _use_new_zipfile_serialization=archive)
    before = contents(folder)
    assert main([str(folder)]) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"baton convert: {folder / 'pytorch_model.bin'} is refused")
    assert error.count("\n") == 1
    assert not canary.exists()
    assert contents(folder) == before  # not even the tokenizer
    call, arguments = Attack(canary).__reduce__()
    call(*arguments)
    assert canary.exists()  # so the canary would have told


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"", "pytorch_model.bin is refused"),
        (b"not a pickle at all", "pytorch_model.bin is refused"),
        ([torch.ones(2)], "no tensors by name"),
        ({"step": 3}, "entry 'step' is not a plain tensor"),
        ({"w": torch.ones(2, 2).to_sparse()}, "entry 'w' is not a plain tensor"),
        ({}, "holds no tensors"),
    ],
)
def test_what_is_no_set_of_tensors_is_refused(content: object, reason: str, tmp_path: Path) -> None:
    folder = make_tiny_model("llama", tmp_path / "model")
    (folder / "model.safetensors").unlink()
    if isinstance(content, bytes):
        (folder / "pytorch_model.bin").write_bytes(content)
    else:
        torch.save(content, folder / "pytorch_model.bin")
    with pytest.raises(ModelRefused, match=reason):
        convert(folder)
    assert sorted(folder.glob("*.safetensors")) == []


def test_incomplete_sets_are_named(tmp_path: Path) -> None:
    folder = make_tiny_model("llama", tmp_path / "model")
    pickle_weights(folder, num_files=2)
    index = folder / PICKLE_INDEX
    content = json.loads(index.read_text())
    second = folder / "pytorch_model-00002-of-00002.bin"

    content["weight_map"]["absent.weight"] = second.name
    index.write_text(json.dumps(content))
    with pytest.raises(ModelRefused, match=r"00002-of-00002\.bin lacks the tensor 'absent"):
        convert(folder)
    content["weight_map"]["absent.weight"] = "../elsewhere.bin"
    index.write_text(json.dumps(content))
    with pytest.raises(ModelRefused, match="names files elsewhere"):
        convert(folder)
    del content["weight_map"]["absent.weight"]
    index.write_text(json.dumps(content))
    second.unlink()
    with pytest.raises(ModelRefused, match=r"00002-of-00002\.bin is missing"):
        convert(folder)
    index.unlink()
    with pytest.raises(ModelRefused, match=r"index\.json is missing"):
        convert(folder)
    (folder / SAFETENSORS_INDEX).write_text(json.dumps({"weight_map": {"a": "gone.safetensors"}}))
    with pytest.raises(ModelRefused, match=r"not gone\.safetensors"):
        convert(folder)


def test_tokenizers_that_cannot_be_converted(tmp_path: Path) -> None:
    folder = make_tiny_model("llama", tmp_path / "model")
    take_tokenizer_apart(folder, "LlamaTokenizer")  # would quietly become an empty one
    with pytest.raises(ModelRefused, match=r"would lose \d+ of 320 tokens"):
        convert(folder)
    config = folder / "tokenizer_config.json"
    config.write_text(json.dumps({"tokenizer_class": "NobodysTokenizer"}))
    (folder / "config.json").write_text(json.dumps({"model_type": "nobodys"}))
    with pytest.raises(ModelRefused, match="transformers cannot convert the tokenizer"):
        convert(folder)
    (folder / "vocab.json").unlink()
    with pytest.raises(ModelRefused, match="no tokenizer that can be converted"):
        convert(folder)
    assert not (folder / "tokenizer.json").exists()


def test_special_tokens_of_a_tokenizer_without_a_config(tmp_path: Path) -> None:
    folder = make_tiny_model("gpt2", tmp_path / "model")
    take_tokenizer_apart(folder)
    (folder / "tokenizer_config.json").unlink()
    convert(folder)
    assert Tokenizer.load(folder).special_tokens["eos_token"] == "<|endoftext|>"


def test_a_disk_that_fills_up_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "model"
    old_checkpoint("llama", folder)
    before = contents(folder)
    calls: list[int] = []

    def fsync(descriptor: int) -> None:
        calls.append(descriptor)
        if len(calls) == 2:  # the first file is in its place by then
            raise OSError(28, "No space left on device")

    monkeypatch.setattr(converter.os, "fsync", fsync)
    assert main([str(folder)]) == 2
    assert "No space left" in capsys.readouterr().err
    assert contents(folder) == before


# ---- the command ----


@pytest.mark.long
def test_the_command_in_its_own_process(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    old_checkpoint("gpt2", folder)
    command = [sys.executable, "-m", "baton.engine.checkpoint.convert", str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    first, second = done.stdout.splitlines()
    size = (folder / "model.safetensors").stat().st_size / 1e6
    assert first == f"wrote {folder / 'model.safetensors'} ({size:.2f} MB)"
    assert second.startswith(f"wrote {folder / 'tokenizer.json'} (")


def test_the_command_says_what_it_refuses(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = make_tiny_model("llama", tmp_path / "model")
    assert main([str(folder)]) == 0
    assert capsys.readouterr().out == f"nothing to convert in {folder}\n"
    assert main([str(tmp_path / "gone")]) == 2
    assert capsys.readouterr().err == f"baton convert: there is no directory {tmp_path / 'gone'}\n"
    (tmp_path / "empty").mkdir()
    assert main([str(tmp_path / "empty")]) == 2
    assert "no config.json" in capsys.readouterr().err
    shutil.copy(folder / "config.json", tmp_path / "file")
    take_tokenizer_apart(folder)
    assert main([str(folder), "--out", str(tmp_path / "file")]) == 2
    assert capsys.readouterr().err.count("\n") == 1
