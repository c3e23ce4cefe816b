"""Prompts off the event loop: tokenizing and rendering in a few threads, and the room for output.

A long text takes tens of milliseconds, in which every stream of this router would stand still;
baton/tokenizer.py lets go of the GIL meanwhile.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, Final, TypeVar

from baton.chat_template import ChatTemplate
from baton.errors import (
    ContextLengthExceeded,
    InvalidRequest,
    ModelRefused,
    UnsupportedFeature,
)
from baton.grammars import FIELD
from baton.reranking import rerank_prompts
from baton.sampling import GuidedDecoding, SamplingParams
from baton.template_limits import OverBudget
from baton.tokenizer import Tokenizer
from router.structured.grammar_checks import Asked, GrammarChecker

T = TypeVar("T")
THREADS: Final = 2
# So little is read at once, in ~0.3 ms: a thread costs two switches and waits for the GIL.
SHORT_CHARS: Final = 1500
SHORT_MESSAGES: Final = 8
AT_ONCE_S: Final = 0.02
MAX_CHARS_AT_ONCE: Final = (
    64 << 10
)  # templates write much beside the messages: default tools, rules
MAX_TEMPLATE_CHARS: Final = 128 << 10
MAX_BROUGHT: Final = 16  # templates of clients that stay compiled
DEFAULT_MAX_TOKENS: Final = 16  # /v1/completions, as OpenAI and vLLM
# Told at once, in the message of one engine step: some 20 MB, of 64 that a message may have.
MAX_PROMPT_LOGPROBS: Final = 1 << 20
FEW_LOGPROBS: Final = 20  # of a token, however many tokens there are


@dataclass(frozen=True, slots=True)
class Conversation:
    """What a chat template renders. `kwargs` are the client's own (chat_template_kwargs)."""

    messages: Sequence[Mapping[str, Any]]
    tools: Sequence[Mapping[str, Any]] = ()
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    add_special_tokens: bool = False
    salt: str = ""  # of whoever may share what was encoded before
    most_tokens: int | None = None  # a text that is sure to have more is not encoded
    documents: Sequence[Mapping[str, str]] = ()
    template: str | None = None  # the client's own, instead of the server's
    kwargs: Mapping[str, Any] = field(default_factory=dict[str, Any])


@dataclass(frozen=True, slots=True)
class ChatPrompt:
    """A rendered conversation, and its tokens."""

    ids: tuple[int, ...]
    text: str


