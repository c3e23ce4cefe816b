"""Keeps the annotation pod-deletion-cost of this node's own pod, through the API server.

Life: DeletionCost() -> look() with each heartbeat -> stop(). A look never waits: if the cost is
news (deletion_cost.py), one task tells it, and a node serves just as well if nobody listens. Each
telling reads token and CA anew, because the kubelet replaces them, and has a connection of its own.

It patches the pod's subresource `status`, whose right is the least that there is: the right to
patch `pods` could give another pod another image, that of `pods/status` changes no pod's spec.
"""

from __future__ import annotations

import asyncio
import logging
import re
import ssl
from http import HTTPStatus
from typing import Final

import httpx

from baton.node.kubernetes.deletion_cost import (
    ANNOTATION,
    NAME,
    CostNews,
    Pod,
    deletion_cost,
)
from baton.protocol.clock import Clock
from baton.protocol.handles import NodeLoad

log = logging.getLogger(__name__)

TIMEOUT_S: Final = 10.0
MERGE_PATCH: Final = "application/merge-patch+json"
TOKEN: Final = re.compile(r"[!-~]+", re.ASCII)
HINTS: Final[dict[int, str]] = {
    HTTPStatus.UNAUTHORIZED: "the token is not, or no longer, a service account's",
    HTTPStatus.FORBIDDEN: "the service account needs the right to patch pods/status",
    HTTPStatus.NOT_FOUND: "there is no such pod: --pod-name must be metadata.name",
}


async def annotate(pod: Pod, name: str, value: str) -> str | None:
    """Set one annotation of a pod. Return why it could not be set, in words; else None."""
    try:
        token = (pod.account / "token").read_text().strip()
        namespace = (pod.account / "namespace").read_text().strip()
        # No default context: it believes other CAs, too, and Python 3.13's refuses those of
        # older clusters.
        trusted = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        trusted.load_verify_locations(cadata=(pod.account / "ca.crt").read_text())
        # Before httpx sees the token: its error would show it.
        if TOKEN.fullmatch(token) is None or NAME.fullmatch(namespace) is None:
            return f"{pod.account}: no token, or no namespace"
        headers = {"Authorization": f"Bearer {token}", "Content-Type": MERGE_PATCH}
        url = f"{pod.api.rstrip('/')}/api/v1/namespaces/{namespace}/pods/{pod.name}/status"
        async with (
            asyncio.timeout(TIMEOUT_S),
            httpx.AsyncClient(verify=trusted, trust_env=False, timeout=TIMEOUT_S) as client,
        ):
            patch = {"metadata": {"annotations": {name: value}}}
            reply = await client.patch(url, json=patch, headers=headers)
    except TimeoutError:
        return f"no answer within {TIMEOUT_S:g} s"
    except (httpx.HTTPError, httpx.InvalidURL, OSError, ValueError) as error:
        return str(error) or type(error).__name__
    return None if reply.status_code == HTTPStatus.OK else _refusal(reply)


def _refusal(reply: httpx.Response) -> str:
    """Return the status, what to do about it, and the server's own words."""
    text = f"status {reply.status_code}"
    if (hint := HINTS.get(reply.status_code)) is not None:
        text += f": {hint}"
    try:
        message = reply.json().get("message", "")
    except (ValueError, AttributeError):
        message = ""
    return f"{text} ({message[:300]})" if isinstance(message, str) and message else text


class DeletionCost:
    """The only writer of its pod's annotation. On the event loop."""

    def __init__(self, pod: Pod, block_size: int, clock: Clock) -> None:
        self._pod = pod
        self._block_size = block_size
        self._clock = clock
        self._news = CostNews()
        self._task: asyncio.Task[None] | None = None
        self._complaint: str | None = None

    def look(self, load: NodeLoad, num_requests: int) -> None:
        """Begin to tell the cost if it is news."""
        cost = deletion_cost(load, num_requests, self._block_size, self._pod.ranks)
        if self._task is None and self._news.due(cost, self._clock.monotonic()):
            self._task = asyncio.get_running_loop().create_task(
                self._tell(cost), name="pod-deletion-cost"
            )

    async def stop(self) -> None:
        """Give up what is on its way. May be called twice."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait([self._task])

    async def _tell(self, cost: int) -> None:
        try:
            complaint = await annotate(self._pod, ANNOTATION, str(cost))
            if complaint is None:
                self._news.told(cost, self._clock.monotonic())
            else:
                self._news.failed(self._clock.monotonic())
            self._report(complaint)
        finally:
            self._task = None

    def _report(self, complaint: str | None) -> None:
        """Log what is new: a failure once, until there is another one."""
        if complaint == self._complaint:
            return
        if complaint is None:
            log.info("the pod's deletion cost is told again")
        else:
            log.warning(
                "the pod's deletion cost cannot be told, this node goes on without: %s", complaint
            )
        self._complaint = complaint
