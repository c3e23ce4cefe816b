"""generation_config.json as sampling defaults: what is taken, what is ignored, what is refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from baton.protocol.errors import ModelRefused
from baton.text.generation_config import SamplingDefaults, sampling_defaults
from tests.test_demo_model import DEMO_MODEL


def write(directory: Path, content: object) -> Path:
    (directory / "generation_config.json").write_text(json.dumps(content))
    return directory


def test_no_file_no_defaults(tmp_path: Path) -> None:
    assert sampling_defaults(tmp_path) == {}


def test_the_demo_model_is_greedy() -> None:
    assert sampling_defaults(DEMO_MODEL) == {"temperature": 0.0}


@pytest.mark.parametrize(
    ("content", "defaults"),
    [
        (
            {"do_sample": True, "temperature": 0.6, "top_k": 20, "top_p": 0.95, "min_p": 0.05},
            {"temperature": 0.6, "top_k": 20, "top_p": 0.95, "min_p": 0.05},
        ),
        ({"repetition_penalty": 1.05, "temperature": None}, {"repetition_penalty": 1.05}),
        ({"do_sample": False, "temperature": 0.6}, {"temperature": 0.0}),
        ({"eos_token_id": 2, "max_new_tokens": 9, "num_beams": 4, "typical_p": 0.5}, {}),
    ],
)
def test_what_is_taken(tmp_path: Path, content: object, defaults: SamplingDefaults) -> None:
    assert sampling_defaults(write(tmp_path, content)) == defaults


@pytest.mark.parametrize(
    ("content", "named"),
    [
        ({"temperature": -1}, "temperature"),
        ({"temperature": "hot"}, "temperature"),
        ({"top_k": 2.5}, "top_k"),
        ({"top_p": 0}, "top_p"),
        ({"min_p": 2}, "min_p"),
        ({"repetition_penalty": True}, "repetition_penalty"),
        ([], "JSON object"),
    ],
)
def test_what_no_request_could_ask_for_is_refused(
    tmp_path: Path, content: object, named: str
) -> None:
    with pytest.raises(ModelRefused, match=f"generation_config.json.*{named}"):
        sampling_defaults(write(tmp_path, content))
