"""Stored responses: read, listed, deleted and gone on from, by their own key, at any router."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from openai.types.responses import Response, ResponseItem
from openai.types.responses.response_item_list import ResponseItemList
from pydantic import TypeAdapter

from baton.runtime.timing import Timing
from router.api.responses import conversation
from router.config import RouterConfig
from router.request.gate.gate import Gate, GateSettings
from router.store.guard import StoreGuard
from router.store.memory_store import MemoryStore, MemoryTables
from router.tenants.keys import Grant
from router.tenants.turns import BYTES_PER_S, LARGE_BYTES, SHARE
from tests.front.dialects import check_response, events_of, front
from tests.front.fakes import TOKENIZER, Front
from tests.front.openai_sdk import sdk
from tests.front.resumable import HeldRouter, held_router
from tests.router.fakes import FakeClock

PATH = "/v1/responses"
ITEM: TypeAdapter[Any] = TypeAdapter(ResponseItem)
ANSWER = "abcdefghijk"


async def ask(router: HeldRouter, **body: Any) -> dict[str, Any]:
    reply = await router.http.post(PATH, json={"input": "hi", **body})
    assert reply.status_code == 200, reply.text
    return reply.json()


async def get(router: HeldRouter, path: str, **query: Any) -> dict[str, Any]:
    reply = await router.http.get(f"{PATH}/{path}", params=query)
    assert reply.status_code == 200, reply.text
    return reply.json()


async def status(router: HeldRouter, method: str, path: str) -> int:
    return (await router.http.request(method, f"{PATH}/{path}")).status_code


def prompt_of(router: HeldRouter) -> str:
    ids = router.dispatcher.script.requests[-1].prompt_ids
    return TOKENIZER.decode(ids, skip_special_tokens=False)


# ---- reading and deleting ----


async def test_any_router_reads_and_deletes_what_one_has_stored(
    one: HeldRouter, two: HeldRouter
) -> None:
    made = await ask(one, metadata={"a": "b"})
    assert made["store"] is True
    assert await get(two, made["id"]) == made
    Response.model_validate(made)
    reply = await two.http.delete(f"{PATH}/{made['id']}")
    assert reply.json() == {"id": made["id"], "object": "response", "deleted": True}
    for router in (one, two):
        assert await status(router, "GET", made["id"]) == 404
        assert await status(router, "DELETE", made["id"]) == 404
        assert await status(router, "GET", f"{made['id']}/input_items") == 404
        assert await status(router, "POST", f"{made['id']}/cancel") == 404


async def test_a_streamed_response_is_there_before_its_last_event(
    one: HeldRouter, two: HeldRouter
) -> None:
    async with one.http.stream("POST", PATH, json={"input": "hi", "stream": True}) as reply:
        text = ""
        async for piece in reply.aiter_text():
            text += piece
            if "event: response.completed" in text:
                break
    told = check_response(events_of(text))
    assert await get(two, told["id"]) == told


async def test_what_is_not_to_be_stored_is_not(one: HeldRouter) -> None:
    made = await ask(one, store=False)
    assert made["store"] is False
    assert await status(one, "GET", made["id"]) == 404


async def test_a_store_that_is_away_keeps_nobody_from_an_answer(one: HeldRouter) -> None:
    one.store.away = True
    made = await ask(one)
    assert (made["status"], made["store"]) == ("completed", False)
    assert await status(one, "GET", made["id"]) == 503
    assert await status(one, "DELETE", made["id"]) == 503
    reply = await one.http.post(PATH, json={"input": "a", "previous_response_id": made["id"]})
    assert reply.status_code == 503


async def test_a_server_that_stores_nothing_says_so() -> None:
    async with held_router("one", MemoryTables(), stored_responses_mb=0) as router:
        made = await ask(router)
        assert made["store"] is False
        assert await status(router, "GET", made["id"]) == 404
        for body, param in (
            ({"previous_response_id": made["id"]}, "previous_response_id"),
            ({"input": [{"type": "item_reference", "id": "msg_0_a"}]}, "input[0]"),
            ({"background": True}, "background"),
        ):
            reply = await router.http.post(PATH, json={"input": "hi", **body})
            assert (reply.status_code, reply.json()["error"]["param"]) == (400, param)


async def test_to_another_key_a_response_does_not_exist() -> None:
    async with held_router("one", MemoryTables(), api_key=("mine", "theirs")) as router:
        mine, theirs = ({"authorization": f"Bearer {key}"} for key in ("mine", "theirs"))
        reply = await router.http.post(PATH, json={"input": "hi"}, headers=mine)
        made = reply.json()
        place = f"{PATH}/{made['id']}"

        async def ask_as(head: dict[str, str]) -> list[httpx.Response]:
            return [
                await router.http.get(place, headers=head),
                await router.http.get(f"{place}/input_items", headers=head),
                await router.http.post(f"{place}/cancel", headers=head),
                await router.http.delete(place, headers=head),
            ]

        assert {reply.status_code for reply in await ask_as(theirs)} == {404}
        reference = {"type": "item_reference", "id": made["output"][0]["id"]}
        for more in ({"previous_response_id": made["id"]}, {"input": [reference]}):
            body = {"input": "hi", **more}
            assert (await router.http.post(PATH, json=body, headers=theirs)).status_code == 400
            assert (await router.http.post(PATH, json=body, headers=mine)).status_code == 200
        assert [reply.status_code for reply in await ask_as(mine)] == [200, 200, 400, 200]


async def test_a_response_is_there_for_its_time() -> None:
    clock = FakeClock()
    store = StoreGuard(MemoryStore("r", Timing(), clock), Timing())
    of = Front(config=RouterConfig(stored_responses_ttl_s=60.0), store=store)
    async with of.client() as client:
        first = (await client.post(PATH, json={"input": "hi"})).json()
        clock.advance(59.0)
        body = {"input": "hi", "previous_response_id": first["id"]}
        second = (await client.post(PATH, json=body)).json()
        clock.advance(2.0)
        places = [f"{PATH}/{made['id']}" for made in (first, second)]
        assert [(await client.get(place)).status_code for place in places] == [404, 200]
        reply = await client.post(PATH, json=body)
        assert (reply.status_code, reply.json()["error"]["param"]) == (400, "previous_response_id")


async def test_the_oldest_of_a_key_give_way() -> None:
    async with Front(config=RouterConfig(stored_responses_mb=1)).client() as client:
        large = {"input": "hi", "safety_identifier": "a" * 400_000}
        made = [(await client.post(PATH, json=large)).json() for _ in range(3)]
        places = [f"{PATH}/{each['id']}" for each in made]
        assert [(await client.get(place)).status_code for place in places] == [404, 200, 200]
        large["safety_identifier"] = "a" * 1_100_000  # more than there is room for
        refused = (await client.post(PATH, json=large)).json()
        assert refused["store"] is False
        assert [(await client.get(place)).status_code for place in places] == [404, 200, 200]


async def test_large_ones_keep_their_distance(tmp_path: Path) -> None:
    """Reading one costs the event loop what reading a body costs (router/tenants/turns.py)."""
    keys = tmp_path / "keys.toml"
    keys.write_text('[[keys]]\nname = "mine"\nkey = "mine"\n')
    of, mine = Front(config=RouterConfig(api_keys=str(keys))), Grant("mine", "mine")
    of.dispatcher.gate = gate = Gate(FakeClock(), GateSettings())
    waits: list[float] = []
    async with of.client(authorization="Bearer mine") as client:
        large = {"input": "hi", "safety_identifier": "a" * LARGE_BYTES}
        made = (await client.post(PATH, json=large)).json()
        with gate.preparing(Grant("other", "other")):  # somebody else is here
            waits.append(gate.reserve(mine, LARGE_BYTES))
            assert (await client.get(f"{PATH}/{made['id']}")).status_code == 200
            waits.append(gate.reserve(mine, LARGE_BYTES))
            body = {"input": "hi", "previous_response_id": made["id"]}
            assert (await client.post(PATH, json=body)).status_code == 200
            waits.append(gate.reserve(mine, LARGE_BYTES))
    two_s = 2 * LARGE_BYTES / BYTES_PER_S / SHARE
    more = [later - earlier for earlier, later in pairwise(waits)]
    assert more == pytest.approx([two_s, two_s], rel=0.1)


# ---- going on ----


async def test_a_response_goes_on_from_the_one_before(one: HeldRouter, two: HeldRouter) -> None:
    first = await ask(one, input="hello", instructions="Be kind.")
    second = await ask(two, input="more", previous_response_id=first["id"])
    assert prompt_of(two) == (f"<s><|user|>hello<|assistant|>{ANSWER}<|user|>more<|assistant|>"), (
        "instructions are not carried over"
    )
    assert second["previous_response_id"] == first["id"]
    await one.http.delete(f"{PATH}/{first['id']}")
    third = await ask(one, input="end", previous_response_id=second["id"], store=False)
    assert prompt_of(one) == (
        f"<s><|user|>hello<|assistant|>{ANSWER}<|user|>more<|assistant|>{ANSWER}"
        "<|user|>end<|assistant|>"
    )
    reply = await one.http.post(PATH, json={"input": "a", "previous_response_id": third["id"]})
    assert (reply.status_code, reply.json()["error"]["param"]) == (400, "previous_response_id")


async def test_tokens_of_a_prompt_that_goes_on_are_counted(one: HeldRouter) -> None:
    first = await ask(one, input="hello")
    body = {"input": "more", "previous_response_id": first["id"]}
    reply = await one.http.post(f"{PATH}/input_tokens", json=body)
    second = await ask(one, **body)
    assert reply.json()["input_tokens"] == second["usage"]["input_tokens"]


async def test_items_can_be_referred_to(one: HeldRouter, two: HeldRouter) -> None:
    first = await ask(one, input="hello")
    answer = {"type": "item_reference", "id": first["output"][0]["id"]}
    hello = {"role": "user", "content": "hello"}
    second = await ask(two, input=[hello, answer, {"role": "user", "content": "more"}])
    wanted = f"<s><|user|>hello<|assistant|>{ANSWER}<|user|>more<|assistant|>"
    assert prompt_of(two) == wanted
    # Also those of its input, and those that it only referred to.
    items = (await get(one, f"{second['id']}/input_items", order="asc"))["data"]
    assert items[1] == first["output"][0]
    await one.http.delete(f"{PATH}/{first['id']}")
    given = [{"type": "item_reference", "id": item["id"]} for item in (items[0], items[2])]
    await ask(one, input=given)
    assert prompt_of(one) == "<s><|user|>hello<|user|>more<|assistant|>"
    for unknown in (answer["id"], "msg_1", "msg_0_nobody", "", None):
        reference = {"type": "item_reference", "id": unknown}
        reply = await one.http.post(PATH, json={"input": [hello, reference]})
        assert reply.status_code == 400
        assert reply.json()["error"]["param"].startswith("input[1]")


async def test_a_conversation_is_no_larger_than_a_body(monkeypatch: pytest.MonkeyPatch) -> None:
    """However often it refers to a large item, or goes on from large responses."""
    monkeypatch.setattr(conversation, "most_body_bytes", lambda _: 600)
    of = Front()
    message = {"role": "user", "content": "a" * 20}
    async with of.client() as client:
        first = (await client.post(PATH, json={"input": [message]})).json()
        listed = (await client.get(f"{PATH}/{first['id']}/input_items")).json()["data"]
        reference = {"type": "item_reference", "id": listed[0]["id"]}
        for large in (
            {"input": [reference] * 10},
            {"input": [message] * 14 + [reference]},
            {"input": [message] * 14, "previous_response_id": first["id"]},
        ):
            reply = await client.post(PATH, json=large)
            assert (reply.status_code, reply.json()["error"]["param"]) == (400, "input")
        for enough in (
            {"input": [reference] * 2},
            {"input": [message] * 2, "previous_response_id": first["id"]},
        ):
            assert (await client.post(PATH, json=enough)).status_code == 200, enough


async def test_an_items_id_is_a_text(one: HeldRouter) -> None:
    for wrong in (5, ["a"], {"a": 1}):
        item = {"role": "user", "content": "a", "id": wrong}
        reply = await one.http.post(PATH, json={"input": [item]})
        assert (reply.status_code, reply.json()["error"]["param"]) == (400, "input[0].id")


async def test_errors_in_what_follows_name_the_place_in_the_clients_input(one: HeldRouter) -> None:
    first = await ask(one)
    wrong = [{"role": "user", "content": "a"}, {"role": "robot", "content": "b"}]
    body = {"input": wrong, "previous_response_id": first["id"]}
    reply = await one.http.post(PATH, json=body)
    assert (reply.status_code, reply.json()["error"]["param"]) == (400, "input[1].role")


async def test_calls_and_thoughts_go_on_too() -> None:
    of = front()
    async with of.client() as client:
        tool = {"type": "function", "name": "get_weather"}
        first = (await client.post(PATH, json={"input": "weather?", "tools": [tool]})).json()
        calls = [item for item in first["output"] if item["type"] == "function_call"]
        results = [
            {"type": "function_call_output", "call_id": call["call_id"], "output": "7"}
            for call in calls
        ]
        body = {"input": results, "previous_response_id": first["id"]}
        assert (await client.post(PATH, json=body)).status_code == 200
    prompt = TOKENIZER.decode(of.dispatcher.requests[-1].prompt_ids, skip_special_tokens=False)
    assert prompt == (
        "<|user|>weather?<|assistant|>(\nhm, Oslo\n)\n\nLet me see."
        "CALLget_weather[city=Oslo]CALLget_weather[city=Oslo]<|tool|>7<|tool|>7<|assistant|>"
    )


async def test_a_call_that_was_cut_short_is_left_out() -> None:
    of = front('<tool_call>\n{"name": "get_weather", "arguments": {"city": "Os')
    async with of.client() as client:
        tool = {"type": "function", "name": "get_weather"}
        body = {"input": "weather?", "tools": [tool], "max_output_tokens": 55}
        first = (await client.post(PATH, json=body)).json()
        assert [item["status"] for item in first["output"]] == ["incomplete"]
        again = {"input": "go on", "previous_response_id": first["id"]}
        assert (await client.post(PATH, json=again)).status_code == 200


async def test_what_can_be_done_with_one_is_said(one: HeldRouter) -> None:
    made = await ask(one)
    place = f"{PATH}/{made['id']}"
    reply = await one.http.request("OPTIONS", place)
    assert reply.status_code == 405
    assert set(reply.headers["allow"].split(", ")) == {"GET", "HEAD", "DELETE"}
    for wrong in ("null", "", "yes"):
        reply = await one.http.get(place, params={"stream": wrong})
        assert (reply.status_code, reply.json()["error"]["param"]) == (400, "stream")
    for no in ("false", "0", "False"):
        assert await get(one, made["id"], stream=no) == made


# ---- input items ----


async def test_input_items_are_whole_and_come_in_pages(one: HeldRouter) -> None:
    items: list[dict[str, Any]] = [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "b"},
        {"role": "developer", "content": [{"type": "input_text", "text": "c"}], "id": "msg_own"},
    ]
    first = await ask(one, input=items)
    made = await ask(one, input="d", previous_response_id=first["id"], instructions="Be kind.")
    whole = await get(one, f"{made['id']}/input_items", order="asc", limit=100)
    ResponseItemList.model_validate(whole)
    for item in whole["data"]:
        ITEM.validate_python(item)
    texts = [item["content"][0]["text"] for item in whole["data"]]
    assert texts == ["a", "b", "c", ANSWER, "d"]
    assert whole["data"][2]["id"] == "msg_own"
    assert len({item["id"] for item in whole["data"]}) == 5
    newest = await get(one, f"{made['id']}/input_items", limit=2)
    assert newest["data"] == whole["data"][:2:-1]
    assert (newest["has_more"], newest["first_id"], newest["last_id"]) == (
        True, whole["data"][4]["id"], whole["data"][3]["id"]
    )  # fmt: skip
    rest = await get(one, f"{made['id']}/input_items", after=newest["last_id"])
    assert (rest["data"], rest["has_more"]) == (whole["data"][2::-1], False)


@pytest.mark.parametrize(
    ("query", "param"),
    [({"limit": "0"}, "limit"), ({"limit": "101"}, "limit"), ({"limit": "x"}, "limit"),
     ({"order": "up"}, "order"), ({"after": "nobody"}, "after")],
)  # fmt: skip
async def test_pages_that_there_are_not_are_refused(
    one: HeldRouter, query: dict[str, str], param: str
) -> None:
    made = await ask(one)
    reply = await one.http.get(f"{PATH}/{made['id']}/input_items", params=query)
    assert (reply.status_code, reply.json()["error"]["param"]) == (400, param)


async def test_the_sdk_finds_everything_where_it_looks() -> None:
    async with sdk(Front()) as client:
        made = await client.responses.create(input="hi")
        assert (await client.responses.retrieve(made.id)).output_text == made.output_text
        listed = [item async for item in client.responses.input_items.list(made.id, limit=1)]
        assert [item.type for item in listed] == ["message"]
        await client.responses.delete(made.id)
        with pytest.raises(openai.NotFoundError):
            await client.responses.retrieve(made.id)
