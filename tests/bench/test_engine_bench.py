"""The engine benchmarks: their arithmetic by hand, and each of them once, small."""

from __future__ import annotations

import json
import lzma
from pathlib import Path
from xml.etree import ElementTree

import pytest

from baton.engine.config import EngineConfig
from baton.engine.kernels.cpu.library import kernels
from baton.engine.loading.loading import load_model
from baton.engine.performance.meter import work_of
from baton.engine.state.interface import SequenceChunk
from baton.engine.state.work import Limits
from baton.llm import LLM
from baton.protocol.sampling import SamplingParams
from bench import (
    engine,
    engine_attention,
    engine_memory,
    engine_overhead,
    engine_swap,
    engine_throughput,
)
from bench.engine import EngineRow, needs, ours, pictures, shares
from bench.engine_kit import (
    InstantRunner,
    Lengths,
    TimedPart,
    instant_engine,
    mixed_lengths,
    plain_request,
    random_prompt,
    run_all,
    tell,
)
from bench.engine_memory import (
    Chain,
    InfiniteCache,
    LruCache,
    Occupancy,
    Sharing,
    chain_of,
    prefix_rows,
    share_samples,
    trace_prompt,
    waste,
    window_rows,
)
from bench.roofline import HEIGHT, LEFT, TOP, WIDTH, Point, Roofline, svg
from tests.block_lists import held
from tests.tiny_models import make_tiny_model


def chunk(name: str, start: int, count: int, blocks: list[int]) -> SequenceChunk:
    return SequenceChunk(name, [9] * count, start, held(blocks))


def test_waste_by_hand() -> None:
    occupancy = Occupancy(8, {"a": Lengths(5, 4), "b": Lengths(17, 3)})
    occupancy.seen([chunk("a", 4, 1, [0]), chunk("b", 0, 17, [1, 2, 3])])
    row = occupancy.row()
    assert row["paged %"] == pytest.approx(100 * (1 - 22 / 32))
    assert row["to longest %"] == pytest.approx(100 * (1 - 22 / (2 * 2048)))
    assert row["to power of 2 %"] == pytest.approx(100 * (1 - 22 / (16 + 32)))
    assert row["to final %"] == pytest.approx(100 * (1 - 22 / (9 + 20)))
    assert row["most running"] == 2


def test_sharing_by_hand() -> None:
    sharing = Sharing()
    sharing.seen([chunk("a", 0, 1, [0, 1, 2]), chunk("a", 0, 1, [0, 1, 3])])
    assert sharing.saved == pytest.approx(100 * 2 / 6)


def test_oracles_by_hand() -> None:
    infinite, lru = InfiniteCache(), LruCache(2)
    chains = [Chain(keys, len(keys)) for keys in ((1, 2), (1, 3), (1, 2), (4,), (1, 2))]
    assert [infinite.hits(chain) for chain in chains] == [0, 1, 2, 0, 2]
    # Two blocks: 2 goes when 3 comes, 3 goes when 2 comes back, and 2 before 1, as tails do.
    assert [lru.hits(chain) for chain in chains] == [0, 1, 1, 0, 1]


def test_equal_hash_ids_are_equal_tokens() -> None:
    one, other = trace_prompt([7, 8, 9], 40), trace_prompt([7, 8, 10], 47)
    assert len(one) == 40
    assert one[:32] == other[:32]
    assert one[32:34] != other[32:34]
    assert chain_of([7, 8, 9], 40) == Chain((7, 8), 2)
    assert chain_of([7, 8], 32) == Chain((7, 8), 1)  # one token is left to compute


def test_paging_wastes_less_than_four_percent_where_contiguous_memory_wastes_most() -> None:
    row = waste(16, 48)
    assert row["paged %"] < 4
    assert row["to longest %"] > 60
    assert row["paged %"] < row["to final %"] < row["to power of 2 %"] < row["to longest %"]


def test_more_samples_share_more() -> None:
    saved = [share_samples(n, engine_memory.SHAREGPT, 6) for n in (1, 2, 4)]
    assert saved[0] == 0
    assert 0 < saved[1] < saved[2]


