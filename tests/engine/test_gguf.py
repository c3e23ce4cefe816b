"""GGUF files: blocks equal to the gguf package's, models equal to the plain ones of their numbers,
tokenizers; files that are damaged, or not read, refused by name."""

from __future__ import annotations

import json
import math
import struct
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from baton.engine.checkpoint.checkpoint import open_checkpoint
from baton.engine.checkpoint.convert import convert
from baton.engine.checkpoint.gguf.blocks import widen_blocks
from baton.engine.checkpoint.gguf.config import gguf_config
from baton.engine.checkpoint.gguf.folder import WEIGHTS, gguf_folder
from baton.engine.checkpoint.gguf.header import BLOCKS, read_gguf
from baton.engine.checkpoint.gguf.tokenizer import gguf_generation, gguf_tokenizer
from baton.engine.checkpoint.gguf.weights import gguf_tensors
from baton.engine.checkpoint.widening import open_tensors
from baton.engine.config import EngineConfig
from baton.engine.loading.loading import load_model
from baton.engine.performance.estimate import rows, sized
from baton.engine.performance.ideal import EstimateOptions
from baton.llm import LLM
from baton.protocol.errors import ModelRefused
from baton.sampling import SamplingParams
from baton.text.chat_template import ChatTemplate
from baton.text.tokenizer import Tokenizer
from deploy.hub import local_model
from deploy.preflight import weight_bytes
from tests.engine.running import load, logits_of, relative_error
from tests.engine.test_tensor_parallel import by_threads
from tests.engine.test_tensor_parallel import logits_of as logits_over_ranks
from tests.golden.random_models import save_random
from tests.tiny_models import EOS_ID, VOCAB_SIZE, make_tiny_model

gguf: Any = pytest.importorskip("gguf")
from tests.engine.gguf_models import MIXES, kind_of, pack_k, write_gguf  # noqa: E402

np: Any = pytest.importorskip("numpy")
CPU = torch.device("cpu")
PROMPT = torch.randint(5, VOCAB_SIZE, (30,), generator=torch.Generator().manual_seed(3)).tolist()
# Rows of 256 numbers: what K types want.
WIDE = {"hidden_size": 256, "intermediate_size": 256, "num_hidden_layers": 2, "head_dim": 64}
GEMMAS = ("gemma", "gemma2", "gemma3_text")
WIDENED: dict[str, Any] = {"quantization": "widened"}


@pytest.fixture(autouse=True)
def _cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(f"{gguf_folder.__module__}.cache_folder", (tmp_path / "cache").joinpath)


def make(folder: Path, kind: str = "llama", mix: str = "Q8_0", **said: Any) -> tuple[Path, Path]:
    """(a GGUF file, its plain twin)."""
    model = folder / "model"
    if kind in GEMMAS:
        windows = {} if kind == "gemma" else {"sliding_window": 9, "query_pre_attn_scalar": 64}
        save_random(model, kind, **WIDE, **windows)
    else:
        make_tiny_model(kind, model, **WIDE)
    file = folder / f"tiny-{mix}.gguf"
    return file, write_gguf(model, file, mix, **said)


@pytest.mark.parametrize("kind", [kind for kind in BLOCKS if "Q" in kind])
def test_blocks_are_the_packages_bit_for_bit(kind: str) -> None:
    """All of 256 values of each byte; factors that are no numbers, too."""
    generator = np.random.default_rng(0)
    assert gguf.GGML_QUANT_SIZES[kind_of(kind)] == BLOCKS[kind]
    blocks = generator.integers(0, 256, (400, BLOCKS[kind][1]), dtype=np.uint8)
    with np.errstate(invalid="ignore"):
        expected = torch.from_numpy(gguf.quants.dequantize(blocks, kind_of(kind)))
    found = widen_blocks(torch.from_numpy(blocks), kind)
    assert torch.equal(found.isfinite(), expected.isfinite())
    assert torch.equal(found.nan_to_num(0, 0, 0), expected.nan_to_num(0, 0, 0))


