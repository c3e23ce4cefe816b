"""Breadth: every causal language model of transformers, tiny and random, through our engine.

    python -m tests.golden.breadth              all of them; writes the table in docs/models.md
    python -m tests.golden.breadth qwen3 bloom  these only; prints, and writes their rows anew

Each architecture runs in a child process with limits on memory and time. Its greedy tokens in
float32, as mixed and chunked steps over the paged pool, must be `generate`'s own; else it must have
been refused at load, by name. Then an engine must give the same tokens with a prompt whose prefix
is cached, and with drafts; what the loader says of two ranks and of rounded weights is asked of it.
A difference is a failure of this program (exit status 1). What was found lies in a file beside the
table's page, so that a run can do a part.
Not a test of pytest: it takes minutes. tests/engine/test_models_families.py holds what CI runs.
"""

from __future__ import annotations

import json
import logging
import multiprocessing
import os
import resource
import signal
import sys
import tempfile
import warnings
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Final, Literal

import torch
from transformers import CONFIG_MAPPING, AutoModelForCausalLM
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
from transformers.utils.logging import disable_progress_bar

from baton.engine.config import EngineConfig
from baton.engine.core.assembly import build_engine
from baton.engine.loading.loading import LoadedModel, load_model
from baton.engine.loading.route import choose_route
from baton.protocol.errors import ConfigError, ModelRefused
from baton.protocol.request import Request
from baton.protocol.sampling import SamplingParams
from tests.engine.driving import run, tokens_of
from tests.golden.greedy import our_tokens, random_prompts, transformers_tokens
from tests.golden.stateful_models import STATEFUL
from tests.tiny_models import write_tiny_tokenizer

DOCUMENT: Final = Path(__file__).parents[2] / "docs" / "models.md"
FOUND: Final = Path(__file__).with_name("breadth.jsonl")  # an Outcome per line
BEGIN, END = "<!-- breadth: begin -->", "<!-- breadth: end -->"
MEMORY_BYTES: Final = 14 << 30
TIME_S: Final = 120
NEW_TOKENS: Final = 24
PROMPT_LENGTHS: Final = (3, 17, 30, 11, 1)
WINDOW: Final = 9

_SIZES: dict[str, Any] = {
    "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "vocab_size": 199, "max_position_embeddings": 256,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
_EXPERTS: dict[str, Any] = {
    "num_experts": 4, "num_local_experts": 4, "num_experts_per_tok": 2, "n_routed_experts": 4,
    "moe_intermediate_size": 48, "n_shared_experts": 1, "n_group": 2, "topk_group": 1,
    "shared_expert_intermediate_size": 48, "decoder_sparse_step": 1, "first_k_dense_replace": 1,
    "num_experts_per_token": 2,
}  # fmt: skip
_LATENT: dict[str, Any] = {
    "q_lora_rank": 24, "kv_lora_rank": 32, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8,
    "v_head_dim": 12, "num_key_value_heads": 4, "head_dim": 8,
}  # fmt: skip
_INDEXED: dict[str, Any] = {
    **_LATENT, "index_topk": 5, "index_n_heads": 8, "index_head_dim": 16,
}  # fmt: skip
_CHUNKED: dict[str, Any] = {"attention_chunk_size": WINDOW, "floor_scale": 5, "attn_scale": 0.3}
_VISION: dict[str, Any] = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 2,
    "image_size": 32, "patch_size": 16,
}  # fmt: skip
_GEMMA3N: dict[str, Any] = {
    "layer_types": ["sliding_attention", "full_attention"] * 2, "num_kv_shared_layers": 2,
    "vocab_size_per_layer_input": 199, "hidden_size_per_layer_input": 16, "laurel_rank": 8,
    "activation_sparsity_pattern": [0.95, 0.95, 0.0, 0.0],
}  # fmt: skip
_GPT: dict[str, Any] = {"n_embd": 64, "n_layer": 4, "n_head": 4, "n_positions": 256, "n_ctx": 256}
# What a family needs beyond the sizes; None removes a size that its config does not take.
_SPECIAL: dict[str, dict[str, Any]] = {
    "axk1": _LATENT,
    "axk2": _INDEXED,
    "codegen": {**_GPT, "rotary_dim": 8},
    "deepseek_v2": {**_LATENT, "topk_method": "greedy", "n_group": 1},
    "deepseek_v3": _LATENT,
    "deepseek_v32": _INDEXED,
    "falcon": {"head_dim": None, "new_decoder_architecture": True, "num_kv_heads": 2},
    "gemma2": {"query_pre_attn_scalar": 16},
    "gemma3_text": {"query_pre_attn_scalar": 16},
    "gemma3n": _GEMMA3N,
    "gemma3n_text": _GEMMA3N,
    "glm4_moe_lite": _LATENT,
    "glm_moe_dsa": _INDEXED,
    "gpt2": _GPT,
    "gpt_neo": {
        "num_layers": 4, "num_heads": 4, "attention_types": [[["global", "local"], 2]],
        "window_size": 9,
    },
    "gptj": {**_GPT, "rotary_dim": 8},
    "hy_v4": _INDEXED,
    "llama4": _CHUNKED,
    "llama4_text": _CHUNKED,
    "longcat_flash": {
        **_LATENT, "num_layers": 2, "ffn_hidden_size": 96, "expert_ffn_hidden_size": 48,
        "zero_expert_num": 2, "moe_topk": 2,
    },
    "minicpm3": {**_LATENT, "qk_head_dim": 24},
    "mistral4": _LATENT,
    "youtu": _LATENT,
    **{name: {"num_hidden_layers": 3, **values} for name, values in STATEFUL.items()},
}  # fmt: skip

