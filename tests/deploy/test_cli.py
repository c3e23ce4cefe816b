"""The `baton` command: parsing, defaults, what it hands over to, what a person sees."""

from __future__ import annotations

import io
import json
import logging
import os
import re
import signal
import sys
from dataclasses import replace
from pathlib import Path
from queue import SimpleQueue
from types import SimpleNamespace
from typing import cast

import pytest
from rich.console import Console

from baton.client import Migrations, Node, ServerInfo
from baton.protocol.errors import ConfigError
from baton.runtime.config import AUTO, load
from baton.runtime.log import LineFormatter
from deploy import cli, local, up
from deploy.chat import ChatSession, StreamedAnswer, describe
from deploy.plan import DEMO_MODEL, UpOptions
from deploy.status import ABOVE_LIMITS, view
from tests.encoder_models import make_encoder


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in list(os.environ):
        if name.startswith("BATON_"):
            monkeypatch.delenv(name)


@pytest.fixture
def model(tmp_path: Path) -> str:
    """A folder with the files that a model has, with nothing in them."""
    (tmp_path / "config.json").write_text("{}")
    for name in ("model.safetensors", "tokenizer.json"):
        (tmp_path / name).touch()
    return str(tmp_path)


def settings(*flags: str) -> tuple[UpOptions, dict[str, object]]:
    return cli.up_settings(cli.build_parser().parse_args(["up", *flags]))


def test_flags_of_up_reach_the_launcher_and_the_engine(model: str) -> None:
    flags = "--prefill 3 --decode 2 --port 9000 --block-size 16 --prefill-block-size 64"
    options, engine = settings(*flags.split(), "--dtype", "float32", "--model", model)
    assert (options.prefill, options.decode, options.port) == (3, 2, 9000)
    assert options.prefill_block_size == 64
    assert engine.pop("shared_weights_cache") == AUTO, "the next start maps what this one packs"
    assert engine == {"model": model, "block_size": "16", "dtype": "float32"}


