"""The child of baton/text/rendering.py: renders chats by any template.

    python -m baton.text.template_child CPU_S BYTES

A question is JSON: the template's source, the special tokens, a Chat's fields. The answer is `=`
and the text, or `!` and JSON: {"message", "field"} of an InvalidRequest; its field is
`chat_template` if the source is no template. baton/runtime/child.py sets the limits.
"""

from __future__ import annotations

import sys
from functools import lru_cache

import orjson

from baton.protocol.errors import BatonError, ModelRefused
from baton.runtime import child
from baton.text.chat_template import Chat, ChatTemplate


def answer(question: bytes) -> bytes:
    asked = orjson.loads(question)
    try:
        template = _template(asked["source"], tuple(asked["special_tokens"].items()))
        return b"=" + template.render(Chat(**asked["chat"])).encode("utf-8", "surrogatepass")
    except BatonError as error:
        field = "chat_template" if isinstance(error, ModelRefused) else error.field
        return b"!" + orjson.dumps({"message": error.message, "field": field})


@lru_cache(8)
def _template(source: str, special_tokens: tuple[tuple[str, str], ...]) -> ChatTemplate:
    return ChatTemplate(source, dict(special_tokens))


if __name__ == "__main__":
    child.serve(answer, float(sys.argv[1]), int(sys.argv[2]), nice=0)