# What a served model also does; the last two are the loader's own answers.
FEATURES: Final = ("prefixes", "drafts", "two ranks", "int8 weights")
_ENGINE: dict[str, Any] = {
    "dtype": "float32", "device": "cpu", "max_model_len": 128, "block_size": 4,
    "num_kv_blocks": 120, "max_num_batched_tokens": 16, "max_num_seqs": 4,
    "num_state_checkpoints": 4, "state_checkpoint_spacing": 4,
}  # fmt: skip

# Checkpoints of a family that are served though its default is not: (family, what they have).
_VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "granitemoehybrid, attention only": (
        "granitemoehybrid", {"layer_types": ["attention"] * 4, "mamba_n_heads": 4},
    ),
    "qwen3_next, attention only": ("qwen3_next", {"layer_types": ["full_attention"] * 4}),
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of one architecture. `detail`: a refusal's reason, or why it was not built."""

    name: str
    result: Literal["identical", "different", "refused", "not built"]
    detail: str = ""
    route: str = ""
    heads: str = ""
    windows: str = ""
    serves: tuple[str, ...] = ()  # of FEATURES


def tiny_config(name: str) -> Any:
    """A config of four small layers, with a short window if the family has windows at all."""
    family, special = _VARIANTS.get(name, (name, _SPECIAL.get(name, {})))
    cls: Any = CONFIG_MAPPING[family]
    values = {**_known(cls, {**_SIZES, **_EXPERTS}), **special}
    values = {key: value for key, value in values.items() if value is not None}
    parts: dict[str, Any] = cls.sub_configs
    if "text_config" in parts:  # a model of several modes: its language model, and little else
        small = {part: dict(_VISION) for part in parts if part != "text_config"}
        return cls(text_config=values, **small)
    if getattr(cls, "sliding_window", None):
        try:
            return cls(**{**values, "sliding_window": WINDOW})
        except Exception as error:  # noqa: BLE001 - a config's validators raise what they like
            logging.getLogger(__name__).info("%s takes no window of %d: %s", name, WINDOW, error)
    return cls(**values)


def _known(cls: Any, values: dict[str, Any]) -> dict[str, Any]:
    """The values that a config class has a meaning for; all, if it has no default to look at."""
    try:
        default = cls()
        if default.sub_configs:  # what it does not know belongs to one of its parts
            return values
        return {key: value for key, value in values.items() if hasattr(default, key)}
    except Exception as error:  # noqa: BLE001 - as above
        logging.getLogger(__name__).info("%s cannot be asked: %s", cls.__name__, error)
        return values


def build(name: str) -> Any:
    """A random model, sharpened so that greedy tokens are decisive."""
    torch.manual_seed(0)
    model: Any = AutoModelForCausalLM.from_config(
        tiny_config(name), dtype=torch.float32, attn_implementation="eager"
    )
    for parameter in model.eval().parameters():
        if parameter.dim() > 1:
            parameter.data.normal_(0, 1.2 / parameter.shape[-1] ** 0.5)
        else:
            parameter.data.add_(torch.randn_like(parameter) * 0.05)
    return model


