"""The whole conversation that a body means: what it refers to is looked up, and put before it.

`previous_response_id`  all that an earlier response answered, and its answer
`item_reference`        an item of an earlier response, by an id that leads back to it

With all of it the conversation is no larger than a body may be: a reference is short, and may
stand in it a thousand times.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import Final

import orjson
from starlette.types import Scope

from baton.protocol.errors import InvalidRequest, UnsupportedFeature
from router.api.http.reading import MAX_BODY_BYTES
from router.api.responses.body import ResponsesBody
from router.api.responses.items import Item, items_of
from router.api.responses.keeper import Keeper, Stored
from router.api.responses.output import response_of
from router.api.resumable.http import owner_of
from router.request.terms import grant_of

_PREVIOUS: Final = "previous_response_id"
_REFERENCE: Final = "item_reference"
MAX_BYTES: Final = MAX_BODY_BYTES
_NOTHING_KEPT: Final = "nothing is stored here, send the whole conversation as input"
Load = Callable[[str], Awaitable[Stored | None]]


async def conversation_of(
    body: ResponsesBody, scope: Scope, keeper: Keeper | None, told: str | None = None
) -> tuple[list[Item], list[Item]]:
    """Items of earlier responses, and those of the body, with what stands in the place of its
    references. `told`: the response that is told once more; what it answers was looked up before,
    and may have gone. Raises InvalidRequest, naming the field; Overloaded, Unavailable."""
    given, asked = items_of(body.input), body.previous_response_id
    referred = [f"input[{index}]" for index, item in enumerate(given) if not _is_own(item)]
    if asked is None and not referred:
        return [], given
    if keeper is None:
        where = _PREVIOUS if asked is not None else referred[0]
        raise UnsupportedFeature(f"{where}: {_NOTHING_KEPT}", field=where)
    owner = owner_of(scope)
    before = None if told is None else await keeper.load(owner, told)
    if before is not None:
        return [], before.items
    load = partial(keeper.load, owner, grant=grant_of(scope))
    earlier = [] if asked is None else await _earlier_items(asked, load)
    own = await _own_items(given, load)
    _check_size([*earlier, *own])
    return earlier, own


def _is_own(item: Item) -> bool:
    return item.get("type") != _REFERENCE


def _check_size(items: Sequence[Item]) -> None:
    room = MAX_BYTES
    for item in items:
        room -= len(orjson.dumps(item))
        if room < 0:
            message = f"input: more than {MAX_BYTES} bytes, with what it goes on from"
            raise InvalidRequest(message, field="input")


async def _earlier_items(asked: str, load: Load) -> list[Item]:
    """Those of the response before."""
    found = await load(asked)
    if found is None:
        message = f"{_PREVIOUS}: there is no response {asked[:200]!r}, or no longer"
        raise InvalidRequest(message, field=_PREVIOUS)
    if not found.ended:
        raise InvalidRequest(f"{_PREVIOUS}: that response has not ended yet", field=_PREVIOUS)
    return [*found.items, *filter(_is_whole, found.response["output"])]


async def _own_items(given: Sequence[Item], load: Load) -> list[Item]:
    """Items in the place of references."""
    items, known = list(given), dict[str, Item]()
    # The last ones first: the response of one has most of those before it among its own items.
    for index, item in reversed(list(enumerate(items))):
        if _is_own(item):
            continue
        where, id_ = f"input[{index}]", item.get("id")
        if not isinstance(id_, str):
            raise InvalidRequest(f"{where}.id must be a string", field=f"{where}.id")
        response_id = response_of(id_)
        if id_ not in known and response_id is not None:
            found = await load(response_id)
            if found is not None:
                listed = [*found.items, *found.response["output"]]
                known |= {each["id"]: each for each in listed}
        if id_ not in known:
            message = f"{where}: there is no item {id_[:200]!r}, or no longer"
            raise InvalidRequest(message, field=where)
        items[index] = known[id_]
    return items


def _is_whole(item: Item) -> bool:
    """Arguments that were cut short are none, and nobody has made that call."""
    return item["type"] != "function_call" or item["status"] == "completed"
