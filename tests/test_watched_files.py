"""Files that are read again when they change: what counts as a change, and what is not believed."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from baton.protocol.errors import ConfigError
from baton.runtime.rotation.deployment_secret import NONE, secret_file, secrets_of
from baton.runtime.rotation.watched_files import LOOK_S, WatchedFiles
from tests.mounted_secret import MountedSecret
from tests.router.fakes import FakeClock


def number_in(path: Path) -> int:
    try:
        return int(path.read_text())
    except (OSError, ValueError) as error:
        raise ConfigError(f"no number in {path}") from error


def watched(path: Path, clock: FakeClock) -> WatchedFiles[int]:
    return WatchedFiles("number", [path], lambda: number_in(path), clock.monotonic)


def test_a_written_file_is_read_again_after_a_while(tmp_path: Path) -> None:
    path, clock = tmp_path / "n", FakeClock()
    path.write_text("1")
    number = watched(path, clock)
    path.write_text("2")
    assert number.value() == 1, "looked at no more often than every LOOK_S"
    clock.advance(LOOK_S)
    assert number.value() == 2
    path.chmod(0o600)
    clock.advance(LOOK_S)
    assert number.value() == 2


def test_a_mounted_secret_is_followed(tmp_path: Path) -> None:
    clock = FakeClock()
    secret = MountedSecret(tmp_path / "secret", {"n": "1"})
    number = watched(secret.path("n"), clock)
    for text in ("2", "3"):
        secret.update({"n": text})
        clock.advance(LOOK_S)
        assert number.value() == int(text)


def test_a_broken_file_leaves_the_value(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path, clock = tmp_path / "n", FakeClock()
    path.write_text("1")
    number = watched(path, clock)
    made_at = number.read_at
    for break_it in (lambda: path.write_text("?"), path.unlink):
        break_it()
        for _ in range(3):
            clock.advance(LOOK_S)
            assert (number.value(), number.succeeded, number.read_at) == (1, False, made_at)
    errors = [each for each in caplog.records if each.levelno == logging.ERROR]
    assert len(errors) == 1, "the same complaint is not repeated"
    path.write_text("4")
    clock.advance(LOOK_S)
    assert (number.value(), number.succeeded) == (4, True)
    assert number.read_at >= made_at


def test_files_that_change_while_they_are_read_are_read_once_more(tmp_path: Path) -> None:
    one, two, clock = tmp_path / "one", tmp_path / "two", FakeClock()
    for path in (one, two):
        path.write_text("1")
    torn = False

    def both() -> tuple[int, int]:
        first = number_in(one)
        if torn:
            one.write_text("3")
            two.write_text("3")
        return first, number_in(two)

    pair = WatchedFiles("pair", [one, two], both, clock.monotonic)
    one.write_text("2")
    two.write_text("2")
    torn = True
    clock.advance(LOOK_S)
    assert (pair.value(), pair.succeeded) == ((1, 1), False), "not 2 and 3"
    torn = False
    clock.advance(LOOK_S)
    assert (pair.value(), pair.succeeded) == ((3, 3), True)


def test_the_first_value_must_be_there(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no number"):
        watched(tmp_path / "none", FakeClock())


def test_secrets_of_a_file(tmp_path: Path) -> None:
    path = tmp_path / "secrets"
    path.write_text("new \n\nold\nnew\n")
    assert secrets_of("", str(path))() == ("new", "old")
    assert secrets_of("one", None)() == ("one",)
    assert secrets_of("", None)() == NONE
    with pytest.raises(ConfigError, match="either") as caught:
        secrets_of("one", str(path))
    assert caught.value.field == "secret_file"


@pytest.mark.parametrize(
    ("content", "told"),
    [(b"", "0 secrets"), (b" \n\n", "0 secrets"), (b"\xff\xfe", "cannot read"),
     ("\n".join(map(str, range(9))).encode(), "9 secrets"), (None, "cannot read")],
)  # fmt: skip
def test_a_file_without_usable_secrets(tmp_path: Path, content: bytes | None, told: str) -> None:
    path = tmp_path / "secrets"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(ConfigError, match=told) as caught:
        secret_file(str(path))
    assert caught.value.field == "secret_file"
