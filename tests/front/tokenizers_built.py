"""Small real tokenizers built in the test: byte-level and byte-fallback BPE, saved like models."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

CORPUS = [
    "What is PagedAttention? Hello, world! naïve café 🙂",
    "the quick brown fox jumps over the lazy dog",
    "什么是注意力",
]
SPECIAL = ["<s>", "</s>", "<|user|>", "<|assistant|>"]

TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}"
    "{% if m.role not in ('system', 'user', 'assistant') %}"
    "{{ raise_exception('unknown role ' + m.role) }}{% endif %}"
    "<|{{ m.role }}|>{{ m.content }}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def byte_level() -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=SPECIAL,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    return tokenizer


def byte_fallback() -> Tokenizer:
    """Llama-2 shaped: metaspace as normalizer, <0xNN> tokens for what the vocabulary lacks."""
    pieces = ["<unk>", *SPECIAL, *(f"<0x{byte:02X}>" for byte in range(256))]
    letters = ["▁", *"abcdefghijklmnopqrstuvwxyz.,!?é"]
    merges = [("▁", "a"), ("h", "e"), ("▁", "he"), ("l", "l"), ("▁he", "ll")]
    vocab = {
        piece: index for index, piece in enumerate([*pieces, *letters, *(a + b for a, b in merges)])
    }
    tokenizer = Tokenizer(
        models.BPE(vocab=vocab, merges=merges, unk_token="<unk>", byte_fallback=True, fuse_unk=True)
    )
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(content=" ", left=1),
        ]
    )
    tokenizer.add_special_tokens(["<unk>", *SPECIAL])
    return tokenizer


def save(tokenizer: Tokenizer, directory: Path, **config: Any) -> Path:
    """Write a model directory: tokenizer.json and tokenizer_config.json with `config`."""
    directory.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(directory / "tokenizer.json"))
    content: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<s>",
        "eos_token": {"__type": "AddedToken", "content": "</s>", "special": True},
    }
    content.update(config)
    (directory / "tokenizer_config.json").write_text(json.dumps(content))
    return directory
