"""Prompts: texts and conversations -> token ids, off the event loop where that takes time.

Who asks for much waits for it by itself (router/prompts/off_loop.py), and what is sure to be too
long is not begun. What is short is read at once: a thread costs two switches and waits for the GIL.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from typing import Any, Final, Literal, TypeVar

from baton.guided.spec import FIELD
from baton.protocol.errors import ContextLengthExceeded, InvalidRequest, UnsupportedFeature
from baton.protocol.sampling import GuidedDecoding, SamplingParams
from baton.runtime.heap import give_back
from baton.text.chat_template import Chat, ChatTemplate
from baton.text.rendering import TemplateRenderer
from baton.text.reranking import rerank_prompts
from baton.text.template_limits import OverBudget
from baton.text.tokenizer import Tokenizer
from router.prompts.grammar_checks import Constraint, GrammarChecker
from router.prompts.off_loop import OffLoop, WorkLane
from router.tenants.keys import EVERYBODY, Grant

T = TypeVar("T")
SHORT_CHARS: Final = 1500  # of all texts together: ~0.3 ms
# Values and characters of a conversation that most templates render in as little; and of one that
# a harmless template may render in this process, on a thread.
SHORT_CHAT: Final = (200, 4000)
OWN_CHAT: Final = (4096, 128 << 10)
AT_ONCE_S: Final = 0.02
ON_THREAD_S: Final = 0.1
MAX_CHARS_AT_ONCE: Final = 16 << 10  # templates write more than the messages: default rules
MAX_TEMPLATE_CHARS: Final = 128 << 10  # of one that a request brings
RENDER_S: Final = 0.01  # about; what it took is settled afterwards
GRAMMAR_S: Final = 0.01
# Where no character has a token of its own, one may stand for a text of any length.
UNKNOWN_CHARS_PER_TOKEN: Final = 256
# Tokens that a cut through a text may change; so many more are kept, and cut off afterwards.
CUT_TOKENS: Final = 64
DEFAULT_MAX_TOKENS: Final = 16  # /v1/completions, as OpenAI and vLLM
# Told at once, in the message of one engine step: some 20 MB, of 64 that a message may have.
MAX_PROMPT_LOGPROBS: Final = 1 << 20
FEW_LOGPROBS: Final = 20  # of a token, however many tokens there are


@dataclass(frozen=True, slots=True)
class Length:
    """How many tokens of a text are of any use: of more, a text is refused, or with a `side` cut
    off there. `name`: what this number is to the client."""

    tokens: int
    side: Literal["left", "right"] | None = None
    name: str = "the model's maximum context length"


@cache
def whole_length(tokens: int) -> Length:
    """Of a text that is not cut: all of the model's context."""
    return Length(tokens)


@dataclass(frozen=True, slots=True)
class TextInputs:
    """What a request's `field` holds: texts, and lists of ids, which stay as they are."""

    items: Sequence[str | tuple[int, ...]]
    field: str
    length: Length
    grant: Grant = EVERYBODY
    add_special_tokens: bool = True

    @property
    def fields(self) -> list[str]:
        """The client's name of each."""
        if len(self.items) == 1:
            return [self.field]
        return [f"{self.field}[{index}]" for index in range(len(self.items))]


