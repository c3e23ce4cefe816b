"""`baton chat` against a front door: thoughts are shown, dimmed, and are not part of the answer."""

from __future__ import annotations

import asyncio
import io
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import httpx
import pytest
from rich.console import Console

from bench.sse import StreamError
from deploy import cli
from deploy.chat import ChatClient, ChatSettings, StreamedAnswer, ask_and_show, chat, thought_of
from router.config import RouterConfig
from tests.front.fakes import FakeDispatcher, Front, serving

CONFIG = RouterConfig(request_timeout_s=20.0, reasoning_parser="deepseek_r1")


async def asked(answer: str) -> tuple[StreamedAnswer, str]:
    """What was returned, and what was printed."""
    out = io.StringIO()
    console = Console(file=out, width=200)
    messages = [{"role": "user", "content": "hi"}]

    def ask(port: int) -> StreamedAnswer:
        with ChatClient(f"http://127.0.0.1:{port}") as client:
            return ask_and_show(client, messages, ChatSettings(max_tokens=60), console)

    async with serving(Front(dispatcher=FakeDispatcher(answer), config=CONFIG)) as port:
        return await asyncio.to_thread(ask, port), out.getvalue()


async def test_a_thought_comes_before_the_answer_and_is_no_part_of_it() -> None:
    answer, shown = await asked("hm hm</think>yes")
    assert answer.text == "yes"
    thought, _, rest = shown.partition("\n\n")
    assert thought == "hm hm"
    assert rest.startswith("yes\n")
    assert answer.num_tokens is not None
    assert answer.first_thought_s is not None
    assert answer.first_text_s is not None
    assert answer.first_token_s == answer.first_thought_s <= answer.first_text_s <= answer.total_s
    assert "first thought" in shown
    assert "first text" in shown


async def test_a_thought_alone_is_shown() -> None:
    answer, shown = await asked("hm hm")
    assert answer.text == ""
    assert answer.first_text_s is None
    assert shown.startswith("hm hm\n")


@pytest.mark.parametrize(
    ("chunk", "thought"),
    [
        ({}, ""),
        ({"choices": []}, ""),
        ({"choices": [{"text": "x"}]}, ""),
        ({"choices": [{"delta": {"content": "x"}}]}, ""),
        ({"choices": [{"delta": {"reasoning_content": "y"}}]}, "y"),
        ({"choices": [{"delta": {"reasoning": "y", "reasoning_content": "y"}}]}, "y"),
    ],
)
def test_thoughts_have_two_names(chunk: dict[str, Any], thought: str) -> None:
    assert thought_of(chunk) == thought


# ---- a server that stops ----

HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
PIECE = b'data: {"choices":[{"delta":{"content":"half"}}]}\n\n'
CHUNK = b"%x\r\n%s\r\n" % (len(PIECE), PIECE)


@contextmanager
def stopping(said: bytes) -> Iterator[str]:
    """The URL of a server that says `said` to its only request, and is gone."""
    with socket.create_server(("127.0.0.1", 0)) as server:

        def serve() -> None:
            connection, _ = server.accept()
            with connection:
                while b"max_tokens" not in connection.recv(65536):
                    pass
                connection.sendall(said)

        thread = threading.Thread(target=serve)
        thread.start()
        yield f"http://127.0.0.1:{server.getsockname()[1]}"
        thread.join(20.0)


@pytest.mark.parametrize("said", [b"", HEAD, HEAD + CHUNK])
def test_a_server_that_stops_is_one_clean_sentence(
    said: bytes, capsys: pytest.CaptureFixture[str]
) -> None:
    with stopping(said) as url:
        assert cli.main(["chat", "hi", "--url", url, "--model", "m", "--max-tokens", "5"]) == 1
    told = capsys.readouterr()
    assert told.err == f"baton: {url} stopped before its answer was complete\n"
    assert ("half" in told.out) == (said == HEAD + CHUNK)


def test_a_silent_server_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    with ChatClient("http://router") as client:

        def silent(request: httpx.Request) -> httpx.Response:
            raise httpx.ReadTimeout("", request=request)

        monkeypatch.setattr(client, "_http", httpx.Client(
            base_url="http://router", transport=httpx.MockTransport(silent)
        ))  # fmt: skip
        with pytest.raises(StreamError, match="has said nothing for 120 s"):
            client.first_model()


# ---- commands ----


class Person(Console):
    """Types `lines`, then Ctrl-D."""

    def __init__(self, *lines: str) -> None:
        super().__init__(file=io.StringIO(), width=200)
        self.lines = list(lines)

    def input(self, *_: Any, **__: Any) -> str:
        if not self.lines:
            raise EOFError
        return self.lines.pop(0)


async def test_commands_are_not_asked() -> None:
    """`/help` lists them; an unknown one says so; a path is a question; `/quit` leaves."""
    front = Front(dispatcher=FakeDispatcher("yes"), config=CONFIG)
    person = Person("/help", "/hlep", "/etc/passwd is what?", "/new", "/quit", "never asked")

    def talk(port: int) -> None:
        with ChatClient(f"http://127.0.0.1:{port}") as client:
            chat(client, ChatSettings(max_tokens=5), person)

    async with serving(front) as port:
        await asyncio.to_thread(talk, port)
    shown = person.file.getvalue()  # type: ignore[attr-defined]
    assert "/help lists commands" in shown
    assert shown.count("forget the conversation") == 2
    assert "/hlep is no command" in shown
    assert len(front.dispatcher.requests) == 1
    assert person.lines == ["never asked"]
