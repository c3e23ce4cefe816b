"""Names of everything that Baton keeps in Redis, in one place; what its URL may be.

Not here: what the values mean (router/store/redis_store.py).

All keys share the hash tag `{pd}`, so that the scripts stay legal on Redis Cluster.
"""

from __future__ import annotations

from typing import Final
from urllib.parse import urlsplit

from baton.protocol.errors import ConfigError

TAG: Final = "{pd}"
LEASES: Final = f"{TAG}:leases"  # zset: request key -> expiry in ms of Redis TIME
EVENTS: Final = f"{TAG}:events"  # stream, MAXLEN ~: (request, state, epoch)
STATES: Final = f"{TAG}:states"  # hash: state -> requests in it (terminal states: requests ever)
REQUEST_PREFIX: Final = f"{TAG}:req:"
NODE_PREFIX: Final = f"{TAG}:node:"
LOG_PREFIX: Final = f"{TAG}:log:"
ABORTS: Final = f"{TAG}:aborts"  # channel: requests that any router is to end
ABORTED_PREFIX: Final = f"{TAG}:aborted:"
ROUTER_PREFIX: Final = f"{TAG}:router:"
DOCUMENT_PREFIX: Final = f"{TAG}:document:"
NODE_PATTERN: Final = "{pd}:node:*"
URL_SCHEMES: Final = ("redis", "rediss", "unix")


def check_redis_url(url: str) -> None:
    """Raise ConfigError for what no client could connect to. Never shows the URL: it may hold a
    password."""
    try:
        parts = urlsplit(url)
        _ = parts.port  # parsed here, out of its range or not a number: ValueError
    except ValueError:
        raise ConfigError("redis_url: its host or port is malformed", field="redis_url") from None
    if parts.scheme not in URL_SCHEMES:
        text = "redis_url must begin with redis://, rediss:// or unix://"
        raise ConfigError(text, field="redis_url")
    database = parts.path.strip("/")
    if parts.scheme != "unix" and database and not database.isdecimal():
        text = "redis_url: the number of its database is malformed"  # redis-py would take 0
        raise ConfigError(text, field="redis_url")


def without_password(url: str) -> str:
    """A Redis URL that may be shown."""
    scheme, separator, rest = url.partition("://")
    return f"{scheme}{separator}{rest.rpartition('@')[2]}"


def request_key(request_id: str) -> str:
    """Hash of one request: state, epoch, owner, fields."""
    return REQUEST_PREFIX + request_id


def node_key(node_id: str) -> str:
    """String with PX: the serialized NodeRecord of one node (baton/protocol/wire.py)."""
    return NODE_PREFIX + node_id


def log_key(request_id: str) -> str:
    """Stream of the tokens that clients of one request were shown."""
    return LOG_PREFIX + request_id


def aborted_key(question_id: str) -> str:
    """List with PX: which requests each router ended for one question
    (router/request/aborts.py)."""
    return ABORTED_PREFIX + question_id


def router_key(router_id: str) -> str:
    """String with PX: this router is alive."""
    return ROUTER_PREFIX + router_id


def document_key(owner: str, name: str) -> str:
    """String with PX: a document of that owner (router/store/documents.py)."""
    return f"{DOCUMENT_PREFIX}{owner}:{name}"


def document_index_key(owner: str) -> str:
    """zset: the names of an owner's documents, by when they came in ms of Redis TIME."""
    return f"{TAG}:documents:{owner}"


def document_sizes_key(owner: str) -> str:
    """Hash: name -> bytes of each of them; "" -> of all."""
    return f"{TAG}:document-sizes:{owner}"
