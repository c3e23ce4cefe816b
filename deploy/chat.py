"""A small OpenAI chat client for the terminal: `baton chat`, and the first question of `baton up`.

It works with any OpenAI-compatible URL. It is synchronous: one person, one question at a time.
"""

from __future__ import annotations

import re
import ssl
import time
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Final

import httpx
from rich.console import Console

from bench.sse import StreamError, parse_lines, text_of

CONNECT_TIMEOUT_S = 5.0
SILENCE_TIMEOUT_S = 120.0  # between two pieces of a stream; long prompts on a CPU take a while
READY_PAUSE_S = 0.03
HELP: Final = """/new   forget the conversation and start over
/help  this list
/quit  leave, as Ctrl-D does
Ctrl-C stops an answer. Everything else is asked."""

Message = dict[str, str]
_NODE = re.compile(r'[{,]node="([^"]+)"')


@dataclass(frozen=True, slots=True)
class ChatSettings:
    """Values that are sent with each question; None = the server's default."""

    model: str | None = None
    max_tokens: int | None = None
    temperature: float | None = None
    seed: int | None = None


@dataclass(frozen=True, slots=True)
class StreamedAnswer:
    """A complete answer, with its times in seconds.

    `first_text_s` and `first_thought_s` are the times until the first piece of text and of thought;
    None if there was none.
    """

    text: str
    first_text_s: float | None
    total_s: float
    num_tokens: int | None
    first_thought_s: float | None = None

    @property
    def first_token_s(self) -> float:
        """Seconds until the first piece of thought or text; `total_s` if there was none."""
        came = [at for at in (self.first_thought_s, self.first_text_s) if at is not None]
        return min(came, default=self.total_s)


@dataclass(slots=True)
class ChatSession:
    """The messages so far. A failed question is not among them."""

    messages: list[Message] = field(default_factory=list[Message])

    def asked(self, question: str) -> list[Message]:
        return [*self.messages, {"role": "user", "content": question}]

    def answered(self, question: str, answer: str) -> None:
        self.messages = [*self.asked(question), {"role": "assistant", "content": answer}]


