"""The answer that is not streamed: one JSON body when all has been computed, or the failure.

A call knows its own JSON; here is what all of them share: the client that leaves aborts the
requests, a deadline is kept, and a failure of any kind becomes the one answer.
"""

from __future__ import annotations

from typing import Protocol

from starlette.types import Receive, Scope, Send

from baton.protocol.errors import Cancelled
from router.api.calls import GRACE_S, CallRunner
from router.api.http.connection import while_connected
from router.api.http.web_errors import error_response
from router.api.receipt import with_receipt
from router.request.completion import Completion
from router.request.failures import as_baton_error, log_failure


class WholeCall(Protocol):
    """What a whole answer needs to know of its call: router/api/calls.py's, or a dialect's own."""

    @property
    def completions(self) -> tuple[Completion, ...]: ...
    @property
    def timeout_s(self) -> float: ...
    async def whole(self, runner: CallRunner) -> bytes:
        """Run the completions; the JSON of their answer."""
        ...


class WholeReply:
    """ASGI answer that waits for all completions; the client's leaving aborts them."""

    def __init__(self, call: WholeCall, runner: CallRunner) -> None:
        self._call = call
        self._runner = runner

    @property
    def call(self) -> WholeCall:
        return self._call

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        call = self._call
        try:
            limit_s = call.timeout_s + GRACE_S
            body = await while_connected(receive, call.whole(self._runner), scope, limit_s)
        except Cancelled as error:
            log_failure(error, error)  # nobody is left to read an answer
            return
        except Exception as error:  # noqa: BLE001  every failure becomes the one answer
            found = as_baton_error(error)
            log_failure(found, error)
            await error_response(found)(scope, receive, send)
            return
        body, more = with_receipt(body, call.completions)
        headers = [(b"content-length", b"%d" % len(body)), (b"content-type", b"application/json")]
        headers += [(name.encode(), value.encode()) for name, value in more.items()]
        # Not Starlette's Response: a tenth of what it does is needed here.
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": body})
