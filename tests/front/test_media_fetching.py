"""Images by URL: from allowed hosts alone, at public addresses, within limits; over a real server
on loopback, whose names a resolver of the test knows."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from baton.protocol.errors import BatonError, ConfigError, InvalidRequest, UnsupportedFeature
from router.config import RouterConfig
from router.images.fetching import MediaFetcher, is_public
from router.images.limits import MAX_IMAGES, ImageLimits, images_per_request
from router.tenants.keys import EVERYBODY
from tests.front.image_front import asked, image_front, part, said
from tests.images.files import picture

FILE = picture()
FIELD = "messages[0].content[0].image_url"
MOST = 1 << 20


@dataclass
class Host:
    """A server of files on loopback: path -> (status line, headers, body); it notes what is
    asked."""

    port: int = 0
    pages: dict[str, tuple[str, dict[str, str], bytes]] = field(
        default_factory=dict[str, tuple[str, dict[str, str], bytes]]
    )
    heads: list[str] = field(default_factory=list[str])
    slow: set[str] = field(default_factory=set[str])

    def put(self, path: str, body: bytes = FILE, status: str = "200 OK", **headers: str) -> str:
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        self.pages[path] = (status, named, body)
        return path

    async def answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Answer one request, and close the connection."""
        try:
            with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):
                await self._answered(reader, writer)
        finally:
            writer.close()
            with contextlib.suppress(ConnectionError):
                await writer.wait_closed()

    async def _answered(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = (await reader.readuntil(b"\r\n\r\n")).decode()
        self.heads.append(head)
        path = head.split(" ")[1]
        status, headers, body = self.pages.get(path, ("404 Not Found", {}, b""))
        if path in self.slow:
            await asyncio.Event().wait()
        if "content-length" not in headers and "transfer-encoding" not in headers:
            headers = {**headers, "content-length": str(len(body))}
        told = "".join(f"{name}: {value}\r\n" for name, value in headers.items())
        writer.write(f"HTTP/1.1 {status}\r\n{told}\r\n".encode() + body)
        await writer.drain()


@pytest.fixture
async def host() -> AsyncIterator[Host]:
    made = Host()
    answering: set[asyncio.Task[None]] = set()

    def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        answering.add(asyncio.get_running_loop().create_task(made.answer(reader, writer)))

    server = await asyncio.start_server(accept, "127.0.0.1", 0)
    made.port = server.sockets[0].getsockname()[1]
    yield made
    server.close()
    for task in answering:
        task.cancel()
    await asyncio.gather(*answering, return_exceptions=True)


Names = Mapping[str, Sequence[str]]


def resolver(names: Names, asked_for: list[str] | None = None) -> Callable[..., Awaitable[Any]]:
    async def resolve(name: str, port: int) -> Sequence[str]:
        if asked_for is not None:
            asked_for.append(name)
        return names.get(name, [])

    return resolve


def fetcher(host: Host, *domains: str, **limits: Any) -> MediaFetcher:
    """A fetcher that may reach loopback, where `files.test` and `other.test` are."""
    names = {name: ["127.0.0.1"] for name in ("files.test", "other.test")}
    allowed = domains or (f"files.test:{host.port}",)
    made = ImageLimits(domains=allowed, **{"private_addresses": True, **limits})
    return MediaFetcher(made, resolver(names))


async def refused(by: MediaFetcher, url: str, most: int = MOST) -> str:
    with pytest.raises(InvalidRequest) as caught:
        await by.get(url, FIELD, EVERYBODY, most)
    assert caught.value.field == FIELD
    assert "127.0.0.1" not in caught.value.message.replace("the host 127.0.0.1", "")
    return caught.value.message


async def test_a_file_of_an_allowed_host(host: Host) -> None:
    url = f"http://files.test:{host.port}{host.put('/a.png?x=1')}"
    assert await fetcher(host).get(url, FIELD, EVERYBODY, MOST) == FILE
    [head] = host.heads
    assert head.startswith("GET /a.png?x=1 HTTP/1.1\r\n")
    assert f"Host: files.test:{host.port}\r\n" in head
    assert "cookie" not in head.lower()


async def test_nothing_is_fetched_without_the_option(host: Host) -> None:
    with pytest.raises(UnsupportedFeature, match="--allowed-media-domains"):
        await MediaFetcher(ImageLimits()).get("https://files.test/a", FIELD, EVERYBODY, MOST)


async def test_other_hosts_ports_and_schemes(host: Host) -> None:
    by, port = fetcher(host), host.port
    urls = [
        f"http://other.test:{port}/a", f"http://files.test:{port + 1}/a", "http://files.test/a",
        f"http://files.test.evil.test:{port}/a", f"http://files.test:{port}@other.test/a",
        f"http://user:pass@files.test:{port}/a", f"http://other.test\\@files.test:{port}/a",
        f"http://other.test#@files.test:{port}/a", f"http://files.test%2e:{port}/a",
        f"file://files.test:{port}/a", f"gopher://files.test:{port}/a", "http:///a",
        f"http://127.0.0.1:{port}/a", "http://[::1]/a", "http://2130706433/a", "http://0x7f.1/a",
        f"http://files.test:{port}/a b", "http://files.test:99999/a", "http://[/a",
        f"http://files.te\u017ft:{port}/a", f"http://files.test:{port}/\r\nHost: x",
    ]  # fmt: skip
    for url in urls:
        await refused(by, url)
    assert not host.heads


@pytest.mark.parametrize(
    "address",
    [
        "127.0.0.1", "127.9.9.9", "0.0.0.0", "10.1.2.3", "172.16.0.1", "192.168.1.1",
        "169.254.169.254", "100.64.0.1", "224.0.0.1", "255.255.255.255", "192.0.2.1", "::", "::1",
        "fe80::1", "fe80::1%eth0", "fc00::1", "fd00:ec2::254", "ff02::1", "::ffff:127.0.0.1",
        "::ffff:10.0.0.1", "64:ff9b::7f00:1", "64:ff9b::a9fe:a9fe", "2002:7f00:1::",
        "2001:db8::1", "no address",
    ],
)  # fmt: skip
async def test_addresses_of_this_network_are_not_reached(host: Host, address: str) -> None:
    assert not is_public(address)
    limits = ImageLimits(domains=("*",))
    for addresses in ([address], ["93.184.216.34", address], [address, "93.184.216.34"]):
        by = MediaFetcher(limits, resolver({"files.test": addresses}))
        assert "no public address" in await refused(by, "http://files.test/a")


def test_public_addresses() -> None:
    for address in ("93.184.216.34", "8.8.8.8", "2606:2800:220:1::1", "::ffff:8.8.8.8"):
        assert is_public(address)


async def test_the_name_is_resolved_once_for_a_connection(host: Host) -> None:
    """A name that changes between check and connection (DNS rebinding) changes nothing: the
    connection goes to the address that was checked."""
    asked_for: list[str] = []
    limits = ImageLimits(domains=("*", f"files.test:{host.port}"), private_addresses=True)
    by = MediaFetcher(limits, resolver({"files.test": ["127.0.0.1"]}, asked_for))
    await by.get(f"http://files.test:{host.port}{host.put('/a')}", FIELD, EVERYBODY, MOST)
    assert asked_for == ["files.test"]
    assert "is not known" in await refused(by, "http://unknown.test/a")


async def test_every_redirect_is_judged(host: Host) -> None:
    by, base = fetcher(host), f"http://files.test:{host.port}"
    host.put("/a")
    host.put("/there", b"", "302 Found", location="/a")
    host.put("/whole", b"", "307 Temporary Redirect", location=f"{base}/there")
    assert await by.get(f"{base}/whole", FIELD, EVERYBODY, MOST) == FILE
    asked_before = len(host.heads)
    for place in (
        f"http://other.test:{host.port}/a", "http://169.254.169.254/latest", "file:///etc/passwd",
        f"//other.test:{host.port}/a", "http://[::1]/",
    ):  # fmt: skip
        host.put("/away", b"", "301 Moved", location=place)
        await refused(by, f"{base}/away")
    assert len(host.heads) == asked_before + 5  # each time only the redirect itself
    host.put("/round", b"", "302 Found", location="/round")
    assert "more than 3 redirects" in await refused(by, f"{base}/round")


async def test_a_redirect_to_a_private_address(host: Host) -> None:
    """An allowed host that redirects to an allowed name, which is inside this network."""
    names = {"files.test": ["127.0.0.1"], "inside.test": ["10.0.0.7"]}
    allowed = (f"files.test:{host.port}", "inside.test")
    limits = ImageLimits(domains=allowed, private_addresses=False)
    by = MediaFetcher(limits, resolver(names))
    assert "no public address" in await refused(by, f"http://files.test:{host.port}/a")
    assert "no public address" in await refused(by, "http://inside.test/a")
    assert not host.heads


async def test_sizes_and_answers(host: Host) -> None:
    by, base = fetcher(host), f"http://files.test:{host.port}"
    host.put("/large", bytes(2000))
    assert "1000 bytes" in await refused(by, f"{base}/large", 1000)
    chunk = b"400\r\n" + bytes(1024) + b"\r\n"
    host.put("/endless", chunk * 50, transfer_encoding="chunked")
    assert "1000 bytes" in await refused(by, f"{base}/endless", 1000)
    host.put("/zipped", FILE, content_encoding="gzip")
    assert "compressed" in await refused(by, f"{base}/zipped")
    assert "status 404" in await refused(by, f"{base}/none")
    host.put("/short", b"abc", content_length="9")
    assert "could not be fetched" in await refused(by, f"{base}/short")
    closed = fetcher(host, "files.test:1")
    assert "could not be fetched" in await refused(closed, "http://files.test:1/a")
    tls = fetcher(host, fetch_s=0.3)  # the server waits for a plain head
    assert "within 0.3 s" in await refused(tls, f"https://files.test:{host.port}/a")


async def test_a_host_that_says_nothing(host: Host) -> None:
    host.slow.add(host.put("/slow"))
    by = fetcher(host, fetch_s=0.3)
    told = await refused(by, f"http://files.test:{host.port}/slow")
    assert "within 0.3 s" in told


async def test_a_request_with_a_url(host: Host, tmp_path: Path) -> None:
    domain = f"localhost:{host.port}"
    front = image_front(tmp_path, allowed_media_domains=(domain,), media_private_addresses=True)
    url = f"http://{domain}{host.put('/a.png')}"
    async with front.client() as client:
        body = {"messages": said(part(url), part(url))}
        assert (await client.post("/v1/chat/completions", json=body)).status_code == 200
        assert [image.data for image in asked(front).images] == [FILE, FILE]
        host.put("/a.png", b"<svg/>")
        body = {"messages": said(part(url))}
        reply = await client.post("/v1/chat/completions", json=body)
        assert (reply.status_code, reply.json()["error"]["param"]) == (400, FIELD)
        blocks = [{"type": "image", "source": {"type": "url", "url": f"http://{domain}/none"}}]
        body = {"max_tokens": 3, "messages": [{"role": "user", "content": blocks}]}
        reply = await client.post("/v1/messages", json=body)
        assert reply.status_code == 400
        assert "messages[0].content[0].source.url: its host answers with status 404" in reply.text


# ---- options ----


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ('{"image": 4}', 4), ("image=4", 4), ("image=3,video=0", 3), ('{"image": 0}', 0),
        ('{"video": 2}', MAX_IMAGES), ('{"image": {"count": 2, "width": 5}}', 2),
    ],
)  # fmt: skip
def test_limit_mm_per_prompt(text: str, count: int) -> None:
    assert images_per_request(text) == count
    assert RouterConfig(limit_mm_per_prompt=text).image_limits().num_images == count


@pytest.mark.parametrize(
    ("options", "field"),
    [
        ({"limit_mm_per_prompt": "4"}, "limit_mm_per_prompt"),
        ({"limit_mm_per_prompt": '{"image": 1000}'}, "limit_mm_per_prompt"),
        ({"limit_mm_per_prompt": "image=x"}, "limit_mm_per_prompt"),
        ({"allowed_media_domains": ("https://a.org",)}, "allowed_media_domains"),
        ({"allowed_media_domains": ("A.org",)}, "allowed_media_domains"),
        ({"max_image_mb": 0}, "max_image_mb"),
        ({"max_image_megapixels": 0}, "max_image_megapixels"),
        ({"media_fetch_s": 0.0}, "media_fetch_s"),
        ({"max_live_image_mb": 0}, "max_live_image_mb"),
    ],
)
def test_wrong_options_stop_the_start(options: dict[str, Any], field: str) -> None:
    with pytest.raises(ConfigError) as caught:
        RouterConfig(model="x", **options).check()
    assert caught.value.field == field
    assert isinstance(caught.value, BatonError)
