"""Greedy tokens of a loaded model in mixed, chunked steps on a paged pool; and of transformers.

The smallest engine that shows what the big one does to a model: some sequences prefill in small
chunks while others decode, in one flattened step, over blocks that are not in order.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from baton.engine.attention.indexed import with_index
from baton.engine.attention.torch_cpu import TorchAttention
from baton.engine.loading.loading import LoadedModel
from baton.engine.memory.kv_cache import KVArena
from baton.engine.memory.layer_groups import one_group
from baton.engine.memory.state_arena import StateArena
from baton.engine.state.batch import flatten
from baton.engine.state.interface import SequenceChunk
from tests.adapters import ids_of
from tests.block_lists import held

NEW_TOKENS = 12
CHUNK = 7  # most tokens of one sequence in one step


def random_prompts(
    vocab_size: int, lengths: Sequence[int] = (3, 17, 41, 11, 1), first: int = 5
) -> list[list[int]]:
    """Prompts of mixed lengths out of ids [first, vocab_size)."""
    generator = torch.Generator().manual_seed(7)
    return [torch.randint(first, vocab_size, (n,), generator=generator).tolist() for n in lengths]


def transformers_tokens(
    source: Path | Any, prompts: Sequence[Sequence[int]], new_tokens: int = NEW_TOKENS
) -> list[list[int]]:
    """The reference: transformers' own generate in float32, one prompt at a time.

    `source` is a checkpoint or a model in memory.
    """
    model: Any = source
    if isinstance(source, Path):
        model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)
    outputs: list[list[int]] = []
    for prompt in prompts:
        ids = torch.tensor([prompt])
        out = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=new_tokens,
            min_new_tokens=new_tokens,
            do_sample=False,
            num_beams=1,
            eos_token_id=None,
            pad_token_id=0,
        )
        outputs.append(out[0, len(prompt) :].tolist())
    return outputs


@torch.inference_mode()
def our_tokens(
    loaded: LoadedModel,
    prompts: Sequence[Sequence[int]],
    new_tokens: int = NEW_TOKENS,
    block_size: int = 4,
    adapters: Sequence[str] = (),
) -> list[list[int]]:
    """All prompts together, each step a mixed batch; `adapters`: one name per prompt, or none."""
    known = [list(prompt) for prompt in prompts]
    names = ids_of(loaded.info, adapters) or [""] * len(known)
    blocks_each = -(-(max(map(len, known)) + new_tokens) // block_size)
    # Blocks are handed out shuffled: a table that is not ascending must not matter.
    order = torch.randperm(blocks_each * len(known), generator=torch.Generator().manual_seed(3))
    tables = order.view(len(known), blocks_each).tolist()
    info = loaded.info
    arena = KVArena(one_group(info.layers), order.numel(), block_size, info.kv_dtype, loaded.device)
    layers = loaded.attention_layers
    attention = with_index(arena, layers, TorchAttention(arena, layers))
    states = StateArena(info.layers, len(known), loaded.device)
    wanted = [len(prompt) + new_tokens for prompt in prompts]
    computed = [0] * len(known)
    while active := [i for i, ids in enumerate(known) if len(ids) < wanted[i]]:
        chunks: list[SequenceChunk] = []
        for i in active:
            stop = min(computed[i] + CHUNK - i % 3, len(known[i]))
            tokens, table = known[i][computed[i] : stop], tables[i][: -(-stop // block_size)]
            chunks.append(
                SequenceChunk(
                    str(i), tokens, computed[i], held(table), num_prompt=len(prompts[i]),
                    adapter=names[i], state_slot=i,
                )
            )  # fmt: skip
            computed[i] = stop
        step = flatten(chunks, attention, block_size, loaded.device, states=states)
        hidden = loaded.forward(step.token_ids, step.positions, step.batch)
        last = torch.tensor([span.first_row + span.num_rows - 1 for span in step.batch.spans])
        best = loaded.logits(hidden[last]).argmax(-1).tolist()
        for i, token in zip(active, best, strict=True):
            if computed[i] == len(known[i]):
                known[i].append(token)
    return [ids[len(prompt) :] for ids, prompt in zip(known, prompts, strict=True)]
