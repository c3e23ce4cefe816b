"""vLLM's fields and endpoints through router, prefill and decode node, against transformers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

from baton.protocol.errors import ModelRefused
from baton.text.tokenizer import Tokenizer
from tests.cluster import Plan
from tests.system.test_endpoints import GREEDY, PROMPT, post, served, streamed
from tests.tiny_models import VOCAB_SIZE, make_tiny_model

LABELS = {"0": "dull", "1": "good", "2": "bad"}
TEXTS = ["the heart of the matter", "a", "there is no rest in the north " * 8]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model("llama", tmp_path_factory.mktemp("llama"))


def make_classifier(path: Path, **overrides: Any) -> Path:
    """A Qwen2 with a head of three classes instead of one of tokens."""
    make_tiny_model("qwen2", path)
    file = path / "config.json"
    config = json.loads(file.read_text()) | {
        "architectures": ["Qwen2ForSequenceClassification"],
        "id2label": LABELS,
        "label2id": {label: int(index) for index, label in LABELS.items()},
        **overrides,
    }
    file.write_text(json.dumps(config))
    weights = load_file(path / "model.safetensors")
    generator = torch.Generator().manual_seed(5)
    weights["score.weight"] = torch.randn(3, config["hidden_size"], generator=generator)
    save_file(weights, path / "model.safetensors", {"format": "pt"})
    return path


@torch.inference_mode()
def logits_of(model: Path, ids: list[int]) -> torch.Tensor:
    """What transformers says of the token after `ids`."""
    reference = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
    return reference(input_ids=torch.tensor([ids])).logits[0, -1]


async def test_log_probabilities_of_named_tokens_and_of_all(model: Path) -> None:
    """Token 1 is the prefill node's, the others the decode node's; with all of the vocabulary they
    are the decode node's alone."""
    ids = [300, 7, 12]
    async with served(Plan(model, router={"max_logprobs": -1})) as (_, client):
        ask = {"prompt": PROMPT, "max_tokens": 4, **GREEDY, "return_tokens_as_token_ids": True}
        named = await post(client, "/v1/completions", **ask, logprobs=0, logprob_token_ids=ids)
        every = await post(client, "/v1/completions", **ask, logprobs=-1)
        chunks = await streamed(client, "/v1/completions", **ask, logprobs=0, logprob_token_ids=ids)
        chat = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 2, **GREEDY}
        chat |= {"logprobs": True, "logprob_token_ids": ids, "return_tokens_as_token_ids": True}
        spoken = await post(client, "/v1/chat/completions", **chat)
    told, all_of_them = (reply["choices"][0]["logprobs"] for reply in (named, every))
    assert told["tokens"] == all_of_them["tokens"]
    drawn = [int(name.removeprefix("token_id:")) for name in told["tokens"]]
    for position, (some, rest) in enumerate(
        zip(told["top_logprobs"], all_of_them["top_logprobs"], strict=True)
    ):
        assert set(some) == {f"token_id:{each}" for each in {*ids, drawn[position]}}
        assert len(rest) == VOCAB_SIZE
        expected = logits_of(model, [*PROMPT, *drawn[:position]]).log_softmax(-1)
        for name, value in some.items():
            assert value == pytest.approx(rest[name], abs=1e-4)
            number = int(name.removeprefix("token_id:"))
            assert value == pytest.approx(float(expected[number]), abs=1e-4)
    parts = [chunk["choices"][0]["logprobs"]["top_logprobs"] for chunk in chunks]
    assert [row for part in parts for row in part] == told["top_logprobs"]
    first = spoken["choices"][0]["logprobs"]["content"][0]["top_logprobs"]
    assert {f"token_id:{each}" for each in ids} <= {each["token"] for each in first}


async def test_many_log_probabilities_do_not_travel_with_the_kv(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """END has room for a megabyte: such a prompt is computed where it decodes."""
    monkeypatch.setattr("router.request.choice.MOST_LOGPROBS", 100)
    async with served(Plan(model, router={"max_logprobs": -1})) as (c, client):
        ask = {"prompt": PROMPT, "max_tokens": 3, **GREEDY}
        few = await post(client, "/v1/completions", **ask, logprobs=20)
        assert c.prefill[0].stats.num_requests == 1
        many = await post(client, "/v1/completions", **ask, logprobs=-1)
        assert c.prefill[0].stats.num_requests == 1
    assert many["choices"][0]["text"] == few["choices"][0]["text"]


async def test_a_thought_ends_after_its_budget_on_both_nodes(model: Path) -> None:
    """Token 1 may be the last of a thought, or the first of its end."""
    router = {"reasoning_parser": "deepseek_r1"}
    async with served(Plan(model, router=router)) as (_, client):
        tokenizer = Tokenizer.load(model)
        end = tokenizer.encode("</think>", add_special_tokens=False)
        messages = [{"role": "user", "content": "hello"}]
        ask = {"messages": messages, "max_tokens": 24, **GREEDY, "return_token_ids": True}
        free = await post(client, "/v1/chat/completions", **ask)
        for budget in (0, 1, 5):
            told = await post(client, "/v1/chat/completions", **ask, thinking_token_budget=budget)
            (choice,) = told["choices"]
            ids = choice["token_ids"]
            assert ids[:budget] == free["choices"][0]["token_ids"][:budget]
            assert ids[budget : budget + len(end)] == end
            assert len(ids) == 24
            thought = choice["message"]["reasoning"]
            assert (thought or "") == tokenizer.decode(ids[:budget])
            assert choice["message"]["content"]
            usage = told["usage"]["completion_tokens_details"]["reasoning_tokens"]
            assert usage == budget + len(end)


async def test_a_classifiers_classes_are_transformers(tmp_path: Path) -> None:
    model = make_classifier(tmp_path / "model")
    reference = AutoModelForSequenceClassification.from_pretrained(model, dtype=torch.float32)
    tokenizer = Tokenizer.load(model)
    async with served(Plan(model)) as (_, client):
        told = await post(client, "/classify", input=TEXTS)
        raw = await post(client, "/pooling", input=TEXTS, use_activation=False)
        writing = await client.post("/v1/completions", json={"prompt": "x"})
    assert (writing.status_code, writing.json()["error"]["param"]) == (400, "model")
    assert "classifier" in writing.json()["error"]["message"]
    for text, classified, logits in zip(TEXTS, told["data"], raw["data"], strict=True):
        ids = torch.tensor([tokenizer.encode(text)])
        with torch.inference_mode():
            expected = reference.eval()(input_ids=ids).logits[0]
        assert logits["data"] == pytest.approx(expected.tolist(), abs=1e-4)
        assert classified["probs"] == pytest.approx(expected.softmax(-1).tolist(), abs=1e-5)
        assert classified["label"] == LABELS[str(int(expected.argmax()))]


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"model_impl": "transformers"}, "lean route serves classifiers"),
        ({"tensor_parallel_size": 2}, "not split over ranks"),
    ],
)
def test_other_routes_refuse_a_classifier_by_name(
    tmp_path: Path, options: dict[str, Any], reason: str
) -> None:
    from baton.engine.config import EngineConfig
    from baton.engine.loading.loading import load_model

    model = make_classifier(tmp_path / "model")
    with pytest.raises(ModelRefused, match=reason):
        load_model(EngineConfig(model=str(model), **options))
    unknown = make_classifier(tmp_path / "other", some_new_key=3)
    with pytest.raises(ModelRefused, match="some_new_key"):
        load_model(EngineConfig(model=str(unknown)))
