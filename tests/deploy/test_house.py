"""tools/house.py counts as it says, and the house does not grow where a reader loses his way."""

from __future__ import annotations

from pathlib import Path

from tests.conftest import THIRDS
from tools import house

ROOT = Path(__file__).resolve().parents[2]
# They only go down; what is wanted is beside them.
# 16,000 is wanted. Timelines brought 890 (480 at first; then first and last bytes, texts for keys,
# Perfetto; 140 for layers of fetches, subscriptions and appends to the log), metrics of answers 60,
# traces for OpenTelemetry 260, the console 1,700, encoders 300, images 1,000, encode nodes 210,
# several models and the picker 1,050, Redis of every kind 500, a stop that breaks no new
# connection 35, a router that sleeps while idle and finds new nodes sooner 50,
# tokens that are shown without a task 97, a gate that knows of placement 24,
# who waits behind a prompt 58, streams that outlive refusals 17, tokens that are logged after they
# are shown 183, those of non-streaming answers that are decoded once 35.
MOST_ROUTER_LINES = 32_540
MOST_SHARED_NAMES = 2  # 8
MOST_SMALL_MODULES = 12  # 10: a child's program and a tower's loader came with images
BIG_FOLDERS = {"bench"}  # where every file is a command


def test_what_is_counted() -> None:
    sources = {
        "router/a.py": "from router import b\nfrom router.c import C\nclass X: ...\n",
        "router/b.py": "class X: ...\nclass Y: ...\n",
        "router/c.py": "import router.b\nclass C: ...\n",
        "deploy/long.py": "x = 1\n" * house.SMALL_LINES,
        "deploy/__main__.py": "import deploy.long\n",
    }
    sources |= {f"bench/file_{index}.py": "" for index in range(house.MAX_FILES + 1)}
    found = house.figures(sources)
    assert found.lines["router"] == 7
    assert found.shared == {"X": ["router.a", "router.b"]}
    assert found.small == {"router.c": "router.a"}  # router.b has two importers
    assert found.big == {"bench": house.MAX_FILES + 1}


def test_the_house_does_not_grow() -> None:
    found = house.figures(house.read(ROOT))
    assert set(found.big) <= BIG_FOLDERS
    assert found.lines["router"] <= MOST_ROUTER_LINES
    assert len(found.shared) <= MOST_SHARED_NAMES
    assert len(found.small) <= MOST_SMALL_MODULES


def test_tests_that_ci_thins_out_exist() -> None:
    for name in sorted(THIRDS):
        file, _, test = name.partition("::")
        assert f"def {test}(" in (ROOT / "tests" / file).read_text(), name