@pytest.mark.parametrize("mix", MIXES)
def test_a_file_is_the_plain_model_of_its_numbers(mix: str, tmp_path: Path) -> None:
    file, twin = make(tmp_path, "llama", mix)
    reader = open_tensors(open_checkpoint(str(file)), torch.float32, CPU)
    expected = load_file(twin / "model.safetensors")
    assert reader.names == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(reader.read(name), tensor.float()), name
    loaded, plain = load(file, **WIDENED), load(twin)
    assert loaded.info.model_impl == "lean"
    assert loaded.info.name == f"tiny-{mix}"
    expected_logits = logits_of(plain, PROMPT)
    assert torch.equal(logits_of(loaded, PROMPT), expected_logits)
    assert loaded.weight_bytes == plain.weight_bytes
    kept = load(file)
    found = logits_of(kept, PROMPT)
    assert kept.info.model_impl == "lean"
    assert relative_error(found, expected_logits) < 1e-5
    assert found.argmax(-1).equal(expected_logits.argmax(-1))
    assert (kept.weight_bytes < plain.weight_bytes) == ("Q" in "".join(MIXES[mix]))
    assert len({kept.info.digest, loaded.info.digest, plain.info.digest}) == 3


@pytest.mark.parametrize("kind", ["qwen2", "qwen3", *GEMMAS])
@pytest.mark.parametrize("mix", ["Q4_K_M", "Q8_0"])
def test_families(kind: str, mix: str, tmp_path: Path) -> None:
    file, twin = make(tmp_path, kind, mix)
    loaded, plain = load(file, **WIDENED), load(twin)
    assert loaded.info.model_impl == plain.info.model_impl
    assert loaded.info.rope == plain.info.rope
    expected = logits_of(plain, PROMPT)
    assert torch.equal(logits_of(loaded, PROMPT), expected)
    assert relative_error(logits_of(load(file), PROMPT), expected) < 1e-5


def test_rounded_again_and_universal(tmp_path: Path) -> None:
    file, twin = make(tmp_path, "qwen3", "Q4_K_M")
    for options in ({"quantization": "int8"}, {"model_impl": "transformers"}):
        loaded, plain = load(file, **options), load(twin, **options)
        assert torch.equal(logits_of(loaded, PROMPT), logits_of(plain, PROMPT))


@torch.inference_mode()
def test_over_two_ranks(tmp_path: Path) -> None:
    """As a plain checkpoint: each rank's share is the twin's, or has the integers of the whole."""
    file, twin = make(tmp_path, "llama", "Q4_K_M")

    def shares(model: Path, **options: Any) -> list[torch.Tensor]:
        placed: dict[str, Any] = {"dtype": "float32", "device": "cpu", "tensor_parallel_size": 2}
        config = EngineConfig(str(model), **placed, **options)
        return by_threads(2, lambda group: logits_over_ranks(load_model(config, group), 2))

    plain = shares(twin)
    for found, expected in zip(shares(file, **WIDENED), plain, strict=True):
        assert torch.equal(found, expected)
    for found, expected in zip(shares(file), plain, strict=True):
        assert relative_error(found, expected) < 1e-5


def test_transformers_reads_the_same(tmp_path: Path) -> None:
    file, _ = make(tmp_path, "llama", "Q4_K_M", **{"rope.dimension_count": 64})
    theirs = AutoModelForCausalLM.from_pretrained(
        tmp_path, gguf_file=file.name, dtype=torch.float32
    )
    with torch.inference_mode():
        expected = theirs(torch.tensor([PROMPT])).logits[0]
    found = logits_of(load(file), PROMPT)
    torch.testing.assert_close(found, expected, atol=2e-3, rtol=1e-3)
    assert found.argmax(-1).equal(expected.argmax(-1))


def test_the_whole_file_served_offline(tmp_path: Path) -> None:
    """LLM: tokens, texts, chat and the end of a text as the plain checkpoint's."""
    file, twin = make(tmp_path, "qwen3", "Q8_0")
    options: dict[str, Any] = {
        "dtype": "float32", "device": "cpu", "kv_cache_memory": "16MB", "max_model_len": 128,
    }  # fmt: skip
    params = SamplingParams(temperature=0.0, max_tokens=12)
    outputs = []
    for model in (file, twin):
        llm = LLM(model=str(model), **options)
        said = [llm.generate(["the cat sat"], params)]
        said.append(llm.chat([{"role": "user", "content": "hello there"}], params))
        outputs.append([o.outputs[0].token_ids for each in said for o in each])
    assert outputs[0] == outputs[1]


