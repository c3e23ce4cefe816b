"""TLS of every listener and every internal connection: PEM files to contexts and credentials.

Between the processes of a deployment TLS is mutual and at least 1.3. A deployment has one
certificate authority, and both ends present a certificate that it signed. Lane `stream` checks the
chain, not the name: every holder of such a certificate belongs to the deployment, and the handshake
inside (HMAC, boot id) says which process it is. gRPC also checks that the certificate names the
host that is called. The public front door accepts TLS 1.2 as well, and wants a client's certificate
only if a CA for clients is given. docs/kv_transfer.md shows how to make certificates with openssl.

Files may be replaced at any time: new connections use the new ones, open ones go on. Files that
cannot be used, half-written ones for instance, leave the old ones in use (watched_files.py).
"""

from __future__ import annotations

import ssl
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import grpc

from baton.protocol.errors import ConfigError
from baton.runtime.rotation.certificates import expires_at
from baton.runtime.rotation.watched_files import WatchedFiles

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class TlsFiles:
    """PEM files: this process's certificate chain, its private key, the CA of its peers.

    Without `ca` a server accepts every client. `prefix` begins the options' names in errors.
    """

    cert: Path
    key: Path
    ca: Path | None = None
    prefix: str = "tls"

    @staticmethod
    def of(
        cert: str | None, key: str | None, ca: str | None, prefix: str, *, mutual: bool = True
    ) -> TlsFiles | None:
        """Return the files that three options name; None if no option is given.

        Raises ConfigError, naming the first missing option (`ca` is needed only if `mutual`).
        """
        given = {f"{prefix}_cert": cert, f"{prefix}_key": key, f"{prefix}_ca": ca}
        if not any(given.values()):
            return None
        needed = list(given) if mutual else list(given)[:2]
        missing = [name for name in needed if not given[name]]
        if missing or not cert or not key:
            flags = ", ".join("--" + name.replace("_", "-") for name in needed)
            raise ConfigError(f"TLS here needs all of {flags}", field=missing[0])
        return TlsFiles(Path(cert), Path(key), Path(ca) if ca else None, prefix)

    @property
    def paths(self) -> tuple[Path, ...]:
        return (self.cert, self.key) if self.ca is None else (self.cert, self.key, self.ca)

    # ---- servers: files that are replaced hold for the connections that come then ----

    def server_context(self, oldest: ssl.TLSVersion = ssl.TLSVersion.TLSv1_3) -> ssl.SSLContext:
        """Return a server's context. Raises ConfigError, naming the option, for an unusable
        file.
        """
        watched = self._watched(lambda: self._context(ssl.PROTOCOL_TLS_SERVER, oldest))
        context = watched.value()
        # Sessions are never resumed, and without tickets an idle connection has nothing to read.
        context.num_tickets = 0

        def begin(connection: ssl.SSLObject | ssl.SSLSocket, *_: object) -> None:
            connection.context = watched.value()

        # OpenSSL calls it in every handshake, whether the client names a server or not. A new
        # context and not new files in the old one: that would trust its old CAs for ever.
        context.sni_callback = begin
        return context

    def server_credentials(self) -> grpc.ServerCredentials:
        """Return credentials for add_secure_port. Raises the errors of `server_context`."""
        watched = self._watched(self._server_configuration)
        served = watched.value()

        def changed() -> Any:
            """Return what holds from now on; None: what held before. gRPC asks one at a time."""
            nonlocal served
            before, served = served, watched.value()
            return None if served is before else served

        return grpc.dynamic_ssl_server_credentials(
            served, changed, require_client_authentication=self.ca is not None
        )

    # ---- clients: ask for the present context or credentials at each new connection ----

    def client_contexts(self) -> Callable[[], ssl.SSLContext]:
        """Return the context of a client, as the files are now, or were when last good.

        `ca` is needed. Raises the errors of `server_context`.
        """
        return self._watched(self._client_context).value

    def channel_credentials(self) -> Callable[[], grpc.ChannelCredentials]:
        """Return credentials for secure_channel, as the files are now, or were when last good.

        They are the same object as long as the files are the same. `ca` is needed. Raises the
        errors of `server_context`.
        """
        return self._watched(self._channel_credentials).value

    # ---- metrics ----

    def expiration(self) -> WatchedFiles[float]:
        """Return when the chain's first certificate ends, in seconds since 1970. Raises the errors
        of `server_context`.
        """
        return self._watched(self._expires_at)

    # ---- the files as they are now ----

    def _watched(self, read: Callable[[], T]) -> WatchedFiles[T]:
        return WatchedFiles(self.prefix, self.paths, read)

    def _client_context(self) -> ssl.SSLContext:
        return self._context(ssl.PROTOCOL_TLS_CLIENT, ssl.TLSVersion.TLSv1_3)

    def _server_configuration(self) -> Any:
        # Checked first, because gRPC accepts any files and then serves nobody.
        self._context(ssl.PROTOCOL_TLS_SERVER, ssl.TLSVersion.TLSv1_3)
        pair = (self.key.read_bytes(), self.cert.read_bytes())
        root = None if self.ca is None else self.ca.read_bytes()
        return grpc.ssl_server_certificate_configuration([pair], root)

    def _channel_credentials(self) -> grpc.ChannelCredentials:
        self._client_context()
        return grpc.ssl_channel_credentials(
            root_certificates=None if self.ca is None else self.ca.read_bytes(),
            private_key=self.key.read_bytes(),
            certificate_chain=self.cert.read_bytes(),
        )

    def _expires_at(self) -> float:
        self._context(ssl.PROTOCOL_TLS_SERVER, ssl.TLSVersion.TLSv1_3)
        return expires_at(self.cert.read_text("latin-1"))

    def _context(self, protocol: int, oldest: ssl.TLSVersion) -> ssl.SSLContext:
        context = ssl.SSLContext(protocol)
        context.check_hostname = False
        context.minimum_version = oldest
        if self.ca is None:
            if protocol == ssl.PROTOCOL_TLS_CLIENT:
                raise ConfigError("a client needs its peers' CA", field=f"{self.prefix}_ca")
        else:
            context.verify_mode = ssl.CERT_REQUIRED
            try:
                context.load_verify_locations(self.ca)
            except OSError as error:
                text = f"cannot use the CA {self.ca}: {error}"
                raise ConfigError(text, field=f"{self.prefix}_ca") from error
        try:
            # A key under a passphrase is refused; without this, openssl would ask the terminal.
            context.load_cert_chain(self.cert, self.key, password=lambda: "")
        except OSError as error:
            text = f"cannot use the certificate {self.cert} with the key {self.key}: {error}"
            raise ConfigError(text, field=f"{self.prefix}_cert") from error
        return context


@dataclass(frozen=True, slots=True)
class ClientTls:
    """How a client of the public API checks its server, and the certificate that it presents.

    `ca` None means the system's CAs. `cert` and `key` are for a server that wants a certificate.
    """

    ca: Path | None = None
    cert: Path | None = None
    key: Path | None = None

    def channel_credentials(self) -> grpc.ChannelCredentials:
        """Return credentials for secure_channel. Raises ConfigError for an unreadable file."""
        try:
            ca, cert, key = (
                None if file is None else file.read_bytes()
                for file in (self.ca, self.cert, self.key)
            )
        except OSError as error:
            raise ConfigError(f"cannot read {error.filename}: {error.strerror}") from error
        if (cert is None) != (key is None):
            raise ConfigError("a client's certificate needs its key, and the key its certificate")
        return grpc.ssl_channel_credentials(ca, private_key=key, certificate_chain=cert)