class PromptReader:
    """Text and messages -> token ids. Owns its threads and processes: `close` ends them, twice is
    safe."""

    def __init__(
        self, tokenizer: Tokenizer, template: ChatTemplate | None, trusts_clients: bool = False
    ) -> None:
        """`trusts_clients`: they may bring templates."""
        self._tokenizer = tokenizer
        self._template = template
        self._trusts_clients = trusts_clients
        self._off_loop = OffLoop()
        self._renderer = TemplateRenderer()
        self._checker = GrammarChecker(self._off_loop)
        self._at_once = template is not None and template.harmless

    async def read(self, asked: TextInputs) -> list[tuple[int, ...]]:
        """Ids of each input. Raises InvalidRequest (its field) where there are none, or are sure
        to be too many."""
        items = [
            self.fitting(item, asked.length, field) if isinstance(item, str) else item
            for item, field in zip(asked.items, asked.fields, strict=True)
        ]

        def encode() -> list[tuple[int, ...]]:
            special = asked.add_special_tokens
            return [
                tuple(self._tokenizer.encode(item, special)) if isinstance(item, str) else item
                for item in items
            ]

        num_chars = sum(len(item) for item in items if isinstance(item, str))
        if num_chars <= SHORT_CHARS:
            found = encode()
        else:
            found = await self._encoded(asked.grant, num_chars, encode)
        for ids, field in zip(found, asked.fields, strict=True):
            if not ids:
                raise InvalidRequest(f"{field} has no tokens", field=field)
        return found

    async def chat(
        self,
        chat: Chat,
        length: Length,
        grant: Grant = EVERYBODY,
        salt: str = "",
        add_special_tokens: bool = False,
        template: str | None = None,
    ) -> tuple[tuple[int, ...], str]:
        """Render a conversation: its token ids and its text. Templates write BOS themselves:
        callers add none. `salt`: of whoever may share what was encoded before. `template`: the
        client's own, instead of the server's."""
        text = self._rendered_at_once(chat) if template is None else None
        short = text is not None and len(text) <= MAX_CHARS_AT_ONCE
        if text is None and template is not None:
            text = await self._rendered_by(template, chat, grant)
        elif text is None:
            text = await self._rendered(chat, grant)
        text = self.fitting(text, length, "messages")
        encode = partial(self._tokenizer.encode_chat, text, salt)
        if add_special_tokens:
            encode = partial(self._tokenizer.encode, text)
        ids = tuple(encode() if short else await self._encoded(grant, len(text), encode))
        if not ids:
            raise InvalidRequest("the messages render to nothing", field="messages")
        return ids, text

    async def _rendered_by(self, source: str, chat: Chat, grant: Grant) -> str:
        """By a client's template. Raises InvalidRequest, UnsupportedFeature."""
        field = "chat_template"
        if not self._trusts_clients:
            message = f"{field} is not taken by this server (--trust-request-chat-template)"
            raise UnsupportedFeature(message, field=field)
        if len(source) > MAX_TEMPLATE_CHARS:
            message = f"{field}: at most {MAX_TEMPLATE_CHARS} characters"
            raise InvalidRequest(message, field=field)
        tokens = self._tokenizer.special_tokens
        return await self._off_loop.run(
            WorkLane.TEMPLATE, grant, RENDER_S,
            lambda: self._renderer.render_by(source, tokens, chat),
        )  # fmt: skip

    def _rendered_at_once(self, chat: Chat) -> str | None:
        """A small conversation by a harmless and quick template; None: in a child, please."""
        template = self._template
        if template is None or not self._at_once or not _is_within(SHORT_CHAT, chat):
            return None
        try:
            return template.render_at_once(AT_ONCE_S, chat)
        except OverBudget:
            # It would hold up every stream of this router, again and again.
            self._at_once = False
            return None

    async def _rendered(self, chat: Chat, grant: Grant) -> str:
        template = self._template
        if template is None:
            raise InvalidRequest("this model has no chat template", field="messages")

        def render() -> str | None:
            with contextlib.suppress(OverBudget):
                return template.render_at_once(ON_THREAD_S, chat)
            return None

        text = None
        if template.harmless and _is_within(OWN_CHAT, chat):
            text = await self._off_loop.run(WorkLane.SHORT, grant, RENDER_S, render)
        if text is not None:
            return text
        return await self._off_loop.run(
            WorkLane.TEMPLATE, grant, RENDER_S, lambda: self._renderer.render(template, chat)
        )

    async def rerank(
        self, pairs: Sequence[tuple[str, str]], instruction: str | None, grant: Grant
    ) -> list[tuple[int, ...]]:
        """Ids of the yes-or-no question about each (query, document)."""

        def encode() -> list[tuple[int, ...]]:
            asked = (rerank_prompts(self._tokenizer, q, [d], instruction) for q, d in pairs)
            return [tuple(prompt) for (prompt,) in asked]

        num_chars = sum(len(query) + len(document) for query, document in pairs)
        return await self._encoded(grant, num_chars, encode)

    async def decode(self, ids: Sequence[int], grant: Grant) -> str:
        """The text of all ids, special tokens too."""
        return await self._encoded(
            grant, len(ids), lambda: self._tokenizer.decode(ids, skip_special_tokens=False)
        )

    async def spell(self, ids: Sequence[int], grant: Grant) -> list[str]:
        """The vocabulary's spelling of each id."""
        return await self._encoded(
            grant, len(ids), lambda: [self._tokenizer.token(token_id) or "" for token_id in ids]
        )

    async def checked(self, asked: Constraint | None, grant: Grant) -> Constraint | None:
        """What a client asked for, once its grammar was checked. Raises InvalidRequest, ..."""
        if asked is not None:
            await self._checker.check(asked.guided, asked.field, grant)
        return asked

    async def check_guided(self, guided: GuidedDecoding | None, grant: Grant) -> None:
        """The same where the client's own name is `guided`."""
        if guided is not None:
            await self._checker.check(guided, FIELD, grant)

    def fitting(self, text: str, length: Length, field: str) -> str:
        """The text, cut if that is wanted. Raises ContextLengthExceeded for one that is sure to
        have too many tokens."""
        spare = 0 if length.side is None else CUT_TOKENS
        most = self._tokenizer.most_chars(length.tokens + spare)
        if most is None:
            most = (length.tokens + spare) * UNKNOWN_CHARS_PER_TOKEN
        if len(text) <= most:
            return text
        if length.side is None:
            raise ContextLengthExceeded(
                f"{field}: {len(text)} characters are more than {length.name}"
                f" of {length.tokens} tokens can hold",
                field=field,
            )
        return text[-most:] if length.side == "left" else text[:most]

    def close(self) -> None:
        self._checker.close()
        self._renderer.close()
        self._off_loop.close()

    async def _encoded(self, grant: Grant, num_chars: int, work: Callable[[], T]) -> T:
        """Work on so many characters, or tokens; the memory that it took is given back."""

        def trimmed() -> T:
            try:
                return work()
            finally:
                give_back(num_chars)

        return await self._off_loop.text(grant, num_chars, trimmed)


