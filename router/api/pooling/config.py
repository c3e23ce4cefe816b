"""How a model's hidden states are used: pooling, dimensions, reranking, classes, tasks.

All of it comes from options and the model's files.

What the options leave to "auto" is read as sentence-transformers and vLLM write it: 1_Pooling's
config.json (which pooling), `is_matryoshka` and `matryoshka_dimensions` (shorter vectors),
`classifier_from_token` or `is_original_qwen3_reranker` (a reranker by its yes and no),
`ForSequenceClassification` with `id2label` (a classifier), `prompts` of
config_sentence_transformers.json (what is written before an input, by its task).
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
    """`dimensions`: those that vectors may be cut to; () = any, None = they are not cut."""

    kind: Literal["last", "mean"] = "last"
    reranker: bool = False
    dimensions: tuple[int, ...] | None = None
    labels: tuple[str, ...] = ()  # of a classifier
    problem: str = ""  # as transformers calls it: what its logits are
    tasks: Mapping[str, str] = field(default_factory=dict[str, str])

    @classmethod
    def of(cls, config: RouterConfig) -> PoolingSettings:
        """Raises ModelRefused for a file that cannot be read."""
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
        """How many to keep, 0 = all. Raises InvalidRequest, UnsupportedFeature."""
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
        """Raises UnsupportedFeature, naming the model, if it is not one."""
        if not self.reranker:
            message = f"the model {model!r} is not served as a reranker (--reranker qwen3)"
            raise UnsupportedFeature(message, field="model")


def _labels(model: Mapping[str, Any]) -> tuple[str, ...]:
    """What config.json calls the classes of a classifier; () of any other model."""
    architectures = cast("list[str]", model.get("architectures") or [])
    if not any(name.endswith("ForSequenceClassification") for name in architectures):
        return ()
    labels = cast("dict[str, str]", model.get("id2label") or {})
    count = len(labels) or 2  # transformers' default
    return tuple(str(labels.get(str(index), f"LABEL_{index}")) for index in range(count))
