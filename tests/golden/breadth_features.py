"""What an architecture does beside answering: on two nodes, behind prefixes, with drafts, on ranks,
with rounded weights. Each cell of the table comes from a run, or from what the loader says."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Sequence
from contextlib import aclosing
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

from baton.engine.config import EngineConfig
from baton.engine.core.assembly import build_engine
from baton.engine.loading.loading import LoadedModel, load_model
from baton.engine.loading.route import HEAD_METHODS, choose_route
from baton.protocol.errors import ConfigError
from baton.protocol.images import ImageInput
from baton.protocol.request import Request
from baton.protocol.sampling import SamplingParams
from tests.cluster import Cluster, Plan, cluster
from tests.engine.driving import run, tokens_of
from tests.engine.tensor_parallel_ranks import engine_of_ranks
from tests.golden.breadth_table import Outcome
from tests.tiny_vision import generated, make_vision_model, picture, prompt_of

NEW_TOKENS: Final = 16
Prompt = tuple[tuple[int, ...], tuple[ImageInput, ...]]
GREEDY: Final = SamplingParams(max_tokens=NEW_TOKENS, temperature=0.0, seed=1, ignore_eos=True)
# Draft heads need a checkpoint of their own; the loader is asked of the model alone.
_HEADS: Final[dict[str, dict[str, Any]]] = {"mtp": {}, "eagle3": {"speculative_model": "head"}}
_ENGINE: dict[str, Any] = {
    "dtype": "float32", "device": "cpu", "max_model_len": 128, "block_size": 4,
    "num_kv_blocks": 120, "max_num_batched_tokens": 40, "max_num_seqs": 4,
    "num_state_checkpoints": 4, "state_checkpoint_spacing": 4,
}  # fmt: skip


def with_features(
    found: Outcome, folder: Path, prompts: Sequence[Prompt], expected: list[list[int]]
) -> Outcome:
    """Add what else the model does; "different" if that changes its tokens."""
    nodes, prefixes = asyncio.run(_handed_over(folder, prompts, expected))
    longest = max(range(len(prompts)), key=lambda index: len(prompts[index][0]))
    drafted = _drafted(folder, prompts[longest])
    ranked = _over_ranks(folder, prompts, expected)
    if "different" in (nodes, ranked) or drafted not in (None, expected[longest]):
        return replace(found, result="different", detail="on two nodes, over ranks or with drafts")
    features = {"P/D": nodes, "prefix cache": prefixes, "TP": ranked, **asked(folder, drafted)}
    return replace(found, features=features)


async def _handed_over(
    folder: Path, prompts: Sequence[Prompt], expected: list[list[int]]
) -> tuple[str, str]:
    """Ask all prompts twice of a prefill and a decode node with other blocks: (P/D, prefix
    cache)."""
    nodes = ({**_ENGINE, "block_size": 4}, {**_ENGINE, "block_size": 8})
    async with cluster(Plan(folder, nodes[:1], nodes[1:], lanes=("stream",))) as c:
        for turn in range(2):
            requests = [
                Request(f"{turn} {index}", ids, GREEDY, images=images)
                for index, (ids, images) in enumerate(prompts)
            ]
            if await asyncio.gather(*(_told(c, each) for each in requests)) != expected:
                return "different", ""
        return handed_over(c, 2 * len(prompts)), prefix_cache(c)


async def _told(c: Cluster, request: Request) -> list[int]:
    found: list[int] = []
    async with aclosing(c.router.services.dispatcher.run(request)) as events:
        async for event in events:
            found += event.token_ids
    return found


def _drafted(folder: Path, prompt: Prompt) -> list[int] | None:
    """The tokens of a prompt with drafts of n-grams; None: the model is refused with them."""
    try:
        engine = build_engine(EngineConfig(str(folder), speculative_method="ngram", **_ENGINE))
    except ConfigError as refusal:
        logging.getLogger(__name__).info("no drafts: %s", refusal)
        return None
    ids, images = prompt
    engine.add(Request("one", ids, GREEDY, images=images))
    return tokens_of(run(engine)["one"])


def _over_ranks(folder: Path, prompts: Sequence[Prompt], expected: list[list[int]]) -> str:
    """Ask all prompts of an engine of two ranks; "no" if the model is refused with them."""
    options = {key: value for key, value in _ENGINE.items() if key not in ("dtype", "device")}
    try:
        with engine_of_ranks(str(folder), 2, **options) as engine:
            for index, (ids, images) in enumerate(prompts):
                engine.add(Request(str(index), ids, GREEDY, images=images))
            events = run(engine)
    except ConfigError as refusal:
        logging.getLogger(__name__).info("no ranks: %s", refusal)
        return "no"
    found = [tokens_of(events[str(index)]) for index in range(len(prompts))]
    return "yes" if found == expected else "different"


def handed_over(c: Cluster, count: int) -> str:
    """Whether `count` requests went to the decode node with all that their prompts left."""
    [decode] = c.decode
    moved = decode.transfers.fetches == count and decode.transfers.failures == {}
    return "yes" if moved and decode.stats.num_prompt_tokens == 0 else "no"


def prefix_cache(c: Cluster) -> str:
    """Whether the prefill node began some prompt behind its prefix, and from what."""
    stats = c.prefill[0].stats
    if not stats.num_prefix_hit_tokens:
        return "no"
    return "checkpoints" if stats.num_checkpoint_hits else "yes"


def asked(folder: Path, drafted: list[int] | None) -> dict[str, str]:
    """What the loader says of drafts and rounded weights. Rounded ones are loaded, too."""
    methods = ["ngram"] * (drafted is not None)
    methods += [m for m in HEAD_METHODS if _accepts(folder, speculative_method=m, **_HEADS[m])]
    rounded = _accepts(folder, quantization="int8")
    if rounded:
        plain, rounded_model = load(folder), load(folder, quantization="int8")
        assert rounded_model.weight_bytes < plain.weight_bytes
    return {
        "speculation": ", ".join(methods) or "no",
        "quantized": "yes" if rounded else "no",
    }


def _accepts(folder: Path, **options: Any) -> bool:
    values = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    try:
        choose_route(values, EngineConfig(str(folder), dtype="float32", **options))
    except ConfigError as refusal:
        logging.getLogger(__name__).info("%s: %s", options, refusal)
        return False
    return True


def examine_images(name: str, kind: str, folder: Path) -> Outcome:
    """Compare a tiny checkpoint that reads images, with an image in some prompts."""
    make_vision_model(kind, folder)
    cat = picture(1)
    asked_of = ([[5, 6, 7], cat, [9, 10]], [[11, 12, 13, 14]], [[5, 6, 7], cat, [20, 21, 22]])
    prompts = [prompt_of(kind, parts) for parts in asked_of]
    expected = [generated(folder, kind, *prompt, NEW_TOKENS) for prompt in prompts]
    loaded = load(folder)
    found = Outcome(name, "identical", "", *described([loaded]))
    return with_features(found, folder, prompts, expected)


def load(folder: Path, **options: Any) -> LoadedModel:
    # A length, because Mamba 2 has no limit of its own.
    given: dict[str, Any] = {"dtype": "float32", "device": "cpu", "max_model_len": 128}
    return load_model(EngineConfig(str(folder), **given, **options))


def described(routes: list[LoadedModel]) -> tuple[str, str, str]:
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
