"""Which API keys a request presents: OpenAI's way, Anthropic's, or both."""

from __future__ import annotations

from collections.abc import Iterable


def keys_of(headers: Iterable[tuple[bytes, bytes]]) -> list[bytes]:
    """The keys in `Authorization: Bearer` and `x-api-key`; none if one of these headers is repeated
    or says something else."""
    keys: dict[bytes, bytes] = {}
    for name, value in headers:
        if name not in (b"authorization", b"x-api-key"):
            continue
        if name in keys:
            return []  # two of them: which one would a proxy have checked?
        keys[name] = value.strip()
        if name == b"authorization":
            scheme, _, key = value.partition(b" ")
            if scheme.lower() != b"bearer":
                return []
            keys[name] = key.strip()
    return list(keys.values())
