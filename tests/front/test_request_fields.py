"""docs/request_fields.md is what the code does; fields of rerankers and /detokenize."""

from __future__ import annotations

import msgspec
import pytest

from router.api.openai.bodies import DetokenizeBody
from router.api.unserved import RERANKING
from tests.front.fakes import Front
from tests.front.request_fields import PAGE, VALUES, page


async def test_the_page_is_what_comes_back() -> None:
    """`python -m tests.front.request_fields` writes it anew."""
    found, told = (await page()).splitlines(), PAGE.read_text().splitlines()
    assert [line for line in found if line not in told] == []
    assert found == told


@pytest.mark.parametrize("path", ["/v1/rerank", "/v1/score"])
async def test_a_question_of_a_reranker_cannot_be_changed(path: str) -> None:
    values = {"max_tokens_per_doc": 9, "max_tokens_per_query": 9, "truncate_prompt_tokens": 5}
    values |= {"use_activation": False}
    body = {"query": "a", "documents": ["b"], "text_1": "a", "text_2": "b"}
    async with Front().client() as client:
        for name in RERANKING:
            asked = {**body, name: (VALUES | values)[name]}
            reply = await client.post(path, json=asked)
            assert (reply.status_code, reply.json()["error"]["param"]) == (400, name)


def test_detokenize_takes_vllms_two_fields() -> None:
    assert {field.name for field in msgspec.structs.fields(DetokenizeBody)} == {"model", "tokens"}
