"""/classify, /pooling, /v2/embed, /invocations, /tokenizer_info over HTTP; vectors come from a
scripted node."""

from __future__ import annotations

import base64
import json
import struct
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer as Backend
from tokenizers import processors

from baton.text.chat_template import ChatTemplate
from baton.text.tokenizer import Tokenizer
from router.api.openai.prompt_options import truncated
from router.api.pooling.classify import activated
from router.api.pooling.config import PoolingSettings
from router.config import RouterConfig
from tests.front.fakes import BACKEND, MODEL, TOKENIZER, Front
from tests.front.test_endpoints import Door, door

CLASSIFIER = {
    "architectures": ["Qwen2ForSequenceClassification"],
    "id2label": {"0": "dull", "1": "good", "2": "bad"},
}
IDS = TOKENIZER.encode("hello")


def model_of(folder: Path, config: dict[str, Any], **more: Any) -> str:
    (folder / "config.json").write_text(json.dumps(config))
    for name, content in more.items():
        (folder / f"{name}.json").write_text(json.dumps(content))
    return str(folder)


async def post(it: Door, path: str, **body: Any) -> dict[str, Any]:
    reply = await it.client.post(path, json=body)
    assert reply.status_code == 200, reply.text
    return reply.json()


async def refused(it: Door, path: str, **body: Any) -> str:
    """The field that is to blame."""
    reply = await it.client.post(path, json=body)
    assert reply.status_code == 400, reply.text
    return reply.json()["error"]["param"]


# ---- classes ----


async def test_classes_have_their_labels_and_probabilities(tmp_path: Path) -> None:
    async with door(model=model_of(tmp_path, CLASSIFIER)) as it:
        told = await post(it, "/classify", input=["hello", [1, 2]], model="tiny")
        assert {asked.kind for asked in it.asked} == {"classify"}
        raw = await post(it, "/classify", input="hello", use_activation=False)
        scores = await post(it, "/pooling", input="hello")
        logits = await post(it, "/pooling", input="hello", task="classify", use_activation=False)
        embedded = await post(it, "/pooling", input="hello", task="embed")
        assert it.asked[-1].kind == "last"
    first, second = told["data"]
    # The node answers [tokens, sum of ids, 0.5].
    assert (first["index"], first["label"], first["num_classes"]) == (0, "good", 3)
    assert second["label"] == "good"
    assert sum(first["probs"]) == pytest.approx(1)
    assert raw["data"][0]["probs"] == [len(IDS), sum(IDS), 0.5]
    assert (told["object"], told["model"], told["id"][:9]) == ("list", MODEL, "classify-")
    assert told["usage"] == {"prompt_tokens": len(IDS) + 2, "total_tokens": len(IDS) + 2}
    assert scores["data"][0]["data"] == pytest.approx(first["probs"])
    assert logits["data"] == [{"object": "pooling", "index": 0, "data": [len(IDS), sum(IDS), 0.5]}]
    assert embedded["data"][0]["data"] == [len(IDS), sum(IDS), 0.5]


def test_what_logits_mean_is_the_models_problem() -> None:
    labels = ("a", "b")
    assert activated([0.0, 0.0], PoolingSettings(labels=labels)) == [0.5, 0.5]
    assert activated([900.0, -900.0], PoolingSettings(labels=labels)) == [1.0, 0.0]
    several = PoolingSettings(labels=labels, problem="multi_label_classification")
    assert activated([0.0, 900.0], several) == [0.5, 1.0]
    assert activated([0.0], PoolingSettings(labels=("a",))) == [0.5]
    number = PoolingSettings(labels=("a",), problem="regression")
    assert activated([7.5], number) == [7.5]


def test_labels_are_read_as_transformers_writes_them(tmp_path: Path) -> None:
    def labels(config: dict[str, Any]) -> tuple[str, ...]:
        return PoolingSettings.of(RouterConfig(model=model_of(tmp_path, config))).labels

    assert labels(CLASSIFIER) == ("dull", "good", "bad")
    assert labels({"architectures": ["LlamaForSequenceClassification"]}) == ("LABEL_0", "LABEL_1")
    assert labels({"architectures": ["LlamaForCausalLM"], "id2label": {"0": "x"}}) == ()
    assert labels({}) == ()


