"""Where a router's console is, and its live data: what `baton top` and `baton console` share.

A router's admin port has `/console/data/stream`: first a snapshot of the whole system, then every
second a delta. `merged` puts a delta into a snapshot.
"""

from __future__ import annotations

import ssl
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final
from urllib.parse import parse_qs, urlsplit

import httpx

from baton.protocol.errors import BatonError, ConfigError, Unavailable
from baton.runtime.cache_folder import cache_folder
from bench.sse import StreamError, parse_line

URL_FILE: Final = "console_url"  # in the run folder of `baton up`
CONNECT_S: Final = 5.0
SILENCE_S: Final = 10.0  # a delta comes each second
MOST_KEPT: Final = {"ended": 50, "events": 200}  # requests and events, as in a snapshot

Snapshot = dict[str, Any]


@dataclass(frozen=True, slots=True)
class ConsoleAddress:
    """The admin port of a router, as `http://host:port`, and an operator's key."""

    origin: str
    key: str

    @property
    def page(self) -> str:
        """The address for a browser. What follows `#` is not sent to the server."""
        return f"{self.origin}/console" + (f"#key={self.key}" if self.key else "")


def console_address(
    given: str | None, key: str | None, environ: Mapping[str, str]
) -> ConsoleAddress:
    """Return the console that was `given` as URL; without one, that of the newest `baton up`.

    `key`: for a URL without `#key=...`. Raises ConfigError.
    """
    url = given or newest_console(environ)
    if url is None:
        text = "no `baton up` runs here: give the URL http://HOST:ADMIN_PORT/console"
        raise ConfigError(text, field="url")
    parts = urlsplit(url if "://" in url else f"http://{url}")
    if parts.scheme not in ("http", "https") or not parts.netloc:
        raise ConfigError(f"{url!r} is not the URL of a console", field="url")
    in_url = parse_qs(parts.fragment).get("key", [""])[0]
    return ConsoleAddress(f"{parts.scheme}://{parts.netloc}", in_url or key or "")


def newest_console(environ: Mapping[str, str]) -> str | None:
    """Return the console's URL, with its key, of the newest `baton up` here; None: none runs."""
    files = sorted(cache_folder("runs", environ).glob(f"*/{URL_FILE}"))
    files = [file for file in files if still_runs(file.parent)]
    return files[-1].read_text().split()[0] if files else None  # workers have one each


def still_runs(folder: Path) -> bool:
    """Whether the `baton up` of a run's folder is still there: the name ends with its process."""
    return Path(f"/proc/{folder.name.rpartition('-')[2]}").exists()


class ConsoleFeed:
    """Asks a console for its data. Close it with `async with`. `trust`: None is httpx's own."""

    def __init__(self, address: ConsoleAddress, trust: ssl.SSLContext | None = None) -> None:
        self._client = httpx.AsyncClient(
            base_url=address.origin,
            headers={"authorization": f"Bearer {address.key}"},
            timeout=httpx.Timeout(SILENCE_S, connect=CONNECT_S),
            trust_env=False,
            verify=trust or True,
        )

    async def __aenter__(self) -> ConsoleFeed:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._client.aclose()

    async def get(self, path: str) -> Any:
        """Return the JSON at `path`. Raises BatonError with the router's message."""
        try:
            reply = await self._client.get(path)
        except httpx.HTTPError as error:
            raise _away(error) from error
        return answer_of(reply)

    async def snapshots(self) -> AsyncIterator[Snapshot]:
        """Yield the state of the whole system, about once in a second. Raises BatonError."""
        snapshot: Snapshot = {}
        try:
            async with self._client.stream("GET", "/console/data/stream") as reply:
                if not reply.is_success:
                    await reply.aread()
                    answer_of(reply)
                async for line in reply.aiter_lines():
                    if (told := parse_line(line)) is not None:
                        snapshot = merged(snapshot, told)
                        yield snapshot
        except (httpx.HTTPError, StreamError) as error:
            raise _away(error) from error
        raise Unavailable("the router has ended the stream of its console")


def merged(snapshot: Snapshot, delta: Snapshot) -> Snapshot:
    """Return the snapshot after `delta`; a first delta is a whole snapshot. Changes neither.

    A delta holds the nodes that changed and the names of those that are `gone`, the events and
    ended requests that are new, and of everything else what has changed.
    """
    result = {**snapshot, **{key: delta[key] for key in delta if key not in ("gone", *_LISTS)}}
    nodes = {node["id"]: node for node in snapshot.get("nodes", ())}
    nodes |= {node["id"]: node for node in delta.get("nodes", ())}
    for name in delta.get("gone") or ():
        nodes.pop(name, None)
    result["nodes"] = list(nodes.values())
    events = [*snapshot.get("events", ()), *delta.get("events", ())]
    result["events"] = events[-MOST_KEPT["events"] :]
    requests, news = snapshot.get("requests", {}), delta.get("requests") or {}
    ended = [*news.get("ended", ()), *requests.get("ended", ())]  # the newest first
    result["requests"] = {**requests, **news, "ended": ended[: MOST_KEPT["ended"]]}
    return result


_LISTS: Final = ("nodes", "events", "requests")


def answer_of(reply: httpx.Response) -> Any:
    """Return the JSON that a router has answered. Raises BatonError with its message, Unavailable
    if it is no router's answer."""
    try:
        told = reply.json()
    except ValueError as error:
        raise Unavailable(f"{reply.request.url} is not a Baton router's") from error
    if reply.is_success:
        return told
    try:
        text = str(told["error"]["message"])
    except (KeyError, TypeError):
        text = f"{reply.request.url} answered {reply.status_code}"
    raise BatonError(text)


def _away(error: Exception) -> Unavailable:
    return Unavailable(f"the router's console does not answer: {error or type(error).__name__}")
