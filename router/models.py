"""ServedModel: what a router knows of one model by its files and options; Models: all of them.

A router has one model (`--model`), or those of a file (`--models FILE`, YAML or TOML):

    models:
      small:                          # its name in the API, and the one that its nodes report
        model: /models/small          # the directory of its files
        tool_call_parser: hermes      # any of MODEL_OPTIONS: as the router's flag of that name
      large:
        model: /models/large
        aliases: [large-latest]       # more names in the API
        nodes: [large-a, large-b]     # the names that its nodes report, if they are others
        digest: 3f2a9c1b              # only nodes with these weights (a beginning is enough)
        adapters: [sql]               # of its nodes' adapters, those that clients may name
        max_live_requests: 64

An entry's options go before the router's flags, which hold for all models. A request names its
model, which is looked up once (router/api/served.py). A node belongs to the first model of the file
that its record fits. What nodes say of a model is in the registry, under the model's key.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Final, cast

from baton.images.checker import ImageChecker
from baton.images.model import ImageModel
from baton.parsers.registry import Choice, Formats, formats_of
from baton.protocol.errors import ConfigError
from baton.protocol.handles import NodeRecord
from baton.runtime import config as options
from baton.text.chat_template import ChatTemplate
from baton.text.generation_config import SamplingDefaults, sampling_defaults
from baton.text.sentence_files import SentenceFiles, sentence_files
from baton.text.tokenizer import Tokenizer
from router.config import API_OPTIONS, RouterConfig
from router.images.fetching import MediaFetcher
from router.nodes.registry import NodeRegistry, ReportedModel
from router.prompts.images import ImageReader, images_of
from router.prompts.reader import PromptReader, PromptWorkers

# The router's options that an entry of the file may set for its model.
MODEL_OPTIONS: Final = API_OPTIONS - {"responses_drop_builtin_tools"} | {
    "limit_mm_per_prompt", "max_live_requests", "max_request_tokens", "model",
}  # fmt: skip
LEAST_DIGEST: Final = 8  # hexadecimal digits
# The router's options that say which model it serves, where there is one.
_OF_ONE_MODEL: Final = ("model", "served_model_name")


@dataclass(frozen=True, slots=True)
class ModelNodes:
    """Which nodes serve a model: by the name that they report, one of `names`; if `digest` is not
    empty, only those whose digest begins with it."""

    names: tuple[str, ...]
    digest: str = ""

    def fits(self, record: NodeRecord) -> bool:
        return record.model in self.names and record.model_digest.startswith(self.digest)


@dataclass(frozen=True)
class ServedModel:
    """One model, by its files. `key`: its name in the file, "" for the model of `--model`.

    `config`: the router's, with the model's own options. `nodes` None: all nodes are its nodes.
    `adapters`: the names of adapters that clients may use; None: all that its nodes have. `encoder`
    is set if the model is one: it writes no text. `images` None: it reads no images.
    """

    config: RouterConfig
    tokenizer: Tokenizer
    chat_template: ChatTemplate | None = None
    sampling_defaults: SamplingDefaults = field(default_factory=dict[str, int | float])
    encoder: SentenceFiles | None = None
    images: ImageModel | None = None
    key: str = ""
    nodes: ModelNodes | None = None
    adapters: frozenset[str] | None = None

    @staticmethod
    def load(config: RouterConfig, **more: Any) -> ServedModel:
        """Read the files of `config.model`. `more`: the last three fields.

        Raises ConfigError or ModelRefused for files that cannot be read."""
        tokenizer = Tokenizer.load(config.model, config.tokenizer_cache_mb << 20)
        template = ChatTemplate.load(config.model, config.chat_template)
        own = config.generation_config == "auto"
        return ServedModel(
            config,
            tokenizer,
            template if template.present else None,
            sampling_defaults(config.model) if own else {},
            sentence_files(Path(config.model)),
            images_of(config.model, tokenizer),
            **more,
        )

    def names(self, info: ReportedModel | None) -> tuple[str, ...]:
        """Return the names that clients may use; answers use the first. `info`: what its nodes say,
        who name the model if no option does. Empty if nobody does."""
        return self.config.served_model_name or (() if info is None else (info.name,))

    @cached_property
    def formats(self) -> Formats:
        """How the model writes tool calls and reasoning."""
        config, template = self.config, self.chat_template
        return formats_of(
            Choice(
                config.tool_call_parser, config.reasoning_parser, config.enable_auto_tool_choice
            ),
            None if template is None else template.source,
            [self.tokenizer.token(token_id) or "" for token_id in self.tokenizer.special_ids],
        )


class Models:
    """The models of a router, in the order of the file. Immutable."""

    def __init__(self, *models: ServedModel) -> None:
        self.all = models
        self._by_key = {model.key: model for model in models}

    @staticmethod
    def load(config: RouterConfig) -> Models:
        """Read `--model`, or `--models` and the files of each of its models.

        Raises ConfigError, naming file and entry; ModelRefused."""
        if config.models is None:
            return Models(ServedModel.load(config))
        return Models(*(ServedModel.load(**each) for each in read_entries(config)))

    def __getitem__(self, key: str) -> ServedModel:
        return self._by_key[key]

    @property
    def only(self) -> ServedModel | None:
        """The model, if there is one; None if there are several."""
        return self.all[0] if len(self.all) == 1 else None

    def key_of(self, record: NodeRecord) -> str | None:
        """Return the key of the model that a node serves; None if it is none of these."""
        for model in self.all:
            if model.nodes is None or model.nodes.fits(record):
                return model.key
        return None

    def name_of(self, key: str, registry: NodeRegistry) -> str:
        """Return the name of a model in answers; "" while nobody has named it."""
        return next(iter(self[key].names(registry.model(key))), "")

    def limits(self, option: str) -> dict[str, int]:
        """Return an option of each model of a file, by key; nothing for the model of `--model`,
        whose limits are the router's own."""
        return {model.key: getattr(model.config, option) for model in self.all if model.key}


