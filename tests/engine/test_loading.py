"""Loading: what is refused, by name; eos ids, dtype, length, digest; the canonical configs."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from baton.engine.checkpoint.checkpoint import Checkpoint, open_checkpoint
from baton.engine.checkpoint.tensors import TensorReader
from baton.engine.config import EngineConfig
from baton.engine.kernels.cpu.library import kernels
from baton.engine.kernels.rope import inverse_frequencies, rope_rule
from baton.engine.loading.loading import LoadedModel, load_model
from baton.engine.loading.route import choose_dtype
from baton.engine.models.families.keys import NotLean
from baton.engine.models.families.read import decoder_config
from baton.engine.performance.estimate import sized
from baton.engine.performance.ideal import EstimateOptions
from baton.engine.quantization.linear import PackedLinear, PanelLinear, PlainLinear, choose_linear
from baton.engine.state.place import choose_device
from baton.protocol.errors import ConfigError, ModelRefused
from tests.tiny_models import EOS_ID, make_tiny_model


@pytest.fixture
def tiny(tmp_path: Path) -> Path:
    return make_tiny_model("llama", tmp_path / "llama")


def load(path: Path | str, **options: Any) -> LoadedModel:
    """Load on the CPU, by the lean route unless told otherwise."""
    merged: dict[str, Any] = {"device": "cpu", "model_impl": "lean", **options}
    return load_model(EngineConfig(model=str(path), **merged))


def edit_json(path: Path, **changes: Any) -> None:
    """Change keys of a JSON file; None removes."""
    content = json.loads(path.read_text()) | changes
    path.write_text(json.dumps({key: v for key, v in content.items() if v is not None}))


def test_info_says_what_others_need(tiny: Path) -> None:
    loaded = load(tiny, served_model_name=("tiny",))
    info = loaded.info
    assert (info.name, info.model_impl, info.kv_dtype) == ("tiny", "lean", "float32")
    assert (info.vocab_size, info.max_model_len, info.eos_token_ids) == (320, 512, (EOS_ID,))
    assert [(s.kv_heads, s.k_dim, s.v_dim, s.window, s.kind) for s in info.layers] == [
        (2, 16, 16, 0, "full")
    ] * 3
    weights = load_file(tiny / "model.safetensors")
    assert loaded.weight_bytes == sum(tensor.nbytes for tensor in weights.values())
    assert json.loads(info.rope) == ["default", 10000.0, {}]


def test_windows_are_in_the_layer_specs(tmp_path: Path) -> None:
    info = load(make_tiny_model("mistral", tmp_path)).info
    assert [(layer.window, layer.kind) for layer in info.layers] == [(9, "sliding")] * 3


@pytest.mark.parametrize(
    ("generation", "config", "expected"),
    [(7, 2, (7,)), ([7, 9], 2, (7, 9)), (None, [2, 3], (2, 3)), (None, 5, (5,)), (None, None, ())],
)
def test_all_eos_ids(tiny: Path, generation: Any, config: Any, expected: tuple[int, ...]) -> None:
    edit_json(tiny / "generation_config.json", eos_token_id=generation)
    edit_json(tiny / "config.json", eos_token_id=config)
    assert load(tiny).info.eos_token_ids == expected


def test_max_model_len(tiny: Path) -> None:
    assert load(tiny, max_model_len=100).info.max_model_len == 100
    with pytest.raises(ConfigError, match="513 exceeds the model's own 512") as error:
        load(tiny, max_model_len=513)
    assert error.value.field == "max_model_len"


def test_yarn_reaches_factor_times_its_original_length(tiny: Path) -> None:
    rule = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 512}
    edit_json(tiny / "config.json", rope_scaling=rule)
    assert load(tiny).info.max_model_len == 2048
    edit_json(tiny / "config.json", max_position_embeddings=4096)
    assert load(tiny).info.max_model_len == 4096


def test_dynamic_scaling_ends_at_the_models_own_length(tiny: Path) -> None:
    """Beyond it a row's rotation would depend on its batch mates."""
    edit_json(tiny / "config.json", rope_scaling={"rope_type": "dynamic", "factor": 4.0})
    assert load(tiny).info.max_model_len == 512
    with pytest.raises(ConfigError, match="513 exceeds"):
        load(tiny, max_model_len=513)