async def test_a_reranker_classifies_by_its_yes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("router.api.pooling.classify.answer_tokens", lambda _: (7, 8))
    async with door(reranker="qwen3") as it:
        told = await post(it, "/classify", input="hello")
        assert (it.asked[0].kind, it.asked[0].answers) == ("yes_no", (7, 8))
    (only,) = told["data"]
    assert (only["label"], only["num_classes"]) == ("LABEL_0", 1)
    assert only["probs"] == pytest.approx([sum(IDS) / 1000])


async def test_what_cannot_be_classified_or_pooled_is_told_by_field() -> None:
    async with door() as it:
        assert await refused(it, "/classify", input="hello") == "model"
        assert await refused(it, "/pooling", input="hello", task="classify") == "model"
        for task in ("token_embed", "token_classify", "score", "plugin"):
            assert await refused(it, "/pooling", input="hello", task=task) == "task"
        assert await refused(it, "/pooling", input="hello", task="sing") == "task"
        assert await refused(it, "/pooling", input="") == "input"
        assert await refused(it, "/pooling", input="a", messages=[{"role": "user"}]) == "messages"
        assert it.asked == []
        vector = await post(it, "/pooling", input="hello", encoding_format="base64")
        raw = base64.b64decode(vector["data"][0]["data"])
        assert struct.unpack("<3f", raw) == (len(IDS), sum(IDS), 0.5)
        assert vector["id"].startswith("pool-")


# ---- Cohere's ----


async def test_embeddings_in_every_kind_of_number() -> None:
    async with door() as it:
        kinds = ["float", "base64"]
        told = await post(
            it, "/v2/embed", texts=["hello", "a"], embedding_types=kinds, model="tiny"
        )
        assert set(told["embeddings"]) == {"float", "base64"}
        assert told["embeddings"]["float"][0] == [len(IDS), sum(IDS), 0.5]
        raw = base64.b64decode(told["embeddings"]["base64"][0])
        assert struct.unpack("<3f", raw) == (len(IDS), sum(IDS), 0.5)
        assert told["texts"] == ["hello", "a"]
        assert told["response_type"] == "embeddings_by_type"
        assert told["meta"]["billed_units"]["input_tokens"] == len(IDS) + 1
        parts = [{"content": [{"type": "text", "text": "hel"}, {"type": "text", "text": "lo"}]}]
        joined = await post(it, "/v2/embed", inputs=parts, input_type="search_query")
        assert "texts" not in joined
        assert TOKENIZER.decode(it.asked[-1].prompts[0]) == "hel\nlo"
        assert [*joined["embeddings"]] == ["float"]


def test_special_tokens_around_a_text_stay_when_it_is_cut() -> None:
    backend = Backend.from_str(BACKEND.to_str())
    single = "<s> $A </s>"
    ends = [("<s>", 1), ("</s>", 2)]
    backend.post_processor = processors.TemplateProcessing(single=single, special_tokens=ends)
    tokenizer = Tokenizer(backend, {})
    (begin,), (end,) = tokenizer.frame
    assert TOKENIZER.frame == ((), ())
    ids = tuple(tokenizer.encode("hello world"))
    assert (ids[0], ids[-1]) == (begin, end)
    cut = partial(truncated, ids, limit=100, frame=tokenizer.frame)
    assert cut(4, side="right") == (begin, *ids[1:3], end)
    assert cut(4, side="left") == (begin, *ids[-3:-1], end)
    assert cut(len(ids)) == cut(-1) == cut(None) == ids
    assert cut(2, side="right") == ids[:2]  # no room for a token of the text beside both


def test_bits_are_signs() -> None:
    from router.api.pooling.cohere import SPELLED

    vector = struct.pack("<16f", *([1.0, -1.0] * 4), *([-0.5] * 7), 0.0)
    assert SPELLED["ubinary"](vector) == [0b10101010, 0b00000001]
    assert SPELLED["binary"](vector) == [0b10101010 - 128, 1 - 128]


