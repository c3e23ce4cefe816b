"""The whole conversation of a body: looks up the earlier responses and items that it refers to.

`previous_response_id`  stands for the whole conversation of an earlier response, with its output
`item_reference`        stands for one item of an earlier response; its id contains that response's

The conversation with all of these may be no larger than a body may be. Otherwise a small body could
stand for a huge one, because it may contain a thousand references.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import Final

import orjson
from starlette.types import Scope

from baton.protocol.errors import InvalidRequest, UnsupportedFeature
from router.api.http.reading import most_body_bytes
from router.api.responses.body import ResponsesBody
from router.api.responses.items import Item, items_of
from router.api.responses.keeper import Keeper, Stored
from router.api.responses.output import response_of
from router.api.resumable.http import owner_of
from router.request.terms import grant_of

_PREVIOUS: Final = "previous_response_id"
_REFERENCE: Final = "item_reference"
_NOTHING_KEPT: Final = "nothing is stored here, send the whole conversation as input"
Load = Callable[[str], Awaitable[Stored | None]]


async def conversation_of(
    body: ResponsesBody, scope: Scope, keeper: Keeper | None, told: str | None = None
) -> tuple[list[Item], list[Item]]:
    """Return the items of earlier responses, and the body's items with its references replaced.

    `told`: the id of the response, if its events are only read again. Then its stored items are
    returned, since what the body refers to may be deleted by now.
    Raises InvalidRequest, naming the field; Overloaded, Unavailable."""
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
    _check_size([*earlier, *own], most_body_bytes(scope))
    return earlier, own


def _is_own(item: Item) -> bool:
    return item.get("type") != _REFERENCE


def _check_size(items: Sequence[Item], most_bytes: int) -> None:
    room = most_bytes
    for item in items:
        room -= len(orjson.dumps(item))
        if room < 0:
            message = f"input: more than {most_bytes} bytes, with what it goes on from"
            raise InvalidRequest(message, field="input")


async def _earlier_items(asked: str, load: Load) -> list[Item]:
    """Return the conversation of the response `asked`: the items that it answered, and its output.

    Raises InvalidRequest if it does not exist or has not ended."""
    found = await load(asked)
    if found is None:
        message = f"{_PREVIOUS}: there is no response {asked[:200]!r}, or no longer"
        raise InvalidRequest(message, field=_PREVIOUS)
    if not found.ended:
        raise InvalidRequest(f"{_PREVIOUS}: that response has not ended yet", field=_PREVIOUS)
    return [*found.items, *filter(_is_whole, found.response["output"])]


async def _own_items(given: Sequence[Item], load: Load) -> list[Item]:
    """Return the items with every reference replaced by the item that it names."""
    items, known = list(given), dict[str, Item]()
    # The last reference first: its response's conversation has most of the items before it.
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
    """Whether an output item belongs to the conversation: all but function calls that were cut
    short, since no client has made such a call."""
    return item["type"] != "function_call" or item["status"] == "completed"
