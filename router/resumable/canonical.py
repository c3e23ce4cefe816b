"""Canonical: all that a router needs to go on with a resumable request, as the store keeps it.

It holds the client's body as it came, the values that were chosen for it (ids, seed, `created`,
prompt ids), and digests of the client's key and of the body. From it and the token log any router
makes the same answer. Its text has at most MAX_CANONICAL_BYTES. Pure.
"""

from __future__ import annotations

import base64
import hashlib
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import inf
from typing import Final

import orjson

from baton.protocol.clock import Clock
from baton.protocol.errors import InvalidRequest
from baton.protocol.request import Request
from baton.protocol.wire_bytes import request_from_bytes, request_to_bytes
from router.store.base import RequestRecord

MAX_CANONICAL_BYTES: Final = 1 << 20
OWNER_FIELD: Final = "owner_key"
BODY_FIELD: Final = "body_digest"
_VERSION: Final = 1


@dataclass(frozen=True, slots=True)
class Canonical:
    """One resumable request.

    `api`: the HTTP path, or "grpc", whose code can read the body. `name`: the client's name of the
    request. `created`: wall-clock seconds. `owner`: a digest of the client's key. `grace_s`: for
    how long the request runs while nobody reads it.
    """

    api: str
    name: str
    owner: str
    created: int
    grace_s: float
    body: bytes
    request: Request

    @property
    def body_digest(self) -> str:
        return body_digest(self.api, self.body)

    def fields(self, clock: Clock, field: str) -> dict[str, str]:
        """Return the fields of the request's record. Raises InvalidRequest that names `field` if
        their text is too large."""
        content = {
            "v": _VERSION,
            "api": self.api,
            "name": self.name,
            "created": self.created,
            "arrived_at": time.time() - (clock.monotonic() - self.request.arrival),
            "grace_s": self.grace_s,
            "body": base64.b64encode(self.body).decode(),
            "request": base64.b64encode(request_to_bytes(self.request, clock)).decode(),
        }
        text = orjson.dumps(content).decode()
        if len(text) > MAX_CANONICAL_BYTES:
            raise InvalidRequest(
                f"{field}: a resumable request is kept whole, and may have at most"
                f" {MAX_CANONICAL_BYTES} bytes; this one has {len(text)}",
                field=field,
            )
        return {
            "resumable": "1",
            "canonical": text,
            OWNER_FIELD: self.owner,
            BODY_FIELD: self.body_digest,
        }


def canonical_of(record: RequestRecord, clock: Clock) -> Canonical | None:
    """Return the canonical form in a record, with its arrival and the rest of its deadline.

    None for the record of a plain request, or of another version.
    """
    fields: Mapping[str, str] = record.fields
    if fields.get("resumable") != "1" or "canonical" not in fields:
        return None
    content = orjson.loads(fields["canonical"])
    if content["v"] != _VERSION:
        return None
    request = request_from_bytes(base64.b64decode(content["request"]), clock)
    # Clocks of machines differ: it came at least as long ago as the store has had it.
    age_s = max(record.age_s, time.time() - content.get("arrived_at", inf))
    request = replace(request, arrival=clock.monotonic() - age_s)
    if request.deadline is not None:
        request = replace(request, deadline=request.deadline - record.age_s)
    return Canonical(
        content["api"],
        content["name"],
        fields[OWNER_FIELD],
        content["created"],
        content["grace_s"],
        base64.b64decode(content["body"]),
        request,
    )


def owner_digest(keys: list[bytes]) -> str:
    """Return a digest of the key that a request presents; without a key, of nothing."""
    return hashlib.sha256(min(keys, default=b"")).hexdigest()


def body_digest(api: str, body: bytes) -> str:
    return hashlib.sha256(api.encode() + b"\0" + body).hexdigest()


def record_id(owner: str, name: str) -> str:
    """Return the engine's id of a resumable request.

    It contains a digest of the owner, so that two keys may use the same name.
    """
    digest = hashlib.sha256(f"{owner}\0{name}".encode()).hexdigest()
    return f"req-{name}-0.{digest[:16]}"
