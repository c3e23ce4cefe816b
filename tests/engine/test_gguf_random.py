"""Random GGUF files: 20 shapes of each family; the twin's logits, or a refusal by name."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

from baton.engine.checkpoint.gguf.folder import gguf_folder
from baton.protocol.errors import ModelRefused
from tests.engine.running import load, logits_of, relative_error
from tests.golden.random_models import save_random, with_random_norms
from tests.tiny_models import VOCAB_SIZE, make_tiny_model

gguf: Any = pytest.importorskip("gguf")
from tests.engine.gguf_models import MIXES, MODEL_ARCHES, kind_of, write_gguf  # noqa: E402

SHAPES = 20
QUICK = 2  # of each family by default
IN_CI = 5  # of each family; the others are `soak`


def random_shape(kind: str, seed: int) -> dict[str, Any]:
    """Heads, widths and windows; rows that make blocks of 256, of 32, or of neither."""
    draw = random.Random(f"{kind} {seed}")
    kv_heads = draw.choice([1, 2, 4])
    shape: dict[str, Any] = {
        "num_key_value_heads": kv_heads, "num_attention_heads": kv_heads * draw.choice([1, 2]),
        "head_dim": draw.choice([16, 32, 64]), "num_hidden_layers": draw.randint(1, 3),
        "hidden_size": draw.choice([48, 64, 128, 256]), "rms_norm_eps": draw.choice([1e-5, 1e-6]),
        "intermediate_size": draw.choice([40, 96, 192, 256, 512]),
        "tie_word_embeddings": draw.random() < 0.5, "rope_theta": draw.choice([1e4, 1e6]),
    }  # fmt: skip
    if kind.startswith("gemma"):
        shape["tie_word_embeddings"] = True  # their files have no head
    if kind in ("gemma2", "gemma3_text"):
        shape |= {
            "sliding_window": draw.choice([5, 9, 64]), "query_pre_attn_scalar": shape["head_dim"],
        }  # fmt: skip
    return shape


CASES = [
    pytest.param(
        kind,
        seed,
        marks=() if seed < QUICK else [pytest.mark.long, *[pytest.mark.soak] * (seed >= IN_CI)],
    )
    for kind in MODEL_ARCHES
    for seed in range(SHAPES)
]


@pytest.mark.parametrize(("kind", "seed"), CASES)
def test_a_random_file_has_its_twins_logits(
    kind: str, seed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Widened bit for bit, as integers up to float32's rounding."""
    monkeypatch.setattr(f"{gguf_folder.__module__}.cache_folder", (tmp_path / "cache").joinpath)
    draw = random.Random(f"{seed} {kind}")
    shape, mix = random_shape(kind, seed), draw.choice(list(MIXES))
    if kind.startswith("gemma"):
        model = with_random_norms(save_random(tmp_path / "model", kind, **shape))
    else:
        model = make_tiny_model(kind, tmp_path / "model", **shape)
    file = tmp_path / "tiny.gguf"
    twin = write_gguf(model, file, mix)
    prompt = [draw.randrange(5, VOCAB_SIZE) for _ in range(30)]
    expected = logits_of(load(twin), prompt)
    assert logits_of(load(file, quantization="widened"), prompt).equal(expected)
    assert relative_error(logits_of(load(file), prompt), expected) < 2e-5


@pytest.mark.parametrize("kind", ["IQ2_XS", "Q3_K", "TQ1_0"])
def test_a_type_that_is_not_read_is_refused_by_name(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = make_tiny_model("llama", tmp_path / "model", hidden_size=256)
    file, add = tmp_path / "tiny.gguf", gguf.GGUFWriter.add_tensor
    size = gguf.GGML_QUANT_SIZES[kind_of(kind)][1]

    def other(writer: Any, name: str, tensor: Any, raw_dtype: Any) -> None:
        """Of the same rows of 256 numbers, one block each."""
        if name == "blk.0.ffn_gate.weight":
            tensor, raw_dtype = tensor[:, :size].copy(), kind_of(kind)
        add(writer, name, tensor, raw_dtype=raw_dtype)

    monkeypatch.setattr(gguf.GGUFWriter, "add_tensor", other)
    write_gguf(model, file, "Q8_0")
    with pytest.raises(ModelRefused, match=f"ffn_gate.weight is of type {kind}, which is not read"):
        load(file)
