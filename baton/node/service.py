"""The gRPC services of a node: Node.Session of protos/node.proto, and grpc.health.v1.

A session is one long-lived stream per router: SessionHello in, NodeRecord out, then router messages
in and one NodeStep per engine step out. It ends when the router leaves, breaks the protocol or does
not read; then the shell aborts its requests. Only this module and baton/protocol/wire.py see
protobuf.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable, Sequence
from typing import Any, Final, NoReturn, Protocol

import grpc
import grpc.aio
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from baton.node.config import NodeConfig, join_address
from baton.node.session import RouterSession
from baton.protocol import wire
from baton.protocol.clock import Clock
from baton.protocol.errors import BatonError, ConfigError, InvalidRequest, Unauthenticated
from baton.protocol.events import NodeStep, RequestFailed
from baton.protocol.handles import NodeRecord
from baton.protocol.kv_spec import PROTOCOL_VERSION
from baton.protocol.messages import (
    ROUTER_METADATA,
    SECRET_METADATA,
    RouterMessage,
    SessionHello,
    session_proven,
)
from baton.runtime.rotation.deployment_secret import Secrets
from baton.runtime.timing import Timing, server_options
from protos import node_pb2, node_pb2_grpc

log = logging.getLogger(__name__)

SERVICE: Final = "baton.node.v1.Node"
OPEN_PREFIX: Final = "/grpc.health.v1.Health/"  # needs no secret
REFUSAL: Final = "the deployment's secret was not proven"
_END = grpc.aio.EOF


class SessionShell(Protocol):
    """What the sessions need of a node: baton/node/shell.py, or a bench's node without an
    engine.
    """

    @property
    def config(self) -> NodeConfig: ...
    @property
    def timing(self) -> Timing: ...
    @property
    def clock(self) -> Clock: ...
    def record(self) -> NodeRecord: ...
    def attach(self, session: RouterSession) -> None: ...
    def detach(self, session: RouterSession) -> None: ...
    def receive(self, session: RouterSession, message: RouterMessage) -> None: ...


class SessionService(node_pb2_grpc.NodeServicer):
    """Serves Node.Session for one shell."""

    def __init__(self, shell: SessionShell, secrets: Secrets) -> None:
        self._shell = shell
        self._secrets = secrets

    async def Session(self, request_iterator: Any, context: Any) -> None:
        """Serve one router's session, from its hello to its end. It is read and written through
        `context`.
        """
        try:
            hello = await self._hello(context)
            session = RouterSession(hello.router_id, self._shell.config.outbox_messages)
            await context.write(wire.node_message_to_wire(self._shell.record()))
            await self._converse(session, context)
        except BatonError as error:
            log.info("session refused or cut: %s", error.message)
            await context.abort(grpc.StatusCode[error.grpc_code], error.message)

    async def _hello(self, context: Any) -> SessionHello:
        try:
            async with asyncio.timeout(self._shell.timing.connect_s):
                first = await context.read()
        except TimeoutError as error:
            raise Unauthenticated("no hello within the deadline") from error
        if first is _END:
            raise InvalidRequest("no hello", field="hello")
        hello = wire.router_message_from_wire(first, self._shell.clock)
        if not isinstance(hello, SessionHello):
            raise InvalidRequest("a session begins with a hello", field="hello")
        self._authenticate(hello.router_id, context)
        if hello.protocol_version != PROTOCOL_VERSION:
            raise InvalidRequest(
                f"protocol version {hello.protocol_version}, this node speaks {PROTOCOL_VERSION}",
                field="protocol_version",
            )
        return hello

    def _authenticate(self, router_id: str, context: Any) -> None:
        if not self._shell.config.guarded:
            return  # NodeConfig.check allows that on loopback only
        metadata = dict(context.invocation_metadata() or ())
        given = str(metadata.get(SECRET_METADATA, ""))
        if not session_proven(self._secrets(), router_id, given):
            raise Unauthenticated(REFUSAL)

    async def _converse(self, session: RouterSession, context: Any) -> None:
        """Read, write, and watch for a cut; the first task to end ends the session."""
        self._shell.attach(session)
        loop = asyncio.get_running_loop()
        tasks = [
            loop.create_task(self._read(session, context)),
            loop.create_task(self._write(session, context)),
            loop.create_task(session.wait_cut()),
        ]
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            reason = session.closed
        finally:
            self._shell.detach(session)
            for task in tasks:
                task.cancel()
            outcomes = await asyncio.gather(*tasks, return_exceptions=True)
        if reason is not None:
            raise reason
        for outcome in outcomes:
            if isinstance(outcome, BatonError):
                raise outcome
            if isinstance(outcome, Exception):
                log.info("session of router %s broke: %s", session.router_id, outcome)

    async def _read(self, session: RouterSession, context: Any) -> None:
        """Handle router messages until there are no more. A bad submission fails only its own
        request.
        """
        while (message := await context.read()) is not _END:
            for one in router_messages(message):
                self._receive(session, one)

    def _receive(self, session: RouterSession, message: node_pb2.RouterMessage) -> None:
        try:
            self._shell.receive(session, wire.router_message_from_wire(message, self._shell.clock))
        except InvalidRequest as error:
            failed = _refusal(message, error)
            if failed is None:
                raise
            session.send(NodeStep(failed=(failed,)))

    async def _write(self, session: RouterSession, context: Any) -> None:
        while True:
            step = await session.next()
            await context.write(wire.node_message_to_wire(step))


def router_messages(message: node_pb2.RouterMessage) -> Sequence[node_pb2.RouterMessage]:
    """Return the messages of a batch, or the message itself if it is no batch."""
    return message.batch.messages if message.WhichOneof("kind") == "batch" else (message,)


def _refusal(message: node_pb2.RouterMessage, error: InvalidRequest) -> RequestFailed | None:
    """Return `error` as the RequestFailed of the request that `message` submits.

    Return None if `message` is no submit, or if its request has no id.
    """
    request = message.submit.request
    if message.WhichOneof("kind") != "submit" or not request.id:
        return None
    return RequestFailed(
        request.id, request.epoch, error.code, error.message, error.retryable, error.field
    )


class SecretGuard(grpc.aio.ServerInterceptor):
    """Refuses every call that does not prove the deployment's secret, or one of its secrets.

    Only the health check is open, as the probes of Kubernetes and Docker cannot prove anything, and
    its answer is one word. The proof is checked on the call's metadata, before a byte of any
    message is read. Node.Session checks once more that the router's hello has the proven name. The
    proof itself is in baton/protocol/messages.py; KV lanes have a mutual handshake of their own
    (kv_transfer/protocol/identity.py).
    """

    def __init__(self, secrets: Secrets) -> None:
        self._secrets = secrets
        self._denial = grpc.unary_unary_rpc_method_handler(_deny)

    async def intercept_service(self, continuation: Any, handler_call_details: Any) -> Any:
        details = handler_call_details
        if str(details.method).startswith(OPEN_PREFIX) or self._proven(details.invocation_metadata):
            return await continuation(details)
        log.info("refused: a call without proof of the secret")
        return self._denial

    def _proven(self, metadata: Iterable[tuple[str, Any]] | None) -> bool:
        """Whether there are exactly one router's name and one valid proof for it."""
        items = list(metadata or ())
        names = [value for key, value in items if key == ROUTER_METADATA]
        proofs = [value for key, value in items if key == SECRET_METADATA]
        if len(names) != 1 or len(proofs) != 1 or not isinstance(names[0], bytes):
            return False
        try:
            return session_proven(self._secrets(), names[0].decode(), str(proofs[0]))
        except UnicodeDecodeError:
            return False


