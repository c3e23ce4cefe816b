"""The URL of Redis: which servers it names, and how a process logs in to them. No I/O.

    redis://[USER:PASSWORD@]HOST[:PORT][/DB]                          one server
    unix://[USER:PASSWORD@]PATH[?db=DB]                               the same, over a socket
    redis+sentinel://[USER:PASSWORD@]HOST[:PORT][,...]/SERVICE[/DB]   the hosts are Sentinels
    redis+cluster://[USER:PASSWORD@]HOST[:PORT][,...]                 some nodes of a Redis Cluster

`rediss` in place of `redis` means TLS. Valkey speaks all of them. Options follow a `?`. Those of
the first two are redis-py's own; the others take the options of TLS and, for Sentinels that want
another login than the server, `sentinel_username` and `sentinel_password`. All take
`password_file`: each new connection reads the password there.
"""

from __future__ import annotations

import enum
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final, NoReturn
from urllib.parse import parse_qsl, unquote, urlsplit

from baton.protocol.errors import ConfigError

FLAG: Final = "--redis-url"
SENTINEL_PORT: Final = 26379
CLUSTER_PORT: Final = 6379
PASSWORD_FILE: Final = "password_file"
TLS_OPTIONS: Final = ("ssl_ca_certs", "ssl_certfile", "ssl_keyfile", "ssl_check_hostname")
SENTINEL_OPTIONS: Final = ("sentinel_username", "sentinel_password")
_SECRET_OPTION: Final = re.compile(r"((?:^|&)\w*password=)[^&]*")


class RedisKind(enum.StrEnum):
    SINGLE = "single"
    SENTINEL = "sentinel"
    CLUSTER = "cluster"


