"""`/` and `/docs`: what a person who looks in with a browser reads."""

from __future__ import annotations

from html.parser import HTMLParser

from router.api.openapi.document import OPERATIONS, document
from router.api.openapi.page import page
from tests.front.fakes import Front

LEADS_OUT = ("src", "href", "action", "srcset", "data")


class Reader(HTMLParser):
    """Collects links, anchors, tags and text."""

    def __init__(self) -> None:
        super().__init__()
        self.links: set[str] = set()
        self.anchors: set[str] = set()
        self.tags: set[str] = set()
        self.text: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        self.links |= {value or "" for name, value in attrs if name in LEADS_OUT}
        self.anchors |= {value or "" for name, value in attrs if name == "id"}

    def handle_data(self, data: str) -> None:
        self.text.append(data)


def read(html: str) -> Reader:
    reader = Reader()
    reader.feed(html)
    return reader


async def test_the_root_leads_to_a_page_of_all_endpoints() -> None:
    async with Front().client() as client:
        first = await client.get("/")
        assert first.status_code == 307
        reply = await client.get("/", follow_redirects=True)
    assert reply.url.path == "/docs"
    assert reply.headers["content-type"].startswith("text/html")
    assert "default-src 'none'" in reply.headers["content-security-policy"]
    text = " ".join(read(reply.text).text)
    assert "/tokenizer_info" not in text, "it is off by default"
    for operation in OPERATIONS:
        if operation.path == "/tokenizer_info":
            continue
        assert f"{operation.method.upper()} {operation.path}" in text
        assert operation.summary in text


def test_the_page_asks_nobody_for_anything() -> None:
    """No script, no outside address; every link within the page leads somewhere."""
    found = read(page(document()))
    assert not found.tags & {"script", "link", "img", "iframe", "object", "form"}
    within = {link[1:] for link in found.links if link.startswith("#")}
    assert within <= found.anchors
    assert {"ChatBody", "ErrorReply"} <= found.anchors
    assert found.links - {f"#{name}" for name in within} == {"openapi.json", "v1/models"}


def test_what_the_document_says_is_text_and_no_markup() -> None:
    told = {
        "info": {"title": "<b>", "version": "1", "description": "a & b"},
        "paths": {"/<i>": {"get": {"summary": "<script>", "responses": {"200": {"content": {}}}}}},
        "components": {"schemas": {"T": {"properties": {"<u>": {"enum": ["<s>"]}}}}},
    }
    html = page(told)
    assert not read(html).tags & {"b", "i", "u", "s", "script"}
    assert "&lt;script&gt;" in html
