"""`baton trace`: bars for people, Chrome's format for Perfetto, what it says without a timeline."""

from __future__ import annotations

import copy
import io
import json
import os
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console, RenderableType

from baton.protocol.errors import BatonError, Unavailable
from deploy import cli
from deploy.cli import main
from deploy.console_feed import URL_FILE
from deploy.trace import TimelineSource, bar, part_name, requests_table, view

TIMELINE: dict[str, Any] = {
    "request_id": "chatcmpl-7-0.1f", "arrived_at": 1e9, "total_ms": 100.0, "ttft_ms": 40.0,
    "queue_ms": 30.0, "outcome": "finished", "error": None, "tenant": None, "prompt_tokens": 812,
    "cached_tokens": 640, "output_tokens": 24, "prefill_node": "p", "decode_node": "d",
    "retries": 1, "migrations": 0, "preemptions": 0,
    "stages": [
        {"stage": "gate", "start_ms": 0.0, "end_ms": 10.0, "epoch": 0},
        {"stage": "retry", "start_ms": 10.0, "end_ms": 20.0, "epoch": 1, "why": "node q was lost"},
        {"stage": "prefill", "start_ms": 20.0, "end_ms": 40.0, "epoch": 2, "node": "p",
         "tokens": [0, 1],
         "parts": [{"name": "queue", "node": "p", "start_ms": 20.0, "end_ms": 30.0},
                   {"name": "compute", "node": "p", "start_ms": 30.0, "end_ms": 40.0,
                    "chunks": 3}]},
        {"stage": "hand-over", "start_ms": 40.0, "end_ms": 50.0, "epoch": 2, "node": "d",
         "parts": [{"name": "fetch", "node": "d", "start_ms": 35.0, "end_ms": 48.0,
                    "kv_bytes": 25_000_000, "lane": "shm"}]},
        {"stage": "decode", "start_ms": 50.0, "end_ms": 100.0, "epoch": 2, "node": "d",
         "tokens": [1, 24]},
    ],
    "transfers": [
        {"stage": "transfer", "start_ms": 25.0, "end_ms": 50.0, "epoch": 2, "node": "d"}
    ],
    "scores": [],
}  # fmt: skip


def shown(what: RenderableType, width: int = 120) -> list[str]:
    out = io.StringIO()
    Console(file=out, width=width).print(what)
    return [line.rstrip() for line in out.getvalue().splitlines()]


def test_each_stage_is_followed_by_what_nodes_did_in_it() -> None:
    lines = shown(view(TIMELINE, 120))
    assert lines[0].startswith("chatcmpl-7-0.1f  finished in 100.0 ms; 812 prompt tokens (640 ca")
    names = [line[:21].strip().split("  ")[0] for line in lines[3:-1]]
    assert lines[2].startswith("stage ")
    assert names == [
        "gate", "retry", "prefill", "queue", "compute in 3 chunks", "transfer", "hand-over",
        "fetch 25 MB shm", "decode",
    ]  # fmt: skip
    assert lines[-1] == "epoch 1 failed: node q was lost"


def test_layers_and_appends_have_their_bars() -> None:
    layers = [
        {"name": "layers 0-1", "first": 0, "last": 1, "start_ms": 35.0, "end_ms": 40.0,
         "kv_bytes": 2_000_000},
        {"name": "layer 2", "first": 2, "last": 2, "start_ms": 40.0, "end_ms": 48.0,
         "kv_bytes": 500},
    ]  # fmt: skip
    told = copy.deepcopy(TIMELINE)
    told["stages"][3]["parts"][0]["layers"] = layers
    append = {"stage": "log-append", "start_ms": 60.0, "end_ms": 70.0, "epoch": 0}
    told["log"] = {"appends": 24, "total_ms": 33.0, "longest_ms": 10.0, "longest": [append]}
    lines = shown(view(told, 120))
    assert lines[1] == "24 log appends took 33.0 ms, the longest 10.0 ms"
    at = next(index for index, line in enumerate(lines) if "fetch 25 MB shm" in line)
    assert [line[:24].strip() for line in lines[at + 1 : at + 3]] == [
        "layers 0-1 2000 kB", "layer 2 0 kB",
    ]  # fmt: skip
    assert all("░" in line for line in lines[at + 1 : at + 3])
    (drawn,) = (line for line in lines if line.startswith(" log-append") or "log-append" in line)
    assert "━" in drawn


@pytest.mark.parametrize("width", [40, 80, 120, 200])
def test_no_width_breaks_a_bar(width: int) -> None:
    lines = shown(view(TIMELINE, width), max(width, 100))
    assert all(len(line) <= max(width, 100) for line in lines)
    decode = next(line for line in lines if "decode" in line and "█" in line)
    assert decode.count("█") > 1


@pytest.mark.parametrize(
    ("start", "end", "expected"),
    [(0, 100, "█" * 10), (0, 50, "█" * 5), (50, 100, " " * 5 + "█" * 5), (30, 30.01, "   █"),
     (100, 100, " " * 9 + "█")],
)  # fmt: skip
def test_a_bar_lies_where_its_span_does(start: float, end: float, expected: str) -> None:
    assert bar({"stage": "decode", "start_ms": start, "end_ms": end}, 100.0, 10).plain == expected


