"""Another engine beside ours in bench.engine: `--peer CMD` starts one of these per set of weights.

A peer is any program that speaks the JSON lines of bench/peers/protocol.py, in its own environment;
bench/peers has those for OpenVINO GenAI, llama.cpp and vLLM. Its life:
    PeerServer.start   the program runs and loads the model, or says that it cannot
    generate           as often as asked; it measures its own call, so pipes and JSON do not count
    (the end)          its input is closed; if it does not end, it is killed
"""

from __future__ import annotations

import contextlib
import json
import os
import shlex
import subprocess
import threading
from collections.abc import Generator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import baton
from baton.protocol.errors import BatonError, ConfigError

ANSWER_S: Final = 900.0  # the longest question is the first: converting and loading a model
STOP_S: Final = 20.0


def environment() -> dict[str, str]:
    """Return this process's environment without what Baton has set for itself."""
    own = baton.WAITING if baton.sets_waiting else {}
    return {name: value for name, value in os.environ.items() if name not in own}


class PeerFailed(BatonError):
    """A peer ended, or reported an error."""


@dataclass(frozen=True, slots=True)
class Took:
    """What an answer took by the clock, and of all of its process' threads; if told, its tokens and
    of one prompt the seconds until the first."""

    seconds: float
    cpu_seconds: float
    tokens: Sequence[Sequence[int]] = ()
    first_seconds: float | None = None


class PeerServer:
    """One running peer with one model. Only one thread at a time may use it."""

    def __init__(self, command: str) -> None:
        """Start the peer. Raises ConfigError if there is no such program."""
        try:
            self._process = subprocess.Popen(
                shlex.split(command), stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
                env=environment(),
            )  # fmt: skip
        except (OSError, ValueError) as error:
            raise ConfigError(f"--peer {command}: {error}", field="peer") from error
        self._command = command
        self.name = command
        self.unsupported: str | None = None  # why it does not serve these weights

    @classmethod
    @contextlib.contextmanager
    def start(
        cls, command: str, model: Path, quantization: str, threads: int
    ) -> Generator[PeerServer, None, None]:
        """Yield a peer that has loaded `model`; it is ended with the context.

        Raises PeerFailed, or ConfigError for a command that is no program.
        """
        peer = cls(command)
        try:
            setup = {"model": str(model), "quantization": quantization, "threads": threads}
            told = peer._ask(setup)
            peer.name = str(told["name"])
            peer.unsupported = told.get("unsupported")
            yield peer
        finally:
            peer._stop()

    def generate(self, prompts: Sequence[list[int]], new: int) -> float:
        """Return the seconds for `new` tokens of each of `prompts`. Raises PeerFailed."""
        return self.timed(prompts, new).seconds

    def timed(self, prompts: Sequence[list[int]], new: int) -> Took:
        """Return the seconds as `generate` does, and the CPU time: 0 of a peer that does not report
        it."""
        told = self._ask({"prompts": prompts, "new_tokens": new})
        if told["new_tokens"] != [new] * len(prompts):
            raise PeerFailed(f"{self.name}: {new} tokens each were asked for, not {told}")
        cpu_seconds = float(told.get("cpu_seconds", 0))
        return Took(
            float(told["seconds"]), cpu_seconds, told.get("tokens", ()), told.get("first_seconds")
        )

    def _ask(self, question: dict[str, Any]) -> dict[str, Any]:
        stdin, stdout = self._process.stdin, self._process.stdout
        assert stdin is not None, "it was given a pipe"
        assert stdout is not None, "it was given a pipe"
        deadline = threading.Timer(ANSWER_S, self._process.kill)
        deadline.start()
        try:
            stdin.write(json.dumps(question) + "\n")
            stdin.flush()
            line = stdout.readline()
        except OSError as error:
            raise PeerFailed(f"{self._command} has ended: {error}") from error
        finally:
            deadline.cancel()
        try:
            told = json.loads(line)
        except json.JSONDecodeError as error:
            text = f"{line[:200]!r}" if line else f"nothing (it ended, or took over {ANSWER_S} s)"
            raise PeerFailed(f"{self._command} answered {text}") from error
        if "error" in told:
            raise PeerFailed(f"{self._command}: {told['error']}")
        return told

    def _stop(self) -> None:
        assert self._process.stdin is not None, "it was given a pipe"
        with contextlib.suppress(OSError):  # it is gone already
            self._process.stdin.close()
        try:
            self._process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        assert self._process.stdout is not None, "it was given a pipe"
        self._process.stdout.close()
