"""A command line of vLLM starts Baton: same names, second spellings, flags that need no effect."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import pytest

from baton.engine.checkpoint.checkpoint import as_stored
from baton.engine.config import EngineConfig
from baton.llm import LLM
from baton.node.config import NodeConfig
from baton.protocol.errors import ConfigError
from baton.runtime.config import add_options, load
from baton.runtime.vllm_flags import IDLE, add_idle
from deploy import cli
from router.config import RouterConfig
from tests.tiny_models import make_tiny_model

OPTIONS = frozenset(
    name
    for cls in (EngineConfig, NodeConfig, RouterConfig)
    for name, spec in cls.__dataclass_fields__.items()
    if "help" in spec.metadata
)


def up(*words: str) -> argparse.Namespace:
    return cli.build_parser().parse_args(["up", *words])


@pytest.mark.parametrize(
    ("words", "option", "value"),
    [
        (["-tp", "2"], "tensor_parallel_size", 2),
        (["-q", "gptq_marlin"], "quantization", "gptq"),
        (["-q", "modelopt_fp4"], "quantization", "modelopt"),
        (["--quantization", "compressed-tensors"], "quantization", "compressed-tensors"),
        (["--dtype", "half"], "dtype", "float16"),
        (["--dtype", "float"], "dtype", "float32"),
        (["--model-impl", "vllm"], "model_impl", "auto"),
        (["--kv-cache-dtype", "fp8_e4m3"], "kv_cache_dtype", "fp8"),
        (["--num-gpu-blocks-override", "9"], "num_kv_blocks", 9),
        (["--guided-decoding-backend", "guidance"], "guided_decoding_backend", "llguidance"),
    ],
)
def test_second_spellings_mean_the_option(words: list[str], option: str, value: object) -> None:
    assert getattr(load(EngineConfig, up("--model", "m", *words)), option) == value


def test_a_second_spelling_holds_in_the_environment() -> None:
    assert load(EngineConfig, {"model": "m"}, {"BATON_DTYPE": "half"}).dtype == "float16"


def test_the_model_may_stand_alone() -> None:
    """As in `vllm serve MODEL`."""
    assert up("org/model", "--seed", "1").model == "org/model"
    assert up("--model", "org/model").model == "org/model"


@pytest.mark.parametrize("name", sorted(IDLE))
def test_a_flag_that_needs_no_effect_is_taken_with_the_reason(
    name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    flag, values = "--" + name.replace("_", "-"), IDLE[name].values
    words = [flag] if values is None else [flag, *(values[:1] or ["7"])]
    plain, given = up("--model", "m"), up("--model", "m", *words)
    assert vars(given) == vars(plain)
    assert capsys.readouterr().err == f"{flag} does nothing here: {IDLE[name].reason}\n"
    assert name not in OPTIONS, "what is an option has its effect"


def test_a_value_that_would_have_an_effect_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        up("--model", "m", "--pipeline-parallel-size", "2")
    assert "--pipeline-parallel-size: invalid choice: '2'" in capsys.readouterr().err


def test_every_process_takes_them() -> None:
    """Whoever starts the processes singly has the same habits."""
    for configs in ((RouterConfig,), (EngineConfig, NodeConfig)):
        parser = argparse.ArgumentParser()
        for config in configs:
            add_options(parser, config)
        add_idle(parser)
        given = parser.parse_args(["--model", "m", "--trust-remote-code"])
        assert given.model == "m"
        assert "trust_remote_code" not in vars(given)


def test_the_name_of_the_stored_quantization_changes_nothing(tmp_path: Path) -> None:
    stored: dict[str, Any] = {"quantization_config": {"quant_method": "gptq", "bits": 4}}
    model = str(make_tiny_model("llama", tmp_path, **stored))
    assert as_stored(EngineConfig(model=model, quantization="gptq")) == EngineConfig(model=model)
    with pytest.raises(ConfigError, match=r"--quantization awq: .* is gptq") as caught:
        as_stored(EngineConfig(model=model, quantization="awq"))
    assert caught.value.field == "quantization"
    with pytest.raises(ConfigError, match=r"--quantization fp8: .* is gptq"):
        as_stored(EngineConfig(model=model, quantization="fp8"))


@pytest.mark.parametrize("method", ["fp8", "fbgemm_fp8", "mxfp4", "modelopt", "bitsandbytes"])
def test_so_do_the_names_of_widened_formats(method: Any, tmp_path: Path) -> None:
    stored: dict[str, Any] = {"quantization_config": {"quant_method": method}}
    model = str(make_tiny_model("llama", tmp_path, **stored))
    assert as_stored(EngineConfig(model=model, quantization=method)) == EngineConfig(model=model)


def test_the_class_takes_them_too(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    model = str(make_tiny_model("llama", tmp_path))
    idle: dict[str, Any] = {"trust_remote_code": True}
    with caplog.at_level("INFO", logger="baton.llm"):
        llm = LLM(model, "half", num_kv_blocks=8, **idle)
    assert str(llm.engine.info.kv_dtype) == "float16"
    assert "--trust-remote-code does nothing here" in caplog.text
    with pytest.raises(ConfigError, match="LLM has no option 'quantisation'"):
        LLM(model, quantisation="int8")
