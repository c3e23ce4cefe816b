"""The deployment's secret, by which its processes know each other; and its rotation.

It is one text (BATON_SECRET), or a file with one secret per line (--secret-file) that is read again
when it changes. Whoever proves uses the first secret; whoever checks accepts every one. So a secret
is replaced in four steps, each of which must have reached all processes before the next one:

    old  ->  old, new  ->  new, old  ->  new
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Final

from baton.protocol.errors import ConfigError
from baton.runtime.rotation.watched_files import WatchedFiles

# The secrets now, the one that proves first. `NONE`: the deployment has no secret.
Secrets = Callable[[], tuple[str, ...]]
NONE: Final = ("",)
MOST: Final = 8
SECRET_FILE_HELP: Final = (
    "file with the deployment's secret, in place of BATON_SECRET; of several lines the first one"
    " proves and all are accepted; read again when it changes"
)


def fixed(secret: str) -> Secrets:
    """Return a secret that never changes."""
    return lambda: (secret,)


def check_secret(secret: str, file: str | None) -> None:
    """Raise ConfigError if both options are given."""
    if secret and file is not None:
        text = "either BATON_SECRET or --secret-file (BATON_SECRET_FILE)"
        raise ConfigError(text, field="secret_file")


def secrets_of(secret: str, file: str | None) -> Secrets:
    """Return the secrets of two options, of which at most one is given. Raises ConfigError."""
    check_secret(secret, file)
    return fixed(secret) if file is None else secret_file(file).value


def secret_file(file: str) -> WatchedFiles[tuple[str, ...]]:
    """Return the secrets of a file. Raises ConfigError if it cannot be read or holds none."""
    return WatchedFiles("secret_file", [Path(file)], lambda: _read(Path(file)))


def _read(path: Path) -> tuple[str, ...]:
    try:
        lines = path.read_text().splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read {path}: {error}", field="secret_file") from error
    found = tuple(dict.fromkeys(line.strip() for line in lines if line.strip()))
    if not 1 <= len(found) <= MOST:
        text = f"{path} has {len(found)} secrets; it needs 1 to {MOST}, each on a line"
        raise ConfigError(text, field="secret_file")
    return found