def test_bars_of_parts_transfers_and_of_no_time_at_all() -> None:
    part = {"name": "queue", "start_ms": 0, "end_ms": 50}
    assert bar(part, 100.0, 4).plain == "▒▒"
    assert bar({**part, "stage": "transfer"}, 100.0, 4).plain == "━━"
    assert bar({"stage": "gate", "start_ms": 0, "end_ms": 0}, 0.0, 4).plain == "█"


@pytest.mark.parametrize(
    ("part", "told"),
    [
        ({"name": "queue"}, "queue"),
        ({"name": "compute", "chunks": 1}, "compute"),
        ({"name": "compute", "chunks": 4}, "compute in 4 chunks"),
        ({"name": "fetch", "kv_bytes": 5376, "lane": "grpc"}, "fetch 5 kB grpc"),
        ({"name": "fetch", "kv_bytes": 25_000_000, "lane": "shm"}, "fetch 25 MB shm"),
    ],
)
def test_what_a_node_did_in_a_few_words(part: dict[str, Any], told: str) -> None:
    assert part_name(part) == told


def test_a_list_of_requests() -> None:
    summary = {**TIMELINE, "ttft_ms": None, "prefill_node": None, "error": "node_lost"}
    text = "\n".join(shown(requests_table([summary], 160), 160))
    assert "chatcmpl-7 " in text
    assert "node_lost" in text
    same = "\n".join(shown(requests_table([summary, summary], 160), 160))
    assert same.count("chatcmpl-7-0.1f") == 2, "prompts of one reply"
    assert "no request has ended yet" in "\n".join(shown(requests_table([], 80)))


@pytest.mark.parametrize("width", [60, 80, 120])
def test_a_list_fits_its_screen_and_keeps_ids_whole(width: int) -> None:
    name = "chatcmpl-b78ce5e6e45f46ec16668121"
    listed = [{**TIMELINE, "request_id": f"{name}-0.1c6f0c83"}]
    lines = shown(requests_table(listed, width), width)
    assert len(lines) == 2, "no line is broken"
    assert not any("\u2026" in line or len(line) > width for line in lines)
    assert lines[1].startswith(f"{name} ")
    heads = lines[0].split()
    assert ("TTFT" in heads, "outcome" in heads) == (True, width >= 80)
    assert ("decode" in heads) is (width >= 120)


@pytest.mark.parametrize("width", [80, 120])
def test_bars_take_what_room_is_left(width: int) -> None:
    lines = shown(view(TIMELINE, width), width)
    rows = lines[lines.index("") + 1 :][1:10]
    assert max(map(len, rows)) == width, "the last stage ends at the edge"
    assert max(row.count("█") for row in rows) >= width // 8


class RouterOfOne(BaseHTTPRequestHandler):
    """Answers as a router with one timeline."""

    def do_GET(self) -> None:
        path, _, query = self.path.partition("?")
        if self.headers["authorization"] != "Bearer k":
            status, told = 401, {"error": {"message": "a key is needed"}}
        elif path == "/v1/requests":
            status, told = 200, {"data": [TIMELINE]}
        elif path in ("/v1/requests/mine/timeline", "/v1/requests/chatcmpl-7-0.1f/timeline"):
            status, told = 200, {"traceEvents": []} if query == "format=perfetto" else TIMELINE
        else:
            status, told = 404, {"error": {"message": "no timeline of it"}}
        body = json.dumps(told).encode()
        self.send_response(status)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        """Nothing."""


@pytest.fixture
def router() -> Iterator[str]:
    server = HTTPServer(("127.0.0.1", 0), RouterOfOne)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    thread.join()
    server.server_close()


def test_what_a_router_says(router: str) -> None:
    source = TimelineSource(router, "k")
    assert source.timeline("mine") == TIMELINE
    assert source.slowest() == "chatcmpl-7-0.1f"
    asked = rf"no timeline of it \(asked {router}; --url names another router\)"
    for look in (source.timeline, source.perfetto):
        with pytest.raises(BatonError, match=asked):
            look("a/../b")
    with pytest.raises(BatonError, match="a key is needed"):
        TimelineSource(router).timeline("mine")


def test_nobody_there() -> None:
    with pytest.raises(Unavailable, match="no router answers"):
        TimelineSource("http://127.0.0.1:1").timeline("mine")


def test_the_command(router: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    asked, file = ["trace", "--url", router, "--api-key", "k"], tmp_path / "7.json"
    assert main([*asked, "--slowest", "--json", "--chrome", str(file)]) == 0
    assert json.loads(capsys.readouterr().out) == TIMELINE
    assert json.loads(file.read_text()) == {"traceEvents": []}
    assert main([*asked, "mine"]) == 0
    assert "hand-over" in capsys.readouterr().out
    assert main([*asked, "--list", "1"]) == 0
    assert "chatcmpl-7" in capsys.readouterr().out
    assert main([*asked, "other"]) != 0


def test_without_a_url_the_newest_run_is_asked(
    router: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(cli, "DEFAULT_URL", "http://127.0.0.1:1")
    assert main(["trace", "mine"]) == 1, "no run here, and nobody at the usual address"
    folder = tmp_path / "baton" / "runs" / f"20260101-{os.getpid()}"
    folder.mkdir(parents=True)
    (folder / URL_FILE).write_text(f"{router}/console#key=k\n")
    assert main(["trace", "mine"]) == 0
    assert "hand-over" in capsys.readouterr().out
    assert main(["trace", "mine", "--url", "http://127.0.0.1:1"]) == 1
