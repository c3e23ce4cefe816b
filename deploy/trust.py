"""Whom the command line trusts: TLS towards front doors, as its options say.

`baton up` asks its own router, whose certificate may be anybody's and name any host: it trusts that
very file and no name. `baton chat` and `baton status` check names and chains, as clients do.
"""

from __future__ import annotations

import argparse
import ssl
from pathlib import Path

from baton.protocol.errors import ConfigError
from baton.runtime.tls import ClientTls


def trusting(cert: str) -> ssl.SSLContext:
    """Of a client that believes whoever holds this certificate (PEM). Raises ConfigError."""
    context = _context(cert)
    context.check_hostname = False
    return context


def add_trust(parser: argparse.ArgumentParser) -> None:
    """The options that `trust_of` and `client_tls` read."""
    text = "PEM certificates that the server's is checked by (default: the system's)"
    parser.add_argument("--tls-ca", metavar="FILE", help=text)
    text = "PEM certificate to present, where the server wants one"
    parser.add_argument("--tls-cert", metavar="FILE", help=text)
    parser.add_argument("--tls-key", metavar="FILE", help="PEM key of --tls-cert")


def trust_of(arguments: argparse.Namespace) -> ssl.SSLContext | None:
    """For https; None for httpx's own. Raises ConfigError."""
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
    """For gRPC; None: without TLS. `wanted`: with TLS, also if no file says so."""
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
    # A file that is given is believed as it is: also a certificate whose CA is not in it.
    context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
    return context


def _check_pair(arguments: argparse.Namespace) -> None:
    if bool(arguments.tls_cert) != bool(arguments.tls_key):
        raise ConfigError("--tls-cert and --tls-key come together", field="tls_key")
