"""Which URLs of Redis there are, what each is refused for, and that no password is shown."""

from __future__ import annotations

import pytest

from baton.protocol.errors import ConfigError
from baton.runtime.redis.keys import ONLY, SPREAD, group_of, key_groups, slot_of
from baton.runtime.redis.urls import RedisKind, parse_redis_url, without_password
from router.config import RouterConfig

SECRET = "hidden"


def test_sentinels() -> None:
    found = parse_redis_url(
        "redis+sentinel://me:p%40ss@one,two:1,[::1]:2/my%20service/3"
        "?sentinel_username=other&sentinel_password=p%26q"
    )
    assert found.kind is RedisKind.SENTINEL
    assert found.hosts == (("one", 26379), ("two", 1), ("::1", 2))
    assert (found.service, found.database, found.tls) == ("my service", 3, None)
    assert found.login == {"username": "me", "password": "p@ss"}
    assert found.sentinel_login == {"username": "other", "password": "p&q"}


def test_a_cluster_with_tls() -> None:
    url = "rediss+cluster://:pw@one,two:7001/0?ssl_ca_certs=/ca.pem&ssl_check_hostname=no"
    found = parse_redis_url(url)
    assert found.kind is RedisKind.CLUSTER
    assert found.hosts == (("one", 6379), ("two", 7001))
    assert found.login == {"password": "pw"}
    assert found.tls == {"ssl_ca_certs": "/ca.pem", "ssl_check_hostname": False}


@pytest.mark.parametrize(
    ("url", "why"),
    [
        ("redis+sentinel://u:hidden@h:1", "name of the Sentinels' service"),
        ("redis+sentinel://u:hidden@h:1/", "name of the Sentinels' service"),
        ("redis+sentinel://u:hidden@h:1/s/one", "number of its database"),
        ("redis+sentinel://u:hidden@h:70000/s", "host or port"),
        ("redis+sentinel://u:hidden@h:1,,g:2/s", "host or port"),
        ("redis+sentinel://u:hidden@/s", "host or port"),
        ("redis+sentinel://u:hidden@h/s?colour=red", "no option 'colour'"),
        ("redis+sentinel://u:hidden@h/s?sentinel_password", "has no value"),
        ("redis+sentinel://u:hidden@h/s?ssl_ca_certs=/ca", "needs rediss+sentinel://"),
        ("redis+cluster://u:hidden@h/1", "no database but 0"),
        ("redis+cluster://u:hidden@h?sentinel_password=hidden", "no option 'sentinel_password'"),
        ("rediss+cluster://u:hidden@h?ssl_certfile=/c", "come together"),
        ("rediss+cluster://u:hidden@h?ssl_check_hostname=maybe", "true or false"),
        ("sentinel://u:hidden@h/s", "must begin with redis://"),
        ("redis+cluster:/u:hidden@h", "must begin with redis://"),
    ],
)
def test_what_is_refused(url: str, why: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_redis_url(url)
    assert caught.value.field == "redis_url"
    assert caught.value.message.startswith("--redis-url: ")
    assert why in caught.value.message
    assert SECRET not in caught.value.message


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("redis://me:hidden@h:6379/1", "redis://h:6379/1"),
        ("redis+cluster://me:hidden@h,g:1", "redis+cluster://h,g:1"),
        (
            "redis+sentinel://me:hidden@h/s?sentinel_username=you&sentinel_password=hidden",
            "redis+sentinel://h/s?sentinel_username=you&sentinel_password=***",
        ),
        ("unix:///run/redis.sock?password=hidden&db=1", "unix:///run/redis.sock?password=***&db=1"),
    ],
)
def test_what_is_shown(url: str, shown: str) -> None:
    assert without_password(url) == shown


def test_no_login_is_in_its_text() -> None:
    assert SECRET not in repr(parse_redis_url("redis+cluster://me:hidden@h"))


def test_key_groups_are_spread_over_all_slots() -> None:
    parts = [slot_of(group.tag) * len(SPREAD) // 16384 for group in SPREAD]
    assert parts == list(range(len(SPREAD))), "one in each equal part"
    assert key_groups(RedisKind.CLUSTER) == SPREAD
    assert key_groups(RedisKind.SENTINEL) == (ONLY,)
    assert slot_of("{user1000}") == 3443, "the Cluster specification's own example"
    counts = [0] * len(SPREAD)
    for number in range(1600):
        counts[group_of(f"cmpl-{number}", len(SPREAD))] += 1
    assert min(counts) > 50
    assert group_of("anything", 1) == 0


@pytest.mark.parametrize(
    ("url", "given", "wanted"),
    [
        (None, None, 0),
        ("redis://h", None, 0),
        ("redis://h", 2, 2),
        ("redis+sentinel://h/s", None, 1),
        ("redis+cluster://h", None, 1),
        ("redis+cluster://h", 0, 0),
    ],
)
def test_how_many_replicas_are_waited_for(url: str | None, given: int | None, wanted: int) -> None:
    assert RouterConfig(redis_url=url, store_replicas=given).replicas_wanted == wanted
