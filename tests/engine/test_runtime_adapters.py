"""LoRA adapters that come and go while an engine runs."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest

from baton.engine.core import adapters
from baton.engine.core.active_model import ActiveModel, NoModel
from baton.engine.core.engine import Engine
from baton.protocol.adapters import adapter_id, adapter_name, ids_named
from baton.protocol.errors import ConfigError, InvalidRequest, UnsupportedFeature
from baton.protocol.request import Request
from tests.engine.test_models_lora import ALL, linear_layers, make_adapter
from tests.engine.test_sleeping import GREEDY, PROMPT, engine_of, said
from tests.tiny_models import make_tiny_model


@pytest.fixture(name="model", scope="module")
def _model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model("llama", tmp_path_factory.mktemp("model"))


def attach(engine: Engine, name: str, path: Path) -> str:
    adapter = adapters.read(adapters.model_of(engine), name, path)
    adapters.attach(engine, adapter, path)
    return adapter.id


def test_ids_and_names() -> None:
    id_ = adapter_id("a@b", "0123456789abcdef" * 4)
    assert id_ == "a@b@0123456789abcdef"
    assert adapter_name(id_) == "a@b"
    assert adapter_name("a@b") == "a@b"
    assert adapter_name("a@0123456789ABCDEF") == "a@0123456789ABCDEF"
    assert ids_named("a@b", [id_, "a"]) == [id_]
    assert ids_named(id_, [id_, "a"]) == [id_]


@pytest.mark.parametrize(
    "options", [{}, {"model_impl": "transformers"}, {"deterministic": True}],
    ids=["lean", "universal", "deterministic"],
)  # fmt: skip
def test_it_is_what_the_start_would_have_loaded(
    model: Path, tmp_path: Path, options: dict[str, Any]
) -> None:
    layers = linear_layers(model, ALL)
    one, two = (make_adapter(tmp_path / f"{seed}", layers, seed) for seed in (1, 2))
    given = engine_of(model, lora_modules=(f"poet={one}",), **options)
    expected = said(given, adapter=given.info.adapters[0])
    engine = engine_of(model, **options)
    plain = said(engine)
    first = attach(engine, "poet", one)
    assert first == given.info.adapters[0]
    assert said(engine, adapter=first) == expected != plain
    second = attach(engine, "poet", two)
    assert engine.info.adapters == (first, second)
    assert engine.config.lora_modules == (f"poet={two}",)
    assert said(engine, adapter=second) not in (expected, plain)
    assert adapters.detach(engine, first)
    assert engine.info.adapters == (second,)
    with pytest.raises(UnsupportedFeature, match="no adapter"):
        engine.add(Request("x", PROMPT, GREEDY, adapter=first))
    assert adapters.detach(engine, second)
    assert engine.config.lora_modules == ()
    assert said(engine) == plain


def test_who_runs_with_it_keeps_it(model: Path, tmp_path: Path) -> None:
    path = make_adapter(tmp_path / "a", linear_layers(model, ALL), 1)
    engine = engine_of(model)
    id_ = attach(engine, "a", path)
    expected = said(engine, adapter=id_)
    engine.add(Request("r", PROMPT, GREEDY, adapter=id_))
    tokens = [token for event in engine.step() for token in event.token_ids]
    assert not adapters.detach(engine, id_)
    while engine.has_work:
        tokens += [token for event in engine.step() for token in event.token_ids]
    assert tokens == expected
    assert adapters.detach(engine, id_)
    assert adapters.detach(engine, id_), "twice is safe"


def test_what_does_not_fit_leaves_nothing(model: Path, tmp_path: Path) -> None:
    layers = {**linear_layers(model, ALL), "model.layers.2.mlp.down_proj": (7, 5)}
    path = make_adapter(tmp_path / "bad", layers, 1)
    engine = engine_of(model)
    plain = said(engine)
    with pytest.raises(ConfigError, match="other sizes"):
        attach(engine, "bad", path)
    assert engine.info.adapters == ()
    layers = cast(Any, adapters.model_of(engine).model)._layers
    assert not any(p.deltas for layer in layers for p in layer.projections)
    assert said(engine) == plain


def test_bounds(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = make_adapter(tmp_path / "a", linear_layers(model, ("q_proj",)), 1)
    engine = engine_of(model)
    monkeypatch.setattr(adapters, "MOST", 2)
    assert attach(engine, "a", path) == attach(engine, "a", path)
    attach(engine, "b", path)
    with pytest.raises(InvalidRequest, match="2 adapters"):
        attach(engine, "c", path)
    split = replace(adapters.model_of(engine), ranks=cast(Any, object()))
    engine.active = replace(engine.active, model=split)
    with pytest.raises(UnsupportedFeature, match="ranks"):
        adapters.model_of(engine)
    engine.active = ActiveModel(NoModel())
    with pytest.raises(UnsupportedFeature):
        adapters.model_of(engine)
