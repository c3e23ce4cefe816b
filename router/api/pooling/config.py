"""PoolingSettings: how a model's hidden states become vectors, scores and classes.

The settings come from options and the model's files.

An option with the value "auto" is read from the files of sentence-transformers and vLLM:
1_Pooling/config.json (pooling), `is_matryoshka` and `matryoshka_dimensions` (shorter vectors),
`classifier_from_token` or `is_original_qwen3_reranker` (a reranker that answers yes or no),
`ForSequenceClassification` with `id2label` (a classifier), `prompts` of
config_sentence_transformers.json (text to write before an input, by task).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, Literal, cast

from baton.protocol.errors import InvalidRequest, UnsupportedFeature
from baton.text.sentence_files import SentenceFiles, labels_of, sentence_files
from baton.text.tokenizer import read_json
from router.config import RouterConfig

_TASKS: Final = "config_sentence_transformers.json"


@dataclass(frozen=True, slots=True)
class PoolingSettings:
    """`dimensions`: the lengths to which vectors may be cut; () = any length, None = no cut.
    `kind`: "own" is what an encoder's checkpoint does. `encoder`: the files of an encoder."""

    kind: Literal["last", "mean", "own"] = "last"
    reranker: bool = False
    dimensions: tuple[int, ...] | None = None
    labels: tuple[str, ...] = ()  # the classes of a classifier; () for any other model
    problem: str = ""  # transformers' `problem_type`: how a classifier's logits are to be read
    tasks: Mapping[str, str] = field(default_factory=dict[str, str])
    encoder: SentenceFiles | None = None

    @classmethod
    def of(cls, config: RouterConfig) -> PoolingSettings:
        """Read the settings of a router's model. Raises ModelRefused for an unreadable file."""
        directory = Path(config.model) if config.model else None
        model = {} if directory is None else read_json(directory / "config.json")
        pooling = {} if directory is None else read_json(directory / "1_Pooling" / "config.json")
        encoder = None if directory is None else sentence_files(directory)
        kind = config.pooling_type
        if kind == "auto" and encoder is not None:
            kind = "own"
        elif kind == "auto":
            means = pooling.get("pooling_mode_mean_tokens") is True
            kind = "mean" if means or pooling.get("pooling_mode") == "mean" else "last"
        known = model.get("classifier_from_token"), model.get("is_original_qwen3_reranker")
        dimensions: tuple[int, ...] | None = config.matryoshka_dimensions or None
        if dimensions is None and model.get("is_matryoshka") is True:
            dimensions = ()
        if dimensions is None and isinstance(model.get("matryoshka_dimensions"), list):
            dimensions = tuple(cast("list[int]", model["matryoshka_dimensions"]))
        tasks = {} if directory is None else read_json(directory / _TASKS).get("prompts")
        return cls(
            cast("Literal['last', 'mean', 'own']", kind),
            config.reranker == "qwen3" or (config.reranker == "auto" and any(known)),
            dimensions,
            labels_of(model),
            str(model.get("problem_type") or ""),
            cast("dict[str, str]", tasks) if isinstance(tasks, dict) else {},
            encoder,
        )

    @property
    def normalizes(self) -> bool:
        """Whether vectors have length 1 if the client does not say: of an encoder, if its
        checkpoint has a Normalize at the end."""
        return self.encoder is None or self.kind != "own" or self.encoder.normalizes

    def prompted(self, given: object, name: str | None) -> object:
        """Return the inputs with the model's prompt in front of each text; ids stay as they are.

        `name`: see SentenceFiles.prompt. Raises InvalidRequest."""
        if self.encoder is None:
            if name is not None:
                message = "prompt_name: only encoders are asked by it (/v2/embed has input_type)"
                raise UnsupportedFeature(message, field="prompt_name")
            return given
        prompt = self.encoder.prompt(name)
        if isinstance(given, str):
            return prompt + given
        if not prompt or not isinstance(given, list):
            return given
        items = cast("list[object]", given)
        return [prompt + each if isinstance(each, str) else each for each in items]

    def check_dimensions(self, asked: int | None) -> int:
        """Return how many dimensions to keep, 0 for all.

        Raises InvalidRequest, UnsupportedFeature."""
        if asked is None:
            return 0
        if self.dimensions is None:
            message = (
                "dimensions: this model's vectors cannot be shortened (not a matryoshka model)"
            )
            raise UnsupportedFeature(message, field="dimensions")
        if asked < 1 or (self.dimensions and asked not in self.dimensions):
            allowed = ", ".join(map(str, self.dimensions)) or "at least 1"
            raise InvalidRequest(f"dimensions: must be {allowed}", field="dimensions")
        return asked

    def check_reranker(self, model: str) -> None:
        """Raise UnsupportedFeature, naming the model, if it is no reranker."""
        if not self.reranker:
            message = f"the model {model!r} is not served as a reranker (--reranker qwen3)"
            raise UnsupportedFeature(message, field="model")

    def check_scores(self, model: str) -> None:
        """Raise UnsupportedFeature, naming the model, if its classes are no score."""
        if len(self.labels) > 1:
            message = f"the model {model!r} has {len(self.labels)} classes; a score needs one"
            raise UnsupportedFeature(message, field="model")
