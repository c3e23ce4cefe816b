"""Tiny random encoders of several families, as folders that sentence-transformers loads, too.

Weights are transformers' own random ones, widened, so that texts have clearly different vectors.
The tokenizer is a byte-level BPE with special tokens around a text, and of a pair with types.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, processors
from transformers import AutoModel, AutoModelForSequenceClassification
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.utils import logging as transformers_logging

from tests.tiny_models import BOS_ID, EOS_ID, PAD_ID, VOCAB_SIZE, write_tiny_tokenizer

HIDDEN: Final = 32
MOST_TOKENS: Final = 160
_PLAIN: Final[dict[str, Any]] = {
    "vocab_size": VOCAB_SIZE, "hidden_size": HIDDEN, "intermediate_size": 48,
    "num_hidden_layers": 3, "num_attention_heads": 4, "max_position_embeddings": MOST_TOKENS,
    "initializer_range": 0.12, "pad_token_id": PAD_ID,
}  # fmt: skip
_OWN: Final[dict[str, dict[str, Any]]] = {
    "albert": {"embedding_size": 24, "type_vocab_size": 2},
    "bert": {"type_vocab_size": 2},
    "deberta": {"relative_attention": True, "pos_att_type": ["p2c", "c2p"], "type_vocab_size": 0},
    "deberta-v2": {
        "relative_attention": True, "pos_att_type": ["p2c", "c2p"], "type_vocab_size": 0,
        "position_biased_input": False, "norm_rel_ebd": "layer_norm", "position_buckets": 16,
    },
    "distilbert": {"dim": HIDDEN, "hidden_dim": 48, "n_layers": 3, "n_heads": 4},
    "electra": {"embedding_size": 24, "type_vocab_size": 2},
    "eurobert": {"num_key_value_heads": 2, "head_dim": 8},
    "modernbert": {
        "local_attention": 16, "global_attn_every_n_layers": 3, "classifier_pooling": "mean",
    },
    "nomic_bert": {"type_vocab_size": 2, "head_dim": 8},
    "rembert": {"input_embedding_size": 24, "output_embedding_size": 24, "type_vocab_size": 2},
}  # fmt: skip
# Families whose positions begin behind the padding's id.
_BEHIND_PADDING: Final = ("camembert", "data2vec-text", "mpnet", "roberta", "xlm-roberta")
TOLD: Final = ("albert", "bert", "electra", "nomic_bert", "rembert")


def make_encoder(path: Path, family: str, *, labels: int = 0, seed: int = 0, **more: Any) -> Path:
    """Write an encoder; with `labels` one of that many classes. `more`: keys of config.json."""
    transformers_logging.disable_progress_bar()
    path.mkdir(parents=True, exist_ok=True)
    extra = {"num_labels": labels} if labels else {}
    if family in _BEHIND_PADDING or family.startswith(("roberta", "xlm-roberta")):
        extra["max_position_embeddings"] = MOST_TOKENS + PAD_ID + 1
    config: Any = CONFIG_MAPPING[family](**{**_PLAIN, **_OWN.get(family, {}), **extra, **more})
    torch.manual_seed(seed)
    made: Any = AutoModelForSequenceClassification if labels else AutoModel
    model = made.from_config(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.add_(torch.randn_like(parameter), alpha=0.1)
    model.save_pretrained(path)
    write_tiny_tokenizer(path)
    tokenizer = Tokenizer.from_file(str(path / "tokenizer.json"))
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A </s>",
        pair="<s>:0 $A:0 </s>:0 $B:1 </s>:1",
        special_tokens=[("<s>", BOS_ID), ("</s>", EOS_ID)],
    )
    tokenizer.save(str(path / "tokenizer.json"))
    names = ["input_ids", "token_type_ids", "attention_mask"]
    told = {
        "tokenizer_class": "PreTrainedTokenizerFast", "pad_token": "<pad>",
        "bos_token": "<s>", "eos_token": "</s>", "model_max_length": MOST_TOKENS,
        "model_input_names": [name for name in names if family in TOLD or "type" not in name],
    }  # fmt: skip
    write_json(path / "tokenizer_config.json", told)
    return path


def add_modules(
    path: Path,
    pooling: str | Sequence[str] = "mean",
    *,
    dense: int = 0,
    normalize: bool = False,
    **told: Any,
) -> Path:
    """Write sentence-transformers' files. `dense`: of so many dimensions, 0 = none. `told`: keys of
    config_sentence_transformers.json."""
    modes = [pooling] if isinstance(pooling, str) else list(pooling)
    width = HIDDEN * len(modes)
    modules = [("Transformer", ""), ("Pooling", "1_Pooling")]
    write_json(
        path / "1_Pooling" / "config.json",
        {"embedding_dimension": width, "pooling_mode": modes, "include_prompt": True},
    )
    if dense:
        modules.append(("Dense", "2_Dense"))
        write_json(
            path / "2_Dense" / "config.json",
            {
                "in_features": width, "out_features": dense, "bias": True,
                "activation_function": "torch.nn.modules.activation.Tanh",
            },
        )  # fmt: skip
        torch.manual_seed(7)
        weights = {
            "linear.weight": torch.randn(dense, width) / 4,
            "linear.bias": torch.randn(dense),
        }
        save_file(weights, path / "2_Dense" / "model.safetensors")
    if normalize:
        modules.append(("Normalize", "3_Normalize"))
    write_json(
        path / "modules.json",
        [
            {
                "idx": at,
                "name": str(at),
                "path": folder,
                "type": f"sentence_transformers.models.{name}",
            }
            for at, (name, folder) in enumerate(modules)
        ],
    )
    write_json(path / "sentence_bert_config.json", {"max_seq_length": 96, "do_lower_case": False})
    write_json(
        path / "config_sentence_transformers.json",
        {"prompts": {}, "default_prompt_name": None, "similarity_fn_name": "cosine", **told},
    )
    return path


def write_json(path: Path, content: object) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content))
