"""Chained hashes of full token blocks: the key of nodes' prefix maps and of prefix-aware routing.

hash[i] = blake2b(hash[i-1], tokens of block i, images that begin in it); hash[-1] is the salt of
model digest, tenant, KV precision and adapter. So equal hashes mean equal tokens and images from
position 0 on, and the same model, tenant, precision and adapter. If a model computes other KV for
outputs than for prompts, the hash of a block with outputs also says where they begin in it.
"""

from __future__ import annotations

import hashlib
import json
from array import array
from collections.abc import Sequence
from functools import lru_cache
from typing import Final

from baton.protocol.images import ImageInput, salt

HASH_BYTES: Final = 16


@lru_cache(maxsize=1024)
def root_hash(
    model_digest: str, tenant_salt: str = "", kv_dtype: str = "", adapter: str = ""
) -> bytes:
    """Return the parent hash of a prompt's first block, from model, tenant, KV precision and
    adapter."""
    # JSON, because a salt comes from a client and must not be able to forge a separator.
    body = json.dumps((model_digest, tenant_salt, kv_dtype, adapter)).encode()
    return hashlib.blake2b(body, digest_size=HASH_BYTES).digest()


def chain(parent: bytes, token_ids: Sequence[int], beside: bytes = b"") -> bytes:
    """Return the hash of one full block of tokens whose predecessor's hash is `parent`. `beside`:
    what tells it from other blocks of these tokens, its salt() of the prompt's images and its
    output_salt()."""
    h = hashlib.blake2b(parent, digest_size=HASH_BYTES)
    h.update(array("I", token_ids).tobytes())
    h.update(beside)
    return h.digest()


def output_salt(first: int) -> bytes:
    """Return what the hash of a block says whose tokens from number `first` on are output, of a
    model that computes other KV for them than for a prompt's."""
    return b"output" + first.to_bytes(4, "little")


def block_hashes(
    root: bytes, token_ids: Sequence[int], block_size: int, images: Sequence[ImageInput] = ()
) -> list[bytes]:
    """Return the hashes of all full blocks of `token_ids`, in order."""
    hashes: list[bytes] = []
    parent = root
    for start in range(0, len(token_ids) - block_size + 1, block_size):
        end = start + block_size
        parent = chain(parent, token_ids[start:end], salt(images, start, end))
        hashes.append(parent)
    return hashes
