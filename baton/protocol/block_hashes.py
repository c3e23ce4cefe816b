"""Chained hashes of full token blocks: the key of nodes' prefix maps and of prefix-aware routing.

hash[i] = blake2b(hash[i-1], tokens of block i, images that begin in it); hash[-1] is the salt of
model digest, tenant, KV precision and adapter. So equal hashes mean equal tokens and images from
position 0 on, and the same model, tenant, precision and adapter.
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


def chain(parent: bytes, token_ids: Sequence[int], images: bytes = b"") -> bytes:
    """Return the hash of one full block of tokens whose predecessor's hash is `parent`. `images`:
    the block's salt() of the prompt's images."""
    h = hashlib.blake2b(parent, digest_size=HASH_BYTES)
    h.update(array("I", token_ids).tobytes())
    h.update(images)
    return h.digest()


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
