"""The longest request: what the model, the options and the pool allow."""

from __future__ import annotations

import logging

from baton.engine.config import EngineConfig
from baton.engine.memory.kv_cache import KVArena
from baton.engine.state.interface import ModelInfo
from baton.protocol.errors import ConfigError

log = logging.getLogger(__name__)


def model_len(config: EngineConfig, info: ModelInfo) -> int:
    """As configured, else the model's own. Raises ConfigError for more than that."""
    if config.max_model_len is None:
        return info.max_model_len
    if config.max_model_len > info.max_model_len:
        raise ConfigError(
            f"max_model_len {config.max_model_len} exceeds the model's {info.max_model_len}",
            field="max_model_len",
        )
    return config.max_model_len


def pool_len(wanted: int, arena: KVArena) -> int:
    """`wanted` tokens, or as many as the whole pool holds of one request.

    A preempted request is computed again from its start, when windows free nothing yet: so that is
    what all groups of layers can hold of it at once. Raises ConfigError if that is no token.
    """
    num_groups = arena.groups.num_groups
    max_len = min(wanted, arena.num_blocks // num_groups * arena.block_size)
    if max_len < 1:
        raise ConfigError(
            f"a pool of {arena.num_blocks} KV blocks holds no token: this model's layers need "
            f"{num_groups} blocks for each {arena.block_size} tokens",
            field="num_kv_blocks",
        )
    if max_len < wanted:
        log.warning(
            "the KV pool of %d blocks of %d tokens (of %d groups of layers each) holds less "
            "than one request of %d tokens: requests are limited to %d",
            arena.num_blocks, arena.block_size, num_groups, wanted, max_len,
        )  # fmt: skip
    return max_len