async def _deny(_: Any, context: Any) -> NoReturn:
    await context.abort(grpc.StatusCode.UNAUTHENTICATED, REFUSAL)
    raise Unauthenticated(REFUSAL)  # not reached: abort raises


class NodeServer:
    """The grpc.aio server of one node. Life: bind() -> start() -> set_health()* -> stop()."""

    def __init__(self, shell: SessionShell) -> None:
        self._shell = shell
        secrets = shell.config.secrets
        self._server = grpc.aio.server(
            options=server_options(shell.timing),
            interceptors=[SecretGuard(secrets)] if shell.config.guarded else [],
        )
        # pyright does not see the conditional import of `aio` in that package.
        self._health: Any = health.aio.HealthServicer()  # pyright: ignore
        node_pb2_grpc.add_NodeServicer_to_server(SessionService(shell, secrets), self._server)
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self._server)

    def bind(self) -> int:
        """Bind the port and return it. Raises ConfigError, also for unusable TLS files."""
        config = self._shell.config
        address = join_address(config.host, config.port)
        tls = config.tls
        credentials = None if tls is None else tls.server_credentials()
        try:
            if credentials is not None:
                return self._server.add_secure_port(address, credentials)
            return self._server.add_insecure_port(address)
        except RuntimeError as error:
            raise ConfigError(f"cannot bind {address}: {error}", field="port") from error

    async def start(self) -> None:
        await self._server.start()
        await self.set_health(serving=True)

    async def set_health(self, *, serving: bool) -> None:
        """Set what grpc.health.v1 answers, for the server and for Node.Session."""
        status = health_pb2.HealthCheckResponse.SERVING
        if not serving:
            status = health_pb2.HealthCheckResponse.NOT_SERVING
        for name in ("", SERVICE):
            await self._health.set(name, status)

    async def stop(self) -> None:
        """End all streams now: the shell's drain is over. May be called twice."""
        await self._server.stop(grace=self._shell.timing.connect_s)
