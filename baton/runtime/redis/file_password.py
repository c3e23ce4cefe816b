"""A password of Redis that lies in a file, which may be replaced: the option `password_file`."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from redis.credentials import CredentialProvider

from baton.protocol.errors import ConfigError
from baton.runtime.redis.urls import FLAG, PASSWORD_FILE

log = logging.getLogger(__name__)


class FilePassword(CredentialProvider):
    """A user's password in a file, which may be replaced. If it cannot be read, the last one holds.

    Inheritance is redis-py's way to ask for it.
    """

    def __init__(self, file: Path, username: str | None) -> None:
        """Raises ConfigError if the file cannot be read."""
        self._file = file
        self._username = username
        try:
            self._password = file.read_text().strip()
        except OSError as error:
            text = f"{FLAG}: {PASSWORD_FILE} {file}: {error.strerror}"
            raise ConfigError(text, field="redis_url") from error

    def get_credentials(self) -> tuple[str] | tuple[str, str]:
        try:
            self._password = self._file.read_text().strip()
        except OSError as error:
            log.error("the last password of Redis stays in use: %s", error)
        if self._username is None:
            return (self._password,)
        return self._username, self._password

    async def get_credentials_async(self) -> tuple[str] | tuple[str, str]:
        return self.get_credentials()


def with_file_password(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return options of a connection as redis-py takes them: each new connection reads the password
    in the file that `password_file` names, if there is one. Raises ConfigError for one that cannot
    be read."""
    taken = dict(options)
    file = taken.pop(PASSWORD_FILE, None)
    if file is not None:
        username = taken.pop("username", None)
        taken["credential_provider"] = FilePassword(Path(file), username)
    return taken
