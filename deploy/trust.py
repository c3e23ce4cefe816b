"""How the command line checks the TLS certificates of front doors.

`baton up` asks its own router, whose certificate may be issued by any CA and name any host. So it
trusts exactly that file and checks no name. `baton chat` and `baton status` check names and chains,
as other clients do.
"""

from __future__ import annotations

import argparse
import ssl
from pathlib import Path

from baton.protocol.errors import ConfigError
from baton.runtime.tls import ClientTls


def trusting(cert: str) -> ssl.SSLContext:
    """Return the context of a client that trusts exactly this certificate (PEM).

    Raises ConfigError.
    """
    context = _context(cert)
    context.check_hostname = False
    return context


def add_trust(parser: argparse.ArgumentParser) -> None:
    """Add the options that `trust_of` and `client_tls` read."""
    text = "PEM certificates that the server's is checked by (default: the system's)"
    parser.add_argument("--tls-ca", metavar="FILE", help=text)
    text = "PEM certificate to present, where the server wants one"
    parser.add_argument("--tls-cert", metavar="FILE", help=text)
    parser.add_argument("--tls-key", metavar="FILE", help="PEM key of --tls-cert")


def trust_of(arguments: argparse.Namespace) -> ssl.SSLContext | None:
    """Return the context for https; None means that of httpx. Raises ConfigError."""
    _check_pair(arguments)
    if not (arguments.tls_ca or arguments.tls_cert):
        return None
    context = _context(arguments.tls_ca)
    if arguments.tls_cert:
        try:
            context.load_cert_chain(arguments.tls_cert, arguments.tls_key, password=lambda: "")
        except OSError as error:
            text = f"cannot use the certificate {arguments.tls_cert}: {error}"
            raise ConfigError(text, field="tls_cert") from error
    return context


def client_tls(arguments: argparse.Namespace, wanted: bool = False) -> ClientTls | None:
    """Return the TLS options for gRPC; None means without TLS.

    `wanted`: use TLS even if no file is given.
    """
    _check_pair(arguments)
    files = (arguments.tls_ca, arguments.tls_cert, arguments.tls_key)
    if not any(files) and not wanted:
        return None
    return ClientTls(*(Path(file) if file else None for file in files))


def _context(ca: str | None) -> ssl.SSLContext:
    try:
        context = ssl.create_default_context(cafile=ca)
    except OSError as error:
        text = f"cannot use the certificates in {ca}: {error}"
        raise ConfigError(text, field="tls_ca") from error
    # Certificates in a given file are trusted as they are, even if their CA is not in the file.
    context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
    return context


def _check_pair(arguments: argparse.Namespace) -> None:
    if bool(arguments.tls_cert) != bool(arguments.tls_key):
        raise ConfigError("--tls-cert and --tls-key come together", field="tls_key")
