"""What the files of an encoder say besides its weights: sentence-transformers' modules and prompts.

    config.json                             family; a cross-encoder's activation
    modules.json, N_Pooling, N_Dense, ...   what makes a vector of a text's hidden states
    sentence_bert_config.json               max_seq_length
    config_sentence_transformers.json       prompts, default_prompt_name, activation_fn

Router and engine both read them with this file, so they cannot disagree. It knows neither torch nor
transformers; baton/engine/encoders/ runs what is read here.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Literal, TypeAlias, cast

from baton.protocol.errors import InvalidRequest, ModelRefused
from baton.text.tokenizer import read_json, read_json_list

# Families (`model_type`) whose vectors are proven equal to sentence-transformers'.
FAMILIES: Final = (
    "albert", "bert", "camembert", "data2vec-text", "deberta", "deberta-v2", "distilbert",
    "electra", "ernie", "eurobert", "gte", "megatron-bert", "modernbert", "mpnet", "nomic_bert",
    "rembert", "roberta", "roberta-prelayernorm", "xlm-roberta", "xlm-roberta-xl",
)  # fmt: skip
Mode = Literal["cls", "max", "mean", "mean_sqrt_len_tokens", "weightedmean", "lasttoken"]
_MODES: Final[tuple[Mode, ...]] = (
    "cls", "max", "mean", "mean_sqrt_len_tokens", "weightedmean", "lasttoken",
)  # fmt: skip
# Names of the modes in files of older versions; several may be true.
_OLD_MODES: Final[Mapping[str, Mode]] = {
    "pooling_mode_cls_token": "cls",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_mean_sqrt_len_tokens": "mean_sqrt_len_tokens",
    "pooling_mode_weightedmean_tokens": "weightedmean",
    "pooling_mode_lasttoken": "lasttoken",
}
# The prompts of both sides of a score. As in sentence-transformers every model has both: they are
# empty unless the checkpoint states them.
QUERY_PROMPT: Final = "query"
DOCUMENT_PROMPT: Final = "document"
_CLASSIFIER: Final = "ForSequenceClassification"
# Classes of tokenizers that tell their model which of two texts a token is of.
_TELL_TEXTS: Final = ("Albert", "Bert", "Deberta", "DebertaV2", "Electra", "RemBert")


@dataclass(frozen=True, slots=True)
class PoolingModule:
    """`modes`: the results of several are written one after another. `keeps_prompt`: the tokens of
    a prompt in front of the text count."""

    modes: tuple[Mode, ...] = ("mean",)
    keeps_prompt: bool = True


@dataclass(frozen=True, slots=True)
class DenseModule:
    """A linear layer over a vector. `activation`: the class in torch.nn. `folder`: of its
    weights."""

    folder: Path
    in_features: int
    out_features: int
    bias: bool = True
    activation: str = "Tanh"


@dataclass(frozen=True, slots=True)
class NormalizeModule:
    """Scales a vector to length 1."""


VectorModule: TypeAlias = DenseModule | NormalizeModule


@dataclass(frozen=True, slots=True)
class SentenceFiles:
    """What the files say. `labels`: the classes of a cross-encoder or classifier, () for a model
    of vectors. `activation`: the class in torch.nn that makes a score of a logit. `tells_texts`:
    the model is told which of two texts a token is of. `modules`: what follows the pooling, without
    a last Normalize, which is `normalizes`."""

    family: str
    labels: tuple[str, ...] = ()
    activation: str = "Identity"
    tells_texts: bool = False
    pooling: PoolingModule = field(default_factory=PoolingModule)
    modules: tuple[VectorModule, ...] = ()
    normalizes: bool = False
    max_tokens: int | None = None
    prompts: Mapping[str, str] = field(default_factory=dict[str, str])
    default_prompt: str = ""
    problem: str = ""  # transformers' `problem_type`

    def activated(self, logits: Sequence[float]) -> list[float]:
        """Return what the logits of the classes stand for: of one class the score, of several
        their probabilities."""
        if len(logits) > 1:
            return class_numbers(logits, self.problem)
        return [logistic(logits[0])] if self.activation == "Sigmoid" else list(logits)

    @property
    def task(self) -> Literal["embed", "score", "classify"]:
        """What the model is for."""
        if not self.labels:
            return "embed"
        return "score" if len(self.labels) == 1 else "classify"

    def prompt(self, name: str | None) -> str:
        """Return the text to write before an input, "" for none.

        `name`: of one of the prompts, None = the checkpoint's default. Raises InvalidRequest for an
        unknown name, and for a prompt whose tokens the pooling would have to leave out."""
        if name is None:
            text = self.default_prompt
        elif name in self.prompts:
            text = self.prompts[name]
        else:
            there = ", ".join(sorted(self.prompts)) or "none"
            message = f"prompt_name: {name[:100]!r} is no prompt of this model; there are: {there}"
            raise InvalidRequest(message, field="prompt_name")
        if text and not self.pooling.keeps_prompt:
            message = "prompt_name: this model's pooling leaves out prompts, which is not served"
            raise InvalidRequest(message, field="prompt_name")
        return text


def is_encoder(config: Mapping[str, Any]) -> bool:
    """Whether a config.json is that of an encoder of a served family."""
    if config.get("model_type") not in FAMILIES or config.get("is_decoder"):
        return False
    return not _architecture(config).endswith(("ForCausalLM", "LMHeadModel"))


def sentence_files(directory: Path) -> SentenceFiles | None:
    """Read the files of `directory`; None if the model is no encoder of a served family.

    Raises ModelRefused, naming file and value, for what is not served exactly."""
    config = read_json(directory / "config.json")
    if not is_encoder(config):
        return None
    told = read_json(directory / "config_sentence_transformers.json")
    family, classifies = str(config["model_type"]), _architecture(config).endswith(_CLASSIFIER)
    kind = told.get("model_type", "CrossEncoder" if classifies else "SentenceTransformer")
    if kind != ("CrossEncoder" if classifies else "SentenceTransformer"):
        raise ModelRefused(
            f"a {kind} of {_architecture(config) or family} is not served: its config says "
            "SentenceTransformer, or CrossEncoder with ...ForSequenceClassification",
            field="model",
        )
    read = _Modules(directory)
    files = SentenceFiles(
        family,
        labels=labels_of(config),
        tells_texts=_tells_texts(directory, config),
        pooling=read.pooling,
        modules=tuple(read.after[:-1] if read.normalizes else read.after),
        normalizes=read.normalizes,
        max_tokens=_max_tokens(directory, config),
        prompts=_prompts(told),
        default_prompt=_default_prompt(told),
    )
    if not classifies:
        return files
    if read.pooled or files.default_prompt:
        what = "a default prompt" if files.default_prompt else "modules behind its classes"
        raise ModelRefused(f"a cross-encoder with {what} is not served", field="model")
    activation = _activation(config, told, len(files.labels))
    return SentenceFiles(
        family,
        files.labels,
        activation,
        files.tells_texts,
        max_tokens=files.max_tokens,
        problem=str(config.get("problem_type") or ""),
    )


def labels_of(config: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the names of a classifier's classes in config.json; () for any other model."""
    if not _architecture(config).endswith(_CLASSIFIER):
        return ()
    labels = cast("dict[str, str]", config.get("id2label") or {})
    count = len(labels) or int(config.get("num_labels") or 2)  # transformers' default is 2
    return tuple(str(labels.get(str(index), f"LABEL_{index}")) for index in range(count))


