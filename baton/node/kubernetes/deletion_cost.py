"""What would be lost with this node's pod, as one number, and when to say it again. No I/O.

A ReplicaSet that becomes smaller removes the ready pods with the lowest pod-deletion-cost first,
and takes a pod without one for 0. Only the order of the pods of one role matters. So the number
need not be exact, and Kubernetes asks not to be told of each change.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Final
from urllib.parse import urlsplit

from baton.protocol.errors import ConfigError
from baton.protocol.handles import NodeLoad

ANNOTATION: Final = "controller.kubernetes.io/pod-deletion-cost"
HIGHEST: Final = 2**31 - 1  # what Kubernetes takes; more is refused
LEAVING: Final = -1  # of a node that serves nobody: goes before one that is only idle
REQUEST_TOKENS: Final = 256  # a request that has to move counts as so many tokens more
CACHE_SHARE: Final = 16  # so many cached tokens, which may never be asked for, count as one
INTERVAL_S: Final = 30.0  # between two tellings, at least
LONGEST_INTERVAL_S: Final = 600.0  # while the API server refuses, or cannot be reached
CHANGE_SHARE: Final = 4  # a change of less than this part of the last cost is no news
NAME: Final = re.compile(r"[a-z0-9]([a-z0-9.-]{0,251}[a-z0-9])?", re.ASCII)


@dataclass(frozen=True, slots=True)
class Pod:
    """Where to write. `account`: a folder with the files token, ca.crt and namespace, as the
    kubelet mounts it. `ranks`: the nodes in this pod."""

    name: str
    api: str
    account: Path
    ranks: int = 1

    def check(self) -> None:
        """Raise ConfigError for values that no API server could be asked with."""
        if NAME.fullmatch(self.name) is None:
            raise ConfigError(f"{self.name!r} is no name of a pod", field="pod_name")
        url = urlsplit(self.api)
        if url.scheme != "https" or not url.netloc:
            raise ConfigError("the API server's URL begins with https://", field="kubernetes_api")


def deletion_cost(load: NodeLoad, num_requests: int, block_size: int, ranks: int = 1) -> int:
    """Return what a node's pod costs: tokens that would have to move, or be computed again.

    `ranks`: nodes in this pod, which are taken for equally busy.
    """
    if load.draining or load.asleep:
        return LEAVING
    used = (load.total_blocks - load.free_blocks) * block_size
    cached = load.cached_blocks * block_size // CACHE_SHARE
    tokens = used + cached + load.waiting_tokens + num_requests * REQUEST_TOKENS
    return min(tokens * ranks, HIGHEST)


class CostNews:
    """Decides when a cost is told. Life: due() -> told() or failed(), as often as one likes."""

    def __init__(self) -> None:
        self._told: int | None = None  # None: nobody knows what the annotation says
        self._wait_s = INTERVAL_S
        self._next = float("-inf")

    def due(self, cost: int, now: float) -> bool:
        """Return whether to tell `cost` at `now`, in seconds of a monotonic clock."""
        if now < self._next:
            return False
        told = self._told
        if told is None or (told < 0) != (cost < 0):
            return True
        return abs(cost - told) > max(REQUEST_TOKENS, told // CHANGE_SHARE)

    def told(self, cost: int, now: float) -> None:
        self._told = cost
        self._wait_s = INTERVAL_S
        self._next = now + INTERVAL_S

    def failed(self, now: float) -> None:
        """Wait twice as long as before. The cost may have arrived, or not."""
        self._told = None
        self._next = now + self._wait_s
        self._wait_s = min(2 * self._wait_s, LONGEST_INTERVAL_S)
