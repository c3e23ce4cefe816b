"""API keys and what each may have: the grants of `--api-key` and of a key file (`--api-keys`).

Keys are kept and compared as SHA-256 digests, in constant time. The file is TOML, or JSON if its
name ends with .json. It is read at the start, and again when it has changed and a request brings a
key. If it cannot be read again, that is logged and the former keys stay
(baton/runtime/rotation/watched_files.py). Its form:

    [[keys]]
    name = "alice"             # in logs and metrics; must be unique
    sha256 = "9f86d0..."       # of the key; or key = "..." in clear
    tenant = "research"        # shares weight, queue and prefix cache; default: the name
    weight = 2.0               # of the tenant, against other tenants that wait
    max_concurrency = 32       # requests at once, waiting or running; absent = no limit
    tokens_per_minute = 100000 # prompt and output; absent = no limit
    best_priority = 0          # the most urgent it may ask for (smaller = sooner)
"""

from __future__ import annotations

import hashlib
import hmac
import json
import re
import time
import tomllib
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final, cast

from baton.protocol.errors import ConfigError
from baton.runtime.rotation.watched_files import WatchedFiles

MAX_KEYS: Final = 10_000
_DIGEST: Final = re.compile(r"[0-9a-f]{64}")
_NAME: Final = re.compile(r"[A-Za-z0-9._:@/-]{1,64}")
_TYPES: Final[dict[str, tuple[type, ...]]] = {
    "name": (str,),
    "sha256": (str,),
    "key": (str,),
    "tenant": (str,),
    "weight": (int, float),
    "max_concurrency": (int,),
    "tokens_per_minute": (int,),
    "best_priority": (int,),
}
# Option -> (minimum, maximum).
_BOUNDS: Final[dict[str, tuple[float, float]]] = {
    "weight": (0.001, 1000.0),
    "max_concurrency": (1, 1_000_000),
    "tokens_per_minute": (1, 10**12),
    "best_priority": (-(2**31), 2**31),
}


@dataclass(frozen=True, slots=True)
class Grant:
    """What the bearer of a key may have. None = no limit.

    `isolated`: the prefix cache is shared only within the `domain`. `cache`: the name of the
    domain, if it is not the tenant.
    """

    name: str = ""
    tenant: str = ""
    weight: float = 1.0
    max_concurrency: int | None = None
    tokens_per_minute: int | None = None
    best_priority: int | None = None
    isolated: bool = False
    cache: str = ""

    @property
    def domain(self) -> str:
        """The group of keys that share cached prompts and may touch each other's requests."""
        return self.cache or self.tenant

    @property
    def holder(self) -> str:
        """The name of the one key that has this grant; "" for the only one of `--api-key`."""
        return self.name or self.cache


KeyGrant = tuple[bytes, Grant]  # the digest of a key, and what its bearer may have
KeyFile = WatchedFiles[Sequence[KeyGrant]]
EVERYBODY: Final = Grant()  # for clients that no key file names: one tenant without limits


class KeyRing:
    """The known keys. Empty = everybody is let in."""

    def __init__(
        self,
        grants: Sequence[KeyGrant],
        file: KeyFile | None = None,
        share_cache: bool = False,
    ) -> None:
        self._own = tuple(grants)
        self._file = file
        self._shares_cache = share_cache
        self._read: Sequence[KeyGrant] = ()  # the file's keys that are among the grants
        self._grants = self._all(self._of_file())

    def _of_file(self) -> Sequence[KeyGrant]:
        return () if self._file is None else self._file.value()

    def _all(self, of_file: Sequence[KeyGrant]) -> tuple[KeyGrant, ...]:
        self._read = of_file
        grants = (*self._own, *of_file)
        if not self._shares_cache:
            return grants
        return tuple((digest, replace(grant, isolated=False)) for digest, grant in grants)

    @classmethod
    def load(
        cls,
        keys: Sequence[str],
        path: str | None = None,
        *,
        share_cache: bool = False,
        now: Callable[[], float] = time.monotonic,
    ) -> KeyRing:
        """Return the ring of `keys` (in clear, with EVERYBODY's limits) and of the file at `path`.

        Each tenant, and each of several `keys`, has a prefix cache of its own. In a shared cache
        the time to the first token would reveal what others have asked. `share_cache`: all share
        one cache. Raises ConfigError.
        """
        digests = [digest_of(key.encode()) for key in dict.fromkeys(keys)]
        # Salted if there are tenants, too: else a client's cache_salt could equal a tenant's salt.
        alone = path is None and len(digests) == 1
        other = EVERYBODY if alone else replace(EVERYBODY, isolated=True)
        owns = [(digest, other) for digest in digests]
        if len(digests) > 1:  # "#" begins no tenant's name
            owns = [(digest, replace(other, cache=f"#{digest.hex()}")) for digest in digests]
        return cls(owns, None if path is None else key_file(path, now=now), share_cache)

    def __len__(self) -> int:
        return len(self._grants)

    def overlaps(self, other: KeyRing) -> bool:
        """Whether some key is in both rings."""
        ours, theirs = ({digest for digest, _ in ring._grants} for ring in (self, other))
        return not ours.isdisjoint(theirs)

    def bearer(self, authorization: bytes) -> Grant | None:
        """Return the grant of a `Bearer KEY` header; None for an unknown key or another header."""
        scheme, _, key = authorization.partition(b" ")
        return self.match(key.strip()) if scheme.lower() == b"bearer" else None

    def match(self, key: bytes) -> Grant | None:
        """Return the grant of a key; None for an unknown key."""
        digest = digest_of(key)
        # Every key is compared, so that the time reveals nothing about which one was close.
        matches = [grant for known, grant in self._known() if hmac.compare_digest(digest, known)]
        return matches[0] if matches else None

    def _known(self) -> tuple[KeyGrant, ...]:
        of_file = self._of_file()
        if of_file is not self._read:
            self._grants = self._all(of_file)
        return self._grants

    def of_digest(self, digest: bytes) -> Grant | None:
        """Return the present grant of the key with this digest; None if there is no such key."""
        return next((grant for known, grant in self._known() if known == digest), None)