def test_tokenizer_template_and_ends(tmp_path: Path) -> None:
    file, twin = make(tmp_path)
    folder = gguf_folder(file)
    found, expected = Tokenizer.load(folder), Tokenizer.load(twin)
    for text in (
        "",
        "hello, world  and\n more",
        "naïve ☃ <|im_start|>user\nx<|im_end|>",
        "'ll 12345",
    ):
        assert found.encode(text) == expected.encode(text)
        assert found.decode(found.encode(text), skip_special_tokens=False) == text
    assert found.special_ids == expected.special_ids
    assert ChatTemplate.load(folder).source == ChatTemplate.load(twin).source
    assert open_checkpoint(str(file)).eos_token_ids == (EOS_ID,)


def test_the_folder_is_made_once_and_anew_for_another_file(tmp_path: Path) -> None:
    file, _ = make(tmp_path)
    folder = gguf_folder(file)
    assert local_model(str(file)) == folder == local_model(str(folder))
    made = (folder / "config.json").stat().st_mtime_ns
    assert gguf_folder(file) == folder
    assert (folder / "config.json").stat().st_mtime_ns == made
    assert load(folder).info.digest == load(file).info.digest
    other = tmp_path / "other"
    other.mkdir()
    write_gguf(tmp_path / "model", other / file.name, "Q4_0")
    (other / file.name).replace(file)
    assert gguf_folder(file) != folder
    assert load(file).info.digest


def test_convert_writes_the_folder(tmp_path: Path) -> None:
    file, twin = make(tmp_path)
    written = convert(file)
    target = file.with_suffix("")
    assert {each.path.name for each in written} >= {"config.json", "tokenizer.json"}
    assert (target / WEIGHTS).resolve() == file.resolve()
    assert convert(file) == []
    found, expected = logits_of(load(target, **WIDENED), PROMPT), logits_of(load(twin), PROMPT)
    assert torch.equal(found, expected)
    assert torch.equal(logits_of(load(target), PROMPT), logits_of(load(file), PROMPT))


def test_estimate_says_what_it_is(tmp_path: Path) -> None:
    file, _ = make(tmp_path, "llama", "Q4_K_M")
    said = dict(rows(sized(EstimateOptions(model=file, quantization="widened"))))
    assert "refused by Baton" not in said
    assert "stored as gguf (F32, Q4_K, Q6_K), read and kept as bfloat16" in said["note"]
    assert "in the files" in said["weights"]
    said = dict(rows(sized(EstimateOptions(model=file))))
    assert "stored as gguf (F32, Q4_K, Q6_K), read and kept as integers" in said["note"]
    assert "matrices integers, head integers" in said["weights"]


@pytest.mark.parametrize("kind", ["llama", "qwen2"])  # the second's head is tied
def test_estimates_of_integers(kind: str, tmp_path: Path) -> None:
    file, _ = make(tmp_path, kind, "Q4_K_M")
    kept = load(file).weight_bytes
    estimate = sized(EstimateOptions(model=file, dtype="float32"))
    assert 0.98 < kept / estimate.weight_bytes < 1.02
    least = weight_bytes(open_checkpoint(str(file)), EngineConfig(str(file), dtype="float32"))
    assert 0.98 < least / kept <= 1


def test_up_knows_what_it_takes(tmp_path: Path) -> None:
    file, _ = make(tmp_path, "llama", "Q4_K_M")
    checkpoint, kept = open_checkpoint(str(file)), load(file, **WIDENED).weight_bytes
    whole = {"dtype": "float32", **WIDENED}
    assert weight_bytes(checkpoint, EngineConfig(str(file), **whole)) == kept
    assert weight_bytes(checkpoint, EngineConfig(str(file), **WIDENED)) == kept / 2
    assert weight_bytes(checkpoint, EngineConfig(str(file), quantization="int8")) == kept / 4


@pytest.mark.parametrize("factor", [8.0, 32.0])
def test_the_frequencies_of_llama_3(factor: float, tmp_path: Path) -> None:
    """As llama.cpp's converter computes them; config.json then has transformers' rule."""
    file, _ = make(tmp_path)
    numbers = []
    for i in range(32):
        inverse = 10000.0 ** (2 * i / 64)
        wavelength = 2 * math.pi * inverse
        if wavelength < 8192 / 4:
            numbers.append(1.0)
        elif wavelength > 8192 / 1:
            numbers.append(factor)
        else:
            smooth = (8192 / wavelength - 1) / (4 - 1)
            numbers.append(1 / ((1 - smooth) / factor + smooth))
    with_tensor(file, "rope_freqs.weight", numbers)
    assert gguf_config(read_gguf(file))["rope_scaling"] == {
        "rope_type": "llama3", "factor": factor, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }  # fmt: skip
    assert "rope_freqs.weight" not in gguf_tensors(file)
    with_tensor(file, "rope_freqs.weight", [n * 1.5 for n in numbers])
    with pytest.raises(ModelRefused, match="of no known rule"):
        gguf_config(read_gguf(file))


