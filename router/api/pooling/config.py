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
from typing import Any, Final, Literal, cast

from baton.protocol.errors import InvalidRequest, UnsupportedFeature
from baton.text.tokenizer import read_json
from router.config import RouterConfig

_TASKS: Final = "config_sentence_transformers.json"


@dataclass(frozen=True, slots=True)
class PoolingSettings:
    """`dimensions`: the lengths to which vectors may be cut; () = any length, None = no cut."""

    kind: Literal["last", "mean"] = "last"
    reranker: bool = False
    dimensions: tuple[int, ...] | None = None
    labels: tuple[str, ...] = ()  # the classes of a classifier; () for any other model
    problem: str = ""  # transformers' `problem_type`: how a classifier's logits are to be read
    tasks: Mapping[str, str] = field(default_factory=dict[str, str])

    @classmethod
    def of(cls, config: RouterConfig) -> PoolingSettings:
        """Read the settings of a router's model. Raises ModelRefused for an unreadable file."""
        directory = Path(config.model) if config.model else None
        model = {} if directory is None else read_json(directory / "config.json")
        pooling = {} if directory is None else read_json(directory / "1_Pooling" / "config.json")
        kind = config.pooling_type
        if kind == "auto":
            kind = "mean" if pooling.get("pooling_mode_mean_tokens") is True else "last"
        known = model.get("classifier_from_token"), model.get("is_original_qwen3_reranker")
        dimensions: tuple[int, ...] | None = config.matryoshka_dimensions or None
        if dimensions is None and model.get("is_matryoshka") is True:
            dimensions = ()
        if dimensions is None and isinstance(model.get("matryoshka_dimensions"), list):
            dimensions = tuple(cast("list[int]", model["matryoshka_dimensions"]))
        tasks = {} if directory is None else read_json(directory / _TASKS).get("prompts")
        return cls(
            cast("Literal['last', 'mean']", kind),
            config.reranker == "qwen3" or (config.reranker == "auto" and any(known)),
            dimensions,
            _labels(model),
            str(model.get("problem_type") or ""),
            cast("dict[str, str]", tasks) if isinstance(tasks, dict) else {},
        )

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


def _labels(model: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the names of a classifier's classes in config.json; () for any other model."""
    architectures = cast("list[str]", model.get("architectures") or [])
    if not any(name.endswith("ForSequenceClassification") for name in architectures):
        return ()
    labels = cast("dict[str, str]", model.get("id2label") or {})
    count = len(labels) or 2  # transformers' default
    return tuple(str(labels.get(str(index), f"LABEL_{index}")) for index in range(count))
