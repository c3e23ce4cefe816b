"""baton/runtime/config.py: defaults < file < environment < flags; what is wrong stops the start by
name."""

from __future__ import annotations

import argparse
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import pytest

from baton.protocol.errors import ConfigError
from baton.runtime.config import add_config, add_options, load, option, parse, spelled
from baton.runtime.config import given as given_options
from baton.runtime.redis.urls import check_redis_url

Level = Literal["info", "debug"]


@dataclass(frozen=True, slots=True)
class Example:
    """One option of each kind."""

    name: str = option(help="required")
    port: int = option(8000, "a port")
    share: float = option(0.5, "50 % of it")
    fast: bool = option(True, "go fast")
    level: Literal["info", "debug"] = option(
        "info", "how much", choices=spelled(("info", "debug"), all="debug"), also=("-l",)
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
    example = load(Example, parsed("--config", str(file), "--url", "u", "--share", "0.3"), environ)
    assert (example.name, example.port, example.share) == ("file", 2, 0.3)
    assert example.nodes == ("a", "b")


def parsed(*flags: str) -> argparse.Namespace:
    """As a command reads its line: with a plain flag beside the options of dataclasses."""
    parser = argparse.ArgumentParser(exit_on_error=False)
    add_options(parser, Example)
    parser.add_argument("--url", required=True)
    parser.add_argument("--count", type=int, default=1)
    parser.add_argument("--kind", choices=("a", "b"), default="a")
    parser.add_argument("--json", action="store_true")
    return parse(parser, flags)


def written(path: Path, text: str) -> str:
    path.write_text(text)
    return str(path)


def test_a_file_of_yaml_speaks_for_every_kind_of_option(tmp_path: Path) -> None:
    text = """
        # as in vLLM's
        name: x
        port: 7
        fast: off
        level: debug
        nodes: [a, b]
        folder: /tmp
        secret: s
        url: there
        count: 3
        json: true
    """
    file = written(tmp_path / "baton.yaml", text)
    arguments = parsed("--config", file)
    example = load(Example, arguments)
    assert example == Example(
        "x", 7, fast=False, level="debug", nodes=("a", "b"), folder=Path("/tmp"), secret="s",
        built=example.built,
    )  # fmt: skip
    assert (arguments.url, arguments.count, arguments.json) == ("there", 3, True)
    later = parsed("--config", file, "--count", "1", "--url=here", "--port", "9")
    assert (later.count, later.url, load(Example, later).port) == (1, "here", 9)


def test_names_in_a_file_may_use_dashes(tmp_path: Path) -> None:
    @dataclass(frozen=True)
    class Dashed:
        grpc_port: int = option(1, "a port")

    parser = argparse.ArgumentParser()
    add_options(parser, Dashed)
    file = written(tmp_path / "baton.toml", "grpc-port = 7\n")
    arguments = parse(parser, ["--config", file])
    assert load(Dashed, arguments).grpc_port == 7
    assert given_options(Dashed, arguments) == {"grpc_port": 7}
    assert given_options(Dashed, arguments, {"BATON_GRPC_PORT": "8"}) == {}
    assert given_options(Dashed, parse(parser, ["--config", file, "--grpc-port", "9"])) == {
        "grpc_port": "9"
    }


def test_each_command_reads_its_own_file(tmp_path: Path) -> None:
    parser = argparse.ArgumentParser()
    commands = parser.add_subparsers()
    add_options(commands.add_parser("run"), Example)
    add_config(other := commands.add_parser("ask"))
    other.add_argument("--count", type=int)
    file = written(tmp_path / "f.yaml", "name: x")
    assert load(Example, parse(parser, ["run", "--config", file])).name == "x"
    with pytest.raises(ConfigError, match="unknown option 'name'"):
        parse(parser, ["ask", "--config", file])
    assert parse(parser, ["ask", "--config", written(tmp_path / "g", "count: 2")]).count == 2


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


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("prot: 1", "unknown option 'prot'"),
        ("help: true", "unknown option 'help'"),
        ("config: x", "unknown option 'config'"),
        ("built: [1]", "unknown option 'built'"),
        ("kind: c", "kind: 'c' is none of a, b"),
        ("port: yes", "True is not a valid int"),
        ("name: [a]", "is not a valid str"),
        ("- name", "must hold options"),
        ("port: {", "cannot read"),
    ],
)
def test_unknown_keys_and_broken_files_stop_the_start(
    tmp_path: Path, text: str, message: str
) -> None:
    file = written(tmp_path / "baton.yaml", f"{text}\n" if text[0] == "-" else f"url: u\n{text}")
    with pytest.raises(ConfigError, match=message):
        load(Example, parsed("--config", file))


def test_a_file_that_is_not_there_or_empty(tmp_path: Path) -> None:
    for name in ("missing.yaml", "missing.toml"):
        with pytest.raises(ConfigError, match="cannot read"):
            parsed("--config", str(tmp_path / name))
    with pytest.raises(ConfigError, match="cannot read"):
        parsed("--config", written(tmp_path / "b.toml", "port = \n"))
    empty = written(tmp_path / "empty.yaml", "# nothing\n")
    assert parsed("--config", empty, "--url", "u").count == 1


@pytest.mark.parametrize("url", ["redis://h:1/0", "rediss://:pw@h", "unix:///run/redis.sock"])
def test_redis_urls(url: str) -> None:
    check_redis_url(url)


@pytest.mark.parametrize(
    "url", ["foo://:pw@x", "localhost:6379", "redis://:pw@h:x", "", "redis://[pw"]
)
def test_what_is_no_redis_url_is_not_shown(url: str) -> None:
    with pytest.raises(ConfigError, match="--redis-url") as caught:
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