SCHEMES: Final = {
    "redis": RedisKind.SINGLE, "rediss": RedisKind.SINGLE, "unix": RedisKind.SINGLE,
    "redis+sentinel": RedisKind.SENTINEL, "rediss+sentinel": RedisKind.SENTINEL,
    "redis+cluster": RedisKind.CLUSTER, "rediss+cluster": RedisKind.CLUSTER,
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class RedisAddress:
    """A parsed URL. All but `kind` and `url` are empty for one server, whose URL redis-py reads.

    `hosts`: host and port of Sentinels, or of nodes of a Cluster. `service`: what the Sentinels
    call the server. `login` and `sentinel_login`: `username` and `password`, as far as given; of
    `login` also `password_file`.
    `tls`: options of redis-py's SSLConnection; None: no TLS.
    """

    kind: RedisKind
    url: str = field(repr=False)
    hosts: tuple[tuple[str, int], ...] = ()
    service: str = ""
    database: int = 0
    login: Mapping[str, str] = field(default_factory=dict[str, str], repr=False)
    sentinel_login: Mapping[str, str] = field(default_factory=dict[str, str], repr=False)
    tls: Mapping[str, str | bool] | None = None

    @property
    def encrypted(self) -> bool:
        return self.url.startswith("rediss")


def parse_redis_url(url: str) -> RedisAddress:
    """Raise ConfigError for a URL to which no client could connect.

    The error never shows the URL, which may hold a password.
    """
    scheme, separator, rest = url.partition("://")
    kind = SCHEMES.get(scheme) if separator else None
    if kind is None:
        _refuse(f"must begin with {', '.join(f'{each}://' for each in SCHEMES)}")
    if kind is RedisKind.SINGLE:
        _check_single(url)
        return RedisAddress(kind, url)
    rest, _, query = rest.partition("?")
    netloc, _, path = rest.partition("/")
    userinfo, at, hosts = netloc.rpartition("@")
    service, database = _place(kind, path)
    options = _options(kind, query, encrypted=scheme.startswith("rediss"))
    sentinel_login = {
        name.removeprefix("sentinel_"): options.pop(name)
        for name in SENTINEL_OPTIONS
        if name in options
    }
    login = _login(userinfo) if at else {}
    if PASSWORD_FILE in options:
        login[PASSWORD_FILE] = options.pop(PASSWORD_FILE)
    port = SENTINEL_PORT if kind is RedisKind.SENTINEL else CLUSTER_PORT
    return RedisAddress(
        kind,
        url,
        hosts=tuple(_host(each, port) for each in hosts.split(",")),
        service=service,
        database=database,
        login=login,
        sentinel_login=sentinel_login,
        tls=_tls(options) if scheme.startswith("rediss") else None,
    )


def check_redis_url(url: str) -> None:
    """Raise ConfigError for a URL to which no client could connect."""
    parse_redis_url(url)


def without_password(url: str) -> str:
    """Return a Redis URL without its passwords, fit to be shown."""
    scheme, separator, rest = url.partition("://")
    place, mark, query = rest.partition("?")
    shown = place.rpartition("@")[2]
    told = _SECRET_OPTION.sub(r"\1***", query)
    return f"{scheme}{separator}{shown}{mark}{told}"


def _refuse(why: str) -> NoReturn:
    raise ConfigError(f"{FLAG}: {why}", field="redis_url") from None


def _check_single(url: str) -> None:
    try:
        parts = urlsplit(url)
        _ = parts.port  # urllib parses it here: ValueError if it is no number or out of range
    except ValueError:
        _refuse("its host or port is malformed")
    if parts.scheme != "unix":
        _database(parts.path.strip("/"))


def _database(text: str) -> int:
    if text and not (text.isascii() and text.isdecimal()):
        _refuse("the number of its database is malformed")  # redis-py would take 0
    return int(text or 0)


def _place(kind: RedisKind, path: str) -> tuple[str, int]:
    """Return service and database of the URL's path."""
    if kind is RedisKind.CLUSTER:
        if _database(path.strip("/")):
            _refuse("a Redis Cluster has no database but 0")
        return "", 0
    service, _, database = path.partition("/")
    if not service:
        _refuse("the name of the Sentinels' service is missing: .../SERVICE or .../SERVICE/DB")
    return unquote(service), _database(database.strip("/"))


def _host(text: str, default_port: int) -> tuple[str, int]:
    """Return host and port of `HOST`, `HOST:PORT` or `[IPV6]:PORT`."""
    found = re.fullmatch(r"(?:\[([0-9A-Fa-f:.%]+)\]|([^:\[\]/\s]+))(?::(\d{1,5}))?", text)
    if found is None or not 0 < int(found[3] or default_port) < 65536:
        _refuse("a host or port is malformed; it takes HOST:PORT,HOST:PORT,...")
    return unquote(found[1] or found[2]), int(found[3] or default_port)


def _login(userinfo: str) -> dict[str, str]:
    username, _, password = userinfo.partition(":")
    login = {"username": unquote(username), "password": unquote(password)}
    return {name: value for name, value in login.items() if value}


def _options(kind: RedisKind, query: str, *, encrypted: bool) -> dict[str, str]:
    try:
        options = dict(parse_qsl(query, keep_blank_values=True, strict_parsing=bool(query)))
    except ValueError:
        _refuse("an option has no value; they follow a ? as NAME=VALUE&NAME=VALUE")
    known = (PASSWORD_FILE, *TLS_OPTIONS) + (SENTINEL_OPTIONS if kind is RedisKind.SENTINEL else ())
    for name in options:
        if name not in known:
            _refuse(f"there is no option {name!r}; it takes {', '.join(known)}")
        if name in TLS_OPTIONS and not encrypted:
            _refuse(f"the option {name} needs rediss+{kind.value}://")
    return options


def _tls(options: Mapping[str, str]) -> dict[str, str | bool]:
    """Return the options of redis-py's SSLConnection."""
    words = {"true": True, "yes": True, "1": True, "false": False, "no": False, "0": False}
    check = words.get(options.get("ssl_check_hostname", "true").lower())
    if check is None:
        _refuse("ssl_check_hostname is true or false")
    if ("ssl_keyfile" in options) != ("ssl_certfile" in options):
        _refuse("ssl_certfile and ssl_keyfile come together")
    return {**options, "ssl_check_hostname": check}