def test_the_engine_finds_what_an_infinite_cache_finds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One request at a time and room for all blocks: equal to the last token."""
    monkeypatch.setattr(engine_memory, "IN_FLIGHT", 1)
    ids = [[1, 2, 3], [1, 2, 4, 5], [6], [1, 2, 4, 5, 7], [1, 2, 3], [6, 8]]
    entries = [
        {"input_length": 512 * len(each) - cut, "output_length": 100, "hash_ids": each}
        for each in ids
        for cut in (90, 0)
    ]
    path = tmp_path / "trace.jsonl.xz"
    with lzma.open(path, "wt") as file:
        file.write("\n".join(json.dumps(entry) for entry in entries))
    rows = prefix_rows(path, 100)
    assert {row["requests"] for row in rows} == {12}
    for row in rows[-2:]:
        assert row["engine hit %"] == pytest.approx(row["infinite hit %"])
        assert row["engine hit %"] > 20
    for row in rows:
        assert row["engine hit %"] <= row["infinite hit %"] + 1e-9


def test_lengths_have_the_asked_means() -> None:
    lengths = mixed_lengths(4000, 100, 30, seed=5)
    assert sum(each.prompt for each in lengths) / 4000 == pytest.approx(100, rel=0.1)
    assert sum(each.output for each in lengths) / 4000 == pytest.approx(30, rel=0.1)
    assert mixed_lengths(3, 100, 30, seed=5) == lengths[:3]


def test_the_instant_runner_serves_samples_and_beams() -> None:
    engine = instant_engine(64, 4, InstantRunner(), check_invariants=True)
    prompt = random_prompt(9, 0)
    run_all(
        engine,
        [
            plain_request("n", prompt, 5, n=3),
            plain_request("beam", prompt, 5, beam_width=2, temperature=0),
        ],
    )
    assert engine.pool.num_used == 0
    assert engine.stats.num_finished == 2


def test_the_cost_of_a_step() -> None:
    row = engine_overhead.measure(2, num_steps=5)
    assert (row["sequences"], row["steps"]) == (2, 5)
    assert row["step us"] == pytest.approx(row["engine us"] + row["batch us"])
    assert row["batch us"] > 0


@pytest.mark.parametrize("kind", list(engine_overhead.KINDS))
def test_the_cost_of_tokens(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_overhead, "LARGE_VOCAB", 3000)
    monkeypatch.setattr(engine_overhead, "WARM_UP", 2)
    row = engine_overhead.measure_sampling(kind, 2, 2)  # asserts that the twin draws the same
    assert (row["kind"], row["rows"], row["steps"]) == (kind, 2, 2)
    assert row["us"] > 0
    whole = engine_overhead.measure_outside(kind, 2, 4)
    assert (whole["sequences"], whole["steps"]) == (2, 4)
    assert whole["5 %"] <= whole["step us"] <= whole["95 %"]


@pytest.mark.parametrize("kv_dtype", ["auto", "int8"])
def test_attention_s_share_of_the_read_bandwidth(kv_dtype: str) -> None:
    cpu_kernels = kernels()
    if cpu_kernels is None:
        pytest.skip("no compiled kernels on this machine")
    case = engine_attention.AttentionCase(40, rows=2)
    row = engine_attention.measure(cpu_kernels, case, 1, 2, kv_dtype)
    assert (row["context"], row["rows"], row["block"]) == (40, 2, 16)
    assert 0 < row["least"] == row["share"] == row["most"]
    assert row["share"] == pytest.approx(row["GB/s"] / row["read GB/s"])


def test_a_row_s_needs_are_what_the_engine_counts(tmp_path: Path) -> None:
    path = make_tiny_model("llama", tmp_path)
    llm = LLM(str(path), num_kv_blocks=32, enable_prefix_caching=False, measure_limits=False)
    work = work_of(load_model(EngineConfig(model=str(path))))
    params, run = SamplingParams(max_tokens=1), ours(llm)
    decode = EngineRow("m", 6, 2)
    step = work.step([SequenceChunk("r", [1], 6, held([0]), sample=params)] * 2)
    found = needs(llm, run, decode, llm.engine.info.vocab_size)
    assert (found.read_bytes, found.flops) == pytest.approx((step.read_bytes, step.flops))
    prompt = work.step([SequenceChunk("r", [1] * 6, 0, held([0]), sample=params)])
    assert needs(llm, run, EngineRow("m", 6), llm.engine.info.vocab_size) == prompt
    limits = Limits(10 * step.read_bytes, 100 * step.flops)
    assert shares(decode, 4.0, step, limits) == pytest.approx({
        "MBU": 0.2, "MFU": 0.02, "FLOP/byte": step.intensity(), "GFLOP/s": 2 * step.flops / 1e9,
    })  # fmt: skip


def test_rows_that_do_not_exist_are_an_error(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as left:
        engine.main(["--models", "/nope"])
    assert left.value.code == 2
    told = capsys.readouterr().err
    assert "no model is called '/nope'; the models are" in told
    assert "Llama-25M" in told
    with pytest.raises(SystemExit):
        engine.main(["--models", "Llama-25M", "--rows", "nothing"])
    told = capsys.readouterr().err
    assert "no row of these models matches 'nothing'; they have prefill 512, decode 1@128" in told
    assert "decode 16@128\n" in told, "its last row: none of another model"


def test_a_roofline_shows_its_rows_under_two_limits(tmp_path: Path) -> None:
    row = {
        "model": "Tiny & small", "row": "decode 1@8", "ratio": 2.0, "FLOP/byte": 1.5,
        "GFLOP/s": 30.0, "read GB/s": 40.0, "GEMM TFLOP/s": 0.8,
    }  # fmt: skip
    prefill = {**row, "row": "prefill 8", "FLOP/byte": 300.0, "GFLOP/s": 400.0, "ratio": 1.2}
    pictures([row, prefill], tmp_path)
    text = (tmp_path / "roofline-tiny & small.svg").read_text()
    root = ElementTree.fromstring(text)
    names = ["".join(each.itertext()) for each in root.iter("{http://www.w3.org/2000/svg}text")]
    assert "1  decode 1@8: 50%" in names
    assert "2  prefill 8: 50%" in names
    assert "reads 40.0 GB/s" in names
    circles = root.findall("{http://www.w3.org/2000/svg}circle")
    assert len(circles) == 2 + 2 * 2  # the key, and both sides of both rows
    picture = Roofline("t", 40e9, 0.8e12, [Point("alone", 2.0, 1e9)])
    assert picture.ridge == 20.0
    assert (
        len(ElementTree.fromstring(svg(picture)).findall("{http://www.w3.org/2000/svg}circle")) == 2
    )


def test_no_number_of_a_roofline_lies_on_another_or_on_a_point() -> None:
    row = [(1.0, 41e9), (1.0, 43e9), (1.6, 60e9), (16.0, 310e9), (16.0, 330e9), (460.0, 335e9),
           (460.0, 330e9), (460.0, 180e9), (1800.0, 330e9)]  # fmt: skip
    points = [Point(f"row {at}", at, high, high / 4) for at, high in row]
    root = ElementTree.fromstring(svg(Roofline("t", 45e9, 0.34e12, points)))
    texts = root.iter("{http://www.w3.org/2000/svg}text")
    wanted = {str(number) for number in range(1, len(points) + 1)}
    places = [
        (float(each.attrib["x"]), float(each.attrib["y"]) - 4)
        for each in texts
        if each.text in wanted and float(each.attrib["x"]) < LEFT + WIDTH
        and float(each.attrib["y"]) < TOP + HEIGHT
    ]  # fmt: skip
    assert len(places) == len(points)
    circles = root.findall("{http://www.w3.org/2000/svg}circle")
    dots = [(float(each.attrib["cx"]), float(each.attrib["cy"])) for each in circles]
    for index, (x, y) in enumerate(places):
        assert LEFT < x < LEFT + WIDTH
        for a, b in [*places[:index], *dots]:
            assert abs(x - a) >= 11 or abs(y - b) >= 10


def test_a_swap_and_a_recomputation(tmp_path: Path) -> None:
    path = make_tiny_model("llama", tmp_path)
    model = load_model(EngineConfig(model=str(path), dtype="float32"))
    row = engine_swap.measure(model, block_size=8, context=40, repetitions=1)
    assert row["swap both ms"] == pytest.approx(row["swap out ms"] + row["swap in ms"])
    assert row["recompute / swap"] == pytest.approx(row["recompute ms"] / row["swap both ms"])


def test_generate_against_transformers(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = make_tiny_model("llama", tmp_path, max_position_embeddings=2048)
    assert engine_throughput.main(["--model", str(path), "--requests", "5", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    (rows,) = [value for name, value in found.items() if name.startswith("5 requests")]
    assert [row["system"] for row in rows][:2] == ["baton", "transformers, one by one"]
    assert rows[0]["baton is"] == "1.00x"


def test_tables_for_people(capsys: pytest.CaptureFixture[str]) -> None:
    tell([TimedPart("a title", [{"size": 8, "share": 0.12345, "name": "x"}])], as_json=False)
    shown = capsys.readouterr().out
    for part in ("a title", "share", "0.123", "x"):
        assert part in shown


def test_windows_shrink_what_a_long_request_holds() -> None:
    rows = window_rows()
    # 63 blocks of 16 tokens, 26 layers, 1 kB of each token in each layer.
    assert rows[0]["all layers MB"] == pytest.approx(63 * 26 * 16 * 1024 / 1e6)
    # At its end: 63 blocks of 4 full layers, 33 of 6 groups of 4 (two of 24 slots are empty).
    assert rows[0]["groups: end MB"] == pytest.approx((63 + 6 * 33) * 4 * 16 * 1024 / 1e6, rel=0.03)
    assert rows[2]["end / all layers"] < 0.25
    assert all(row["groups: end MB"] <= row["groups: peak MB"] for row in rows)
