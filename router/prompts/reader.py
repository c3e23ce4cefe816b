"""PromptReader: texts and conversations -> token ids, off the event loop where that takes time.

Long texts are tokenized in threads (router/prompts/off_loop.py). A text that is certainly too long
for the model is refused before it is tokenized. Short texts are tokenized on the event loop: a
thread would cost two switches and a wait for the GIL.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from typing import Any, Final, Literal, TypeVar

from baton.guided.spec import FIELD
from baton.images.model import ImageFile
from baton.protocol.errors import ContextLengthExceeded, InvalidRequest, UnsupportedFeature
from baton.protocol.images import ImageInput
from baton.protocol.sampling import GuidedDecoding, SamplingParams
from baton.runtime.heap import give_back
from baton.text.chat_template import Chat, ChatTemplate
from baton.text.rendering import TemplateRenderer
from baton.text.reranking import rerank_prompts
from baton.text.template_limits import OverBudget
from baton.text.tokenizer import Tokenizer
from router.images.parts import ImagePart
from router.prompts.grammar_checks import Constraint, GrammarChecker
from router.prompts.images import ImageReader
from router.prompts.off_loop import OffLoop, WorkLane
from router.tenants.keys import EVERYBODY, Grant

T = TypeVar("T")
SHORT_CHARS: Final = 1500  # all texts of a request: tokenized on the event loop in ~0.3 ms
# Most (values, characters) of a conversation that is rendered on the event loop.
SHORT_CHAT: Final = (200, 4000)
# Most (values, characters) of a conversation that is rendered in a thread of this process. Larger
# ones, and templates that are not harmless, are rendered in a child process.
OWN_CHAT: Final = (4096, 128 << 10)
AT_ONCE_S: Final = 0.02  # time limit of rendering on the event loop
ON_THREAD_S: Final = 0.1  # time limit of rendering in a thread
# Longest rendered text that is tokenized on the event loop. A template writes more than the
# messages, such as default rules.
MAX_CHARS_AT_ONCE: Final = 16 << 10
MAX_TEMPLATE_CHARS: Final = 128 << 10  # of a template in a request
RENDER_S: Final = 0.01  # expected time of rendering; the tenant is charged the real time afterwards
GRAMMAR_S: Final = 0.01
# Most characters per token that are assumed if the tokenizer knows no bound.
UNKNOWN_CHARS_PER_TOKEN: Final = 256
# A cut through a text may change the tokens next to it. So many more tokens are kept at first, and
# removed after tokenizing.
CUT_TOKENS: Final = 64
DEFAULT_MAX_TOKENS: Final = 16  # /v1/completions, as OpenAI and vLLM
# Most log-probabilities in the message of one engine step: some 20 MB; a message may have 64 MB.
MAX_PROMPT_LOGPROBS: Final = 1 << 20
FEW_LOGPROBS: Final = 20  # so many per token are allowed for any number of tokens


@dataclass(frozen=True, slots=True)
class Length:
    """The most tokens that a text may have. A longer text is refused, or, if `side` is set, cut
    (`left`: its beginning is removed). `name`: what an error calls this limit."""

    tokens: int
    side: Literal["left", "right"] | None = None
    name: str = "the model's maximum context length"


@cache
def whole_length(tokens: int) -> Length:
    """Return the limit of a text that is not cut: the model's context of `tokens` tokens."""
    return Length(tokens)


@dataclass(frozen=True, slots=True)
class TextInputs:
    """The inputs in a request's `field`: texts to tokenize, and lists of ids, which stay as they
    are."""

    items: Sequence[str | tuple[int, ...]]
    field: str
    length: Length
    grant: Grant = EVERYBODY
    add_special_tokens: bool = True

    @property
    def fields(self) -> list[str]:
        """The name of each input in errors: `field`, or `field[index]` if there are several."""
        if len(self.items) == 1:
            return [self.field]
        return [f"{self.field}[{index}]" for index in range(len(self.items))]


@dataclass(frozen=True, slots=True)
class ChatInputs:
    """A conversation to render. `salt`: only chats with the same salt share cached encodings.
    `add_special_tokens` adds the tokenizer's, such as BOS; most templates write them already.
    `template`: the source of the client's template, used instead of the server's. `images`: those
    of the messages, in order."""

    chat: Chat
    length: Length
    grant: Grant = EVERYBODY
    salt: str = ""
    add_special_tokens: bool = False
    template: str | None = None
    images: Sequence[ImagePart] = ()


@dataclass(frozen=True, slots=True)
class ReadPrompt:
    """A prompt as nodes get it, and its text before images took their places."""

    ids: tuple[int, ...]
    text: str = ""
    images: tuple[ImageInput, ...] = ()


