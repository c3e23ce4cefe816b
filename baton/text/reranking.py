"""The prompts of a yes-or-no reranker (Qwen3-Reranker's), and the two tokens of its answer.

The score of a document is the probability of "yes" in the softmax over the logits of "no" and "yes"
after the prompt's last token. This file has text and ids only; baton/engine/core/pooling.py has the
logits. Source: Qwen3-Embedding and Qwen3-Reranker (arXiv 2506.05176), their model cards' prompts.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from baton.protocol.errors import UnsupportedFeature
from baton.text.tokenizer import Tokenizer

DEFAULT_INSTRUCTION: Final = (
    "Given a web search query, retrieve relevant passages that answer the query"
)
RERANK_PREFIX: Final = (
    "<|im_start|>system\nJudge whether the Document meets the requirements based on the Query and "
    'the Instruct provided. Note that the answer can only be "yes" or "no".<|im_end|>\n'
    "<|im_start|>user\n"
)
RERANK_PAIR: Final = "<Instruct>: {instruction}\n<Query>: {query}\n<Document>: {document}"
RERANK_SUFFIX: Final = "<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"


def rerank_prompts(
    tokenizer: Tokenizer, query: str, documents: Sequence[str], instruction: str | None
) -> list[list[int]]:
    """Return the token ids of one yes-or-no question per document.

    The three parts are encoded separately, as the model was trained.
    """
    head = tokenizer.encode(RERANK_PREFIX, add_special_tokens=False)
    tail = tokenizer.encode(RERANK_SUFFIX, add_special_tokens=False)
    prompts: list[list[int]] = []
    for document in documents:
        pair = RERANK_PAIR.format(
            instruction=instruction or DEFAULT_INSTRUCTION, query=query, document=document
        )
        prompts.append([*head, *tokenizer.encode(pair, add_special_tokens=False), *tail])
    return prompts


def answer_tokens(tokenizer: Tokenizer) -> tuple[int, int]:
    """Return the ids of "yes" and "no". Raises UnsupportedFeature if one has several tokens."""
    ids = [tokenizer.encode(word, add_special_tokens=False) for word in ("yes", "no")]
    if any(len(word) != 1 for word in ids):
        raise UnsupportedFeature(
            'this model cannot rerank: "yes" and "no" are not single tokens of it', field="model"
        )
    return ids[0][0], ids[1][0]