def _is_within(bounds: tuple[int, int], chat: Chat) -> bool:
    """Whether it has at most so many values and characters in all. Looks no further than that."""
    left, room = bounds
    found: list[Any] = [*chat.messages, *chat.tools, *chat.documents, chat.kwargs]
    while found:
        value = found.pop()
        left -= 1
        if isinstance(value, str):
            room -= len(value)
        elif isinstance(value, Mapping):
            left -= len(value)
            found.extend([*value.keys(), *value.values()] if left > 0 else ())
        elif isinstance(value, list | tuple):
            left -= len(value)
            found.extend(value if left > 0 else ())
        if left < 0 or room < 0:
            return False
    return True


def room_for_output(num_prompt_tokens: int, max_model_len: int, field: str) -> int:
    """Tokens that the model can still write. Raises ContextLengthExceeded (`field`) if none."""
    room = max_model_len - num_prompt_tokens
    if room < 1:
        raise ContextLengthExceeded(
            f"{field}: {num_prompt_tokens} tokens leave no room to answer in the model's"
            f" maximum context length of {max_model_len} tokens",
            field=field,
        )
    return room


def beyond_room(
    num_prompt_tokens: int, max_tokens: int, max_model_len: int, field: str
) -> ContextLengthExceeded:
    """What to tell of a prompt and an output (`field`) that do not fit together."""
    return ContextLengthExceeded(
        f"{field}: {num_prompt_tokens} prompt tokens and {max_tokens} output tokens exceed the"
        f" model's maximum context length of {max_model_len} tokens",
        field=field,
    )


def check_logprobs(params: SamplingParams, at_once: bool, field: str) -> None:
    """Raise InvalidRequest (`field`) if an answer, told `at_once` or token by token, has more
    log-probabilities than one may hold. A few of each token always may."""
    count = params.logprobs or 0
    told = params.num_outputs * (count + 1) * (params.max_tokens if at_once else 1)
    if count > FEW_LOGPROBS and told > MAX_PROMPT_LOGPROBS:
        raise InvalidRequest(
            f"{field}: {count} alternatives for each of up to {params.max_tokens} tokens are more"
            f" than the {MAX_PROMPT_LOGPROBS} log-probabilities that one answer may hold: stream,"
            " or lower max_tokens",
            field=field,
        )


def check_prompt_logprobs(num_prompt_tokens: int, count: int | None, field: str) -> None:
    """Raise InvalidRequest (`field`) if more would be told of the prompt than one message holds."""
    if count is not None and num_prompt_tokens * (count + 1) > MAX_PROMPT_LOGPROBS:
        raise InvalidRequest(
            f"{field}: {count} alternatives for each of {num_prompt_tokens} prompt tokens are more"
            f" than the {MAX_PROMPT_LOGPROBS} log-probabilities that one answer may hold",
            field=field,
        )