class PromptWorkers:
    """The threads and child processes in which prompts are read; one set for all models. `close`
    ends them; calling it twice is safe."""

    def __init__(self) -> None:
        self.off_loop = OffLoop()
        self.renderer = TemplateRenderer()
        self.checker = GrammarChecker(self.off_loop)

    def close(self) -> None:
        self.checker.close()
        self.renderer.close()
        self.off_loop.close()


class PromptReader:
    """Turns texts and messages of one model into token ids, in the threads and child processes of
    its `workers`. `close` ends them; calling it twice is safe."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        template: ChatTemplate | None,
        trusts_clients: bool = False,
        images: ImageReader | None = None,
        workers: PromptWorkers | None = None,
    ) -> None:
        """`trusts_clients`: a request may bring its own chat template. `images`: reads those of
        requests; None: the model reads no images. `workers` None: it has its own."""
        self._images = images or ImageReader(None)
        self._tokenizer = tokenizer
        self._template = template
        self._trusts_clients = trusts_clients
        self._workers = workers = workers or PromptWorkers()
        self._off_loop, self._renderer = workers.off_loop, workers.renderer
        self._checker = workers.checker
        self._at_once = template is not None and template.harmless

    async def read(self, asked: TextInputs) -> list[tuple[int, ...]]:
        """Return the token ids of each input.

        Raises InvalidRequest, naming the field, for an input without tokens or one that certainly
        has too many; Overloaded."""
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
            self.refuse_markers(ids, field)
        return found

    def refuse_markers(self, ids: Sequence[int], field: str) -> None:
        """Raise InvalidRequest, naming `field`, if a prompt without images holds tokens that stand
        for images."""
        if self._images.model is not None:
            with _named(field):
                self._images.model.check_plain(ids)

    async def chat(self, asked: ChatInputs) -> ReadPrompt:
        """Render a conversation and put its images into it.

        Raises InvalidRequest, naming the part; Overloaded, Unavailable."""
        chat, grant = asked.chat, asked.grant
        if asked.images and asked.length.side is not None:
            field = "truncate_prompt_tokens"
            raise UnsupportedFeature(f"{field}: a prompt with images is not cut", field=field)
        files: Sequence[ImageFile] = ()
        if asked.images:
            files = await self._images.read(asked.images, grant, self._off_loop)
        text = self._rendered_at_once(chat) if asked.template is None else None
        short = text is not None and len(text) <= MAX_CHARS_AT_ONCE
        if text is None and asked.template is not None:
            text = await self._rendered_by(asked.template, chat, grant)
        elif text is None:
            text = await self._rendered(chat, grant)
        text = self.fitting(text, asked.length, "messages")
        if self._images.model is not None:
            with _named("messages"):
                text = self._images.model.rewritten(text, len(files))
        encode = partial(self._tokenizer.encode_chat, text, asked.salt)
        if asked.add_special_tokens:
            encode = partial(self._tokenizer.encode, text)
        ids = tuple(encode() if short else await self._encoded(grant, len(text), encode))
        if not ids:
            raise InvalidRequest("the messages render to nothing", field="messages")
        if self._images.model is None:
            return ReadPrompt(ids, text)
        return self._placed(ids, text, files, asked.length, "messages")

    async def illustrated(self, asked: TextInputs, images: Sequence[ImagePart]) -> ReadPrompt:
        """Read one prompt that holds the model's marker once for each image.

        Raises InvalidRequest, naming the prompt's field or the image's; Overloaded, Unavailable."""
        [item], [field] = asked.items, asked.fields
        files = await self._images.read(images, asked.grant, self._off_loop)
        text = ""
        if isinstance(item, str):
            text = self.fitting(item, asked.length, field)
            if self._images.model is not None:
                with _named(field):
                    text = self._images.model.rewritten(text, len(files))
            encode = partial(self._tokenizer.encode, text, asked.add_special_tokens)
            item = tuple(await self._encoded(asked.grant, len(text), encode))
        return self._placed(item, text, files, asked.length, field)

    def _placed(
        self,
        ids: tuple[int, ...],
        text: str,
        files: Sequence[ImageFile],
        length: Length,
        field: str,
    ) -> ReadPrompt:
        """Return a prompt with its images in place. `field`: of the prompt, for errors."""
        if self._images.model is None:
            return ReadPrompt(ids, text)
        with _named(field):
            placed, images = self._images.model.placed(ids, files, length.tokens)
        return ReadPrompt(placed, text, images)

    async def _rendered_by(self, source: str, chat: Chat, grant: Grant) -> str:
        """Render a chat by the template of a client, in a child process.

        Raises InvalidRequest, UnsupportedFeature."""
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
        """Render a small conversation on the event loop, if the template is harmless and quick.
        Otherwise return None: the caller renders it off the event loop."""
        template = self._template
        if template is None or not self._at_once or not _is_within(SHORT_CHAT, chat):
            return None
        try:
            return template.render_at_once(AT_ONCE_S, chat)
        except OverBudget:
            # The template is slow: do not render on the event loop again.
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
        """Return, for each (query, document), the token ids of the reranker's yes-or-no prompt."""

        def encode() -> list[tuple[int, ...]]:
            asked = (rerank_prompts(self._tokenizer, q, [d], instruction) for q, d in pairs)
            return [tuple(prompt) for (prompt,) in asked]

        num_chars = sum(len(query) + len(document) for query, document in pairs)
        return await self._encoded(grant, num_chars, encode)

    async def pairs(
        self, pairs: Sequence[tuple[str, str]], grant: Grant
    ) -> list[tuple[tuple[int, ...], int]]:
        """Return, for each (query, document), the token ids of both in one prompt of a
        cross-encoder, and where the second begins."""

        def encode() -> list[tuple[tuple[int, ...], int]]:
            read = (self._tokenizer.encode_pair(*pair) for pair in pairs)
            return [(tuple(ids), second) for ids, second in read]

        num_chars = sum(len(query) + len(document) for query, document in pairs)
        return await self._encoded(grant, num_chars, encode)

    async def decode(self, ids: Sequence[int], grant: Grant) -> str:
        """Return the text of token ids, including special tokens."""
        return await self._encoded(
            grant, len(ids), lambda: self._tokenizer.decode(ids, skip_special_tokens=False)
        )

    async def spell(self, ids: Sequence[int], grant: Grant) -> list[str]:
        """Return each id's entry in the vocabulary; "" for an unknown id."""
        return await self._encoded(
            grant, len(ids), lambda: [self._tokenizer.token(token_id) or "" for token_id in ids]
        )

    async def checked(self, asked: Constraint | None, grant: Grant) -> Constraint | None:
        """Check the grammar of a constraint and return the constraint; None stays None.

        Raises InvalidRequest, Overloaded, Unavailable (GrammarChecker.check)."""
        if asked is not None:
            await self._checker.check(asked.guided, asked.field, grant)
        return asked

    async def check_guided(self, guided: GuidedDecoding | None, grant: Grant) -> None:
        """Check the grammar of a gRPC request, whose field is called `guided`; None is accepted.

        Raises the same exceptions as `checked`."""
        if guided is not None:
            await self._checker.check(guided, FIELD, grant)

    def fitting(self, text: str, length: Length, field: str) -> str:
        """Return the text; if it certainly has too many tokens, only the part that `length` keeps.

        Raises ContextLengthExceeded for such a text if `length` does not allow a cut."""
        if len(text) <= length.tokens:  # each token has room for a character
            return text
        count = length.tokens + (0 if length.side is None else CUT_TOKENS)
        most = self._tokenizer.most_chars(count) or count * UNKNOWN_CHARS_PER_TOKEN
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
        self._images.close()
        self._workers.close()

    async def _encoded(self, grant: Grant, num_chars: int, work: Callable[[], T]) -> T:
        """Run `work` on `num_chars` characters or tokens in a thread; return its result. After a
        large one, freed memory goes back to the operating system."""

        def trimmed() -> T:
            try:
                return work()
            finally:
                give_back(num_chars)

        return await self._off_loop.text(grant, num_chars, trimmed)