def examine(name: str, folder: Path) -> Outcome:
    """Build, save, load through our loader, compare."""
    try:
        model = build(name)
        vocab_size: int = model.config.get_text_config().vocab_size
        model.save_pretrained(folder)
        write_tiny_tokenizer(folder)
    except Exception as error:  # noqa: BLE001 - exotic configs fail in exotic ways
        return Outcome(name, "not built", _one_line(error))
    try:
        routes = [_load(folder, "auto")]
        if routes[0].info.model_impl == "lean":
            routes.append(_load(folder, "transformers"))
    except ModelRefused as refusal:
        return Outcome(name, "refused", str(refusal))
    prompts = random_prompts(vocab_size, PROMPT_LENGTHS, first=3)
    try:
        # Read back: what a checkpoint ties or leaves out is then as our loader sees it.
        reference = AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch.float32, attn_implementation="eager"
        )
        expected = transformers_tokens(reference, prompts, NEW_TOKENS)
    except Exception as error:  # noqa: BLE001 - then there is nothing to be equal to
        return Outcome(name, "not built", f"its own generate fails: {_one_line(error)}")
    described = _described(routes)
    if not all(our_tokens(loaded, prompts, NEW_TOKENS) == expected for loaded in routes):
        return Outcome(name, "different", "", *described)
    longest = max(range(len(prompts)), key=lambda index: len(prompts[index]))
    return _with_features(
        Outcome(name, "identical", "", *described), folder, prompts[longest], expected[longest]
    )


def _with_features(found: Outcome, folder: Path, prompt: list[int], expected: list[int]) -> Outcome:
    """Add what else the model does; "different" if that changes its tokens."""
    serves: list[str] = []
    plain, prefixes = _answers(folder, prompt)
    drafted: list[list[int]] | None = None
    try:
        drafted, _ = _answers(folder, prompt, speculative_method="ngram")
    except ConfigError as refusal:
        logging.getLogger(__name__).info("%s takes no drafts: %s", found.name, refusal)
    if any(tokens != expected for tokens in (*plain, *(drafted or ()))):
        return replace(found, result="different", detail="in an engine")
    serves += ["prefixes"] * (prefixes > 0) + ["drafts"] * (drafted is not None)
    values = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    asked: dict[str, dict[str, Any]] = {
        "two ranks": {"tensor_parallel_size": 2},
        "int8 weights": {"quantization": "int8"},
    }
    for feature, option in asked.items():
        try:
            choose_route(values, EngineConfig(str(folder), dtype="float32", **option))
        except ConfigError:
            continue
        serves.append(feature)
    return replace(found, serves=tuple(serves))


def _answers(folder: Path, prompt: list[int], **options: Any) -> tuple[list[list[int]], int]:
    """The tokens of a prompt that is asked twice, and how many of its tokens were cached."""
    engine = build_engine(EngineConfig(str(folder), **_ENGINE, **options))
    params = SamplingParams(max_tokens=NEW_TOKENS, temperature=0.0, ignore_eos=True)
    answers: list[list[int]] = []
    for name in ("first", "again"):
        engine.add(Request(name, tuple(prompt), params))
        answers.append(tokens_of(run(engine)[name]))
    return answers, engine.stats.num_prefix_hit_tokens


def _load(folder: Path, impl: Literal["auto", "transformers"]) -> LoadedModel:
    # A length, because Mamba 2 has no limit of its own.
    options: dict[str, Any] = {"dtype": "float32", "device": "cpu", "max_model_len": 128}
    return load_model(EngineConfig(str(folder), model_impl=impl, **options))


def _described(routes: list[LoadedModel]) -> tuple[str, str, str]:
    """(routes, KV heads and dims, windows) of a loaded model."""
    layers = routes[0].info.layers
    heads = [
        f"latent {layer.k_dim}"
        if layer.kind == "mla"
        else f"{layer.kv_heads} x ({layer.k_dim}, {layer.v_dim})"
        for layer in layers
    ]
    windows = sorted({layer.window for layer in layers})
    named = ["none" if window == 0 else str(window) for window in windows]
    impls = ", ".join(loaded.info.model_impl for loaded in routes)
    return impls, ", ".join(dict.fromkeys(heads)), ", ".join(named)


