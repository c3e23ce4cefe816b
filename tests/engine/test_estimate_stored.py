"""`baton estimate` of quantized checkpoints: command lines that were copied from `baton up`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, get_args

import pytest

from baton.engine.config import Quantization
from baton.engine.performance.estimate import main, sized
from baton.engine.performance.ideal import EstimateOptions
from tests.engine.quantized_models import RECIPES

CONFIGS = Path(__file__).parent / "configs"
LLAMA = "llama-3-8b"


def config_file(folder: Path, quantized: dict[str, Any] | None, **changes: Any) -> Path:
    """A config.json of Llama 3 8B alone."""
    file = folder / "config.json"
    values = json.loads((CONFIGS / f"{LLAMA}.json").read_text()) | changes
    file.write_text(json.dumps(values | ({"quantization_config": quantized} if quantized else {})))
    return file


@pytest.mark.parametrize("name", ["gptq", "awq", "w4a16", "w8a8"])
def test_the_stored_format_by_its_name_changes_nothing(name: str, tmp_path: Path) -> None:
    file = config_file(tmp_path, RECIPES[name].config)
    plain = sized(EstimateOptions(model=file))
    method = RECIPES[name].config["quant_method"]
    assert sized(EstimateOptions(model=file, quantization=method)) == plain
    assert plain.refused is None
    assert plain.quantization == method


def test_a_format_that_the_checkpoint_does_not_have_is_refused(tmp_path: Path) -> None:
    file = config_file(tmp_path, RECIPES["gptq"].config)
    assert "is gptq" in (sized(EstimateOptions(model=file, quantization="awq")).refused or "")
    file = config_file(tmp_path, None)
    refused = sized(EstimateOptions(model=file, quantization="gguf")).refused
    assert "is not quantized" in (refused or "")


def test_4_bit_floats_are_kept_by_their_name_too() -> None:
    file = CONFIGS / "gpt-oss-20b.json"
    named = sized(EstimateOptions(model=file, quantization="mxfp4"))
    assert named == sized(EstimateOptions(model=file))
    assert named.quantization == "mxfp4 (experts)"


@pytest.mark.parametrize("flag", ["--quantization", "-q"])
def test_every_value_of_the_engine_is_a_value_here(
    flag: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = config_file(tmp_path, RECIPES["gptq"].config)
    for value in (*get_args(Quantization), "gptq_marlin"):
        assert main([str(file), flag, value, "--json"]) == 0
        refused = json.loads(capsys.readouterr().out)["refused"]
        assert (refused is None) == (value in ("none", "gptq", "gptq_marlin"))
