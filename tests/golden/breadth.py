"""Breadth: every causal language model of transformers, tiny and random, through our engine.

    python -m tests.golden.breadth              all of them; writes the table in docs/models.md
    python -m tests.golden.breadth qwen3 bloom  these only, and writes their rows anew

Each architecture runs in a child process with limits on memory and time. Its greedy tokens in
float32, as mixed and chunked steps over the paged pool, must be `generate`'s own; else it must have
been refused at load, by name. Then a prefill and a decode node must give the same tokens twice, the
second time behind cached prefixes, an engine of two ranks, and one with drafts; the loader is asked
what it says of draft heads and rounded weights (breadth_features.py). A difference, or a promised
architecture that is missing, is a failure of this program (exit status 1). What was found lies in
breadth.jsonl, so that a run can do a part.
Not a test of pytest: it takes minutes. tests/engine/test_models_families.py holds what CI runs,
tests/system/test_breadth.py runs some rows anew.
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
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, Final

import torch
import transformers
from transformers import CONFIG_MAPPING, AutoModelForCausalLM
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
from transformers.utils.logging import disable_progress_bar

from baton.protocol.errors import ModelRefused
from tests.golden.breadth_features import (
    NEW_TOKENS,
    described,
    examine_images,
    load,
    with_features,
)
from tests.golden.breadth_table import (
    Outcome,
    read_found,
    write_found,
    write_table,
)
from tests.golden.greedy import our_tokens, random_prompts, transformers_tokens
from tests.golden.stateful_models import STATEFUL
from tests.tiny_models import write_tiny_tokenizer
from tests.tiny_vision import KINDS

MEMORY_BYTES: Final = 14 << 30
TIME_S: Final = 120  # of a processor
LONGEST_S: Final = 20 * TIME_S  # until one that waits for ever is ended
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
_DELTA: dict[str, Any] = {**STATEFUL["qwen3_5_text"], "num_hidden_layers": 3}
_GPT: dict[str, Any] = {"n_embd": 64, "n_layer": 4, "n_head": 4, "n_positions": 256, "n_ctx": 256}
# What a config says of a layer that drafts, where it says nothing by default.
_DRAFTS: dict[str, dict[str, Any]] = {
    "qwen3_5_text": {"mtp_num_hidden_layers": 1}, "qwen3_5_moe_text": {"mtp_num_hidden_layers": 1},
}  # fmt: skip
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
    "glm4_moe_lite": {**_LATENT, "num_nextn_predict_layers": 1},
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
    "qwen3_5": _DELTA,
    "qwen3_5_moe": _DELTA,
    "youtu": _LATENT,
    **{
        name: {"num_hidden_layers": 3, **values, **_DRAFTS.get(name, {})}
        for name, values in STATEFUL.items()
    },
}  # fmt: skip

IMAGES: Final = {f"{kind}, images": kind for kind in KINDS}
# What models.md promises beyond what transformers happens to have.
REQUIRED: Final = (
    *STATEFUL, *IMAGES, "axk2", "deepseek_v32", "glm_moe_dsa", "hy_v4", "llama4_text",
)  # fmt: skip
# Checkpoints of a family that are served though its default is not: (family, what they have).
_VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "granitemoehybrid, attention only": (
        "granitemoehybrid", {"layer_types": ["attention"] * 4, "mamba_n_heads": 4},
    ),
    "qwen3_next, attention only": ("qwen3_next", {"layer_types": ["full_attention"] * 4}),
}  # fmt: skip


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
        routes = [load(folder)]
        if routes[0].info.model_impl == "lean":
            routes.append(load(folder, model_impl="transformers"))
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
    seen = described(routes)
    if not all(our_tokens(loaded, prompts, NEW_TOKENS) == expected for loaded in routes):
        return Outcome(name, "different", "", *seen)
    found = Outcome(name, "identical", "", *seen)
    return with_features(found, folder, [(tuple(ids), ()) for ids in prompts], expected)


def _one_line(error: BaseException) -> str:
    text = " ".join(f"{type(error).__name__}: {error}".split())
    return text[:160]


def _child(name: str, folder: str, pipe: Any) -> None:
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    resource.setrlimit(resource.RLIMIT_CPU, (TIME_S, TIME_S))
    signal.alarm(LONGEST_S)  # the default action ends the process
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    disable_progress_bar()
    kind = IMAGES.get(name)
    found = (
        examine(name, Path(folder)) if kind is None else examine_images(name, kind, Path(folder))
    )
    pipe.send(asdict(replace(found, transformers=transformers.__version__)))


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


def wanting(found: dict[str, Outcome]) -> list[str]:
    """The names of what must be served and is not, or not with transformers' tokens."""
    different = [each.name for each in found.values() if each.result == "different"]
    known = {name: each.result for name, each in found.items()}
    missing = [name for name in REQUIRED if known.get(name) != "identical"]
    return sorted({*different, *missing})


def main(arguments: list[str]) -> int:
    """Examine the named architectures, or all; 1 if any of all is wanting."""
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    every = sorted({*MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, *_VARIANTS, *REQUIRED})
    known = {name: each for name, each in read_found().items() if name in every}
    for outcome in outcomes(arguments or every):
        sys.stdout.write(json.dumps(asdict(outcome)) + "\n")
        sys.stdout.flush()
        known[outcome.name] = outcome
        kept = [known[name] for name in sorted(known)]
        write_found(kept)
        write_table(kept)
    if wrong := wanting(known):
        sys.stderr.write(f"not as transformers, or not served: {', '.join(wrong)}\n")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