def test_tensors_are_cast_and_stacked_in_place(tmp_path: Path) -> None:
    stored = {
        "a": torch.randn(3, 5),
        "b": torch.randn(2, 5).bfloat16(),
        "c": torch.tensor(7.0),
        "d": torch.arange(6, dtype=torch.int8).view(2, 3),
        "e": torch.zeros(0, 5),
        "f": torch.randn(2, 4),
    }
    file = tmp_path / "x.safetensors"
    save_file(stored, file)
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        reader = TensorReader([file], dtype, torch.device("cpu"))
        expected = torch.cat([stored["a"].to(dtype), stored["b"].to(dtype)])
        assert torch.equal(reader.read("a", "b", "e"), expected)
        assert torch.equal(reader.read("c"), stored["c"].to(dtype))
        assert reader.bytes_read == (15 + 10 + 1) * dtype.itemsize
        assert torch.equal(reader.read_as_stored("d"), stored["d"])
    with pytest.raises(ModelRefused, match="no tensor 'absent'"):
        reader.read("a", "absent")
    with pytest.raises(ModelRefused, match="a, f do not fit"):
        reader.read("a", "f")
    size = file.stat().st_size
    with file.open("r+b") as opened:
        opened.truncate(size - 8)
    with pytest.raises(ModelRefused, match="shorter"):
        [reader.read(name) for name in stored]


@pytest.mark.parametrize("stored", ["float32", "bfloat16", "float16"])
def test_a_dtype_that_no_config_states_is_that_of_most_numbers(stored: str, tmp_path: Path) -> None:
    path = make_tiny_model("llama", tmp_path, torch_dtype=stored)
    tensors = load_file(path / "model.safetensors")
    other = torch.bfloat16 if stored == "float32" else torch.float32
    first = {n: t.to(other if "norm" in n else t.dtype) for n, t in tensors.items()}
    save_file(first, path / "model.safetensors", {"format": "pt"})
    edit_json(path / "config.json", torch_dtype=None, dtype=None)
    info = load_model(EngineConfig(str(path), device="cpu")).info
    assert (info.dtype, info.kv_dtype) == (stored, stored)
    assert sized(EstimateOptions(model=path)).dtype == stored
    edit_json(path / "config.json", dtype="float16")
    assert open_checkpoint(str(path)).config["dtype"] == "float16"


def test_unstated_dtypes_keep_the_rules_of_quantized_checkpoints(tmp_path: Path) -> None:
    path = make_tiny_model("llama", tmp_path, torch_dtype="bfloat16")
    edit_json(path / "config.json", torch_dtype=None, dtype=None, quantization_config={"bits": 4})
    assert choose_dtype("auto", open_checkpoint(str(path)).config) == "float32"
    edit_json(path / "config.json", quantization_config=None)
    save_file({"a": torch.zeros(2, dtype=torch.int8)}, path / "model.safetensors")
    assert choose_dtype("auto", open_checkpoint(str(path)).config) == "float32"
    for broken in (b"", b"[]", b'{"a": 1}'):
        data = len(broken).to_bytes(8, "little") + broken
        (path / "model.safetensors").write_bytes(data)
        assert choose_dtype("auto", open_checkpoint(str(path)).config) == "float32"
        with pytest.raises(ModelRefused, match="is not a safetensors file"):
            load(path)


def test_dtype_auto_is_the_checkpoints(tmp_path: Path) -> None:
    for stored, expected in (("bfloat16", "bfloat16"), ("float16", "float16"), (None, "float32")):
        path = make_tiny_model("llama", tmp_path / str(stored), torch_dtype=stored or "float32")
        edit_json(path / "config.json", torch_dtype=stored)
        assert choose_dtype("auto", open_checkpoint(str(path)).config) == expected
        assert choose_dtype("float32", open_checkpoint(str(path)).config) == "float32"
    published = {"model_type": "gpt_oss", "quantization_config": {"quant_method": "mxfp4"}}
    assert choose_dtype("auto", published) == "bfloat16"
    edit_json(path / "config.json", dtype="torch.bfloat16")
    assert choose_dtype("auto", open_checkpoint(str(path)).config) == "bfloat16"
    edit_json(path / "config.json", dtype="float8_e4m3fn")
    with pytest.raises(ModelRefused, match="float8_e4m3fn"):
        choose_dtype("auto", open_checkpoint(str(path)).config)


