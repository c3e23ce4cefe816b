"""The two processes of a KV handshake: whether they may exchange KV, and the proof of the
secret.
"""

from __future__ import annotations

import enum
import hashlib
import hmac
from dataclasses import dataclass, field

from baton.protocol.kv_spec import PROTOCOL_VERSION, PoolFormat
from baton.runtime.rotation.deployment_secret import Secrets
from kv_transfer.protocol.messages import Failure, FailureCode, Hello


class Side(enum.StrEnum):
    EXPORTER = "exporter"
    FETCHER = "fetcher"


@dataclass(frozen=True, slots=True)
class Identity:
    """Who this process is in a handshake. `secrets`: those of the deployment; the first one proves,
    each is accepted.
    """

    boot_id: str
    fingerprint: str
    format: PoolFormat
    secrets: Secrets = field(repr=False)
    protocol_version: int = PROTOCOL_VERSION

    def hello(self, side: Side, nonce: bytes, peer_nonce: bytes | None) -> Hello:
        """Return our HELLO; it answers the peer's challenge if `peer_nonce` is given."""
        mac = (
            b""
            if peer_nonce is None
            else prove(self.secrets()[0], side, peer_nonce, self.boot_id, self.fingerprint)
        )
        return Hello(self.protocol_version, self.boot_id, self.fingerprint, self.format, nonce, mac)

    def refuse(self, peer: Hello) -> Failure | None:
        """Return why these two may never exchange KV; None if they may.

        Block size, precision and tensor parallelism are no reason: they are converted.
        """
        if peer.protocol_version != self.protocol_version:
            text = f"protocol version {peer.protocol_version}, here {self.protocol_version}"
            return Failure(FailureCode.PROTOCOL, text)
        if peer.layout_fingerprint != self.fingerprint:
            text = f"layout {peer.layout_fingerprint}, here {self.fingerprint}"
            return Failure(FailureCode.LAYOUT, text)
        return None

    def proven(self, peer: Hello, side: Side, own_nonce: bytes) -> bool:
        """Whether the peer answered our challenge with one of our secrets (each is compared in
        constant time).
        """
        expected = [
            prove(secret, side, own_nonce, peer.boot_id, peer.layout_fingerprint)
            for secret in self.secrets()
        ]
        return any(hmac.compare_digest(each, peer.mac) for each in expected)


def prove(secret: str, side: Side, peer_nonce: bytes, boot_id: str, fingerprint: str) -> bytes:
    """Return HMAC-SHA256(secret, side | peer's nonce | own boot id | fingerprint), joined
    by 0x7c.
    """
    body = b"|".join((side.value.encode(), peer_nonce, boot_id.encode(), fingerprint.encode()))
    return hmac.new(secret.encode(), body, hashlib.sha256).digest()