def class_numbers(logits: Sequence[float], problem: str) -> list[float]:
    """Return what a classifier's logits stand for: probabilities, or for regression the logits.
    `problem`: transformers' `problem_type`."""
    if problem == "regression":
        return list(logits)
    if problem == "multi_label_classification" or len(logits) == 1:
        return [logistic(each) for each in logits]
    highest = max(logits)
    weights = [math.exp(each - highest) for each in logits]
    return [each / sum(weights) for each in weights]


def logistic(number: float) -> float:
    """Return 1 / (1 + exp(-number)), in a form that cannot overflow."""
    return 0.5 * (1 + math.tanh(number / 2))


def module_files(directory: Path) -> list[Path]:
    """Return the files beside config.json and weights that decide about a vector, sorted."""
    names = ("modules.json", "sentence_bert_config.json", "config_sentence_transformers.json")
    found = [directory / name for name in names]
    folders = {str(entry.get("path") or "") for entry in read_json_list(directory / names[0])}
    for folder in sorted(folders - {""}):
        found += [directory / folder / "config.json", directory / folder / "model.safetensors"]
    return sorted(file for file in found if file.is_file())


class _Modules:
    """The modules of modules.json. Raises ModelRefused for one that is not served."""

    def __init__(self, directory: Path) -> None:
        self.pooling = PoolingModule()
        self.after: list[VectorModule] = []
        self.pooled = False
        entries = read_json_list(directory / "modules.json")
        for place, entry in enumerate(entries):
            self._add(place, str(entry.get("type") or ""), directory / str(entry.get("path") or ""))
        if entries and not self.pooled and len(entries) > 1:
            raise ModelRefused(f"{directory}/modules.json has no Pooling", field="model")

    @property
    def normalizes(self) -> bool:
        return bool(self.after) and isinstance(self.after[-1], NormalizeModule)

    def _add(self, place: int, named: str, folder: Path) -> None:
        name = named.rpartition(".")[2] if named.startswith("sentence_transformers.") else ""
        if name == "Transformer" and place == 0:
            return
        if name == "Pooling" and place == 1:
            self.pooling, self.pooled = _pooling(folder), True
        elif name == "Normalize" and self.pooled:
            self.after.append(NormalizeModule())
        elif name == "Dense" and self.pooled:
            self.after.append(_dense(folder))
        elif name != "Dropout":  # which does nothing to vectors that are only computed
            message = f"modules.json: module {place} is {named!r}, which is not served there"
            raise ModelRefused(message, field="model")