async def test_the_end_that_is_cut_and_the_types_of_texts(tmp_path: Path) -> None:
    long = "hello " * 200
    tasks = {"prompts": {"query": "ask: ", "document": ""}}
    model = model_of(tmp_path, {}, config_sentence_transformers=tasks)
    async with door(model=model) as it:
        await post(it, "/v2/embed", texts=["hello world"], max_tokens=3)
        whole = tuple(TOKENIZER.encode("hello world"))
        assert it.asked[-1].prompts == [whole[:3]]
        await post(it, "/v2/embed", texts=["hello world"], max_tokens=3, truncate="START")
        assert it.asked[-1].prompts == [whole[-3:]]
        await post(it, "/v2/embed", texts=[long])
        assert len(it.asked[-1].prompts[0]) == it.node.record.max_model_len
        assert await refused(it, "/v2/embed", texts=[long], truncate="NONE") == "texts"
        few = {"texts": ["hello world"], "truncate": "NONE", "max_tokens": 2}
        assert await refused(it, "/v2/embed", **few) == "max_tokens"
        await post(it, "/v2/embed", texts=["hello"], input_type="search_query")
        assert TOKENIZER.decode(it.asked[-1].prompts[0]) == "ask: hello"
        await post(it, "/v2/embed", texts=["hello"], input_type="document")
        assert TOKENIZER.decode(it.asked[-1].prompts[0]) == "hello"
        assert await refused(it, "/v2/embed", texts=["a"], input_type="clustering") == "input_type"
        assert await refused(it, "/v2/embed", texts=["a"], max_tokens=999) == "max_tokens"
        assert await refused(it, "/v2/embed", texts=["a"], max_tokens=0) == "max_tokens"
        assert await refused(it, "/v2/embed", texts=["a"], output_dimension=2) == "output_dimension"
        assert await refused(it, "/v2/embed", texts=["a", ""]) == "texts[1]"
        assert await refused(it, "/v2/embed") == "texts"
        assert await refused(it, "/v2/embed", texts=["a"], images=["x"]) == "images"
        image = [{"content": [{"type": "image_url", "image_url": {"url": "x"}}]}]
        assert await refused(it, "/v2/embed", inputs=image) == "inputs[0].content[0]"
        kinds = ["ubinary"]
        assert await refused(it, "/v2/embed", texts=["a"], embedding_types=kinds) == (
            "embedding_types"
        )


# ---- one door, and what the tokenizer is ----


async def test_one_door_for_every_body(tmp_path: Path) -> None:
    async with door() as it:
        chat = await post(it, "/invocations", messages=[{"role": "user", "content": "hi"}])
        assert chat["object"] == "chat.completion"
        text = await post(it, "/invocations", prompt="hi", request_id="mine")
        assert (text["object"], text["id"]) == ("text_completion", "cmpl-mine")
        stream = await it.client.post("/invocations", json={"prompt": "hi", "stream": True})
        assert stream.text.endswith("data: [DONE]\n\n")
        assert (await post(it, "/invocations", input="hi"))["data"][0]["object"] == "embedding"
        assert await refused(it, "/invocations", query="a", documents=["b"]) == "model"
        assert await refused(it, "/invocations", text_1="a", text_2="b") == "model"
        assert await refused(it, "/invocations", prompt="hi", temperature=-1) == "temperature"
        nothing = await it.client.post("/invocations", json={"hello": 1})
        assert nothing.status_code == 400
        assert "messages" in nothing.json()["error"]["message"]
    async with door(model=model_of(tmp_path, CLASSIFIER)) as it:
        assert (await post(it, "/invocations", input="hello"))["data"][0]["label"] == "good"


async def test_the_tokenizer_is_told_of_only_where_that_is_wanted(tmp_path: Path) -> None:
    told = {"bos_token": {"content": "<s>", "lstrip": False}, "name_or_path": "/home/me/model",
            "model_max_length": 9, "added_tokens_decoder": {"0": {"content": "<s>"}},
            "extra_special_tokens": [{"content": "<x>"}]}  # fmt: skip
    model = model_of(tmp_path, {}, tokenizer_config=told)
    async with Front(config=RouterConfig(model=model)).client() as client:
        assert (await client.get("/tokenizer_info")).status_code == 404
        assert "/tokenizer_info" not in (await client.get("/openapi.json")).json()["paths"]
    config = RouterConfig(model=model, enable_tokenizer_info_endpoint=True)
    front = Front(config=config, chat_template=ChatTemplate("the template", {}))
    async with front.client() as client:
        assert "/tokenizer_info" in (await client.get("/openapi.json")).json()["paths"]
        assert (await client.get("/tokenizer_info")).json() == {
            "bos_token": "<s>",
            "model_max_length": 9,
            "added_tokens_decoder": {"0": "<s>"},
            "extra_special_tokens": ["<x>"],
            "tokenizer_class": "PreTrainedTokenizerFast",
            "chat_template": "the template",
        }