class ChatClient:
    """Talks to one server. Raises httpx.HTTPError or StreamError; both carry a readable message."""

    def __init__(
        self, url: str, api_key: str | None = None, trust: ssl.SSLContext | None = None
    ) -> None:
        """Make a client of `url`. `trust` is for https; None = the CAs that httpx knows."""
        self.url = url.rstrip("/").removesuffix("/v1")
        headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        timeout = httpx.Timeout(SILENCE_TIMEOUT_S, connect=CONNECT_TIMEOUT_S)
        verify = True if trust is None else trust
        self._http = httpx.Client(
            base_url=self.url, headers=headers, timeout=timeout, verify=verify
        )

    def wait_ready(self, timeout_s: float) -> None:
        """Return when `/ready` answers 200; after `timeout_s` raise StreamError with the last
        answer.

        HTTP has no event to wait on, so this asks every 30 ms. Only a starting launcher calls it.
        """
        deadline = time.monotonic() + timeout_s
        while True:
            try:
                response = self._http.get("/ready")
                if response.is_success:
                    return
                state = response.text.strip()
            except httpx.TransportError as error:
                state = str(error)
            if time.monotonic() >= deadline:
                raise StreamError(f"{self.url} is not ready after {timeout_s:.0f} s: {state}")
            time.sleep(READY_PAUSE_S)

    def nodes(self) -> set[str]:
        """Return the ids of the nodes that the server's metrics name."""
        response = self._http.get("/metrics")
        _raise_for_status(response)
        return set(_NODE.findall(response.text))

    def first_model(self) -> str:
        """Return the first model that the server lists."""
        with self._reaching():
            response = self._http.get("/v1/models")
        _raise_for_status(response)
        models = response.json().get("data") or []
        if not models:
            raise StreamError(f"{self.url} lists no model")
        return str(models[0]["id"])

    def ask(
        self,
        messages: Sequence[Message],
        settings: ChatSettings,
        show: Callable[[str], None],
        think: Callable[[str], None] = lambda _: None,
    ) -> StreamedAnswer:
        """Stream one answer and return it.

        `show` gets each piece of text as it comes, `think` each piece of a thought before the text.
        """
        body: dict[str, object] = {
            "model": settings.model or self.first_model(),
            "messages": list(messages),
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        optional = {
            "max_tokens": settings.max_tokens,
            "temperature": settings.temperature,
            "seed": settings.seed,
        }
        body |= {name: value for name, value in optional.items() if value is not None}
        with self._reaching():
            return self._stream(body, show, think)

    @contextmanager
    def _reaching(self) -> Generator[None, None, None]:
        """Turn the errors of a server that is not there, or goes away, into a StreamError."""
        try:
            yield
        except httpx.ConnectError as error:
            text = f"no router at {self.url}; is `./run up` running?"
            raise StreamError(text) from error
        except httpx.ReadTimeout as error:
            text = f"{self.url} has said nothing for {SILENCE_TIMEOUT_S:.0f} s: given up"
            raise StreamError(text) from error
        except (httpx.NetworkError, httpx.RemoteProtocolError) as error:
            text = f"{self.url} stopped before its answer was complete"
            raise StreamError(text) from error

    def _stream(
        self, body: dict[str, object], show: Callable[[str], None], think: Callable[[str], None]
    ) -> StreamedAnswer:
        began = time.monotonic()
        first_text: float | None = None
        first_thought: float | None = None
        pieces: list[str] = []
        num_tokens: int | None = None
        with self._http.stream("POST", "/v1/chat/completions", json=body) as response:
            _raise_for_status(response)
            for chunk in parse_lines(response.iter_lines()):
                text, thought = text_of(chunk), thought_of(chunk)
                if thought:
                    first_thought = first_thought or time.monotonic() - began
                    think(thought)
                if text:
                    first_text = first_text or time.monotonic() - began
                    pieces.append(text)
                    show(text)
                if chunk.get("usage"):
                    num_tokens = int(chunk["usage"]["completion_tokens"])
        total = time.monotonic() - began
        return StreamedAnswer("".join(pieces), first_text, total, num_tokens, first_thought)

    def close(self) -> None:
        self._http.close()

    def __enter__(self) -> ChatClient:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()


def thought_of(chunk: dict[str, Any]) -> str:
    """Return the text of a thought in a chunk, under vLLM's newer or older name."""
    deltas = [choice.get("delta") or {} for choice in chunk.get("choices") or []]
    return "".join(each.get("reasoning") or each.get("reasoning_content") or "" for each in deltas)


def _raise_for_status(response: httpx.Response) -> None:
    """Raise StreamError with the server's own message for a 4xx or 5xx."""
    if response.is_success:
        return
    response.read()
    try:
        message = str(response.json()["error"]["message"])
    except (ValueError, KeyError, TypeError):
        message = response.text.strip()[:500]
    raise StreamError(f"HTTP {response.status_code}: {message}")


def describe(answer: StreamedAnswer) -> str:
    """Return one line about the speed of an answer."""
    thought, text = answer.first_thought_s, answer.first_text_s
    named = [("thought", thought), ("token" if thought is None else "text", text)]
    parts = [f"first {name} {at * 1000:.0f} ms" for name, at in named if at is not None]
    if answer.num_tokens and answer.num_tokens > 1 and answer.total_s > answer.first_token_s:
        rate = (answer.num_tokens - 1) / (answer.total_s - answer.first_token_s)
        parts.append(f"{answer.num_tokens} tokens, {rate:.0f} per second")
    return ", ".join(parts)


def ask_and_show(
    client: ChatClient, messages: Sequence[Message], settings: ChatSettings, console: Console
) -> StreamedAnswer:
    """Ask, print the answer while it streams (thoughts are dimmed), then a line about its speed."""
    thoughtful = False

    def show(text: str, style: str | None = None) -> None:
        console.print(text, end="", markup=False, highlight=False, soft_wrap=True, style=style)
        console.file.flush()

    def think(text: str) -> None:
        nonlocal thoughtful
        thoughtful = True
        show(text, "dim")

    def speak(text: str) -> None:
        nonlocal thoughtful
        if thoughtful:
            console.print("\n")
            thoughtful = False
        show(text)

    answer = client.ask(messages, settings, speak, think)
    console.print()
    console.print(describe(answer), style="dim", highlight=False)
    return answer


def chat(client: ChatClient, settings: ChatSettings, console: Console) -> None:
    """Ask and answer until Ctrl-D or Ctrl-C. Input that begins with / is a command (see HELP)."""
    model = settings.model or client.first_model()
    console.print(f"{model} at {client.url}; /help lists commands, Ctrl-D ends.", style="dim")
    settings = ChatSettings(model, settings.max_tokens, settings.temperature, settings.seed)
    conversation = ChatSession()
    while True:
        try:
            question = console.input("[bold]> [/bold]").strip()
        except (EOFError, KeyboardInterrupt):
            console.print()
            return
        if question == "/quit":
            return
        if question == "/new":
            conversation = ChatSession()
        elif question.startswith("/") and question[1:].isalpha():
            unknown = "" if question == "/help" else f"{question} is no command:\n"
            console.print(unknown + HELP, style="dim", markup=False, highlight=False)
        elif question:
            _turn(client, settings, console, conversation, question)


def _turn(
    client: ChatClient,
    settings: ChatSettings,
    console: Console,
    conversation: ChatSession,
    question: str,
) -> None:
    try:
        answer = ask_and_show(client, conversation.asked(question), settings, console)
    except KeyboardInterrupt:
        console.print("\n(stopped)", style="dim")  # closing the stream aborts it on every hop
    except (httpx.HTTPError, StreamError) as error:
        console.print(f"\n{error}", style="red", markup=False)
    else:
        conversation.answered(question, answer.text)
