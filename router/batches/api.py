"""/v1/files and /v1/batches, as in OpenAI's API: the server runs what `baton batch` runs.

POST         /v1/files                    multipart: file, purpose, expires_after[seconds]
GET          /v1/files
GET, DELETE  /v1/files/{id}
GET          /v1/files/{id}/content
POST, GET    /v1/batches
GET          /v1/batches/{id}
POST         /v1/batches/{id}/cancel

Each API key sees only its own files and batches. The store blocks, so it is called in threads.
"""

from __future__ import annotations

import asyncio
import re
import secrets
import time
from collections.abc import Sequence
from typing import Any, Final, TypeVar

import msgspec
from starlette.datastructures import UploadFile
from starlette.exceptions import HTTPException
from starlette.requests import Request as HttpRequest
from starlette.responses import FileResponse, Response
from starlette.routing import Route
from starlette.types import Message

from baton.protocol.errors import InvalidRequest, RequestNotFound, TooLarge
from router.api.http.reading import read_body
from router.api.openai.bodies import object_of, struct_of
from router.api.resumable.http import owner_of
from router.batches.objects import (
    ENDED,
    PURPOSE,
    BatchBody,
    BatchList,
    BatchObject,
    FileDeleted,
    FileList,
    FileObject,
)
from router.batches.runner import BatchRunner
from router.batches.store import KEPT_S, BatchStore

ENDPOINTS: Final = (
    "/v1/chat/completions", "/v1/completions", "/v1/embeddings", "/v1/rerank", "/v1/score",
)  # fmt: skip
WINDOW: Final = re.compile(r"([1-9][0-9]{0,3})h")
LONGEST_H: Final = 24 * 7
SHORTEST_KEPT_S: Final = 3600
FORM_BYTES: Final = 16 << 10  # most bytes of an upload beside its file
UPLOADS: Final = 4  # uploads at once; more wait
MAX_NAME_CHARS: Final = 255
MAX_METADATA: Final = (16, 64, 512)  # pairs, characters of a key, of a value
PAGE: Final = {"files": 10_000, "batches": 20}
T = TypeVar("T", FileObject, BatchObject)


class BatchesApi:
    """The routes. `origins`: web pages of these origins may upload files; "*" allows all."""

    def __init__(self, store: BatchStore, runner: BatchRunner, origins: Sequence[str]) -> None:
        self._store = store
        self._runner = runner
        self._origins = frozenset(origins)
        self._uploads = asyncio.Semaphore(UPLOADS)

    def routes(self) -> list[Route]:
        file, batch = "/v1/files/{id}", "/v1/batches/{id}"
        return [
            Route("/v1/files", self.upload, methods=["POST"]),
            Route("/v1/files", self.files, methods=["GET"]),
            Route(file, self.file, methods=["GET"]),
            Route(file, self.delete, methods=["DELETE"]),
            Route(f"{file}/content", self.content, methods=["GET"]),
            Route("/v1/batches", self.create, methods=["POST"]),
            Route("/v1/batches", self.batches, methods=["GET"]),
            Route(batch, self.batch, methods=["GET"]),
            Route(f"{batch}/cancel", self.cancel, methods=["POST"]),
        ]

    # ---- files ----

    async def upload(self, request: HttpRequest) -> Response:
        """Store the file of a multipart form.

        Raises InvalidRequest, TooLarge, Overloaded; HTTPException (400, 403, 415)."""
        kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
        if kind != "multipart/form-data":
            raise HTTPException(415, "the content-type must be multipart/form-data")
        origin = request.headers.get("origin")
        if origin is not None and self._origins.isdisjoint((origin, "*")):
            # Browsers post multipart forms to other origins without a CORS preflight.
            raise HTTPException(403, "no web page of that origin may upload (--allowed-origins)")
        owner = owner_of(request.scope)
        async with self._uploads:
            room = await asyncio.to_thread(self._store.room, owner)
            bounded = HttpRequest(request.scope, _bounded(request, room + FORM_BYTES))
            async with bounded.form(max_files=1, max_fields=4, max_part_size=FORM_BYTES) as form:
                file, purpose = form.get("file"), form.get("purpose")
                if not isinstance(file, UploadFile):
                    raise InvalidRequest("file: a file is missing", field="file")
                if purpose != PURPOSE:
                    message = f"purpose must be {PURPOSE}: nothing else is done with files here"
                    raise InvalidRequest(message, field="purpose")
                seconds = _kept_s(form.get("expires_after[seconds]"))
                name = (file.filename or "file")[:MAX_NAME_CHARS]
                told = await asyncio.to_thread(
                    self._store.upload, owner, file.file, (name, PURPOSE), seconds
                )
        return _json(told)

    async def files(self, request: HttpRequest) -> Response:
        found = await asyncio.to_thread(self._store.files, owner_of(request.scope))
        wanted = request.query_params.get("purpose")
        listed = [file for file in found if wanted in (None, file.purpose)]
        page, more = _page(request, listed, PAGE["files"])
        return _json(FileList(data=page, has_more=more, **_ends(page)))

    async def file(self, request: HttpRequest) -> Response:
        return _json(await asyncio.to_thread(self._store.file, *_named(request)))

    async def content(self, request: HttpRequest) -> Response:
        path = await asyncio.to_thread(self._store.content, *_named(request))
        return FileResponse(path, media_type="application/octet-stream")

    async def delete(self, request: HttpRequest) -> Response:
        owner, id_ = _named(request)
        await asyncio.to_thread(self._store.delete, owner, id_)
        return _json(FileDeleted(id_))

    # ---- batches ----

    async def create(self, request: HttpRequest) -> Response:
        owner = owner_of(request.scope)
        body = struct_of(object_of(await read_body(request)), BatchBody)
        window_s = _checked(body)
        try:
            file = await asyncio.to_thread(self._store.file, owner, body.input_file_id)
        except RequestNotFound as error:
            raise RequestNotFound(error.message, field="input_file_id") from error
        if file.purpose != PURPOSE:
            message = f"input_file_id: a file of purpose {PURPOSE} is wanted"
            raise InvalidRequest(message, field="input_file_id")
        now = int(time.time())
        batch = BatchObject(
            id=f"batch_{secrets.token_hex(12)}",
            endpoint=body.endpoint,
            input_file_id=body.input_file_id,
            completion_window=body.completion_window,
            created_at=now,
            expires_at=now + window_s,
            metadata=body.metadata,
            output_expires_after=body.output_expires_after,
        )
        await asyncio.to_thread(self._store.add_batch, owner, batch)
        self._runner.poke()
        return _json(batch)

    async def batches(self, request: HttpRequest) -> Response:
        found = await asyncio.to_thread(self._store.batches, owner_of(request.scope))
        page, more = _page(request, found, PAGE["batches"])
        return _json(BatchList(data=page, has_more=more, **_ends(page)))

    async def batch(self, request: HttpRequest) -> Response:
        return _json(await asyncio.to_thread(self._store.batch, *_named(request)))

    async def cancel(self, request: HttpRequest) -> Response:
        """Ask for the end of a batch. If it has ended already, raise InvalidRequest."""
        owner, id_ = _named(request)
        batch = await asyncio.to_thread(self._store.batch, owner, id_)
        if batch.status in ENDED:
            raise InvalidRequest(f"batch_id: {id_} is {batch.status} already", field="batch_id")
        await asyncio.to_thread(self._store.place(owner, id_).cancel.touch)
        self._runner.poke()
        return _json(await asyncio.to_thread(self._store.batch, owner, id_))


