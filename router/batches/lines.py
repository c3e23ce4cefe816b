"""OpenAI's batch files: lines in, lines out, and what a broken-off run has left. No network.

In:   {"custom_id": ..., "method": "POST", "url": "/v1/chat/completions", "body": {...}}
Out:  {"id": ..., "custom_id": ..., "response": {"status_code", "request_id", "body"}, "error": ...}

Lines go out in the order in which answers come; the custom_id says what belongs to what. A line
whose end is missing was being written when the run broke off: it is cut off and asked again.
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

FAILED: Final = 400  # statuses from here on
MAX_ID_CHARS: Final = 512
URLS: Final = ("/v1/", "/inference/v1/", "/tokenize", "/detokenize")


@dataclass(frozen=True, slots=True)
class BatchTask:
    """One request of the file."""

    custom_id: str
    url: str
    body: dict[str, Any]


@dataclass(frozen=True, slots=True)
class Response:
    """What a server answered, whatever its status."""

    status_code: int
    request_id: str
    body: Any


def read_tasks(path: Path) -> Iterator[BatchTask]:
    """The file's requests in order. Raises InvalidRequest, naming the line, for a bad one."""
    with path.open("rb") as lines:
        for number, line in enumerate(lines, 1):
            if line.strip():
                yield task_of(line, f"{path}, line {number}")


def check_tasks(path: Path) -> int:
    """Read all of the file before anything is sent: how many requests it holds.

    Raises InvalidRequest for a bad line, and for a custom_id that two lines share.
    """
    seen: set[str] = set()
    for task in read_tasks(path):
        check_new(task, seen, f"{path}: ")
        seen.add(task.custom_id)
    return len(seen)


def check_new(task: BatchTask, seen: Container[str], place: str = "") -> None:
    """Raises InvalidRequest for a custom_id that an earlier line had."""
    if task.custom_id in seen:
        message = f"{place}custom_id {task.custom_id[:100]!r} is there twice"
        raise InvalidRequest(message, field="custom_id")


def task_of(line: bytes, place: str) -> BatchTask:
    """Raises InvalidRequest; `place`: what its message says of the line."""
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
    """The file of answers. The life: open() -> write()* -> close(); one line per write, whole."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self.done: dict[str, bool] = {}  # custom_id -> it went well

    def open(self) -> None:
        """Learn what is answered, cut off a torn last line. Raises InvalidRequest for other files.

        Mutates `done`.
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
        """One answer, or why there is none (code, message). On disk when it returns."""
        self._file.write(_line(task.custom_id, response, error))
        self._file.flush()
        self.done[task.custom_id] = _well(None if response is None else response.status_code)

    def close(self) -> None:
        self._file.close()


def failure_line(custom_id: str, code: str, message: str) -> bytes:
    """Of a request that was never answered."""
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
    """There is an answer, and none that says what went wrong."""
    return status is not None and status < FAILED


def _answered(line: bytes, place: str) -> tuple[str, int | None]:
    """The custom_id of a line, and the status of its answer, if there is one."""
    try:
        told = orjson.loads(line)
        custom_id, response = told["custom_id"], told["response"]
        status = None if response is None else int(response["status_code"])
    except (ValueError, KeyError, TypeError) as error:  # JSON's own is a ValueError
        message = f"{place}: not an answer of a batch; give another file"
        raise InvalidRequest(message, field="output") from error
    return str(custom_id), status
