"""Chats rendered in a child, where any template and any data may do what they like.

A template can hang or fill a process in one call of native code that no limit within the process
would stop (baton/text/template_rules.py has an example), and what a client sends can make a good
one do the same. The child ends with its time or its memory: that chat is refused, and nobody else
notices.

    renderer.render(template, chat)             the model's own template
    renderer.render_by(source, tokens, chat)    any source, as by a request's own `chat_template`

Both are for threads; many texts and lists go through a pipe, a millisecond per megabyte.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Final

import orjson

from baton.protocol.errors import InvalidRequest, Unavailable
from baton.runtime.children import ChildBudget, Children, Excess, GivenUp
from baton.text.chat_template import Chat, ChatTemplate

CHILD: Final = (sys.executable, "-m", "baton.text.template_child")
# Long histories take milliseconds; a prompt of 16 MiB is a few copies of it.
BUDGET: Final = ChildBudget(cpu_s=2.0, memory_bytes=512 << 20, wall_s=20.0)
RETRY_S: Final = 2
_WORDS: Final = {Excess.CPU: "time", Excess.MEMORY: "memory"}


class TemplateRenderer:
    """`close` twice is safe. Starts no process before one is needed, unless told to `prepare`."""

    def __init__(self, budget: ChildBudget | None = None) -> None:
        self.children = Children(CHILD, budget or BUDGET)

    def prepare(self) -> None:
        """Start a process now."""
        self.children.prepare()

    def render(self, template: ChatTemplate, chat: Chat) -> str:
        """ChatTemplate.render, within limits. Raises InvalidRequest (field `messages`, ...),
        Unavailable if this machine was too busy for it."""
        if template.source is None:
            return template.render(chat)
        return self.render_by(template.source, template.special_tokens, chat)

    def render_by(self, source: str, special_tokens: Mapping[str, str], chat: Chat) -> str:
        """The same by any source. Raises InvalidRequest (field `chat_template`) for one that is no
        template."""
        try:
            question = orjson.dumps(
                {"source": source, "special_tokens": special_tokens, "chat": chat}
            )
        except (orjson.JSONEncodeError, RecursionError) as error:
            raise InvalidRequest("the messages are nested too deeply", field="messages") from error
        try:
            told = self.children.ask(question)
        except GivenUp as error:
            raise _given_up(error.excess) from error
        if told.startswith(b"="):
            return told[1:].decode("utf-8", "surrogatepass")
        refusal = orjson.loads(told[1:])
        raise InvalidRequest(refusal["message"], field=refusal["field"])

    def close(self) -> None:
        self.children.close()


def _given_up(excess: Excess) -> InvalidRequest | Unavailable:
    if excess is Excess.TIME:
        message = "the server is too busy to render these messages now"
        return Unavailable(message, field="messages", retry_after_s=RETRY_S)
    message = (
        f"the chat template is given up over these messages: it takes too much {_WORDS[excess]}"
    )
    return InvalidRequest(message, field="messages")
