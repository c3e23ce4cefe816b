"""Which requests may a node have died of? One that kills nodes must end; the others go on. Pure.

A request that kills nodes does it where it begins. So a death is held against those that the node
had just begun, if these are few, and against all that it ran, if those were few. Who was in
mid-stream among many others, while nodes die by themselves, is innocent.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Final

from router.nodes.attachments import Attachment

FEW: Final = 4


def suspects(attached: Collection[Attachment], num_running: int) -> set[str]:
    """Ids of the requests that a node may have died of. `num_running`: what it had by its own last
    word, which other routers' requests are part of."""
    beginning = {each.request_id for each in attached if not each.begun}
    if max(len(attached), num_running) <= FEW:
        return {each.request_id for each in attached}
    return beginning if len(beginning) <= FEW else set()