def keys_of(headers: Iterable[tuple[bytes, bytes]]) -> list[bytes]:
    """Return the keys in `Authorization: Bearer` and `x-api-key`.

    Returns none if one of these headers is repeated, or if `Authorization` has another scheme.
    """
    keys: dict[bytes, bytes] = {}
    for name, value in headers:
        if name not in (b"authorization", b"x-api-key"):
            continue
        if name in keys:
            return []  # repeated: a proxy may have checked the other one
        keys[name] = value.strip()
        if name == b"authorization":
            scheme, _, key = value.partition(b" ")
            if scheme.lower() != b"bearer":
                return []
            keys[name] = key.strip()
    return list(keys.values())


def key_file(
    path: str, option: str = "api_keys", now: Callable[[], float] = time.monotonic
) -> KeyFile:
    """Return the keys of a file, which `option` names. Raises ConfigError."""
    return WatchedFiles(option, [Path(path)], lambda: _read(Path(path)), now)


def digest_of(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()


def _read(path: Path) -> list[KeyGrant]:
    """Return the digest and the grant of each key in a file. Raises ConfigError."""
    grants = [_grant(f"{path}: keys[{index}]", it) for index, it in enumerate(_tables(path))]
    _check_once(path, "name", [grant.name for _, grant in grants])
    _check_once(path, "key", [digest.hex()[:12] for digest, _ in grants])
    weights: dict[str, float] = {}
    for _, grant in grants:
        if weights.setdefault(grant.tenant, grant.weight) != grant.weight:
            raise _refused(f"{path}: the keys of tenant {grant.tenant!r} differ in weight")
    return grants


def _tables(path: Path) -> list[Any]:
    try:
        text = path.read_text()
        content: Any = json.loads(text) if path.suffix == ".json" else tomllib.loads(text)
    except (OSError, ValueError) as error:  # both parsers' errors are ValueErrors
        raise ConfigError(f"cannot read {path}: {error}", field="api_keys") from error
    tables: Any = content.get("keys") if isinstance(content, dict) else None
    if not isinstance(tables, list) or not 0 < len(tables) <= MAX_KEYS or len(content) != 1:
        raise _refused(f"{path}: holds one list, `keys`, of 1 to {MAX_KEYS} tables")
    return tables


def _check_once(path: Path, what: str, values: Sequence[str]) -> None:
    value, count = Counter(values).most_common(1)[0]
    if count > 1:
        raise _refused(f"{path}: the {what} {value!r} is there twice")


def _grant(where: str, table: Any) -> KeyGrant:
    """Return the digest and the grant of one table of the file.

    Raises ConfigError that names `where` the table stands, and the field.
    """
    if not isinstance(table, dict):
        raise _refused(f"{where} is no table")
    values = cast("dict[str, Any]", table)
    for name, value in values.items():
        _check_value(where, name, value)
    for name in ("name", "tenant"):
        if not _NAME.fullmatch(values.get(name, values.get("name", ""))):
            raise _refused(f"{where}.{name}: 1 to 64 letters, digits or ._:@/-")
    return _digest(where, values), Grant(
        name=values["name"],
        tenant=values.get("tenant", values["name"]),
        weight=float(values.get("weight", 1.0)),
        max_concurrency=values.get("max_concurrency"),
        tokens_per_minute=values.get("tokens_per_minute"),
        best_priority=values.get("best_priority"),
        isolated=True,
    )


def _check_value(where: str, name: str, value: Any) -> None:
    if name not in _TYPES:
        raise _refused(f"{where}: unknown field {name!r}")
    # type() and not isinstance: a boolean is no number here.
    if type(value) not in _TYPES[name]:
        raise _refused(f"{where}.{name} must be {_TYPES[name][0].__name__}")
    if name in _BOUNDS:
        low, high = _BOUNDS[name]
        if not low <= value <= high:
            raise _refused(f"{where}.{name} must be between {low} and {high}")


def _digest(where: str, values: dict[str, Any]) -> bytes:
    """Return the digest of a table's key, which the table holds in clear or as digest."""
    if ("sha256" in values) == ("key" in values):
        raise _refused(f"{where} needs either sha256 or key")
    if "key" in values:
        if not values["key"].strip():
            raise _refused(f"{where}.key must not be empty")
        return digest_of(values["key"].encode())
    if not _DIGEST.fullmatch(values["sha256"].lower()):
        raise _refused(f"{where}.sha256: 64 hexadecimal digits")
    return bytes.fromhex(values["sha256"])


def _refused(what: str) -> ConfigError:
    return ConfigError(what, field="api_keys")