def _pooling(folder: Path) -> PoolingModule:
    values = read_json(folder / "config.json")
    given = values.get("pooling_mode")
    if given is None:
        modes = [mode for name, mode in _OLD_MODES.items() if values.get(name)] or ["mean"]
    else:
        modes = [given] if isinstance(given, str) else list(cast("list[str]", given))
    for mode in modes:
        if mode not in _MODES:
            raise ModelRefused(f"{folder}: pooling {mode!r} is not known", field="model")
    return PoolingModule(
        cast("tuple[Mode, ...]", tuple(modes)), values.get("include_prompt") is not False
    )


def _dense(folder: Path) -> DenseModule:
    values = read_json(folder / "config.json")
    ends = values.get("module_input_name"), values.get("module_output_name")
    if values.get("use_residual") or {*ends} - {None, "sentence_embedding"}:
        raise ModelRefused(f"{folder}: a Dense with use_residual or other names", field="model")
    return DenseModule(
        folder,
        int(values["in_features"]),
        int(values["out_features"]),
        values.get("bias") is not False,
        _torch_class(values.get("activation_function") or "torch.nn.Tanh", str(folder)),
    )


def _activation(config: Mapping[str, Any], told: Mapping[str, Any], num_labels: int) -> str:
    """Return the activation of a cross-encoder. Source: sentence-transformers' CrossEncoder."""
    own = cast("dict[str, Any]", config.get("sentence_transformers") or {})
    named = (
        told.get("activation_fn")
        or own.get("activation_fn")
        or config.get("sbert_ce_default_activation_function")
    )
    if named is None:
        return "Sigmoid" if num_labels == 1 else "Identity"
    found = _torch_class(named, "activation_fn")
    if found not in ("Sigmoid", "Identity"):
        message = f"activation_fn {named}: of a cross-encoder only Sigmoid and Identity are served"
        raise ModelRefused(message, field="model")
    return found


def _torch_class(named: object, where: str) -> str:
    if not isinstance(named, str) or not named.startswith("torch.nn."):
        message = f"{where}: {named!r} is no class of torch.nn (code of a checkpoint is never run)"
        raise ModelRefused(message, field="model")
    return named.rpartition(".")[2]


def _tells_texts(directory: Path, config: Mapping[str, Any]) -> bool:
    if int(config.get("type_vocab_size") or _TYPES.get(str(config["model_type"]), 0)) < 2:
        return False
    values = read_json(directory / "tokenizer_config.json")
    names = values.get("model_input_names")
    if isinstance(names, list):
        return "token_type_ids" in names
    name = str(values.get("tokenizer_class") or "")
    return name.removesuffix("Fast").removesuffix("Tokenizer") in _TELL_TEXTS


# transformers' own `type_vocab_size`, for a config.json that does not state it.
_TYPES: Final = {"albert": 2, "bert": 2, "electra": 2, "ernie": 4, "megatron-bert": 2, "rembert": 2}


def _max_tokens(directory: Path, config: Mapping[str, Any]) -> int | None:
    """Return the longest text of sentence-transformers, special tokens included; None = the
    model's."""
    for name in ("sentence_bert_config.json", "sentence_xlm-roberta_config.json"):
        stated = read_json(directory / name).get("max_seq_length")
        if isinstance(stated, int):
            return stated
    stated = read_json(directory / "tokenizer_config.json").get("model_max_length")
    return int(stated) if isinstance(stated, int | float) and stated < 1 << 30 else None


def _prompts(told: Mapping[str, Any]) -> dict[str, str]:
    given = told.get("prompts")
    named = cast("dict[str, str | None]", given) if isinstance(given, dict) else {}
    own = {name: text or "" for name, text in named.items()}
    return {QUERY_PROMPT: "", DOCUMENT_PROMPT: "", **own}


def _default_prompt(told: Mapping[str, Any]) -> str:
    name = told.get("default_prompt_name")
    return "" if name is None else _prompts(told).get(str(name), "")


def _architecture(config: Mapping[str, Any]) -> str:
    return str((config.get("architectures") or [""])[0])
