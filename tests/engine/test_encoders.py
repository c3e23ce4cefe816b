"""Encoders of many families: sentence-transformers' numbers, whatever else is in the batch."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModel, AutoModelForSequenceClassification

from baton.engine.config import EngineConfig
from baton.engine.encoders.encoder import Encoder, load_encoder
from baton.engine.encoders.packed import PACKED
from baton.engine.performance.estimate import rows, sized, stored_bytes
from baton.engine.performance.ideal import EstimateOptions
from baton.engine.state.encoder_texts import EncoderText, VectorAsk, batch_sizes
from baton.llm import LLM
from baton.protocol.errors import ContextLengthExceeded, InvalidRequest, ModelRefused
from baton.text.sentence_files import FAMILIES
from baton.text.tokenizer import Tokenizer
from tests.encoder_models import MOST_TOKENS, add_modules, make_encoder, write_json

LENGTHS = (7, 120, 3, 7, 40, 1)
SENTENCES = [
    "the heart of the matter", "a", "on the other hand, one is not two",
    "there is no rest in the north, and none in the south either", " spaces before and after ",
    "Die Wärme\nsteigt",
]  # fmt: skip
QUERY = "who rests in the north?"
CLOSE = 1e-5


def some_texts(encoder: Encoder, seed: int = 3) -> list[EncoderText]:
    draw = torch.Generator().manual_seed(seed)
    return [
        EncoderText(
            torch.randint(5, encoder.info.vocab_size, (length,), generator=draw).tolist(),
            length // 2 if encoder.files.tells_texts else None,
        )
        for length in LENGTHS
    ]


def loaded(path: Path, **options: Any) -> Encoder:
    return load_encoder(EngineConfig(str(path), device="cpu", **options))


def together(encoder: Encoder, texts: Sequence[EncoderText], ask: VectorAsk) -> torch.Tensor:
    return torch.stack(encoder.run(texts, [ask] * len(texts)))


@pytest.mark.parametrize("family", FAMILIES)
def test_a_text_has_the_vector_and_classes_that_it_has_alone(family: str, tmp_path: Path) -> None:
    """Mean vectors and logits of a mixed batch are those of transformers, text by text."""
    for labels in (0, 3):
        path = make_encoder(tmp_path / str(labels), family, labels=labels)
        encoder = loaded(path)
        texts = some_texts(encoder)
        own: Any = AutoModelForSequenceClassification if labels else AutoModel
        model = own.from_pretrained(path, attn_implementation="eager").eval()
        got = together(encoder, texts, VectorAsk("classify" if labels else "mean"))
        for text, found in zip(texts, got, strict=True):
            ids = torch.tensor([list(text.ids)])
            more: dict[str, Any] = {}
            if text.second_from is not None:
                kinds = (torch.arange(ids.shape[1]) >= text.second_from).long()
                more["token_type_ids"] = kinds[None]
            with torch.inference_mode():
                out = model(input_ids=ids, attention_mask=torch.ones_like(ids), **more)
            wanted = out.logits[0] if labels else out.last_hidden_state[0].mean(0)
            torch.testing.assert_close(found, wanted, atol=CLOSE, rtol=0)
    assert got.std(0).min() > 1e-3  # texts differ, so a mix-up would show


def test_a_packed_row_mixes_nothing(tmp_path: Path) -> None:
    """Other neighbours, in another order, change no vector; without the borders they would."""
    encoder = loaded(make_encoder(tmp_path, "modernbert"))
    assert encoder.files.family in PACKED
    texts, others = some_texts(encoder), some_texts(encoder, seed=4)
    ask = VectorAsk("mean")
    alone = together(encoder, texts, ask)
    mixed = together(encoder, [*others[:3], *reversed(texts), *others[3:]], ask)[3:-3].flip(0)
    torch.testing.assert_close(mixed, alone, atol=CLOSE, rtol=0)
    joined = EncoderText([*texts[0].ids, *texts[2].ids])
    one = together(encoder, [joined], ask)[0]
    apart = (alone[0] * LENGTHS[0] + alone[2] * LENGTHS[2]) / (LENGTHS[0] + LENGTHS[2])
    assert (one - apart).abs().max() > 100 * CLOSE


# family -> pooling, dimensions of a Dense, Normalize at the end
EMBEDDERS: dict[str, tuple[str | tuple[str, ...], int, bool]] = {
    "bert": ("cls", 24, True),
    "xlm-roberta": ("mean", 0, True),
    "modernbert": ("cls", 0, False),
    "mpnet": ("mean_sqrt_len_tokens", 16, False),
    "distilbert": (("max", "mean"), 0, True),
    "nomic_bert": ("weightedmean", 0, True),
    "eurobert": ("lasttoken", 0, False),
    "deberta-v2": ("mean", 0, True),
}


@pytest.mark.parametrize("family", EMBEDDERS)
def test_vectors_are_those_of_sentence_transformers(family: str, tmp_path: Path) -> None:
    library = pytest.importorskip("sentence_transformers")
    pooling, dense, normalize = EMBEDDERS[family]
    path = add_modules(make_encoder(tmp_path, family), pooling, dense=dense, normalize=normalize)
    encoder, tokenizer = loaded(path), Tokenizer.load(path)
    assert encoder.info.max_model_len == 96
    assert encoder.files.normalizes is normalize
    texts = [EncoderText(tokenizer.encode(sentence)) for sentence in SENTENCES]
    got = together(encoder, texts, VectorAsk(normalize=encoder.files.normalizes))
    reference = library.SentenceTransformer(str(path), device="cpu")
    wanted = torch.tensor(reference.encode(SENTENCES))
    torch.testing.assert_close(got, wanted, atol=CLOSE, rtol=0)
    short = together(encoder, texts, VectorAsk(normalize=True, dimensions=8))
    cut = torch.tensor(reference.encode(SENTENCES, truncate_dim=8, normalize_embeddings=True))
    torch.testing.assert_close(short, cut, atol=CLOSE, rtol=0)


# family -> activation in config.json, None = the default
CROSS: dict[str, str | None] = {
    "bert": None,
    "roberta": "torch.nn.modules.linear.Identity",
    "xlm-roberta": "torch.nn.modules.activation.Sigmoid",
    "modernbert": None,
    "deberta-v2": None,
    "electra": "torch.nn.modules.linear.Identity",
    "nomic_bert": None,
}


@pytest.mark.parametrize("family", CROSS)
def test_scores_are_those_of_sentence_transformers(family: str, tmp_path: Path) -> None:
    library = pytest.importorskip("sentence_transformers")
    named = CROSS[family]
    more: dict[str, Any] = {}
    if named is not None:
        more = {"sentence_transformers": {"activation_fn": named}}
    path = make_encoder(tmp_path, family, labels=1, **more)
    encoder, tokenizer = loaded(path), Tokenizer.load(path)
    read = [tokenizer.encode_pair(QUERY, sentence) for sentence in SENTENCES]
    texts = [EncoderText(ids, at if encoder.files.tells_texts else None) for ids, at in read]
    logits = together(encoder, texts, VectorAsk("classify"))[:, 0]
    got = logits.sigmoid() if encoder.files.activation == "Sigmoid" else logits
    reference = library.CrossEncoder(str(path), device="cpu")
    wanted = torch.tensor(reference.predict([(QUERY, sentence) for sentence in SENTENCES]))
    torch.testing.assert_close(got, wanted, atol=CLOSE, rtol=0)
    assert wanted.std() > 1e-3


def test_a_model_without_modules_is_averaged(tmp_path: Path) -> None:
    """As sentence-transformers does it with a plain encoder."""
    library = pytest.importorskip("sentence_transformers")
    path = make_encoder(tmp_path, "roberta")
    encoder, tokenizer = loaded(path), Tokenizer.load(path)
    assert encoder.info.max_model_len == MOST_TOKENS
    got = together(encoder, [EncoderText(tokenizer.encode(s)) for s in SENTENCES], VectorAsk())
    wanted = torch.tensor(library.SentenceTransformer(str(path), device="cpu").encode(SENTENCES))
    torch.testing.assert_close(got, wanted, atol=CLOSE, rtol=0)


def test_what_an_encoder_cannot_compute_is_refused_by_field(tmp_path: Path) -> None:
    path = add_modules(make_encoder(tmp_path / "e", "bert"))
    encoder, classes = loaded(path), loaded(make_encoder(tmp_path / "c", "bert", labels=2))
    fine = [EncoderText((5, 6))]
    with pytest.raises(ContextLengthExceeded, match="97 tokens; the limit is 96"):
        encoder.check([EncoderText((5,) * 97)], VectorAsk())
    for texts, ask, field in (
        ([EncoderText(())], VectorAsk(), "prompt"),
        ([EncoderText((320,))], VectorAsk(), "prompt"),
        (fine, VectorAsk(dimensions=33), "dimensions"),
        (fine, VectorAsk("classify"), "model"),
        (fine, VectorAsk("yes_no"), "kind"),
    ):
        with pytest.raises(InvalidRequest) as told:
            encoder.check(texts, ask)
        assert told.value.field == field
    with pytest.raises(InvalidRequest, match="makes classes"):
        classes.check(fine, VectorAsk())


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"architectures": ["JinaBertForMaskedLM"]}, "no class of transformers' bert"),
        ({"architectures": ["BertForTokenClassification"]}, "ForSequenceClassification"),
        ({"position_embedding_type": "alibi"}, "position_embedding_type alibi"),
        ({"quantization_config": {"quant_method": "gptq"}}, "quantized encoders"),
    ],
)
def test_other_encoders_are_refused_by_name(
    change: dict[str, Any], text: str, tmp_path: Path
) -> None:
    path = make_encoder(tmp_path, "bert")

    config = json.loads((path / "config.json").read_text())
    write_json(path / "config.json", config | change)
    with pytest.raises(ModelRefused, match=text):
        loaded(path)


def test_batches_hold_so_many_tokens_and_texts() -> None:
    assert list(batch_sizes([3, 3, 3, 9, 1, 1, 1], 6, 2)) == [2, 1, 1, 2, 1]
    assert list(batch_sizes([], 6, 2)) == []


def test_llm_runs_an_encoder(tmp_path: Path) -> None:
    """Vectors, cosines, scores and classes offline, in several batches; it generates nothing."""
    library = pytest.importorskip("sentence_transformers")
    told = {"prompts": {"query": "seek: ", "passage": "text: "}, "default_prompt_name": "query"}
    path = add_modules(make_encoder(tmp_path / "e", "xlm-roberta"), normalize=True, **told)
    small = {"max_num_batched_tokens": 64, "max_num_seqs": 2, "device": "cpu"}
    llm, reference = LLM(str(path), **small), library.SentenceTransformer(str(path), device="cpu")
    wanted = torch.tensor(reference.encode(SENTENCES))
    torch.testing.assert_close(torch.tensor(llm.embed(SENTENCES)), wanted, atol=CLOSE, rtol=0)
    cosines = reference.encode_document(SENTENCES) @ reference.encode_query(QUERY)
    assert llm.score(QUERY, SENTENCES) == pytest.approx(cosines.tolist(), abs=CLOSE)
    path = make_encoder(tmp_path / "c", "electra", labels=1)
    llm, cross = LLM(str(path), **small), library.CrossEncoder(str(path), device="cpu")
    scores = cross.predict([(QUERY, sentence) for sentence in SENTENCES]).tolist()
    assert llm.rerank(QUERY, SENTENCES) == pytest.approx(scores, abs=CLOSE)
    path = make_encoder(tmp_path / "k", "roberta", labels=3)
    llm = LLM(str(path), **small)
    (found,) = llm.classify("the heart")
    ids = torch.tensor([llm.tokenizer.encode("the heart")])
    with torch.inference_mode():
        logits = AutoModelForSequenceClassification.from_pretrained(path)(input_ids=ids).logits[0]
    assert found == pytest.approx(logits.softmax(-1).tolist(), abs=CLOSE)
    for call in (
        lambda: llm.generate("hi"),
        lambda: llm.embed("hi"),
        lambda: llm.score("a", ["b"]),
        lambda: llm.rerank("a", ["b"], "an instruction"),
        lambda: LLM(str(tmp_path / "e"), **small).classify("hi"),
    ):
        with pytest.raises(InvalidRequest):
            call()
    assert llm.engine.pool.num_free == llm.engine.pool.num_blocks


def test_an_encoder_needs_no_kv(tmp_path: Path) -> None:
    """Its parameters are those of its file; a family that is not served is refused by name."""
    path = make_encoder(tmp_path / "bert", "bert", labels=1)
    result = sized(EstimateOptions(model=path, memory="1GB", flops="1TFLOPS", bandwidth="1GB/s"))
    assert result.weight_bytes == stored_bytes(path)
    assert (result.kv_bytes_per_token, result.num_blocks, result.decode) == (0, None, ())
    assert result.refused is None
    told = dict(rows(result))
    assert "KV per token" not in told
    assert "no decode nodes" in told["note"]
    assert "160 tokens" in told["ideal time"]
    refused = sized(EstimateOptions(model=path, quantization="int8")).refused
    assert refused is not None
    assert "--quantization is not for encoders" in refused