class PromptReaders:
    """`of`: the prompt reader of each model, by its key. All share threads and child processes,
    which `close` ends; calling it twice is safe."""

    def __init__(self, config: RouterConfig, models: Models) -> None:
        self._workers, checker = PromptWorkers(), ImageChecker()
        fetcher = MediaFetcher(config.image_limits())
        self.of: dict[str, PromptReader] = {}
        for each in models.all:
            images = ImageReader(each.images, each.config.image_limits(), fetcher, checker)
            trusts = each.config.trust_request_chat_template
            self.of[each.key] = PromptReader(
                each.tokenizer, each.chat_template, trusts, images, self._workers
            )

    def close(self) -> None:
        for reader in self.of.values():
            reader.close()


def read_entries(config: RouterConfig) -> list[dict[str, Any]]:
    """Return the entries of `--models`, each as the arguments of `ServedModel.load`.

    Raises ConfigError, naming file, entry and key."""
    path = Path(cast(str, config.models))
    for name in _OF_ONE_MODEL:
        if getattr(config, name):
            flag = name.replace("_", "-")
            raise ConfigError(f"--models and --{flag} exclude each other", field="models")
    told = options.read_file(path, "models")
    if set(told) != {"models"} or not isinstance(told["models"], dict) or not told["models"]:
        message = f'{path}: expected one key, "models", with an entry for each model'
        raise ConfigError(message, field="models")
    entries = cast("dict[object, object]", told["models"])
    found = [_entry(config, f"{path}: {name}", str(name), entries[name]) for name in entries]
    taken: dict[str, str] = {}
    for each in found:
        for name in each["config"].served_model_name:
            if taken.setdefault(name, each["key"]) != each["key"]:
                message = f"{path}: {taken[name]} and {each['key']} both have the name {name!r}"
                raise ConfigError(message, field="models")
    return found


def _entry(config: RouterConfig, place: str, key: str, given: object) -> dict[str, Any]:
    """Return one entry as the arguments of `ServedModel.load`. `place`: of it, for errors."""
    if not isinstance(given, dict) or not key:
        raise ConfigError(f"{place}: a model has a name and options", field="models")
    told = {
        str(name).replace("-", "_"): it for name, it in cast("dict[object, Any]", given).items()
    }
    names = _texts(told.pop("aliases", ()), f"{place}: aliases")
    nodes = _texts(told.pop("nodes", (key,)), f"{place}: nodes")
    digest = str(told.pop("digest", "")).lower()
    adapters = told.pop("adapters", None)
    for name in told:
        if name not in MODEL_OPTIONS:
            raise ConfigError(f"{place}: unknown option {name!r}", field="models")
    if not told.get("model"):
        raise ConfigError(f"{place}: model is missing, the directory of its files", field="models")
    if digest and (len(digest) < LEAST_DIGEST or not set(digest) <= set("0123456789abcdef")):
        message = f"{place}: digest must have {LEAST_DIGEST} or more hexadecimal digits"
        raise ConfigError(message, field="models")
    if not nodes:
        raise ConfigError(f"{place}: nodes must name what its nodes report", field="models")
    try:
        own = options.load(RouterConfig, told)
        values = {name: getattr(own, name) for name in told}
        mine = replace(config, models=None, served_model_name=(key, *names), **values)
        mine.check()
    except ConfigError as error:
        raise ConfigError(f"{place}: {error.message}", field="models") from error
    offered = None if adapters is None else frozenset(_texts(adapters, f"{place}: adapters"))
    return {"config": mine, "key": key, "nodes": ModelNodes(nodes, digest), "adapters": offered}


def _texts(given: object, place: str) -> tuple[str, ...]:
    """Return a list of texts. Raises ConfigError, naming its place, for anything else."""
    items = cast("Sequence[object]", given if isinstance(given, list | tuple) else (given,))
    if not all(isinstance(item, str) and item for item in items):
        raise ConfigError(f"{place}: expected names", field="models")
    return tuple(cast("Sequence[str]", items))
