"""The `baton` command: parsing, defaults, what it hands over to, what a person sees."""

from __future__ import annotations

import io
import json
import os
import re
import signal
import sys
from pathlib import Path

import pytest
from rich.console import Console

from baton.client import Node, ServerInfo
from baton.errors import ConfigError
from deploy import cli, up
from deploy.chat import Answer, Conversation, describe
from deploy.plan import DEMO_MODEL, UpOptions
from deploy.status import view


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in list(os.environ):
        if name.startswith("BATON_"):
            monkeypatch.delenv(name)


def settings(*flags: str) -> tuple[UpOptions, dict[str, object]]:
    return cli.up_settings(cli.build_parser().parse_args(["up", *flags]))


def test_flags_of_up_reach_the_launcher_and_the_engine(tmp_path: Path) -> None:
    flags = "--prefill 3 --decode 2 --port 9000 --block-size 16 --prefill-block-size 64"
    options, engine = settings(*flags.split(), "--dtype", "float32", "--model", str(tmp_path))
    assert (options.prefill, options.decode, options.port) == (3, 2, 9000)
    assert options.prefill_block_size == 64
    assert engine == {"model": str(tmp_path), "block_size": "16", "dtype": "float32"}


def test_the_demo_model_is_the_default(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cli, "DEMO_MODEL", tmp_path)
    with pytest.raises(ConfigError, match="the demo model is missing"):
        settings()
    (tmp_path / "config.json").touch()
    assert settings()[1] == {
        "model": str(tmp_path),
        "served_model_name": cli.DEMO_NAME,
        "kv_cache_memory": cli.DEMO_POOL,
    }
    assert "kv_cache_memory" not in settings("--num-kv-blocks", "64")[1]
    monkeypatch.setenv("BATON_SERVED_MODEL_NAME", "mine")
    assert "served_model_name" not in settings()[1]  # the nodes read it themselves
    assert DEMO_MODEL.parent == Path(cli.__file__).resolve().parents[1]


def test_the_environment_is_a_layer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BATON_MODEL", str(tmp_path))
    monkeypatch.setenv("BATON_DECODE", "4")
    options, engine = settings()
    assert engine["model"] == str(tmp_path)
    assert options.decode == 4


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        (["--dtype", "float64"], "dtype"),
        (["--block-size", "0"], "block_size"),
        (["--decode", "0"], "decode"),
        (["--port", "eighty"], "port"),
    ],
)
def test_bad_values_stop_before_anything_starts(
    flags: list[str], named: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    try:
        status = cli.main(["up", "--model", str(tmp_path), *flags])
    except SystemExit as exit_:  # argparse's own refusal
        status = exit_.code
    assert status == 2
    assert named in capsys.readouterr().err.replace("-", "_")


@pytest.mark.parametrize(
    ("words", "program"),
    [
        (["router", "--port", "1"], ["-m", "router", "--port", "1"]),
        (["prefill", "--help"], ["-m", "prefill_node", "--help"]),
        (["decode"], ["-m", "decode_node"]),
        (["bench", "serve", "--rate", "2"], ["-m", "bench.serve", "--rate", "2"]),
        (["convert", "dir"], ["-m", "baton.engine.convert", "dir"]),
    ],
)
def test_commands_that_become_another_program(words: list[str], program: list[str]) -> None:
    assert cli.split_passed_on(words) == [sys.executable, *program]


@pytest.mark.parametrize("words", [[], ["up"], ["chat", "hi"], ["status", "--once"]])
def test_commands_that_stay(words: list[str]) -> None:
    assert cli.split_passed_on(words) is None


def test_an_unknown_benchmark_lists_the_known(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        cli.main(["bench", "fly"])
    assert caught.value.code == 2
    assert "serve" in capsys.readouterr().err


def test_chat_against_nobody_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["chat", "hi", "--url", "http://127.0.0.1:9"]) == 1
    error = capsys.readouterr().err
    assert error.startswith("baton: ")
    assert "Traceback" not in error


def test_the_printed_curl_is_a_valid_request() -> None:
    command = up.curl_command("http://127.0.0.1:8000", "it's", with_key=True)
    assert "Authorization: Bearer $BATON_API_KEY" in command
    quoted = re.search(r"-d '(.*)'$", command, re.DOTALL)
    assert quoted is not None
    body = json.loads(quoted[1].replace("'\\''", "'"))
    assert body["model"] == "it's"
    assert body["stream"] is True
    assert "Authorization" not in up.curl_command("http://h", "m", with_key=False)


def test_secrets_travel_in_the_environment() -> None:
    drawn = [up.child_variables(UpOptions())["BATON_SECRET"] for _ in range(2)]
    assert len(drawn[0]) == 64
    assert drawn[0] != drawn[1]
    given = up.child_variables(UpOptions(secret="s", api_key="k"))
    assert given == {"BATON_SECRET": "s", "BATON_API_KEY": "k"}
    with pytest.raises(ConfigError, match="comma"):
        up.child_variables(UpOptions(api_key="a,b"))


def test_run_folders_are_below_the_cache(tmp_path: Path) -> None:
    found = up.default_run_dir({"XDG_CACHE_HOME": str(tmp_path)})
    assert found.parent == tmp_path / "baton" / "runs"


def test_the_first_signal_unwinds_the_second_kills() -> None:
    killed: list[bool] = []
    before = signal.getsignal(signal.SIGTERM)
    with up.Interrupts(lambda: killed.append(True)):
        with pytest.raises(up.StopRequested):
            signal.raise_signal(signal.SIGTERM)
        assert killed == []
        signal.raise_signal(signal.SIGINT)
        assert killed == [True]
    assert signal.getsignal(signal.SIGTERM) is before


def test_a_failed_question_leaves_no_trace() -> None:
    conversation = Conversation()
    assert conversation.asked("one") == [{"role": "user", "content": "one"}]
    assert conversation.messages == []
    conversation.answered("one", "1")
    assert [message["role"] for message in conversation.asked("two")] == [
        "user", "assistant", "user",
    ]  # fmt: skip


def test_speed_of_an_answer() -> None:
    assert describe(Answer("x", 0.05, 1.05, 11)) == "first token 50 ms, 11 tokens, 10 per second"
    assert describe(Answer("x", 0.05, 0.05, 1)) == "first token 50 ms"


def test_the_status_table_shows_every_node() -> None:
    nodes = (
        Node("d0", "decode", "h:2", "m", 3, 1, 25, 100, draining=True),
        Node("p0", "prefill", "h:1", "m", 0, 0, 100, 100, draining=False),
    )
    console = Console(file=io.StringIO(), width=140)
    console.print(view(ServerInfo("0.1.0", nodes, {"DECODE": 3, "QUEUED": 0}), "h:50051"))
    text = console.file.getvalue()  # type: ignore[attr-defined]
    assert text.index("p0") < text.index("d0 (draining)")
    assert "75/100 (75%)" in text
    assert "requests: 3 DECODE" in text


def test_the_status_table_without_nodes() -> None:
    console = Console(file=io.StringIO(), width=140)
    console.print(view(ServerInfo("0.1.0", (), {}), "h:50051"))
    text = console.file.getvalue()  # type: ignore[attr-defined]
    assert "no node is registered" in text
    assert "requests: none" in text
