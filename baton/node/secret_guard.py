"""SecretGuard: no call reaches a node's gRPC server unless it proves the deployment's secret.

Every method is closed, known or not, but the health check: the probes of Kubernetes and Docker can
prove nothing, and what it answers is one word. The proof is checked on the call's metadata, before
a byte of any message is read; Node.Session checks once more that the router calls itself the same
in its hello (baton/node/service.py). Not here: the proof itself (baton/protocol/messages.py), nor
the KV lanes', whose handshake is mutual (kv_transfer/protocol/identity.py).
"""

from __future__ import annotations

import hmac
import logging
from collections.abc import Iterable
from typing import Any, Final, NoReturn

import grpc
import grpc.aio

from baton.protocol.errors import Unauthenticated
from baton.protocol.messages import ROUTER_METADATA, SECRET_METADATA, session_mac

log = logging.getLogger(__name__)

OPEN_PREFIX: Final = "/grpc.health.v1.Health/"
REFUSAL: Final = "the deployment's secret was not proven"


class SecretGuard(grpc.aio.ServerInterceptor):
    """`secret` is the deployment's; an empty one is no reason to make a guard."""

    def __init__(self, secret: str) -> None:
        self._secret = secret
        self._denial = grpc.unary_unary_rpc_method_handler(_deny)

    async def intercept_service(self, continuation: Any, handler_call_details: Any) -> Any:
        details = handler_call_details
        if str(details.method).startswith(OPEN_PREFIX) or self._proven(details.invocation_metadata):
            return await continuation(details)
        log.info("refused: a call without proof of the secret")
        return self._denial

    def _proven(self, metadata: Iterable[tuple[str, Any]] | None) -> bool:
        """Whether there is one router's name, and one proof for it."""
        items = list(metadata or ())
        names = [value for key, value in items if key == ROUTER_METADATA]
        proofs = [value for key, value in items if key == SECRET_METADATA]
        if len(names) != 1 or len(proofs) != 1 or not isinstance(names[0], bytes):
            return False
        try:
            expected = session_mac(self._secret, names[0].decode())
        except UnicodeDecodeError:
            return False
        return hmac.compare_digest(str(proofs[0]).encode(), expected.encode())


async def _deny(_: Any, context: Any) -> NoReturn:
    await context.abort(grpc.StatusCode.UNAUTHENTICATED, REFUSAL)
    raise Unauthenticated(REFUSAL)  # abort has raised
