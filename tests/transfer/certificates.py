"""Certificates for tests, made by the `openssl` binary: a CA, a node of it, and a stranger."""

from __future__ import annotations

import subprocess
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from baton.runtime.tls import TlsFiles

KEY = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes")
HERE = ("127.0.0.1",)


def make_files(directory: Path, addresses: Sequence[str] = HERE, days: int = 2) -> TlsFiles:
    """A fresh CA and one node certificate for hosts at these addresses."""
    directory.mkdir(parents=True, exist_ok=True)
    _openssl(directory, "-keyout", "ca.key", "-out", "ca.pem", "-subj", "/CN=deployment")
    return issue(directory, directory, addresses, days)


def issue(ca: Path, directory: Path, addresses: Sequence[str] = HERE, days: int = 2) -> TlsFiles:
    """Another certificate, with a key of its own, by the CA that `make_files` has made in `ca`."""
    directory.mkdir(parents=True, exist_ok=True)
    names = ",".join([*(f"IP:{address}" for address in addresses), "DNS:localhost"])
    _openssl(
        directory, "-keyout", "node.key", "-out", "node.pem", "-subj", "/CN=node",
        "-CA", str(ca / "ca.pem"), "-CAkey", str(ca / "ca.key"),
        "-addext", "basicConstraints=CA:FALSE", "-addext", f"subjectAltName={names}", days=days,
    )  # fmt: skip
    return TlsFiles(directory / "node.pem", directory / "node.key", ca / "ca.pem", prefix="kv_tls")


def believing(own: TlsFiles, ca: TlsFiles) -> TlsFiles:
    """`own` certificate, but the CA of `ca`: believes its peer and is not believed."""
    return replace(own, ca=ca.ca)


def _openssl(directory: Path, *arguments: str, days: int = 2) -> None:
    subprocess.run(
        ["openssl", "req", "-x509", *KEY, "-days", str(days), *arguments],
        cwd=directory,
        check=True,
        capture_output=True,
        timeout=30,
    )
