"""The names of all keys that Baton keeps in Redis, and the check of its URL.

router/store/redis_store.py says what the values mean. All keys share the hash tag `{pd}`, so that
the scripts are legal on Redis Cluster.
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
ABORTS: Final = f"{TAG}:aborts"  # channel: requests that any router is to abort
ABORTED_PREFIX: Final = f"{TAG}:aborted:"
ROUTER_PREFIX: Final = f"{TAG}:router:"
DOCUMENT_PREFIX: Final = f"{TAG}:document:"
NODE_PATTERN: Final = "{pd}:node:*"
URL_SCHEMES: Final = ("redis", "rediss", "unix")


def check_redis_url(url: str) -> None:
    """Raise ConfigError for a URL to which no client could connect.

    The error never shows the URL, which may hold a password.
    """
    try:
        parts = urlsplit(url)
        _ = parts.port  # urllib parses it here: ValueError if it is no number or out of range
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
    """Return a Redis URL without its password, fit to be shown."""
    scheme, separator, rest = url.partition("://")
    return f"{scheme}{separator}{rest.rpartition('@')[2]}"


def request_key(request_id: str) -> str:
    """Return the key of one request's hash: state, epoch, owner, fields."""
    return REQUEST_PREFIX + request_id


def node_key(node_id: str) -> str:
    """Return the key of one node's record, a string with PX (NodeRecord,
    baton/protocol/wire.py).
    """
    return NODE_PREFIX + node_id


def log_key(request_id: str) -> str:
    """Return the key of a stream: the tokens that clients of one request were shown."""
    return LOG_PREFIX + request_id


def aborted_key(question_id: str) -> str:
    """Return the key of a list with PX: the requests that routers ended because of one question.

    See router/request/aborts.py.
    """
    return ABORTED_PREFIX + question_id


def router_key(router_id: str) -> str:
    """Return the key of a string with PX: it exists while this router is alive."""
    return ROUTER_PREFIX + router_id


def document_key(owner: str, name: str) -> str:
    """Return the key of a string with PX: a document of that owner (router/store/documents.py)."""
    return f"{DOCUMENT_PREFIX}{owner}:{name}"


def document_index_key(owner: str) -> str:
    """Return the key of a zset: names of an owner's documents, by arrival in ms of Redis TIME."""
    return f"{TAG}:documents:{owner}"


def document_sizes_key(owner: str) -> str:
    """Return the key of a hash: document name -> bytes; "" -> bytes of all documents."""
    return f"{TAG}:document-sizes:{owner}"
