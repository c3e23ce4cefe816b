"""Key files: what they grant, and that nothing doubtful in one passes for a key."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import pytest

from baton.protocol.errors import ConfigError
from baton.runtime.rotation.watched_files import LOOK_S
from router.config import RouterConfig
from router.tenants.keys import EVERYBODY, Grant, KeyRing
from tests.router.fakes import FakeClock

DIGEST = hashlib.sha256(b"k1").hexdigest()
FILE = f"""
[[keys]]
name = "alice"
sha256 = "{DIGEST.upper()}"
tenant = "research"
weight = 2
max_concurrency = 4
tokens_per_minute = 1000
best_priority = 0

[[keys]]
name = "bob"
key = "k2"
"""


def test_a_file_grants(tmp_path: Path) -> None:
    path = tmp_path / "keys.toml"
    path.write_text(FILE)
    ring = KeyRing.load(["plain"], str(path))
    assert len(ring) == 3
    assert ring.bearer(b"Bearer k1") == Grant(
        "alice", "research", 2.0, max_concurrency=4, tokens_per_minute=1000, best_priority=0,
        isolated=True,
    )  # fmt: skip
    assert ring.bearer(b"bearer k2 ") == Grant("bob", "bob", isolated=True)
    assert ring.bearer(b"Bearer plain") == Grant(isolated=True)
    assert KeyRing.load(["plain"]).bearer(b"Bearer plain") is EVERYBODY
    for wrong in (b"Bearer k3", b"Bearer ", b"Basic k1", b"k1", DIGEST.encode(), b"Bearer K1"):
        assert ring.bearer(wrong) is None


def test_json_by_its_name(tmp_path: Path) -> None:
    path = tmp_path / "keys.json"
    path.write_text(json.dumps({"keys": [{"name": "alice", "key": "k1"}]}))
    assert KeyRing.load((), str(path)).bearer(b"Bearer k1") is not None


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("keys = [", "cannot read"),
        ("", "`keys`"),
        ("keys = []", "`keys`"),
        ("keys = [1]", "keys[0] is no table"),
        ('[[keys]]\nname = "a"\nkey = "x"\n[other]\na = 1', "`keys`"),
        ('[[keys]]\nname = "a"\nkey = "x"\nlimit = 3', "unknown field 'limit'"),
        ('[[keys]]\nkey = "x"', "keys[0].name"),
        ('[[keys]]\nname = "a b"\nkey = "x"', "keys[0].name"),
        ('[[keys]]\nname = "a"\ntenant = ""\nkey = "x"', "keys[0].tenant"),
        ('[[keys]]\nname = "a"', "either sha256 or key"),
        ('[[keys]]\nname = "a"\nkey = " "', "keys[0].key"),
        (f'[[keys]]\nname = "a"\nkey = "x"\nsha256 = "{DIGEST}"', "either sha256 or key"),
        ('[[keys]]\nname = "a"\nsha256 = "abc"', "64 hexadecimal digits"),
        ('[[keys]]\nname = "a"\nkey = "x"\nweight = 0', "keys[0].weight must be between"),
        ('[[keys]]\nname = "a"\nkey = "x"\nweight = nan', "keys[0].weight must be between"),
        ('[[keys]]\nname = "a"\nkey = "x"\nmax_concurrency = true', "max_concurrency must be int"),
        ('[[keys]]\nname = "a"\nkey = "x"\nmax_concurrency = 0', "max_concurrency must be between"),
        ('[[keys]]\nname = "a"\nkey = "x"\ntokens_per_minute = "9"', "must be int"),
        ('[[keys]]\nname = "a"\nkey = "x"\n[[keys]]\nname = "a"\nkey = "y"', "'a' is there twice"),
        ('[[keys]]\nname = "a"\nkey = "x"\n[[keys]]\nname = "b"\nkey = "x"', "is there twice"),
        ('[[keys]]\nname = "a"\nkey = "x"\n[[keys]]\nname = "b"\ntenant = "a"\nweight=2\nkey="y"',
         "differ in weight"),
    ],
)  # fmt: skip
def test_a_doubtful_file_stops_the_start(tmp_path: Path, text: str, told: str) -> None:
    path = tmp_path / "keys.toml"
    path.write_text(text)
    with pytest.raises(ConfigError) as caught:
        KeyRing.load((), str(path))
    assert told in caught.value.message
    assert caught.value.field == "api_keys"
    assert '"x"' not in caught.value.message, "no key in a message"


def test_a_missing_file_stops_the_start(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot read"):
        KeyRing.load((), str(tmp_path / "none.toml"))


def test_a_file_opens_a_foreign_bind_as_a_key_does() -> None:
    RouterConfig(host="0.0.0.0", api_keys="keys.toml", insecure=True).check()
    with pytest.raises(ConfigError, match="--api-keys"):
        RouterConfig(host="0.0.0.0", insecure=True).check()
    with pytest.raises(ConfigError, match="max_queued_requests"):
        RouterConfig(max_queued_requests=-1).check()
    with pytest.raises(ConfigError, match="prefill_window_s"):
        RouterConfig(prefill_window_s=0.0).check()


def test_a_file_is_read_anew_once_it_has_changed(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path, clock = tmp_path / "keys.toml", FakeClock()
    path.write_text('[[keys]]\nname = "a"\nkey = "one"\n')
    ring = KeyRing.load(["plain"], str(path), now=clock.monotonic)
    path.write_text('[[keys]]\nname = "a"\nkey = "two"\nmax_concurrency = 3\n')
    assert ring.match(b"one") is not None  # not looked at more than once in LOOK_S
    clock.advance(LOOK_S)
    assert ring.match(b"one") is None
    found = ring.match(b"two")
    assert found is not None
    assert found.max_concurrency == 3
    assert ring.match(b"plain") is not None
    path.write_text("[[keys]]\n")  # half written, or wrong: the keys stay
    clock.advance(LOOK_S)
    assert ring.match(b"two") is not None
    clock.advance(LOOK_S)
    assert ring.match(b"two") is not None
    assert caplog.text.count("api_keys: the old files stay in use") == 1
    path.unlink()
    clock.advance(LOOK_S)
    assert ring.match(b"two") is not None
    other = tmp_path / "new.toml"  # as secrets are mounted: another file in its place
    other.write_text('[[keys]]\nname = "b"\nkey = "three"\n')
    other.rename(path)
    clock.advance(LOOK_S)
    assert (ring.match(b"two"), len(ring)) == (None, 2)
    assert ring.match(b"three") is not None
