"""OfflineEncoder: vectors, scores and classes by an encoder in this process, for LLM."""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from tqdm import tqdm

from baton.engine.config import EngineConfig
from baton.engine.state.encoder_texts import EncoderText, VectorAsk, batch_sizes
from baton.llm_inputs import Inputs, Prompt
from baton.protocol.errors import UnsupportedFeature
from baton.text.sentence_files import DOCUMENT_PROMPT, QUERY_PROMPT

if TYPE_CHECKING:  # lazy at run time: it takes transformers
    from baton.engine.encoders.encoder import Encoder

Bar = bool | Callable[..., Any]  # show one on a terminal, or make it by this instead of tqdm


class OfflineEncoder:
    """Runs an engine's encoder over texts. It keeps no state."""

    def __init__(self, encoder: Encoder, config: EngineConfig, inputs: Inputs) -> None:
        self._encoder = encoder
        self._files = encoder.files
        self._config = config
        self._inputs = inputs

    def embed(
        self, prompts: Sequence[Prompt], pooling: str | None, normalize: bool | None, bar: Bar
    ) -> list[list[float]]:
        """See LLM.embed."""
        own = self._files.normalizes if pooling is None else True
        ask = VectorAsk(pooling or "own", own if normalize is None else normalize)
        before = self._files.prompt(None)
        asked = [before + prompt if isinstance(prompt, str) else prompt for prompt in prompts]
        texts = [EncoderText(self._inputs.read(prompt)[0]) for prompt in asked]
        return [vector.tolist() for vector in self._run(texts, ask, bar)]

    def classify(self, prompts: Sequence[Prompt], bar: Bar) -> list[list[float]]:
        """See LLM.classify."""
        if not self._files.labels:
            raise UnsupportedFeature("this encoder has no classes", field="model")
        texts = [EncoderText(self._inputs.read(prompt)[0]) for prompt in prompts]
        found = self._run(texts, VectorAsk("classify"), bar)
        return [self._files.activated(logits.tolist()) for logits in found]

    def score(self, first: Sequence[str], second: Sequence[str], bar: Bar) -> list[float]:
        """See LLM.score. Both have the same length."""
        if len(self._files.labels) > 1:
            message = f"the model has {len(self._files.labels)} classes; a score needs one"
            raise UnsupportedFeature(message, field="model")
        encode, files = self._inputs.tokenizer.encode, self._files
        if files.labels:
            read = [
                self._inputs.tokenizer.encode_pair(*it) for it in zip(first, second, strict=True)
            ]
            pairs = [EncoderText(ids, at if files.tells_texts else None) for ids, at in read]
            found = self._run(pairs, VectorAsk("classify"), bar)
            return [files.activated(logits.tolist())[0] for logits in found]
        before, behind = files.prompt(QUERY_PROMPT), files.prompt(DOCUMENT_PROMPT)
        texts = [before + text for text in first] + [behind + text for text in second]
        asked = [EncoderText(encode(text)) for text in texts]
        vectors = torch.stack(self._run(asked, VectorAsk(normalize=True), bar))
        return (vectors[: len(first)] * vectors[len(first) :]).sum(-1).tolist()

    def _run(self, texts: Sequence[EncoderText], ask: VectorAsk, bar: Bar) -> list[Tensor]:
        """Return the numbers of each text, on the CPU. Raises InvalidRequest before anything
        runs."""
        self._encoder.check(texts, ask)
        lengths = [len(text.ids) for text in texts]
        config, found = self._config, list[Tensor]()
        with progress_bar(len(texts), bar) as shown:
            for size in batch_sizes(lengths, config.max_num_batched_tokens, config.max_num_seqs):
                some = texts[len(found) : len(found) + size]
                found += [vector.cpu() for vector in self._encoder.run(some, [ask] * size)]
                shown.update(size)
        return found


@contextmanager
def progress_bar(total: int, wanted: Bar) -> Generator[Any, None, None]:
    """What is reported of each prompt that has ended; shown on a terminal only."""
    if callable(wanted):
        bar = wanted(total=total, desc="prompts")
    else:
        bar = tqdm(total=total, desc="prompts", unit="prompt", disable=None if wanted else True)
    with bar:
        yield bar
