"""The names of all keys that Baton keeps in Redis, and which of them share a hash tag.

Keys with one hash tag are on one server of a Redis Cluster, so one script may use them together.
The keys of nodes have the tag `{pd}`. Those of requests are in key groups, each with a tag of its
own; a request's id decides its group. One server needs only one group, which has the tag `{pd}`,
too; a Cluster spreads NUM_GROUPS of them over its servers (docs/adr/0013-key-groups.md).
router/store/redis_store.py says what the values mean.
"""

from __future__ import annotations

import itertools
from binascii import crc_hqx
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final
from zlib import crc32

from baton.runtime.redis.urls import RedisKind

TAG: Final = "{pd}"
NODE_PREFIX: Final = f"{TAG}:node:"
NODE_PATTERN: Final = f"{NODE_PREFIX}*"
ABORTS: Final = f"{TAG}:aborts"  # channel: requests that any router is to abort
ABORTED_PREFIX: Final = f"{TAG}:aborted:"
NUM_SLOTS: Final = 16384  # of any Redis Cluster
NUM_GROUPS: Final = 16  # of a Cluster; its routers and tools must agree


@dataclass(frozen=True, slots=True)
class KeyGroup:
    """The keys of some requests and owners of documents. `tag`: their hash tag, with its braces."""

    tag: str

    @property
    def leases(self) -> str:
        """A zset: request key -> expiry in ms of Redis TIME."""
        return f"{self.tag}:leases"

    @property
    def events(self) -> str:
        """A stream, MAXLEN ~: (request, state, epoch)."""
        return f"{self.tag}:events"

    @property
    def states(self) -> str:
        """A hash: state -> requests in it (terminal states: requests ever)."""
        return f"{self.tag}:states"

    @property
    def request_prefix(self) -> str:
        return f"{self.tag}:req:"

    def request_key(self, request_id: str) -> str:
        """Return the key of one request's hash: state, epoch, owner, fields."""
        return f"{self.tag}:req:{request_id}"

    def log_key(self, request_id: str) -> str:
        """Return the key of a stream: the tokens that clients of one request were shown.

        SWEEP (router/store/redis_scripts.py) makes it of the request's key.
        """
        return f"{self.tag}:log:{request_id}"

    def router_key(self, router_id: str) -> str:
        """Return the key of a string with PX: it exists while this router is alive."""
        return f"{self.tag}:router:{router_id}"

    def document_key(self, owner: str, name: str) -> str:
        """Return the key of a string with PX: a document of that owner
        (router/store/documents.py)."""
        return f"{self.tag}:document:{owner}:{name}"

    def document_index_key(self, owner: str) -> str:
        """Return the key of a zset: names of an owner's documents, by arrival in ms of Redis
        TIME."""
        return f"{self.tag}:documents:{owner}"

    def document_sizes_key(self, owner: str) -> str:
        """Return the key of a hash: document name -> bytes; "" -> bytes of all documents."""
        return f"{self.tag}:document-sizes:{owner}"


def slot_of(tag: str) -> int:
    """Return the slot of a Redis Cluster that has the keys with this hash tag."""
    return crc_hqx(tag.strip("{}").encode(), 0) % NUM_SLOTS


def _spread(count: int) -> tuple[KeyGroup, ...]:
    """Return `count` groups, one in each of `count` equal parts of the slots."""
    groups: dict[int, KeyGroup] = {}
    for number in itertools.count():
        group = KeyGroup(f"{{pd.{number}}}")
        groups.setdefault(slot_of(group.tag) * count // NUM_SLOTS, group)
        if len(groups) == count:
            return tuple(groups[part] for part in range(count))
    raise AssertionError("the numbers never end")


ONLY: Final = KeyGroup(TAG)
SPREAD: Final = _spread(NUM_GROUPS)


def key_groups(kind: RedisKind) -> Sequence[KeyGroup]:
    """Return all key groups of such a Redis, in the order that `group_of` counts them."""
    return SPREAD if kind is RedisKind.CLUSTER else (ONLY,)


def group_of(name: str, count: int) -> int:
    """Return the place of a request's or an owner's group among `count` groups."""
    return crc32(name.encode()) % count if count > 1 else 0


def node_key(node_id: str) -> str:
    """Return the key of one node's record, a string with PX (NodeRecord,
    baton/protocol/wire.py).
    """
    return NODE_PREFIX + node_id


def aborted_key(question_id: str) -> str:
    """Return the key of a list with PX: the requests that routers ended because of one question.

    See router/request/aborts.py.
    """
    return ABORTED_PREFIX + question_id