def test_cuda_without_a_gpu_is_an_error() -> None:
    assert choose_device("cpu").type == "cpu"
    if not torch.cuda.is_available():
        with pytest.raises(ConfigError, match="no GPU"):
            choose_device("cuda")
        assert choose_device("auto").type == "cpu"


def test_digest_is_bound_to_the_content(tiny: Path, tmp_path: Path) -> None:
    original = load(tiny).info.digest
    copy = Path(shutil.copytree(tiny, tmp_path / "elsewhere"))
    edit_json(copy / "config.json", _name_or_path="elsewhere", transformers_version="9.9")
    assert load(copy).info.digest == original
    edit_json(copy / "config.json", rms_norm_eps=1e-5)
    assert load(copy).info.digest != original
    weights = load_file(tiny / "model.safetensors")
    weights["model.norm.weight"][3] += 1e-3  # same size, same header: only the bytes differ
    save_file(weights, tiny / "model.safetensors", {"format": "pt"})
    assert load(tiny).info.digest != original


def test_sharded_checkpoints(tiny: Path) -> None:
    whole = load(tiny)
    weights = load_file(tiny / "model.safetensors")
    (tiny / "model.safetensors").unlink()
    shards = {name: f"model-0000{1 + i % 2}-of-00002.safetensors" for i, name in enumerate(weights)}
    for file in sorted(set(shards.values())):
        save_file({n: t for n, t in weights.items() if shards[n] == file}, tiny / file)
    index = tiny / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": shards}))
    sharded = load(tiny)
    assert sharded.weight_bytes == whole.weight_bytes
    hidden = torch.randn(2, 64, generator=torch.Generator().manual_seed(0))
    assert torch.equal(sharded.logits(hidden), whole.logits(hidden))
    (tiny / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(ModelRefused, match=r"model-00002-of-00002\.safetensors is missing"):
        load(tiny)
    index.write_text(json.dumps({"weight_map": {"x": "../other.safetensors"}}))
    with pytest.raises(ModelRefused, match="elsewhere"):
        load(tiny)


@pytest.mark.parametrize(
    ("removed", "message"),
    [
        ("model.safetensors", "no safetensors.*baton convert"),
        ("tokenizer.json", "no tokenizer.json.*baton convert"),
        ("config.json", "no config.json"),
    ],
)
def test_incomplete_checkpoints_are_refused(tiny: Path, removed: str, message: str) -> None:
    (tiny / removed).unlink()
    (tiny / "pytorch_model.bin").write_bytes(b"never read")
    with pytest.raises(ModelRefused, match=message) as error:
        load(tiny)
    assert error.value.field == "model"


def test_broken_files_are_refused(tiny: Path) -> None:
    (tiny / "config.json").write_text("{")
    with pytest.raises(ModelRefused, match="cannot read"):
        load(tiny)
    (tiny / "config.json").write_text("[]")
    with pytest.raises(ModelRefused, match="JSON object"):
        load(tiny)


@pytest.mark.parametrize("content", [b"", b"\xff" * 100, b"\x10\0\0\0\0\0\0\0not json at all!!"])
def test_broken_weights_are_refused(tiny: Path, content: bytes) -> None:
    (tiny / "model.safetensors").write_bytes(content)
    with pytest.raises(ModelRefused, match="safetensors"):
        load(tiny)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"quantization_config": {"quant_method": "bitsandbytes"}}, "bitsandbytes"),
        ({"is_encoder_decoder": True}, "encoder-decoder"),
        ({"model_type": "no_such_model"}, "no lean decoder"),
        ({"attention_chunk_size": 8}, "attention_chunk_size"),
    ],
)
def test_unservable_configs_are_refused(tiny: Path, changes: Any, message: str) -> None:
    edit_json(tiny / "config.json", **changes)
    with pytest.raises(ModelRefused, match=message):
        load(tiny)


def test_unknown_tensors_are_not_lean(tiny: Path) -> None:
    weights = load_file(tiny / "model.safetensors")
    weights["model.layers.0.adapter.weight"] = torch.zeros(2)
    save_file(weights, tiny / "model.safetensors")
    with pytest.raises(ModelRefused, match=r"not understood.*adapter"):
        load(tiny)


def test_neither_directory_nor_hub_id(tmp_path: Path) -> None:
    for model in (str(tmp_path / "absent"), "just-a-name", "a/b/c", "./x/y"):
        with pytest.raises(ModelRefused, match="neither a directory nor a hub id"):
            open_checkpoint(model)


