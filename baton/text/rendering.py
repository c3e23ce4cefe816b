"""Renders chats in a child process, where no template and no data can do harm.

One call of native code in a template can hang a process or fill its memory, and no limit within the
process would stop it (baton/text/template_rules.py has an example). A client's messages can make
even a good template do so. The child ends when its time or its memory is used up. Then that chat is
refused, and other requests are not affected.

    renderer.render(template, chat)             the model's own template
    renderer.render_by(source, tokens, chat)    any source, as by a request's own `chat_template`

Both are for threads. Chats go through a pipe, which takes a millisecond per megabyte.
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
# Long histories take milliseconds. A prompt of 16 MiB takes the memory of a few copies.
BUDGET: Final = ChildBudget(cpu_s=2.0, memory_bytes=512 << 20, wall_s=20.0)
RETRY_S: Final = 2
_WORDS: Final = {Excess.CPU: "time", Excess.MEMORY: "memory"}


class TemplateRenderer:
    """Renders chats in child processes. `close` may be called twice.

    No process starts before one is needed, unless `prepare` is called.
    """

    def __init__(self, budget: ChildBudget | None = None) -> None:
        self.children = Children(CHILD, budget or BUDGET)

    def prepare(self) -> None:
        """Start a process now."""
        self.children.prepare()

    def render(self, template: ChatTemplate, chat: Chat) -> str:
        """Call ChatTemplate.render within limits.

        Raises InvalidRequest (field `messages`, ...), and Unavailable if this machine was too busy.
        """
        if template.source is None:
            return template.render(chat)
        return self.render_by(template.source, template.special_tokens, chat)

    def render_by(self, source: str, special_tokens: Mapping[str, str], chat: Chat) -> str:
        """Render with the template `source`. Raises the errors of `render`.

        For a source that is no template it raises InvalidRequest (field `chat_template`).
        """
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