def _one_line(error: BaseException) -> str:
    text = " ".join(f"{type(error).__name__}: {error}".split())
    return text[:160]


def _child(name: str, folder: str, pipe: Any) -> None:
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    signal.alarm(TIME_S)  # the default action ends the process
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    disable_progress_bar()
    pipe.send(asdict(examine(name, Path(folder))))


def outcomes(names: list[str]) -> Iterator[Outcome]:
    """One after another, each in a child forked from this process (transformers is imported
    once)."""
    context = multiprocessing.get_context("fork")
    for name in names:
        with tempfile.TemporaryDirectory() as folder:
            ours, theirs = context.Pipe(duplex=False)
            child = context.Process(target=_child, args=(name, folder, theirs))
            child.start()
            theirs.close()
            try:
                yield Outcome(**ours.recv())
            except EOFError:
                child.join()
                cause = f"exit status {child.exitcode} ({TIME_S} s or {MEMORY_BYTES >> 30} GiB)"
                yield Outcome(name, "not built", cause)
            child.join()


def _mark(outcome: Outcome, feature: str) -> str:
    if outcome.result != "identical":
        return "-"
    return "yes" if feature in outcome.serves else "no"


def table(found: list[Outcome]) -> str:
    """The Markdown between the markers of docs/models.md."""
    counts = Counter(outcome.result for outcome in found)
    by_result = {kind: [o for o in found if o.result == kind] for kind in counts}
    served = [
        f"| {o.name} | {o.result} | {o.heads} | {o.windows} | {o.route} | "
        + " | ".join(_mark(o, feature) for feature in FEATURES)
        + " |"
        for o in by_result.get("identical", []) + by_result.get("different", [])
    ]
    # What would work instead, the refusal itself says behind a semicolon.
    reasons = ((o.name, o.detail.split(";")[0]) for o in by_result.get("refused", []))
    refused = [f"| {name} | {_cell(reason)} |" for name, reason in reasons]
    unbuilt = [f"| {o.name} | {_cell(o.detail)} |" for o in by_result.get("not built", [])]
    summary = ", ".join(f"{counts[kind]} {kind}" for kind in ("identical", "different", "refused"))
    return "\n".join(
        [
            f"{summary}; {counts['not built']} that this program could not build small.",
            "",
            "| architecture | tokens | KV heads x (key, value dims) | windows | route | "
            + " | ".join(FEATURES)
            + " |",
            "|---|---|---|---|---|" + "---|" * len(FEATURES),
            *served,
            "",
            "| refused | reason |",
            "|---|---|",
            *refused,
            "",
            "| not built | why there is nothing to compare |",
            "|---|---|",
            *unbuilt,
        ]
    )


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("<", "&lt;").replace("\n", " ")[:220]


def write_table(found: list[Outcome], document: Path = DOCUMENT) -> None:
    """Replace what is between the markers. Raises ValueError without markers."""
    text = document.read_text(encoding="utf-8")
    before, after = text.index(BEGIN) + len(BEGIN), text.index(END)
    document.write_text(f"{text[:before]}\n{table(found)}\n{text[after:]}", encoding="utf-8")


def read_found() -> list[Outcome]:
    """What earlier runs found."""
    lines = FOUND.read_text(encoding="utf-8").splitlines() if FOUND.exists() else ()
    found = [Outcome(**json.loads(line)) for line in lines]
    return [replace(each, serves=tuple(each.serves)) for each in found]


def main(arguments: list[str]) -> int:
    """Examine the named architectures, or all; 1 if any was served with other tokens."""
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    every = sorted({*MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, *_VARIANTS})
    found: list[Outcome] = []
    for outcome in outcomes(arguments or every):
        found.append(outcome)
        sys.stdout.write(json.dumps(asdict(outcome)) + "\n")
        sys.stdout.flush()
    known = {outcome.name: outcome for outcome in [*read_found(), *found]}
    kept = [known[name] for name in sorted(known) if name in every]
    FOUND.write_text("".join(json.dumps(asdict(each)) + "\n" for each in kept), encoding="utf-8")
    write_table(kept)
    return 1 if any(outcome.result == "different" for outcome in found) else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
