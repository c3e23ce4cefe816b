"""Interference and goodput against a real HTTP server that plays a model; the figure they draw."""

from __future__ import annotations

from pathlib import Path
from xml.etree import ElementTree

import pytest
from rich.console import Console
from rich.table import Table

from baton.protocol.errors import ConfigError
from bench import serve_goodput, serve_interference
from bench.load import LoadTarget
from bench.measure import SloLimits
from bench.plot import Line, Panel, svg
from bench.recorded import Scaling, bundled
from bench.serve import ServeOptions, goodput_table, numbers_of, pair_of, parse
from bench.serve_goodput import Sweep
from bench.serve_interference import InterferencePlan
from tests.bench.test_load import FakeModel, serving


def render(table: Table) -> str:
    console = Console(width=200)
    with console.capture() as captured:
        console.print(table)
    return captured.get()


SCALING = Scaling(20.0, 0.5, 16, 4, 64, (300, 400))


async def test_streams_go_on_while_prompts_arrive() -> None:
    model = FakeModel()
    plan = InterferencePlan(
        streams=2, idle_s=0.2, loaded_s=0.3, prompt_tokens=50, stream_tokens=40,
        vocabulary=(300, 400), rate=20.0,
    )  # fmt: skip
    async with serving(model) as url:
        found = await serve_interference.measure(LoadTarget(url), plan)
    prompts = [body["prompt"] for body in model.requests]
    assert sum(len(prompt) == 50 for prompt in prompts if isinstance(prompt, list)) == 6
    assert found["prompts"] == 6
    assert found["rate"] == 20.0
    for phase in ("idle", "loaded"):
        assert found[phase]["tokens"] > 40
        assert found[phase]["tpot_p99_ms"] >= found[phase]["tpot_p50_ms"] > 0
    assert found["loaded_over_idle"]["tpot_p99_ms"] > 0
    modes = [{"mode": mode, **found} for mode in ("apart", "colocated", "apart")]
    ratios = serve_interference.summary(modes)
    assert ratios["apart"]["gap_p99_ms"]["median"] == found["loaded_over_idle"]["gap_p99_ms"]


async def test_the_rate_of_arrivals_is_found_by_timing_a_prompt() -> None:
    model = FakeModel()
    plan = InterferencePlan(1, 0.05, 0.05, 50, 40, (300, 400))
    async with serving(model) as url:
        assert (await serve_interference.measure(LoadTarget(url), plan))["rate"] > 1.0


async def test_a_sweep_counts_what_met_both_limits() -> None:
    model = FakeModel()
    sweep = Sweep(bundled(), [10.0, 20.0], SCALING, [SloLimits(5.0, 1.0)])
    async with serving(model) as url:
        rows = await serve_goodput.measure({"auto": LoadTarget(url)}, sweep, sweep.load())
        none = Sweep(bundled(), [10.0], SCALING, [SloLimits(0.0, 0.0), SloLimits(5.0, 1.0)])
        lost = await serve_goodput.measure({"colocated": LoadTarget(url)}, none, none.load())
    assert [(row["trace"], row["rate"]) for row in rows] == [
        (trace, rate) for trace in bundled() for rate in (10.0, 20.0)
    ]
    assert {row["within_limits"] for row in rows} == {1.0}
    # Less on a machine that is too busy to send as fast.
    assert all(0.0 < row["goodput"] <= 1.2 * row["rate"] for row in rows)
    assert [row["limits"] for row in lost] == ["0/0", "5000/1000"] * len(bundled())
    assert [row["goodput"] > 0 for row in lost] == [False, True] * len(bundled())
    lost = [{**row, "limits": rows[0]["limits"]} for row in lost if not row["goodput"]]
    compared = serve_goodput.compare([*rows, *lost])
    both = [row for row in compared if row["rate"] == 10.0]
    assert [row["auto_not_below"] for row in both] == [True, True]
    assert all(row["spread"]["colocated"] == (0.0, 0.0) for row in both)
    assert all(low == high > 0 for low, high in (row["auto_over_colocated"] for row in both))
    assert "auto" in render(goodput_table([{**row, "remote": 0.0, "spread": {
        **row["spread"], "remote": (0.0, 0.0)}} for row in both]))  # fmt: skip
    drawn = ElementTree.fromstring(serve_goodput.plot(both, sweep.limits[0]))
    lines = drawn.findall("{http://www.w3.org/2000/svg}polyline")
    assert len(lines) == 4  # two traces, two modes