def test_what_is_kept_for_the_next_start_may_be_told(
    model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    told = settings("--model", model, "--shared-weights-cache", "0")[1]
    assert told["shared_weights_cache"] == "0"
    monkeypatch.setenv("BATON_SHARED_WEIGHTS_CACHE", "8GB")  # the nodes read it themselves
    assert "shared_weights_cache" not in settings("--model", model)[1]


def test_the_demo_model_is_the_default(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cli, "DEMO_MODEL", tmp_path)
    with pytest.raises(ConfigError, match="the demo model is missing"):
        settings()
    (tmp_path / "config.json").write_text("{}")
    assert settings()[1] == {
        "model": str(tmp_path),
        "served_model_name": (cli.DEMO_NAME,),
        "kv_cache_memory": cli.DEMO_POOL,
        "shared_weights_cache": AUTO,
    }
    assert "kv_cache_memory" not in settings("--num-kv-blocks", "64")[1]
    monkeypatch.setenv("BATON_SERVED_MODEL_NAME", "mine")
    assert "served_model_name" not in settings()[1]  # the nodes read it themselves
    assert DEMO_MODEL.parent == Path(cli.__file__).resolve().parents[1]


def test_an_encoder_gets_no_decode_node(tmp_path: Path) -> None:
    path = make_encoder(tmp_path / "bert", "bert")
    assert settings("--model", str(path), "--prefill", "2")[0].decode == 0
    with pytest.raises(ConfigError, match="prefill nodes only"):
        settings("--model", str(path), "--decode", "2")


def test_the_environment_is_a_layer(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BATON_MODEL", model)
    monkeypatch.setenv("BATON_DECODE", "4")
    options, engine = settings()
    assert engine["model"] == model
    assert options.decode == 4


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        (["--dtype", "float64"], "dtype"),
        (["--block-size", "0"], "block_size"),
        (["--decode", "0"], "decode"),
        (["--port", "eighty"], "port"),
        (["--host", "0.0.0.0"], "api_key"),
        (["--host", "192.0.2.1", "--insecure", "--api-key", "k"], "host 192.0.2.1"),
        (["--cores", "0-x"], "__cores: '0_x'"),
        (["--cores", "100000"], "__cores"),
        (["--redis-url", "foo://x"], "redis_url: must begin with"),
        (["--redis-url", "redis://:pw@127.0.0.1:1"], "redis://127.0.0.1:1 does not answer"),
    ],
)
def test_bad_values_stop_before_anything_starts(
    flags: list[str],
    named: str,
    model: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def never(*rest: object) -> None:
        raise AssertionError("something was started")

    monkeypatch.setattr(local.Cluster, "start", never)
    try:
        status = cli.main(["up", "--model", model, *flags])
    except SystemExit as exit_:  # argparse's own refusal
        status = exit_.code
    assert status == 2
    complaint = capsys.readouterr().err
    assert named in complaint.replace("-", "_")
    assert "Traceback" not in complaint


@pytest.mark.parametrize("missing", ["config.json", "model.safetensors", "tokenizer.json"])
def test_a_folder_that_is_no_model_is_refused(
    missing: str, model: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (Path(model) / missing).unlink()
    assert cli.main(["up", "--model", model]) == 2
    assert missing.removeprefix("model") in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "program"),
    [
        (["router", "--port", "1"], ["-m", "router", "--port", "1"]),
        (["prefill", "--help"], ["-m", "prefill_node", "--help"]),
        (["decode"], ["-m", "decode_node"]),
        (["bench", "serve", "--rate", "2"], ["-m", "bench.serve", "--rate", "2"]),
        (["bench", "engine", "--json"], ["-m", "bench.engine", "--json"]),
        (["convert", "dir"], ["-m", "baton.engine.checkpoint.convert", "dir"]),
        (["estimate", "--json"], ["-m", "baton.engine.performance.estimate", "--json"]),
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
    assert error == "baton: no router at http://127.0.0.1:9; is `./run up` running?\n"
    assert cli.main(["status", "--once", "--grpc", "127.0.0.1:9"]) == 1
    error = capsys.readouterr().err
    assert error == "baton: no router at 127.0.0.1:9; is `./run up` running?\n"


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
    given = up.child_variables(UpOptions(secret="s", api_key=("k", "l"), admin_key=("o",)))
    assert len(given.pop("BATON_CONSOLE_KEY")) >= 32  # drawn anew for each `baton up`
    assert given == {
        "BATON_SECRET": "s", "BATON_SECRET_FILE": "", "BATON_API_KEY": "k,l", "BATON_ADMIN_KEY": "o"
    }  # fmt: skip
    for name in ("api_key", "admin_key"):
        with pytest.raises(ConfigError, match="comma") as caught:
            up.child_variables(load(UpOptions, {name: ("a,b",)}))
        assert caught.value.field == name


def test_status_is_offered_where_it_would_be_answered() -> None:
    offered = [options for options in (
        UpOptions(), UpOptions(api_key=("k",)), UpOptions(api_keys="f"),
        UpOptions(admin_key=("o",)), UpOptions(api_key=("k",), admin_keys="f"),
    ) if up.next_commands(options, "http://h", "h:1")[1:]]  # fmt: skip
    assert offered == [
        UpOptions(), UpOptions(admin_key=("o",)), UpOptions(api_key=("k",), admin_keys="f"),
    ]  # fmt: skip


def test_the_keys_that_pasted_commands_need_are_named() -> None:
    assert up.with_keys(UpOptions()) == ""
    assert up.with_keys(UpOptions(api_keys="f")) == " that has BATON_API_KEY"
    both = UpOptions(api_key=("k",), admin_key=("o",))
    assert up.with_keys(both) == " that has BATON_API_KEY and BATON_ADMIN_KEY"


def test_run_folders_are_below_the_cache(tmp_path: Path) -> None:
    found = up.default_run_dir({"XDG_CACHE_HOME": str(tmp_path)})
    assert found.parent == tmp_path / "baton" / "runs"


def test_the_first_signal_asks_and_a_later_one_kills() -> None:
    heard: SimpleQueue[str] = SimpleQueue()
    now = 5.0
    before = signal.getsignal(signal.SIGTERM)
    with up.Interrupts(lambda: heard.put("ask"), lambda: heard.put("kill"), lambda: now):
        signal.raise_signal(signal.SIGTERM)
        assert heard.get(timeout=30.0) == "ask"
        signal.raise_signal(signal.SIGINT)  # the same wish, by another way
    assert heard.empty()  # all that was raised is heard when the block ends
    with up.Interrupts(lambda: heard.put("ask"), lambda: heard.put("kill"), lambda: now) as signals:
        signals.begin_stop()
        now = 7.0
        signal.raise_signal(signal.SIGINT)
        assert heard.get(timeout=30.0) == "kill"
    assert signal.getsignal(signal.SIGTERM) is before


def test_a_failed_question_leaves_no_trace() -> None:
    conversation = ChatSession()
    assert conversation.asked("one") == [{"role": "user", "content": "one"}]
    assert conversation.messages == []
    conversation.answered("one", "1")
    assert [message["role"] for message in conversation.asked("two")] == [
        "user", "assistant", "user",
    ]  # fmt: skip


def test_speed_of_an_answer() -> None:
    assert (
        describe(StreamedAnswer("x", 0.05, 1.05, 11))
        == "first token 50 ms, 11 tokens, 10 per second"
    )
    assert describe(StreamedAnswer("x", 0.05, 0.05, 1)) == "first token 50 ms"
    thoughtful = StreamedAnswer("x", 2.0, 3.0, 61, first_thought_s=0.05)
    assert thoughtful.first_token_s == 0.05
    assert describe(thoughtful) == (
        "first thought 50 ms, first text 2000 ms, 61 tokens, 20 per second"
    )
    assert describe(StreamedAnswer("", None, 1.05, 11, 0.05)).startswith(
        "first thought 50 ms, 11 tokens"
    )
    assert describe(StreamedAnswer("", None, 1.0, 0)) == ""


def test_the_status_table_shows_every_node() -> None:
    nodes = (
        Node("d0", "decode", "h:2", "m", 3, 1, 25, 100, draining=True),
        Node("p0", "prefill", "h:1", "m", 0, 0, 100, 100, draining=False),
    )
    console = Console(file=io.StringIO(), width=140)
    console.print(view(ServerInfo("0.1.0", nodes, {"DECODE": 3, "QUEUED": 0}), "h:50051", 140))
    text = console.file.getvalue()  # type: ignore[attr-defined]
    assert text.index("p0") < text.index("d0 (draining)")
    assert "75/100 (75%)" in text
    assert "requests: 3 DECODE" in text


def test_the_status_tells_of_migrations() -> None:
    console = Console(file=io.StringIO(), width=140)
    moves = Migrations(done=4, failed=1, tokens=900, seconds=0.08, given_back=2)
    console.print(view(ServerInfo("0.1.0", (), {}, moves), "h:50051", 140))
    text = console.file.getvalue()  # type: ignore[attr-defined]
    assert "migrations: 4 done (900 tokens, 20 ms each), 2 given back, 1 failed" in text


def test_the_status_warns_of_nodes_that_compute_otherwise() -> None:
    one = Node("d0", "decode", "h:2", "m", 0, 0, 9, 9, draining=False, precision="float32")
    other = replace(one, node_id="d1", precision="bfloat16")
    prefill = replace(other, role="prefill")
    for nodes, told in (((one, prefill), False), ((one, other, prefill), True)):
        console = Console(file=io.StringIO(), width=140)
        console.print(view(ServerInfo("0.1.0", nodes, {}), "h:50051", 140))
        text = console.file.getvalue()  # type: ignore[attr-defined]
        assert ("decode nodes differ in precision" in text) == told
        assert ("d0 float32, d1 bfloat16" in text) == told
        assert "prefill nodes differ" not in text


def test_the_status_table_without_nodes() -> None:
    console = Console(file=io.StringIO(), width=140)
    console.print(view(ServerInfo("0.1.0", (), {}), "h:50051", 140))
    text = console.file.getvalue()  # type: ignore[attr-defined]
    assert "no node is registered" in text
    assert "requests: none" in text
    assert "migrations" not in text


def test_the_status_tells_the_share_of_the_machine_s_limits_where_it_is_known() -> None:
    idle = Node("p0", "prefill", "h:1", "m", 0, 0, 100, 100, draining=False)
    busy = Node("d0", "decode", "h:2", "m", 3, 1, 25, 100, draining=False, mbu=0.62, mfu=0.071)
    for nodes, told in (((idle,), False), ((idle, busy), True)):
        console = Console(file=io.StringIO(), width=140)
        console.print(view(ServerInfo("0.1.0", nodes, {}), "h:50051", 140))
        text = console.file.getvalue()  # type: ignore[attr-defined]
        assert ("MBU" in text and "62%" in text and "7%" in text) == told


def test_the_status_says_what_a_share_above_one_means() -> None:
    for mbu, told in ((1.0, False), (1.53, True)):
        node = Node("d0", "decode", "h:2", "m", 3, 1, 25, 100, draining=False, mbu=mbu)
        console = Console(file=io.StringIO(), width=300)
        console.print(view(ServerInfo("0.1.0", (node,), {}), "h:50051", 300))
        text = console.file.getvalue()  # type: ignore[attr-defined]
        assert (ABOVE_LIMITS in text) == told


@pytest.mark.parametrize("mbu", [0.0, 1.0])
@pytest.mark.parametrize("width", [80, 100, 120])
def test_the_status_table_never_cuts_an_address(width: int, mbu: float) -> None:
    address = "127.0.0.1:40123"
    nodes = tuple(
        Node(
            f"{role}-0", role, address, "m", 10, 100, 25, 40960, draining=role == "decode", mbu=mbu
        )
        for role in ("prefill", "decode")
    )
    console = Console(file=io.StringIO(), width=width)
    console.print(view(ServerInfo("0.1.0", nodes, {}), "h:50051", width))
    text = console.file.getvalue()  # type: ignore[attr-defined]
    assert text.count(address) == 2
    assert text.count("40935/40960 (100%)") == 2
    assert ("█" in text) == (width >= 100)


def test_the_hint_is_a_command_of_this_shell(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    python = tmp_path / ".venv" / "bin" / "python"
    monkeypatch.setattr(sys, "executable", str(python))
    assert up.baton_command() == [str(python), "-m", "deploy"]
    python.parent.mkdir(parents=True)
    python.with_name("baton").touch()
    assert up.baton_command() == [str(python.with_name("baton"))]
    monkeypatch.chdir(tmp_path)
    assert up.baton_command() == [".venv/bin/baton"]


def test_what_is_shown_while_processes_start_is_what_they_say() -> None:
    """The log's own words in front of it would fill the line."""
    said = "loading weights: 40 % of 16.1 GB, about 12 s more"
    record = logging.LogRecord(
        "baton.engine.checkpoint.tensors", logging.INFO, "", 0, said, None, None
    )
    line = LineFormatter("prefill-0").format(record)
    child = SimpleNamespace(last_lines=lambda _: [line])
    spec = SimpleNamespace(name="prefill-0")
    member = SimpleNamespace(ready_after=None, child=child, began=0.0, spec=spec)
    view = up.StartingView(cast("local.Cluster", SimpleNamespace(members={"prefill-0": member})))
    console = Console(width=120, record=True, file=io.StringIO())
    console.print(view)
    assert console.export_text().rstrip().endswith(f" s  {said}")