def test_hub_out_of_reach(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: dict[str, Any] = {}

    def unreachable(repository: str, **options: Any) -> str:
        asked.update(options, repository=repository)
        raise OSError("connection refused")

    monkeypatch.setattr("huggingface_hub.snapshot_download", unreachable)
    with pytest.raises(ModelRefused, match=r"owner/name .*connection refused.*--model"):
        open_checkpoint("owner/name")
    assert asked["repository"] == "owner/name"
    assert not any(pattern.endswith(".bin") for pattern in asked["allow_patterns"])


def test_hub_models_are_served_from_their_snapshot(
    tiny: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("huggingface_hub.snapshot_download", lambda *_, **__: str(tiny))
    found: Checkpoint = open_checkpoint("owner/name")
    assert found.path == tiny
    assert load("owner/name").info.name == "owner/name"


@pytest.mark.parametrize(
    ("family", "changes", "reason"),
    [
        ("llama", {"hidden_act": "gelu"}, "hidden_act"),
        ("llama", {"pretraining_tp": 2}, "pretraining_tp"),
        ("llama", {"sliding_window": 8}, "windows"),
        ("llama", {"num_hidden_layers": None}, "absent"),
        ("llama", {"architectures": ["LlamaForSequenceClassification"]}, "architecture"),
        ("llama", {"rope_scaling": {"rope_type": "yarn", "factor": 2.0}}, "yarn"),
        ("llama", {"rope_scaling": {"rope_type": "linear"}}, "linear"),
        ("llama", {"partial_rotary_factor": 0.5}, "not understood"),
        ("mistral", {"sliding_window": None}, "absent"),
        ("mistral", {"attention_bias": True}, "attention_bias"),
        ("mistral", {"layer_types": ["full_attention"] * 3}, "layer_types"),
        ("qwen2", {"mlp_bias": True}, "mlp_bias"),
        (
            "qwen3",
            {"use_sliding_window": True, "sliding_window": 4, "layer_types": ["chunked"] * 3},
            "chunked",
        ),
    ],
)
def test_what_is_not_understood_is_not_lean(
    family: str, changes: Any, reason: str, tmp_path: Path
) -> None:
    config = open_checkpoint(str(make_tiny_model(family, tmp_path))).config | changes
    config = {key: value for key, value in config.items() if value is not None}
    with pytest.raises(NotLean, match=reason):
        decoder_config(config)


def test_layer_types_choose_the_windows(tmp_path: Path) -> None:
    config = open_checkpoint(str(make_tiny_model("qwen3", tmp_path))).config
    kinds = ["full_attention", "sliding_attention", "full_attention"]
    config |= {"use_sliding_window": True, "sliding_window": 4, "layer_types": kinds}
    assert decoder_config(config).windows == (0, 4, 0)
    assert decoder_config(config | {"use_sliding_window": False}).windows == (0, 0, 0)


def test_both_spellings_of_rope_are_one_rule() -> None:
    old = rope_rule({"rope_theta": 5e5, "rope_scaling": {"type": "linear", "factor": 2.0}})
    new = rope_rule({"rope_parameters": {"rope_type": "linear", "rope_theta": 5e5, "factor": 2.0}})
    assert old == new
    assert old is not None
    assert rope_rule({"n_embd": 8}) is None
    plain = rope_rule({"rope_theta": 5e5, "rope_scaling": None})
    assert plain is not None
    assert torch.equal(inverse_frequencies(old, 16) * 2, inverse_frequencies(plain, 16))


def test_linear_formats_agree() -> None:
    cpu = torch.device("cpu")
    assert choose_linear(torch.float32, cpu) is PlainLinear
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(24, 40, generator=generator).bfloat16()
    bias = torch.randn(24, generator=generator).bfloat16()
    x = torch.randn(5, 40, generator=generator).bfloat16()
    chosen = choose_linear(torch.bfloat16, cpu)
    if kernels() is None:
        assert chosen in (PlainLinear, PackedLinear)
    else:
        assert isinstance(chosen(weight, bias), PanelLinear | PackedLinear)
    for b in (None, bias):
        expected = PlainLinear(weight, b)(x).float()
        torch.testing.assert_close(chosen(weight, b)(x).float(), expected, atol=0.1, rtol=0.02)
