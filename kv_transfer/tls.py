"""TLS for the lanes that cross hosts: mutual, TLS 1.3, one certificate authority per deployment.

Both ends present a certificate of the deployment's own CA. `stream` checks the chain, not the name:
who holds such a certificate belongs, and the handshake inside (HMAC, boot id) says which process it
is. `grpc` also checks, as gRPC always does, that the certificate names the host that is called.
Not here: making certificates (docs/kv_transfer.md shows it with openssl).
"""

from __future__ import annotations

import ssl
from dataclasses import dataclass
from pathlib import Path

import grpc

from baton.errors import ConfigError


@dataclass(frozen=True, slots=True)
class TlsFiles:
    """PEM files: this node's certificate chain, its private key, the deployment's CA."""

    cert: Path
    key: Path
    ca: Path

    def server_context(self) -> ssl.SSLContext:
        """Raises ConfigError, naming the option, for a file that cannot be used."""
        context = self._context(ssl.PROTOCOL_TLS_SERVER)
        context.num_tickets = 0  # never resumed; and an idle connection has nothing to read
        return context

    def client_context(self) -> ssl.SSLContext:
        """Raises as `server_context`."""
        return self._context(ssl.PROTOCOL_TLS_CLIENT)

    def server_credentials(self) -> grpc.ServerCredentials:
        """For add_secure_port. Raises as `server_context`."""
        self.server_context()  # the files are checked here: gRPC accepts anything and serves nobody
        pair = (self.key.read_bytes(), self.cert.read_bytes())
        return grpc.ssl_server_credentials(
            [pair], root_certificates=self.ca.read_bytes(), require_client_auth=True
        )

    def channel_credentials(self) -> grpc.ChannelCredentials:
        """For secure_channel. Raises as `server_context`."""
        self.client_context()
        return grpc.ssl_channel_credentials(
            root_certificates=self.ca.read_bytes(),
            private_key=self.key.read_bytes(),
            certificate_chain=self.cert.read_bytes(),
        )

    def _context(self, protocol: int) -> ssl.SSLContext:
        context = ssl.SSLContext(protocol)
        context.check_hostname = False
        context.verify_mode = ssl.CERT_REQUIRED
        context.minimum_version = ssl.TLSVersion.TLSv1_3
        try:
            context.load_verify_locations(self.ca)
        except OSError as error:
            raise ConfigError(f"cannot use the CA {self.ca}: {error}", field="kv_tls_ca") from error
        try:
            # A key under a passphrase is refused; without this openssl would ask the terminal.
            context.load_cert_chain(self.cert, self.key, password=lambda: "")
        except OSError as error:
            text = f"cannot use the certificate {self.cert} with the key {self.key}: {error}"
            raise ConfigError(text, field="kv_tls_cert") from error
        return context
