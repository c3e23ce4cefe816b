"""Code blocks of the documents: Python compiles, commands and flags exist, links lead somewhere."""

from __future__ import annotations

import argparse
import ast
import importlib.util
import json
import re
import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import get_args

import pytest

from baton.engine.config import EngineConfig, Quantization
from baton.node.config import NodeConfig
from baton.runtime.config import add_options
from baton.runtime.failpoints import IMAGE_STAGES, STAGES
from baton.runtime.vllm_flags import IDLE
from bench.serve import ServeOptions
from deploy.cli import BENCHMARKS, PROCESSES, build_parser
from router.config import RouterConfig

ROOT = Path(__file__).resolve().parents[2]
DOCUMENTS = sorted(
    path
    for pattern in ("*.md", "*/README.md", "deploy/*/README.md", "docs/**/*.md")
    for path in ROOT.glob(pattern)
    if not path.relative_to(ROOT).parts[0].startswith(".")
)
OPTIONS: dict[str, tuple[type, ...]] = {
    "router": (RouterConfig,),
    "prefill": (NodeConfig, EngineConfig),
    "decode": (NodeConfig, EngineConfig),
    "bench": (ServeOptions,),
}
RUN_TASKS = {
    "setup", "up", "chat", "status", "test", "clients", "coverage", "check", "bench", "proto",
    "fmt", "audit", "pictures", "sbom",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Block:
    """One fenced block of a document."""

    where: str
    language: str
    text: str


def blocks(*languages: str) -> list[Block]:
    found: list[Block] = []
    for document in DOCUMENTS:
        name = str(document.relative_to(ROOT))
        for number, match in enumerate(
            re.finditer(r"```(\w+)\n(.*?)```", document.read_text(), re.DOTALL)
        ):
            if match[1] in languages:
                found.append(Block(f"{name}#{number}", match[1], match[2]))
    return found


def commands(text: str) -> list[list[str]]:
    """The words of each command of a shell block; comments dropped, continuation lines joined."""
    lines = text.replace("\\\n", " ").splitlines()
    return [words for line in lines if (words := shlex.split(line, comments=True))]


def by_name(block: Block) -> str:
    return block.where


@pytest.mark.parametrize("block", blocks("python"), ids=by_name)
def test_python_compiles_and_its_imports_exist(block: Block) -> None:
    tree = ast.parse(block.text, block.where)
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module:
            assert importlib.util.find_spec(node.module) is not None, node.module


@pytest.mark.parametrize("block", blocks("sh", "bash", "shell"), ids=by_name)
def test_shell_commands_exist(block: Block) -> None:
    for words in commands(block.text):
        if words[0] == "./run":
            check_run(words[1:])
        elif words[0] == "baton":
            check_baton(words[1:])
        elif words[0] == "curl":
            check_curl(words[1:])


def check_curl(words: list[str]) -> None:
    """A chat, or a question for a stream."""
    if "-d" in words:
        body = json.loads(words[words.index("-d") + 1])
        assert body["messages"][0]["content"]
    else:
        assert any(re.search(r"/v1/requests/[\w-]+/stream", word) for word in words)


def check_run(words: list[str]) -> None:
    task, *rest = words
    assert task in RUN_TASKS
    if task in ("up", "chat", "status", "bench"):
        check_baton([task, *rest])


def check_baton(words: list[str]) -> None:
    command, *rest = words
    if command == "bench":
        assert rest.pop(0) in BENCHMARKS
    if command in OPTIONS:
        parser = argparse.ArgumentParser(exit_on_error=False)
        for config in OPTIONS[command]:
            add_options(parser, config)
        parser.parse_args(rest)
    else:
        assert command not in PROCESSES
        build_parser().parse_args(words)


def test_the_table_of_commands_is_complete() -> None:
    text = (ROOT / "README.md").read_text()
    (section,) = re.findall(r"^## The command\n(.*?)^## ", text, re.DOTALL | re.MULTILINE)
    rows = re.findall(r"^\| (`baton .*?) \|", section, re.MULTILINE)
    listed = [command for row in rows for command in re.findall(r"`baton (\w+)", row)]
    assert sorted(listed) == sorted(subcommands())


def test_the_table_of_tasks_is_complete() -> None:
    text = (ROOT / "CONTRIBUTING.md").read_text()
    (first,) = re.findall(r"\A# Contributing\n\n```sh\n(.*?)```", text, re.DOTALL)
    listed = {words[1] for words in commands(first)}
    assert listed == RUN_TASKS - {"up", "chat", "status", "bench"}, "those are in the README"


def test_each_value_of_quantization_is_described() -> None:
    text = (ROOT / "docs/quantization.md").read_text()
    code = " ".join(re.findall(r"`([^`]+)`", text))
    assert not {*get_args(Quantization)} - {*re.split(r"[|\s]+", code)}


def test_flags_named_in_the_readme_exist() -> None:
    text = (ROOT / "README.md").read_text()
    known = "".join(subcommand_help(name) for name in ("up", "status", "doctor", "trace"))
    for options in (EngineConfig, RouterConfig, NodeConfig):
        parser = argparse.ArgumentParser()
        add_options(parser, options)
        known += parser.format_help()
    known += "--compare --peer"  # of `baton bench serve`
    known += "".join("--" + name.replace("_", "-") for name in IDLE)
    for flag in re.findall(r"`(--[a-z-]+)", text):
        assert flag in known, flag


def subcommands() -> dict[str, argparse.ArgumentParser]:
    (actions,) = [
        action
        for action in build_parser()._actions
        if isinstance(action, argparse._SubParsersAction)
    ]
    return dict(actions.choices)


def subcommand_help(name: str) -> str:
    return subcommands()[name].format_help()


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_links_lead_somewhere(document: Path) -> None:
    for target in re.findall(r"\]\(([^)#]+)[^)]*\)", document.read_text()):
        if not target.startswith(("http://", "https://", "mailto:")):
            assert (document.parent / target).exists(), target


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_files_named_in_the_tables_exist(document: Path) -> None:
    for row in re.findall(r"^\| (`.*?) \|", document.read_text(), re.MULTILINE):
        for name in re.findall(r"`([\w/]+(?:\.\w+|/))`", row):
            places = (document.parent, ROOT)
            if name in STAGES + IMAGE_STAGES:  # of a request's life, no file
                continue
            assert any((place / name).exists() for place in places), name


def test_there_is_something_to_check() -> None:
    assert len(blocks("python")) >= 2
    assert len(blocks("sh")) >= 4