class PromptReader:
    """Text and messages -> token ids. Owns its threads: `close` ends them, twice is safe."""

    def __init__(
        self, tokenizer: Tokenizer, template: ChatTemplate | None, trusts_clients: bool = False
    ) -> None:
        """`trusts_clients`: they may bring templates."""
        self._tokenizer = tokenizer
        self._template = template
        self._trusts_clients = trusts_clients
        self._brought: OrderedDict[str, ChatTemplate] = OrderedDict()
        self._threads = ThreadPoolExecutor(THREADS, thread_name_prefix="prompts")
        self._checker = GrammarChecker()
        self._slow_template = False  # it has taken its time over a short conversation

    async def text(
        self,
        text: str,
        field: str,
        add_special_tokens: bool = True,
        most_tokens: int | None = None,
    ) -> tuple[int, ...]:
        """Ids of a text. Raises InvalidRequest (`field`) where there is none, or are sure to be
        more than `most_tokens`."""
        self._check_chars(text, most_tokens, field)
        if len(text) <= SHORT_CHARS:
            ids = self._tokenizer.encode(text, add_special_tokens)
        else:
            ids = await self._off_loop(lambda: self._tokenizer.encode(text, add_special_tokens))
        if not ids:
            raise InvalidRequest(f"{field} has no tokens", field=field)
        return tuple(ids)

    async def chat(self, asked: Conversation) -> ChatPrompt:
        """Render a conversation. Templates write BOS themselves: callers add none."""
        template = self._template
        if asked.template is not None:
            template = await self._bring(asked.template)
        if template is None:
            raise InvalidRequest("this model has no chat template", field="messages")
        if asked.documents and not template.reads_documents:
            message = "documents: the chat template reads none; put them into the messages"
            raise InvalidRequest(message, field="documents")

        def encoded(text: str) -> ChatPrompt:
            self._check_chars(text, asked.most_tokens, "messages")
            if asked.add_special_tokens:
                return ChatPrompt(tuple(self._tokenizer.encode(text)), text)
            return ChatPrompt(tuple(self._tokenizer.encode_chat(text, asked.salt)), text)

        text = self._render_at_once(template, asked)
        if text is not None and len(text) <= MAX_CHARS_AT_ONCE:
            prompt = encoded(text)
        elif text is not None:
            prompt = await self._off_loop(lambda: encoded(text))
        else:
            prompt = await self._off_loop(
                lambda: encoded(
                    template.render(asked.messages, asked.add_generation_prompt, **_others(asked))
                )
            )
        if not prompt.ids:
            raise InvalidRequest("the messages render to nothing", field="messages")
        return prompt

    async def _bring(self, source: str) -> ChatTemplate:
        """A client's template, compiled. Raises InvalidRequest, UnsupportedFeature."""
        field = "chat_template"
        if not self._trusts_clients:
            message = f"{field} is not taken by this server (--trust-request-chat-template)"
            raise UnsupportedFeature(message, field=field)
        if len(source) > MAX_TEMPLATE_CHARS:
            message = f"{field}: at most {MAX_TEMPLATE_CHARS} characters"
            raise InvalidRequest(message, field=field)
        found = self._brought.get(source)
        if found is None:
            specials = self._tokenizer.special_tokens
            try:
                found = await self._off_loop(lambda: ChatTemplate(source, specials))
            except ModelRefused as error:
                raise InvalidRequest(f"{field}: {error.message}", field=field) from error
            self._brought[source] = found
        self._brought.move_to_end(source)
        if len(self._brought) > MAX_BROUGHT:
            self._brought.popitem(last=False)
        return found

    def _render_at_once(self, template: ChatTemplate, asked: Conversation) -> str | None:
        """A short conversation by a quick template; None: on a thread, please."""
        if self._slow_template or asked.template is not None or not _is_short(asked):
            return None
        try:
            return template.render_within(
                AT_ONCE_S, asked.messages, asked.add_generation_prompt, **_others(asked)
            )
        except OverBudget:
            # It would hold up every stream of this router, again and again.
            self._slow_template = True
            return None

    async def rerank(
        self, pairs: Sequence[tuple[str, str]], instruction: str | None
    ) -> list[tuple[int, ...]]:
        """Ids of the yes-or-no question about each (query, document)."""

        def encode() -> list[tuple[int, ...]]:
            asked = (rerank_prompts(self._tokenizer, q, [d], instruction) for q, d in pairs)
            return [tuple(prompt) for (prompt,) in asked]

        return await self._off_loop(encode)

    async def decode(self, ids: Sequence[int]) -> str:
        return await self._off_loop(lambda: self._tokenizer.decode(ids, skip_special_tokens=False))

    def _check_chars(self, text: str, most_tokens: int | None, field: str) -> None:
        most = None if most_tokens is None else self._tokenizer.most_chars(most_tokens)
        if most is not None and len(text) > most:
            raise ContextLengthExceeded(
                f"{field}: {len(text)} characters are more than the model's maximum context length"
                f" of {most_tokens} tokens can hold",
                field=field,
            )

    def spell(self, ids: Sequence[int]) -> list[str]:
        """The vocabulary's spelling of each id."""
        return [self._tokenizer.token(token_id) or "" for token_id in ids]

    async def checked(self, asked: Asked | None) -> Asked | None:
        """What a client asked for, once its grammar was checked. Raises InvalidRequest."""
        if asked is not None:
            await self._checker.check(asked.guided, asked.field)
        return asked

    async def check_guided(self, guided: GuidedDecoding | None) -> None:
        """The same where the client's own name is `guided`."""
        if guided is not None:
            await self._checker.check(guided, FIELD)

    def close(self) -> None:
        self._checker.close()
        self._threads.shutdown(wait=False, cancel_futures=True)

    async def _off_loop(self, work: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._threads, work)


def _others(asked: Conversation) -> dict[str, Any]:
    """What a template is given by keyword."""
    return {
        **asked.kwargs,
        "tools": asked.tools,
        "documents": [dict(document) for document in asked.documents] or None,
        "continue_final_message": asked.continue_final_message,
    }


def _is_short(asked: Conversation) -> bool:
    """Plain messages of few characters: templates walk tools and long histories at length."""
    contents = [message.get("content") for message in asked.messages]
    return (
        not asked.tools
        and not asked.documents
        and len(contents) <= SHORT_MESSAGES
        and all(content is None or isinstance(content, str) for content in contents)
        and sum(len(content or "") for content in contents) <= SHORT_CHARS
    )


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


def check_room(num_prompt_tokens: int, max_tokens: int, max_model_len: int, field: str) -> None:
    """Raise ContextLengthExceeded (`field`) if prompt and output do not fit together."""
    if num_prompt_tokens + max_tokens > max_model_len:
        raise ContextLengthExceeded(
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
