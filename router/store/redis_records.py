"""Records and log entries as Redis answers with them (router/store/redis_scripts.py)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from baton.protocol.request import RequestState
from router.store.base import LogEntry, RequestRecord


def request_of(key: str) -> str:
    """Return the id in a request's key."""
    return key.partition(":req:")[2]


def flatten(fields: Mapping[str, str]) -> list[str]:
    return [part for item in fields.items() for part in item]


def pairs(flat: Sequence[bytes]) -> dict[bytes, bytes]:
    return dict(zip(flat[::2], flat[1::2], strict=True))


def values_of(entries: Sequence[LogEntry]) -> list[str | int]:
    """Return what APPEND and MOVE get of each entry."""
    values: list[str | int] = []
    for entry in entries:
        tokens = ",".join(map(str, entry.token_ids))
        values += [entry.epoch, entry.sample, entry.position, len(entry.token_ids), tokens]
        values.append(entry.more)
    return values


def log_entry_of(request_id: str, row: Mapping[bytes, bytes]) -> LogEntry:
    """Return an entry of a log's stream."""
    tokens = row[b"t"]
    return LogEntry(
        request_id,
        epoch=int(row[b"e"]),
        position=int(row[b"p"]),
        token_ids=tuple(map(int, tokens.split(b","))) if tokens else (),
        sample=int(row[b"s"]),
        more=row.get(b"m", b"").decode(),
    )


def record_of(request_id: str, raw: Mapping[bytes, Any]) -> RequestRecord:
    """Return the record in a request's hash; `raw` has the time of the answer as `now`."""
    now, seen = int(raw[b"now"]), raw.get(b"seen")
    return RequestRecord(
        id=request_id,
        state=RequestState(raw[b"state"].decode()),
        epoch=int(raw[b"epoch"]),
        owner=raw[b"owner"].decode(),
        tries=int(raw[b"tries"]),
        fields={
            name[2:].decode(): value.decode() for name, value in raw.items() if name[:2] == b"f:"
        },
        age_s=(now - int(raw.get(b"since", now))) / 1000,
        idle_s=None if seen is None else (now - int(seen)) / 1000,
    )
