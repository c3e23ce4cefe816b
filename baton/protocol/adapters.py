"""The two names of a LoRA adapter: clients use its name, nodes and routers its id. Pure functions.

    "law"  ->  "law@3f9a01c2d4e5b607"       the name, and 16 hex digits of its contents' digest

Whatever depends on an adapter's weights (KV, the node that holds them) is keyed by the id. So a
name may get other weights while requests with the old ones are under way.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Final

DIGITS: Final = 16
_DIGEST: Final = re.compile(rf"@[0-9a-f]{{{DIGITS}}}")


def adapter_id(name: str, digest: str) -> str:
    """Return the id of an adapter. `digest`: the hex digest of its contents."""
    return f"{name}@{digest[:DIGITS]}"


def adapter_name(id_: str) -> str:
    """Return the name that clients use; a name is returned unchanged."""
    if not id_:
        return id_
    return id_[: -1 - DIGITS] if _DIGEST.fullmatch(id_[-1 - DIGITS :]) else id_


def ids_named(name: str, ids: Iterable[str]) -> list[str]:
    """Return those of `ids` that `name` may mean."""
    return [id_ for id_ in ids if name in (id_, adapter_name(id_))]
