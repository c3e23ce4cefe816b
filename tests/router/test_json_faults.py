"""The field that made a body unreadable is named (router/api/openai/breaches.py)."""

from __future__ import annotations

import pytest

from baton.protocol.errors import InvalidRequest
from router.api.openai.bodies import ChatBody, parse
from router.api.openai.breaches import fault_of


@pytest.mark.parametrize(
    ("raw", "field"),
    [
        (b'{"temperature": NaN}', "temperature"),
        (b'{"top_p": -Infinity}', "top_p"),
        (b'{"logit_bias": {"5": 1e999}}', "logit_bias.5"),
        (b'{"stop": ["a", "\\ud800"]}', "stop[1]"),
        (b'{"messages": [{"role": "user", "content": "\\udfff!"}]}', "messages[0].content"),
        (b'{"seed": ' + b"9" * 400 + b"}", "seed"),
    ],
)
def test_the_field_is_named(raw: bytes, field: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        parse(raw, ChatBody)
    assert caught.value.field == field
    assert field in caught.value.message


@pytest.mark.parametrize("raw", [b"{", b"[" * 100_000, b'{"a": 1}', b"nonsense"])
def test_broken_json_has_no_field(raw: bytes) -> None:
    assert fault_of(raw) is None
