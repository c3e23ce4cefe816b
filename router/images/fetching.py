"""MediaFetcher: fetches images from URLs of clients, without becoming their way into the network.

A URL of a client must not reach what only this machine can reach (server-side request forgery):

    hosts       only those of --allowed-media-domains; by default none
    addresses   a host's name is resolved here; every address that it has must be public, and the
                connection goes to an address that was checked: the name is not resolved again
    redirects   at most MAX_HOPS, each judged like the first URL; never from https to http
    size, time  the limit of bytes holds while reading, the time for all hops together
    nothing else: no proxy of the environment, no cookies, no compressed bodies, no other schemes

A tenant's fetches take turns with those of others (router/tenants/turns.py).
"""

from __future__ import annotations

import asyncio
import socket
import ssl
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass
from ipaddress import IPv4Address, IPv6Address, ip_address, ip_network
from typing import Any, Final, cast
from urllib.parse import SplitResult, urljoin, urlsplit

import httpcore

from baton.protocol.clock import Clock, SystemClock
from baton.protocol.errors import InvalidRequest, UnsupportedFeature
from router.images.limits import ImageLimits
from router.tenants.keys import Grant
from router.tenants.turns import Turns

PLACES: Final = 8  # fetches at once
EXPECTED_S: Final = 0.3
MAX_HOPS: Final = 3
_PORTS: Final = {"http": 80, "https": 443}
_REDIRECTS: Final = frozenset({301, 302, 303, 307, 308})
_NAT64: Final = ip_network("64:ff9b::/96")  # an IPv4 address in its last 32 bits
_HEADERS: Final = (
    (b"User-Agent", b"baton"), (b"Accept", b"image/*"), (b"Accept-Encoding", b"identity"),
)  # fmt: skip
Resolve = Callable[[str, int], Awaitable[Sequence[str]]]


class _Refused(Exception):
    """Why a URL is not fetched, in words for its client."""