@contextlib.contextmanager
def _named(field: str) -> Iterator[None]:
    """Let errors that name no field name this one."""
    try:
        yield
    except InvalidRequest as error:
        if error.field is not None:
            raise
        raise type(error)(f"{field}: {error.message}", field=field) from error


def _is_within(bounds: tuple[int, int], chat: Chat) -> bool:
    """Whether a chat has at most `bounds` (values, characters). The count stops at the bounds."""
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
    """Return how many tokens the model can write after the prompt.

    Raises ContextLengthExceeded, naming `field`, if there is no room for one."""
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
    """Return the error for a prompt and `max_tokens` that exceed the context together. `field`: the
    client's name of `max_tokens`."""
    return ContextLengthExceeded(
        f"{field}: {num_prompt_tokens} prompt tokens and {max_tokens} output tokens exceed the"
        f" model's maximum context length of {max_model_len} tokens",
        field=field,
    )


def check_logprobs(params: SamplingParams, at_once: bool, field: str) -> None:
    """Raise InvalidRequest, naming `field`, if one message would hold too many log-probabilities.

    `at_once`: one message has the whole answer; otherwise one step of it. Up to FEW_LOGPROBS per
    token are always allowed."""
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
    """Raise InvalidRequest, naming `field`, if the prompt's log-probabilities do not fit into one
    message. `count`: how many per token, None for no log-probabilities."""
    if count is not None and num_prompt_tokens * (count + 1) > MAX_PROMPT_LOGPROBS:
        raise InvalidRequest(
            f"{field}: {count} alternatives for each of {num_prompt_tokens} prompt tokens are more"
            f" than the {MAX_PROMPT_LOGPROBS} log-probabilities that one answer may hold",
            field=field,
        )