async def test_each_turn_sends_other_requests_the_same_in_every_mode() -> None:
    asked: list[list[str]] = []
    sweep = Sweep(bundled(), [10.0], SCALING, [SloLimits(5.0, 1.0)])
    for mode, turn in (("auto", 0), ("colocated", 0), ("auto", 1)):
        model = FakeModel()
        async with serving(model) as url:
            await serve_goodput.measure({mode: LoadTarget(url)}, sweep, sweep.load(), turn)
        asked.append(sorted(str(body["prompt"]) for body in model.requests))
    assert asked[0] == asked[1] != asked[2]


async def test_each_load_goes_to_all_modes_and_each_of_them_is_first_in_turn() -> None:
    sweep = Sweep(bundled(), [10.0, 20.0], SCALING, [SloLimits(5.0, 1.0)])
    async with serving(FakeModel()) as url:
        targets: dict[str, LoadTarget] = {"remote": LoadTarget(url), "auto": LoadTarget(url)}
        rows = await serve_goodput.measure(targets, sweep, sweep.load(), turn=1)
    order = [(row["trace"], row["rate"], row["mode"]) for row in rows]
    assert order == [
        (trace, rate, mode)
        for trace in bundled()
        for rate, modes in ((10.0, ("auto", "remote")), (20.0, ("remote", "auto")))
        for mode in modes
    ]


def test_a_point_where_auto_loses_is_told() -> None:
    point = {"trace": "t", "rate": 4.0, "limits": "500/50"}
    rows = [
        {**point, "mode": mode, "goodput": goodput}
        for mode, goodput in (("auto", 3.0), ("colocated", 3.2), ("auto", 3.5), ("colocated", 3.4))
    ]
    (row,) = serve_goodput.compare(rows)
    assert row["auto_not_below"] is False
    assert row["auto_over_colocated"] == pytest.approx((-0.2, 0.1)), "pair by pair"
    assert row["spread"]["auto"] == (3.0, 3.5)


def test_a_figure_is_an_svg_with_every_line() -> None:
    panel = Panel("a < b", "rate", "goodput", [Line("x & y", [(1, 2), (3, 4)]), Line("z", [])])
    root = ElementTree.fromstring(svg([panel, Panel("empty", "", "", [])]))
    assert root.tag.endswith("svg")
    texts = ["".join(each.itertext()) for each in root.iter() if each.tag.endswith("text")]
    assert {"a < b", "x & y", "z", "empty"} <= set(texts)


@pytest.mark.parametrize("text", ["", "x", "3", "5,4", "1,2,3", "0,4"])
def test_a_vocabulary_is_two_ascending_numbers(text: str) -> None:
    with pytest.raises(ConfigError):
        pair_of(text)


def test_options_say_what_to_start(tmp_path: Path) -> None:
    assert numbers_of("1,2.5") == [1.0, 2.5]
    options, passed_on = parse(["--goodput", "--rates", "2,4", "--", "--prefill", "2"])
    assert passed_on == ["--prefill", "2"]
    sweep = options.sweep()
    assert (sweep.rates, set(sweep.traces)) == ([2.0, 4.0], set(bundled()))
    given = ServeOptions(trace=(tmp_path / "mine.csv",)).sweep()
    assert list(given.traces) == ["mine"]
    assert ServeOptions(interference=True).starts_clusters
    with pytest.raises(ConfigError, match="need --compare"):
        parse(["--", "--prefill", "2"])
