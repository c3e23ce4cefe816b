"""Read and write the lines of OpenAI's batch files. No network.

In:   {"custom_id": ..., "method": "POST", "url": "/v1/chat/completions", "body": {...}}
Out:  {"id": ..., "custom_id": ..., "response": {"status_code", "request_id", "body"}, "error": ...}

Output lines stand in the order in which answers come; the custom_id links an answer to its request.
A last line without a line break was being written when an earlier run ended: `Output.open` removes
it, and the request is sent again.
"""

from __future__ import annotations

import secrets
from collections.abc import Container, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, cast

import orjson

from baton.protocol.errors import InvalidRequest

FAILED: Final = 400  # a status from here on is a failure
MAX_ID_CHARS: Final = 512
URLS: Final = ("/v1/", "/inference/v1/", "/tokenize", "/detokenize")


@dataclass(frozen=True, slots=True)
class BatchTask:
    """One request of an input file."""

    custom_id: str
    url: str
    body: dict[str, Any]


@dataclass(frozen=True, slots=True)
class Response:
    """The answer of a server, with any status."""

    status_code: int
    request_id: str
    body: Any


def read_tasks(path: Path) -> Iterator[BatchTask]:
    """Yield the requests of a file in order. Raises InvalidRequest for a bad line, naming it."""
    with path.open("rb") as lines:
        for number, line in enumerate(lines, 1):
            if line.strip():
                yield task_of(line, f"{path}, line {number}")


def check_tasks(path: Path) -> int:
    """Read the whole file before any request is sent. Return how many requests it holds.

    Raises InvalidRequest for a bad line, and for a custom_id that two lines share.
    """
    seen: set[str] = set()
    for task in read_tasks(path):
        check_new(task, seen, f"{path}: ")
        seen.add(task.custom_id)
    return len(seen)


def check_new(task: BatchTask, seen: Container[str], place: str = "") -> None:
    """Raise InvalidRequest if the custom_id of `task` is in `seen`. `place` begins the message."""
    if task.custom_id in seen:
        message = f"{place}custom_id {task.custom_id[:100]!r} is there twice"
        raise InvalidRequest(message, field="custom_id")


def task_of(line: bytes, place: str) -> BatchTask:
    """Parse a line. Raises InvalidRequest for a bad one; its message names the line as `place`."""
    try:
        content: object = orjson.loads(line)
    except orjson.JSONDecodeError as error:
        raise InvalidRequest(f"{place}: not JSON: {error}") from error
    if not isinstance(content, dict):
        raise InvalidRequest(f"{place}: not an object")
    fields = cast("dict[str, Any]", content)
    custom_id, url, body = fields.get("custom_id"), fields.get("url"), fields.get("body")
    if not isinstance(custom_id, str) or not 0 < len(custom_id) <= MAX_ID_CHARS:
        message = f"{place}: custom_id must be a text of 1 to {MAX_ID_CHARS} characters"
        raise InvalidRequest(message, field="custom_id")
    if fields.get("method", "POST") != "POST":
        raise InvalidRequest(f"{place}: method must be POST", field="method")
    if not isinstance(url, str) or not url.startswith(URLS):
        raise InvalidRequest(f"{place}: url must begin with one of {', '.join(URLS)}", field="url")
    if not isinstance(body, dict):
        raise InvalidRequest(f"{place}: body must be an object", field="body")
    known = cast("dict[str, Any]", body)
    if known.get("stream"):
        raise InvalidRequest(f"{place}: a batch does not stream", field="stream")
    return BatchTask(custom_id, url, known)


class Output:
    """The file of answers; each write adds one complete line.

    The life: open() -> write()* -> close()."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self.done: dict[str, bool] = {}  # custom_id -> whether its answer has a status below 400

    def open(self) -> None:
        """Open the file, fill `done` from its lines, and remove an incomplete last line.

        Raises InvalidRequest if the file holds anything but answers of a batch.
        """
        with ExitStack() as stack:
            file = stack.enter_context(self._path.open("a+b"))
            file.seek(0)
            end = 0
            for number, line in enumerate(file, 1):
                if not line.endswith(b"\n"):
                    break
                custom_id, status = _answered(line, f"{self._path}, line {number}")
                self.done[custom_id] = _well(status)
                end += len(line)
            file.truncate(end)
            stack.pop_all()
        self._file = file

    def write(
        self, task: BatchTask, response: Response | None, error: tuple[str, str] | None
    ) -> None:
        """Write the answer to `task`, or the `error` (code, message) if there is no answer. Flushes
        the file. Mutates `done`."""
        self._file.write(_line(task.custom_id, response, error))
        self._file.flush()
        self.done[task.custom_id] = _well(None if response is None else response.status_code)

    def close(self) -> None:
        self._file.close()


def failure_line(custom_id: str, code: str, message: str) -> bytes:
    """Return the output line of a request that got no answer."""
    return _line(custom_id, None, (code, message))


def _line(custom_id: str, response: Response | None, error: tuple[str, str] | None) -> bytes:
    answer = None
    if response is not None:
        answer = {
            "status_code": response.status_code,
            "request_id": response.request_id,
            "body": response.body,
        }
    line = {
        "id": f"batch_req_{secrets.token_hex(12)}",
        "custom_id": custom_id,
        "response": answer,
        "error": None if error is None else {"code": error[0], "message": error[1]},
    }
    return orjson.dumps(line) + b"\n"


def _well(status: int | None) -> bool:
    """Whether there is an answer with a status below FAILED. None: there is no answer."""
    return status is not None and status < FAILED


def _answered(line: bytes, place: str) -> tuple[str, int | None]:
    """Return the custom_id of an output line, and its answer's status or None for no answer.

    Raises InvalidRequest if the line is no output line of a batch."""
    try:
        told = orjson.loads(line)
        custom_id, response = told["custom_id"], told["response"]
        status = None if response is None else int(response["status_code"])
    except (ValueError, KeyError, TypeError) as error:  # JSONDecodeError is a ValueError
        message = f"{place}: not an answer of a batch; give another file"
        raise InvalidRequest(message, field="output") from error
    return str(custom_id), status
