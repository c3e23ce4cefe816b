"""A folder as Kubernetes mounts a Secret: every name is a link through the link `..data`, which is
moved to a new folder when the Secret changes, so that all files change at once.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping
from pathlib import Path

from baton.runtime.tls import TlsFiles


class MountedSecret:
    def __init__(self, folder: Path, content: Mapping[str, bytes | str]) -> None:
        folder.mkdir(parents=True)
        self.folder = folder
        self._count = 0
        self.update(content)
        for name in content:
            (folder / name).symlink_to(Path("..data") / name)

    def path(self, name: str) -> Path:
        return self.folder / name

    def update(self, content: Mapping[str, bytes | str]) -> None:
        self._count += 1
        fresh = self.folder / f"..{self._count}"
        fresh.mkdir()
        for name, value in content.items():
            (fresh / name).write_bytes(value.encode() if isinstance(value, str) else value)
        moved = self.folder / "..data_tmp"
        moved.symlink_to(fresh.name)
        os.replace(moved, self.folder / "..data")
        shutil.rmtree(self.folder / f"..{self._count - 1}", ignore_errors=True)


class MountedCertificate(MountedSecret):
    """tls.crt, tls.key and ca.crt, as cert-manager keeps them."""

    def __init__(self, folder: Path, files: TlsFiles) -> None:
        super().__init__(folder, _content(files))

    def files(self, prefix: str = "tls") -> TlsFiles:
        names = ("tls.crt", "tls.key", "ca.crt")
        return TlsFiles(*map(self.path, names), prefix=prefix)

    def renew(self, files: TlsFiles, *old: TlsFiles) -> None:
        """From now on the certificate of `files`; the CAs of `old` are trusted, too."""
        self.update(_content(files, *old))


def _content(files: TlsFiles, *old: TlsFiles) -> dict[str, bytes]:
    cas = [each.ca.read_bytes() for each in (files, *old) if each.ca is not None]
    return {
        "tls.crt": files.cert.read_bytes(),
        "tls.key": files.key.read_bytes(),
        "ca.crt": b"".join(cas),
    }
