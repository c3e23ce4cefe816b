"""What is read of an encoder's files, and what is refused by name."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
from tokenizers import normalizers

from baton.protocol.errors import InvalidRequest, ModelRefused
from baton.text.sentence_files import (
    DenseModule,
    NormalizeModule,
    PoolingModule,
    SentenceFiles,
    class_numbers,
    module_files,
    sentence_files,
)
from baton.text.tokenizer import Tokenizer, read_json_list
from tests.encoder_models import write_json
from tests.tiny_models import write_tiny_tokenizer

BERT: dict[str, Any] = {"model_type": "bert", "architectures": ["BertModel"]}
CLASSES = BERT | {"architectures": ["BertForSequenceClassification"]}
TOLD = "config_sentence_transformers.json"


def read(path: Path, config: dict[str, Any], **files: object) -> SentenceFiles:
    """`files`: their names with _ for . and __ for /."""
    write_json(path / "config.json", config)
    for name, content in files.items():
        write_json(path / name.replace("__", "/").replace("_json", ".json"), content)
    found = sentence_files(path)
    assert found is not None
    return found


def modules(*kinds: str, prefix: str = "sentence_transformers.models.") -> list[dict[str, str]]:
    paths = ["", *(f"{at}_{kind}" for at, kind in enumerate(kinds) if at)]
    return [{"type": prefix + kind, "path": at} for kind, at in zip(kinds, paths, strict=True)]


def test_a_plain_encoder_is_averaged(tmp_path: Path) -> None:
    found = read(tmp_path, BERT)
    assert (found.pooling, found.modules, found.normalizes) == (PoolingModule(), (), False)
    assert (found.task, found.max_tokens, found.prompt(None)) == ("embed", None, "")
    assert not found.tells_texts
    assert module_files(tmp_path) == []


def test_the_modules_are_read_in_their_order(tmp_path: Path) -> None:
    dense = {"in_features": 4, "out_features": 2, "activation_function": "torch.nn.ReLU"}
    found = read(
        tmp_path,
        BERT,
        modules_json=modules(
            "Transformer", "Pooling", "Normalize", "Dense", "Dropout", "Normalize"
        ),
        **{
            "1_Pooling__config_json": {
                "pooling_mode_max_tokens": True,
                "pooling_mode_cls_token": 1,
            },
            "3_Dense__config_json": dense | {"bias": False},
            "sentence_bert_config_json": {"max_seq_length": 12},
        },
    )
    assert found.pooling.modes == ("cls", "max")
    module = DenseModule(tmp_path / "3_Dense", 4, 2, bias=False, activation="ReLU")
    assert found.modules == (NormalizeModule(), module)
    assert (found.normalizes, found.max_tokens) == (True, 12)
    assert len(module_files(tmp_path)) == 4


@pytest.mark.parametrize(
    ("names", "kind", "more", "expected"),
    [
        ({"model_input_names": ["input_ids", "token_type_ids"]}, "bert", {}, True),
        ({"model_input_names": ["input_ids"]}, "bert", {}, False),
        ({"tokenizer_class": "BertTokenizerFast"}, "bert", {}, True),
        ({"tokenizer_class": "XLMRobertaTokenizer"}, "xlm-roberta", {"type_vocab_size": 1}, False),
        ({"tokenizer_class": "DebertaV2Tokenizer"}, "deberta-v2", {}, False),
    ],
)
def test_which_models_are_told_of_two_texts(
    names: dict[str, Any], kind: str, more: dict[str, Any], expected: bool, tmp_path: Path
) -> None:
    config = {"model_type": kind, **more}
    found = read(tmp_path, config, tokenizer_config_json={**names, "model_max_length": 77})
    assert found.tells_texts is expected
    assert found.max_tokens == 77


def test_prompts(tmp_path: Path) -> None:
    told = {
        "prompts": {"query": "q: ", "passage": "p: ", "none": None},
        "default_prompt_name": "query",
    }
    found = read(tmp_path, BERT, **{TOLD.replace(".", "_"): told})
    assert found.prompt(None) == found.prompt("query") == "q: "
    assert (found.prompt("passage"), found.prompt("document"), found.prompt("none")) == (
        "p: ",
        "",
        "",
    )
    with pytest.raises(InvalidRequest, match="there are: document, none, passage, query"):
        found.prompt("corpus")
    write_json(tmp_path / "modules.json", modules("Transformer", "Pooling"))
    write_json(tmp_path / "1_Pooling" / "config.json", {"include_prompt": False})
    left_out = sentence_files(tmp_path)
    assert left_out is not None
    with pytest.raises(InvalidRequest, match="leaves out prompts"):
        left_out.prompt("query")


def test_the_activation_of_a_cross_encoder(tmp_path: Path) -> None:
    one = CLASSES | {"id2label": {"0": "yes"}}
    plain = read(tmp_path, one)
    assert (plain.task, plain.labels, plain.activation) == ("score", ("yes",), "Sigmoid")
    assert plain.activated([0.0]) == [0.5]
    assert plain.activated([-900.0]) == [0.0]
    identity = "torch.nn.modules.linear.Identity"
    old = read(tmp_path, one | {"sbert_ce_default_activation_function": identity})
    assert old.activated([3.0]) == [3.0]
    named = one | {"sentence_transformers": {"activation_fn": identity}}
    assert read(tmp_path, named).activation == "Identity"
    two = read(tmp_path, CLASSES)
    assert (two.task, two.labels) == ("classify", ("LABEL_0", "LABEL_1"))
    assert two.activated([1.0, 1.0]) == [0.5, 0.5]
    own = read(tmp_path, one, **{TOLD.replace(".", "_"): {"activation_fn": identity}})
    assert own.activation == "Identity"


def test_class_numbers() -> None:
    assert class_numbers([2.0, 3.0], "regression") == [2.0, 3.0]
    assert class_numbers([0.0, 0.0], "multi_label_classification") == [0.5, 0.5]
    assert class_numbers([0.0, math.log(3)], "") == pytest.approx([0.25, 0.75])


@pytest.mark.parametrize(
    ("config", "name", "content", "reason"),
    [
        (BERT, TOLD, {"model_type": "SparseEncoder"}, "a SparseEncoder of BertModel"),
        (BERT, "modules.json", modules("Transformer", "Pooling", "CNN"), "CNN"),
        (BERT, "modules.json", modules("Router"), "module 0 is .*Router"),
        (BERT, "modules.json", modules("Transformer", prefix="own."), "own.Transformer"),
        (BERT, "modules.json", modules("Transformer", "Dropout"), "no Pooling"),
        (BERT, "modules.json", {}, "list of JSON objects"),
        (BERT, "1_Pooling/config.json", {"pooling_mode": "median"}, "median"),
        (BERT, "2_Dense/config.json", {"use_residual": True}, "use_residual"),
        (
            BERT, "2_Dense/config.json",
            {"in_features": 1, "out_features": 1, "activation_function": "own.Act"}, "own.Act",
        ),
        (CLASSES, "modules.json", modules("Transformer", "Pooling"), "modules behind its classes"),
        (
            CLASSES, TOLD, {"prompts": {"q": "q"}, "default_prompt_name": "q"}, "a default prompt",
        ),
        (CLASSES, TOLD, {"activation_fn": "torch.nn.Softmax"}, "only Sigmoid and Identity"),
    ],
)  # fmt: skip
def test_what_is_not_served_is_refused_by_name(
    config: dict[str, Any], name: str, content: object, reason: str, tmp_path: Path
) -> None:
    if name.startswith(("1_", "2_")):
        write_json(tmp_path / "modules.json", modules("Transformer", "Pooling", "Dense"))
    write_json(tmp_path / "config.json", config)
    write_json(tmp_path / name, content)
    with pytest.raises(ModelRefused, match=reason):
        sentence_files(tmp_path)


def test_other_models_are_no_encoders(tmp_path: Path) -> None:
    for config in ({"model_type": "llama"}, BERT | {"is_decoder": True},
                   BERT | {"architectures": ["BertLMHeadModel"]}):  # fmt: skip
        write_json(tmp_path / "config.json", config)
        assert sentence_files(tmp_path) is None


def test_a_list_of_json_objects(tmp_path: Path) -> None:
    assert read_json_list(tmp_path / "none.json") == []
    write_json(tmp_path / "numbers.json", [1])
    with pytest.raises(ModelRefused, match="list of JSON objects"):
        read_json_list(tmp_path / "numbers.json")


def test_a_tokenizer_in_lower_case_and_of_pairs(tmp_path: Path) -> None:
    write_tiny_tokenizer(tmp_path)
    plain = Tokenizer.load(tmp_path)
    write_json(tmp_path / "sentence_bert_config.json", {"do_lower_case": True})
    lower = Tokenizer.load(tmp_path)
    assert lower.encode("The NORTH") == plain.encode("the north")
    ids, second = plain.encode_pair("the", "north")
    assert ids == [*plain.encode("the"), *plain.encode("north")]
    assert second in (len(plain.encode("the")), len(ids))  # as the post-processor counts
    with pytest.raises(InvalidRequest, match="Unicode"):
        plain.encode_pair("a", "\ud800")
    backend = lower._backend
    backend.normalizer = normalizers.NFC()
    backend.save(str(tmp_path / "tokenizer.json"))
    assert Tokenizer.load(tmp_path).encode("NORTH") == plain.encode("north")