@dataclass(frozen=True, slots=True)
class _Target:
    """A URL that may be fetched."""

    scheme: str
    host: str
    port: int
    path: str

    @property
    def authority(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return host if _PORTS[self.scheme] == self.port else f"{host}:{self.port}"

    @property
    def url(self) -> str:
        return f"{self.scheme}://{self.authority}{self.path}"


class MediaFetcher:
    """Fetches files by the rules above. `resolve`: returns the addresses of a host, as text."""

    def __init__(
        self, limits: ImageLimits, resolve: Resolve | None = None, clock: Clock | None = None
    ) -> None:
        self._limits = limits
        self._resolve = resolve or resolved
        self._turns = Turns(PLACES, clock or SystemClock())
        self._tls: ssl.SSLContext | None = None

    async def get(self, url: str, field: str, grant: Grant, most_bytes: int) -> bytes:
        """Return the file at `url`, of at most `most_bytes`.

        Raises InvalidRequest, naming `field`, for anything that goes wrong; Overloaded if too many
        fetches of the tenant wait."""
        if not self._limits.domains:
            message = (
                f"{field}: this server fetches no images (--allowed-media-domains): send a data URL"
            )
            raise UnsupportedFeature(message, field=field)
        place = await self._turns.take(grant, EXPECTED_S)
        try:
            async with asyncio.timeout(self._limits.fetch_s):
                return await self._followed(url, most_bytes)
        except _Refused as error:
            raise InvalidRequest(f"{field}: {error}", field=field) from error
        except TimeoutError as error:
            message = f"{field}: the image did not come within {self._limits.fetch_s:g} s"
            raise InvalidRequest(message, field=field) from error
        except (httpcore.NetworkError, httpcore.ProtocolError, httpcore.TimeoutException) as error:
            message = f"{field}: the image could not be fetched"
            raise InvalidRequest(message, field=field) from error
        finally:
            place.give_back()

    async def _followed(self, url: str, most_bytes: int) -> bytes:
        """Fetch a URL and what it redirects to."""
        target = target_of(url, self._limits.domains)
        for _ in range(1 + MAX_HOPS):
            found = await self._fetched(target, most_bytes)
            if isinstance(found, bytes):
                return found
            hop = target_of(urljoin(target.url, found), self._limits.domains)
            if (target.scheme, hop.scheme) == ("https", "http"):
                raise _Refused("its redirect leaves https")
            target = hop
        raise _Refused(f"more than {MAX_HOPS} redirects")

    async def _fetched(self, target: _Target, most_bytes: int) -> bytes | str:
        """Return the file, or the place that it redirects to."""
        if self._tls is None and target.scheme == "https":
            self._tls = await asyncio.to_thread(ssl.create_default_context)
        backend = _CheckedBackend(self._resolve, self._limits.private_addresses)
        try:
            return await self._asked(target, backend, most_bytes)
        finally:
            await backend.close()

    async def _asked(
        self, target: _Target, backend: _CheckedBackend, most_bytes: int
    ) -> bytes | str:
        url = httpcore.URL(
            scheme=target.scheme, host=target.host, port=target.port, target=target.path
        )
        headers = [(b"Host", target.authority.encode()), *_HEADERS]
        async with (
            httpcore.AsyncConnectionPool(
                ssl_context=self._tls, network_backend=backend, max_connections=1
            ) as pool,
            pool.stream("GET", url, headers=headers) as response,
        ):
            told = {name.lower(): value for name, value in response.headers}
            if response.status in _REDIRECTS and b"location" in told:
                return told[b"location"].decode("latin-1")
            if response.status != 200:
                raise _Refused(f"its host answers with status {response.status}")
            if told.get(b"content-encoding", b"identity").lower() != b"identity":
                raise _Refused("its host sends it compressed")
            length = told.get(b"content-length", b"0")
            if length.isdigit() and int(length) > most_bytes:
                raise _Refused(too_large(most_bytes))
            return await _read(response.aiter_stream(), most_bytes)


async def _read(parts: Any, most_bytes: int) -> bytes:
    content = bytearray()
    async for part in parts:
        content += part
        if len(content) > most_bytes:
            raise _Refused(too_large(most_bytes))
    return bytes(content)


def too_large(most_bytes: int) -> str:
    return f"the image has more than the {most_bytes} bytes that are allowed"


def target_of(url: str, domains: Sequence[str]) -> _Target:
    """Return what to fetch for a URL, if its host is allowed.

    Raises _Refused. A URL that could be read in two ways is refused: what is judged here is what is
    fetched."""
    if not url.isascii() or not url.isprintable() or " " in url or "\\" in url:
        raise _Refused("a URL has no spaces, backslashes or unescaped characters")
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError as error:
        raise _Refused("this is no URL") from error
    if parts.scheme not in _PORTS:
        raise _Refused("only http and https are fetched")
    host = (parts.hostname or "").rstrip(".")
    if not host or "@" in parts.netloc or "%" in host:
        raise _Refused("its host is no plain name")
    port = _PORTS[parts.scheme] if port is None else port
    if not _is_allowed(host, port, parts.scheme, domains):
        raise _Refused(f"the host {host[:200]} is not among --allowed-media-domains")
    return _Target(parts.scheme, host, port, _path_of(parts))


def _path_of(parts: SplitResult) -> str:
    return (parts.path or "/") + (f"?{parts.query}" if parts.query else "")


def _is_allowed(host: str, port: int, scheme: str, domains: Sequence[str]) -> bool:
    """Whether a host is in the list. An entry without a port allows the scheme's own port."""
    shown = f"[{host}]" if ":" in host else host
    if f"{shown}:{port}" in domains:
        return True
    return port == _PORTS[scheme] and (shown in domains or "*" in domains)


class _CheckedBackend(httpcore.AsyncNetworkBackend):
    """Connects to checked addresses alone. httpcore takes a backend as a subclass only. `close`
    closes what httpcore leaves open when it is cancelled in the middle of a TLS handshake."""

    def __init__(self, resolve: Resolve, private_addresses: bool) -> None:
        self._resolve = resolve
        self._private = private_addresses
        self._opened: list[httpcore.AsyncNetworkStream] = []
        self._inner = cast("httpcore.AsyncNetworkBackend", httpcore.AnyIOBackend())

    async def connect_tcp(
        self,
        host: str,
        port: int,
        timeout: float | None = None,
        local_address: str | None = None,
        socket_options: Iterable[Any] | None = None,
    ) -> httpcore.AsyncNetworkStream:
        addresses = await self._resolve(host, port)
        if not addresses:
            raise _Refused("its host is not known")
        if not self._private and not all(map(is_public, addresses)):
            raise _Refused("its host has no public address")
        stream = await self._inner.connect_tcp(
            addresses[0], port, timeout, local_address, socket_options
        )
        self._opened.append(stream)
        return stream

    async def close(self) -> None:
        for stream in self._opened:
            await stream.aclose()

    async def connect_unix_socket(
        self, path: str, timeout: float | None = None, socket_options: Iterable[Any] | None = None
    ) -> httpcore.AsyncNetworkStream:
        raise AssertionError("no URL names a socket")

    async def sleep(self, seconds: float) -> None:
        await asyncio.sleep(seconds)


def is_public(address: str) -> bool:
    """Whether an address is one of the internet, and also any IPv4 address within it."""
    try:
        found = ip_address(address.partition("%")[0])
    except ValueError:
        return False
    return all(each.is_global and not each.is_multicast for each in _meant(found))


def _meant(address: IPv4Address | IPv6Address) -> list[IPv4Address | IPv6Address]:
    """Return an address, and the IPv4 addresses that packets to it may end at."""
    if isinstance(address, IPv4Address):
        return [address]
    mapped = address.ipv4_mapped
    if mapped is not None:
        return [mapped]
    within: list[IPv4Address | IPv6Address] = [address]
    if address.sixtofour is not None:
        within.append(address.sixtofour)
    if address.teredo is not None:
        within += address.teredo
    if address in _NAT64:
        within.append(IPv4Address(int(address) & 0xFFFF_FFFF))
    return within


async def resolved(host: str, port: int) -> list[str]:
    """Return the addresses of a host by the machine's resolver, [] if it has none."""
    try:
        ip_address(host)
    except ValueError:
        pass
    else:
        return [host]
    loop = asyncio.get_running_loop()
    try:
        found = await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError):
        return []
    return list(dict.fromkeys(str(place[0]) for *_, place in found))
