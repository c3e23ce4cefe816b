"""baton/config.py: defaults < file < environment < flags; what is wrong stops the start by name."""

from __future__ import annotations

import argparse
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import pytest

from baton.config import add_options, load, option
from baton.errors import ConfigError
from baton.redis_keys import check_redis_url

Level = Literal["info", "debug"]


@dataclass(frozen=True, slots=True)
class Example:
    """One option of each kind."""

    name: str = option(help="required")
    port: int = option(8000, "a port")
    share: float = option(0.5, "50 % of it")
    fast: bool = option(True, "go fast")
    level: Literal["info", "debug"] = option(
        "info", "how much", choices=("info", "debug"), also=("-l",), spellings={"all": "debug"}
    )
    limit: int | None = option(None, "none = unlimited")
    nodes: tuple[str, ...] = option((), "repeatable")
    folder: Path | None = option(None, "a path")
    secret: str = option("", "never a flag", secret=True)
    built: list[int] = field(default_factory=list[int])  # composed in code, not an option


def given(*flags: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser(exit_on_error=False)
    add_options(parser, Example)
    return parser.parse_args(flags)


def test_defaults() -> None:
    example = load(Example, {"name": "x"})
    assert (example.port, example.share, example.fast, example.limit) == (8000, 0.5, True, None)
    assert (example.nodes, example.built) == ((), [])


def test_flags() -> None:
    flags = "--name x --port 1 --share 0.25 --no-fast -l debug --limit 3 --nodes a --nodes b"
    example = load(Example, given(*flags.split(), "--folder", "/tmp"))
    assert example == Example(
        "x", 1, 0.25, False, "debug", 3, ("a", "b"), Path("/tmp"), built=example.built
    )


def test_later_layers_win(tmp_path: Path) -> None:
    file = tmp_path / "baton.toml"
    file.write_text('name = "file"\nport = 1\nshare = 0.1\nnodes = ["a", "b"]\n')
    environ = {"BATON_PORT": "2", "BATON_SHARE": "0.2", "OTHER": "x"}
    example = load(Example, given("--share", "0.3"), environ, file)
    assert (example.name, example.port, example.share) == ("file", 2, 0.3)
    assert example.nodes == ("a", "b")


def test_names_in_a_file_may_use_dashes(tmp_path: Path) -> None:
    @dataclass(frozen=True)
    class Dashed:
        grpc_port: int = option(1, "a port")

    file = tmp_path / "baton.toml"
    file.write_text("grpc-port = 7\n")
    assert load(Dashed, file=file).grpc_port == 7


@pytest.mark.parametrize(
    ("text", "value"), [("1", True), ("TRUE", True), ("off", False), ("No", False)]
)
def test_booleans_of_the_environment(text: str, value: bool) -> None:
    assert load(Example, {"name": "x"}, {"BATON_FAST": text}).fast is value


def test_environment_lists_and_blanks() -> None:
    environ = {"BATON_NODES": "a,b", "BATON_LIMIT": "", "BATON_SECRET": "s"}
    example = load(Example, {"name": "x"}, environ)
    assert (example.nodes, example.limit, example.secret) == (("a", "b"), None, "s")


def test_a_secret_is_never_a_flag() -> None:
    with pytest.raises(SystemExit):
        given("--secret", "s")


def test_options_composed_in_code_are_not_flags() -> None:
    with pytest.raises(SystemExit):
        given("--built", "1")


@pytest.mark.parametrize(
    ("environ", "message"),
    [
        ({"BATON_PORT": "many"}, "BATON_PORT: 'many' is not a valid int"),
        ({"BATON_SHARE": "half"}, "BATON_SHARE"),
        ({"BATON_FAST": "maybe"}, "BATON_FAST"),
        ({"BATON_LIMIT": "x"}, "BATON_LIMIT"),
        ({"BATON_LEVEL": "loud"}, "level: 'loud' is none of info, debug"),
    ],
)
def test_bad_values_name_their_source(environ: dict[str, str], message: str) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        load(Example, {"name": "x"}, environ)
    assert caught.value.field is not None


def test_a_bad_flag_names_itself() -> None:
    with pytest.raises(ConfigError, match="--port: 'x'"):
        load(Example, {"name": "x", "port": "x"})


def test_a_missing_option_is_named() -> None:
    with pytest.raises(ConfigError, match=r"^missing: --name \(.*: BATON_NAME\)$") as caught:
        load(Example)
    assert caught.value.field == "name"


def test_unknown_keys_and_broken_files_stop_the_start(tmp_path: Path) -> None:
    file = tmp_path / "baton.toml"
    file.write_text("prot = 1\n")
    with pytest.raises(ConfigError, match="unknown option 'prot'"):
        load(Example, {"name": "x"}, file=file)
    file.write_text("port = \n")
    with pytest.raises(ConfigError, match="cannot read"):
        load(Example, {"name": "x"}, file=file)
    with pytest.raises(ConfigError, match="cannot read"):
        load(Example, {"name": "x"}, file=tmp_path / "missing.toml")


@pytest.mark.parametrize("url", ["redis://h:1/0", "rediss://:pw@h", "unix:///run/redis.sock"])
def test_redis_urls(url: str) -> None:
    check_redis_url(url)


@pytest.mark.parametrize(
    "url", ["foo://:pw@x", "localhost:6379", "redis://:pw@h:x", "", "redis://[pw"]
)
def test_what_is_no_redis_url_is_not_shown(url: str) -> None:
    with pytest.raises(ConfigError, match="redis_url") as caught:
        check_redis_url(url)
    assert "pw" not in caught.value.message
    assert caught.value.field == "redis_url"


def test_help_comes_from_the_dataclass() -> None:
    parser = argparse.ArgumentParser()
    add_options(parser, Example)
    text = parser.format_help()
    assert "50 % of it" in text
    assert "(default: 8000)" in text
    assert "{info,debug}" in text
    assert "secret" not in text
