"""Certificates for tests, made by the `openssl` binary: a CA, a node of it, and a stranger."""

from __future__ import annotations

import subprocess
from dataclasses import replace
from pathlib import Path

from baton.runtime.tls import TlsFiles

KEY = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes", "-days", "2")


def make_files(directory: Path) -> TlsFiles:
    """A fresh CA and one node certificate for this host."""
    directory.mkdir(parents=True, exist_ok=True)
    _openssl(directory, "-keyout", "ca.key", "-out", "ca.pem", "-subj", "/CN=deployment")
    _openssl(
        directory, "-keyout", "node.key", "-out", "node.pem", "-subj", "/CN=node",
        "-CA", "ca.pem", "-CAkey", "ca.key", "-addext", "basicConstraints=CA:FALSE",
        "-addext", "subjectAltName=IP:127.0.0.1,DNS:localhost",
    )  # fmt: skip
    pem = [directory / name for name in ("node.pem", "node.key", "ca.pem")]
    return TlsFiles(*pem, prefix="kv_tls")


def believing(own: TlsFiles, ca: TlsFiles) -> TlsFiles:
    """`own` certificate, but the CA of `ca`: believes its peer and is not believed."""
    return replace(own, ca=ca.ca)


def _openssl(directory: Path, *arguments: str) -> None:
    subprocess.run(
        ["openssl", "req", "-x509", *KEY, *arguments],
        cwd=directory,
        check=True,
        capture_output=True,
        timeout=30,
    )