def _bounded(request: HttpRequest, most: int) -> Any:
    """Return an ASGI `receive` for the request's body that raises TooLarge beyond `most` bytes."""
    left = most

    async def receive() -> Message:
        nonlocal left
        message = await request.receive()
        left -= len(message.get("body", b""))
        if left < 0:
            raise TooLarge("file: it is more than this key has room for", field="file")
        return message

    return receive


def _kept_s(given: Any) -> int:
    if given is None:
        return KEPT_S
    if not isinstance(given, str) or not given.isdecimal() or len(given) > 9:
        message = "expires_after[seconds] must be a number of seconds"
        raise InvalidRequest(message, field="expires_after[seconds]")
    return _within(int(given), "expires_after[seconds]")


def _within(seconds: int, field: str) -> int:
    if not SHORTEST_KEPT_S <= seconds <= KEPT_S:
        raise InvalidRequest(f"{field}: {SHORTEST_KEPT_S} to {KEPT_S} seconds", field=field)
    return seconds


def _checked(body: BatchBody) -> int:
    """Check a body; return its completion window in seconds.

    Raises InvalidRequest, naming the field."""
    if body.endpoint not in ENDPOINTS:
        message = f"endpoint must be one of {', '.join(ENDPOINTS)}"
        raise InvalidRequest(message, field="endpoint")
    window = WINDOW.fullmatch(body.completion_window)
    if window is None or int(window[1]) > LONGEST_H:
        message = f"completion_window must be hours from 1h to {LONGEST_H}h, such as 24h"
        raise InvalidRequest(message, field="completion_window")
    if body.output_expires_after is not None:
        _within(body.output_expires_after.seconds, "output_expires_after.seconds")
    metadata, (pairs, longest_key, longest) = body.metadata or {}, MAX_METADATA
    sizes = [(len(key), len(value)) for key, value in metadata.items()]
    if len(sizes) > pairs or any(key > longest_key or value > longest for key, value in sizes):
        message = f"metadata: at most {pairs} texts of {longest} characters, keys of {longest_key}"
        raise InvalidRequest(message, field="metadata")
    return int(window[1]) * 3600


def _page(request: HttpRequest, listed: list[T], most: int) -> tuple[list[T], bool]:
    """Return the page that the query asks for, and whether more follows. `most`: the default limit.

    Raises InvalidRequest."""
    query = request.query_params
    limit, after, order = query.get("limit"), query.get("after"), query.get("order", "desc")
    if order not in ("asc", "desc"):
        raise InvalidRequest("order must be asc or desc", field="order")
    if limit is not None:
        most = int(limit) if limit.isdecimal() and len(limit) < 6 else 0
    if not 1 <= most <= PAGE["files"]:
        message = f"limit must be a number from 1 to {PAGE['files']}"
        raise InvalidRequest(message, field="limit")
    found = listed if order == "desc" else listed[::-1]
    if after is not None:
        places = [place for place, one in enumerate(found, 1) if one.id == after]
        if not places:
            raise InvalidRequest(f"after: there is no {after[:100]!r}", field="after")
        found = found[places[0] :]
    return found[:most], len(found) > most


def _ends(page: Sequence[FileObject | BatchObject]) -> dict[str, Any]:
    return {"first_id": page[0].id, "last_id": page[-1].id} if page else {}


def _named(request: HttpRequest) -> tuple[str, str]:
    return owner_of(request.scope), str(request.path_params["id"])


def _json(content: msgspec.Struct) -> Response:
    return Response(msgspec.json.encode(content), media_type="application/json")