def with_tensor(file: Path, name: str, numbers: list[float]) -> None:
    """Write a file of the same keys with one float32 tensor more."""
    reader = gguf.GGUFReader(file)
    architecture = reader.fields["general.architecture"].contents()
    writer = gguf.GGUFWriter(file.with_suffix(".new"), architecture)
    for field in reader.fields.values():
        if field.name.startswith("GGUF.") or field.name == "general.architecture":
            continue
        element = field.types[-1] if field.types[0] == gguf.GGUFValueType.ARRAY else None
        writer.add_key_value(field.name, field.contents(), field.types[0], sub_type=element)
    for tensor in reader.tensors:
        if tensor.name != name:
            writer.add_tensor(tensor.name, np.array(tensor.data), raw_dtype=tensor.tensor_type)
    writer.add_tensor(name, np.array(numbers, dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    del reader
    file.with_suffix(".new").replace(file)


@pytest.mark.parametrize(
    ("said", "reason"),
    [
        ({"expert_count": 8}, "mixtures are not read"),
        ({"block_count": None}, "llama.block_count is None"),
        ({"attention.head_count": 0}, "llama.attention.head_count is 0"),
        ({"attention.layer_norm_rms_epsilon": float("nan")}, "rms_epsilon is nan"),
        ({"rope.dimension_count": 16}, "rotate partly"),
        ({"attention.value_length": 16}, "values differ"),
        ({"rope.scaling.type": "longrope", "rope.scaling.factor": 2.0}, "scaled by longrope"),
    ],
)
def test_features_that_are_not_read(said: dict[str, Any], reason: str, tmp_path: Path) -> None:
    file, _ = make(tmp_path, **said)
    with pytest.raises(ModelRefused, match=reason):
        open_checkpoint(str(file))


def test_linear_scaling(tmp_path: Path) -> None:
    file, _ = make(tmp_path, **{"rope.scaling.type": "linear", "rope.scaling.factor": 4.0})
    rule = {"rope_type": "linear", "factor": 4.0}
    assert gguf_config(read_gguf(file))["rope_scaling"] == rule


def replaced(file: Path, old: bytes, new: bytes) -> None:
    content = file.read_bytes()
    assert len(old) == len(new)
    assert old in content
    file.write_bytes(content.replace(old, new, 1))


@pytest.mark.parametrize(
    ("old", "new", "reason"),
    [
        (b"GGUF", b"GGML", "does not begin with GGUF"),
        (b"GGUF\x03", b"GGUF\x01", "its version is 1"),
        (b"blk.1.ffn_down.weight", b"blk.1.ffn_door.weight", "ffn_door.weight is no tensor"),
        (b"output_norm.weight", b"output_norn.weight", "output_norn.weight is no tensor"),
        (b"\x05\0\0\0\0\0\0\0llama", b"\x05\0\0\0\0\0\0\0lmama", "GGUF files of lmama"),
        (b"gpt-2", b"gpt-9", "splits text as 'gpt-9', which is not known"),
    ],
)
def test_files_that_are_not_read(old: bytes, new: bytes, reason: str, tmp_path: Path) -> None:
    file, _ = make(tmp_path)
    replaced(file, old, new)
    with pytest.raises(ModelRefused, match=reason):
        load(file)


def test_a_type_that_is_not_read(tmp_path: Path) -> None:
    file, _ = make(tmp_path)
    name = b"blk.1.ffn_down.weight"
    sizes = struct.pack("<I2Q", 2, 256, 256)
    replaced(file, name + sizes + struct.pack("<I", 8), name + sizes + struct.pack("<I", 10))
    with pytest.raises(ModelRefused, match=r"ffn_down.weight is of type Q2_K.*only F32, F16"):
        load(file)


def test_a_missing_tensor_and_factors_that_are_none(tmp_path: Path) -> None:
    file, _ = make(tmp_path)
    tensor = read_gguf(file).tensors["blk.1.ffn_down.weight"]
    content = bytearray(file.read_bytes())
    content[tensor.start : tensor.start + 2] = b"\x00\x7e"  # the first factor: not a number
    file.write_bytes(content)
    with pytest.raises(ModelRefused, match=r"layers.1.mlp.down_proj.weight: .* not finite"):
        load(file)
    replaced(file, b"blk.1.ffn_down.weight", b"blk.7.ffn_down.weight")
    with pytest.raises(ModelRefused, match="tensors missing"):
        load(file)


@pytest.mark.parametrize("length", [0, 3, 30, 500, 4000, -1])
def test_files_that_end(length: int, tmp_path: Path) -> None:
    file, _ = make(tmp_path)
    file.write_bytes(file.read_bytes()[:length])
    with pytest.raises(ModelRefused, match=r"not a whole GGUF file|not a GGUF file"):
        load(file)


@pytest.fixture(scope="module")
def header(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """A whole file of a few kilobytes."""
    folder = tmp_path_factory.mktemp("header")
    small = {"hidden_size": 32, "intermediate_size": 32, "head_dim": 8, "num_hidden_layers": 1}
    model = make_tiny_model("llama", folder / "model", **small)
    write_gguf(model, folder / "small.gguf", "Q8_0")
    return (folder / "small.gguf").read_bytes()


@settings(
    max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(data=st.data())
def test_damaged_headers_are_refused_and_nothing_else_happens(
    data: st.DataObject, header: bytes, tmp_path: Path
) -> None:
    """Bytes changed at random, most of them where counts, lengths and types are."""
    content = bytearray(header)
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, 23) | st.integers(24, 12_000)) % len(content)
        new = data.draw(st.binary(min_size=1, max_size=8))
        content[at : at + len(new)] = new
    cut = data.draw(st.none() | st.integers(0, len(content)))
    file = tmp_path / "damaged.gguf"
    file.write_bytes(content[:cut])
    try:
        found = read_gguf(file)
        config = gguf_config(found)
        assert json.dumps(config)
        tokenizer, _ = gguf_tokenizer(found)
        assert json.dumps([tokenizer, gguf_generation(found)])
        for name, tensor in gguf_tensors(file).items():
            assert math.prod(tensor.shape) < 1 << 24, name
    except ModelRefused as reason:
        assert str(file) in str(reason) or "weight" in str(reason)  # noqa: PT017


@pytest.mark.long
@settings(
    max_examples=20, deadline=None, derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)  # fmt: skip
@given(
    mix=st.sampled_from(sorted(MIXES)),
    kind=st.sampled_from(["llama", "qwen2", "qwen3"]),
    shape=st.fixed_dictionaries(
        {
            "hidden_size": st.sampled_from([32, 64, 128, 256]),
            "intermediate_size": st.sampled_from([32, 96, 256]),
            "num_attention_heads": st.sampled_from([4, 8]),
            "num_key_value_heads": st.sampled_from([1, 2, 4]),
            "tie_word_embeddings": st.booleans(),
        }
    ),
)
def test_random_configurations(
    mix: str, kind: str, shape: dict[str, Any], tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.mktemp("random")
    small = {"head_dim": 16, "num_hidden_layers": 1}
    model = make_tiny_model(kind, folder / "model", **small, **shape)
    twin = write_gguf(model, folder / "random.gguf", mix)
    loaded, plain = load(folder / "random.gguf", **WIDENED), load(twin)
    expected = logits_of(plain, PROMPT)
    assert torch.equal(logits_of(loaded, PROMPT), expected)
    assert relative_error(logits_of(load(folder / "random.gguf"), PROMPT), expected) < 1e-5


@pytest.mark.parametrize("kind", ["Q4_K", "Q5_K", "Q6_K"])
def test_what_the_tests_pack_is_near_what_they_were_given(kind: str) -> None:
    weight = torch.randn(8, 512, generator=torch.Generator().manual_seed(1))
    packed = torch.from_numpy(pack_k(weight, kind)).view(-1, BLOCKS[kind][1])
    found = widen_blocks(packed, kind).view_as(weight)
    error = float((found - weight).norm() / weight.norm())
    assert 0 < error < {"Q4_K": 0.09, "Q5_K": 0.05, "Q6_K": 0.03}[kind]
