"""What a LoRA adapter is called: its name by clients, its id by nodes and routers. Pure.

    "law"  ->  "law@3f9a01c2d4e5b607"       the name, and 16 hex digits of its contents' digest

Whatever depends on an adapter's weights (KV, the node that has them) goes by the id: so the same
name may come to mean other weights while requests of the old ones are under way.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Final

DIGITS: Final = 16
_DIGEST: Final = re.compile(rf"@[0-9a-f]{{{DIGITS}}}")


def adapter_id(name: str, digest: str) -> str:
    """`digest`: hex, of its contents."""
    return f"{name}@{digest[:DIGITS]}"


def adapter_name(id_: str) -> str:
    """What clients call it; a name is itself."""
    return id_[: -1 - DIGITS] if _DIGEST.fullmatch(id_[-1 - DIGITS :]) else id_


def ids_named(name: str, ids: Iterable[str]) -> list[str]:
    """Those of `ids` that `name` may mean."""
    return [id_ for id_ in ids if name in (id_, adapter_name(id_))]
