"""`baton up` with one node of each role: whichever is killed, streams wait for it to be started
again and go on, with the tokens of an undisturbed run. Each start of a node takes seconds longer
than it needs here, as with a real model.
"""

from __future__ import annotations

import json
import os
import random
import re
import signal
import threading
from pathlib import Path

import pytest

from baton.client import Client, GenerateOptions
from baton.protocol.sampling import SamplingParams
from baton.runtime.failpoints import VARIABLE
from tests.deploy.test_up import Up, running
from tests.system.references import prompts
from tests.tiny_models import make_wide_model

pytestmark = [pytest.mark.redis, pytest.mark.slow, pytest.mark.long]

START_S = 6.0  # longer than anything in a router used to wait for a node
NUM_KILLS = 5  # of each node
NUM_TOKENS = 300
LATEST = 150  # tokens that the client has by then: half a stream is still to come
PROMPT = prompts([300], seed=3)[0]
PARAMS = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True)
OPTIONS = GenerateOptions(timeout_s=120.0)


def stream(client: Client, up: Up, victim: str | None, after: int) -> tuple[list[int], int]:
    """The tokens of one stream, and its retries. `victim` is killed when `after` of them have been
    read; with 0 while the request is on its way to the first node, or has just come there."""
    tokens: list[int] = []
    retries = 0
    if victim is not None and after == 0:
        threading.Thread(target=os.kill, args=(up.child(victim), signal.SIGKILL)).start()
        victim = None
    for event in client.stream(PROMPT, PARAMS, OPTIONS):
        assert event.position == len(tokens), "a gap or a duplicate"
        tokens += event.token_ids
        retries = event.retries
        if victim is not None and len(tokens) >= after:
            os.kill(up.child(victim), signal.SIGKILL)
            victim = None
    return tokens, retries


def losses(log: Path) -> int:
    """How often the router of this log has lost the decode node with the stream."""
    return len(re.findall(r"node decode-0 at \S+ is lost with 1 requests", log.read_text()))


@pytest.mark.parametrize("victim", ["prefill-0", "decode-0"])
def test_every_stream_outlives_its_only_node(tmp_path: Path, victim: str) -> None:
    model = make_wide_model(tmp_path / "wide")
    flags = ["--no-warm-up", "--model", str(model), "--dtype", "float32"]
    flags += ["--prefill-placement", "remote"]
    delay = f"loading:1:delay={START_S * 1000:.0f}"
    draw = random.Random(victim)
    log = tmp_path / "run" / "router.log"
    with running(tmp_path, flags, **{VARIABLE: delay}) as up:
        ready = json.loads(up.wait_line('"ready": true'))
        with Client(ready["grpc"]) as client:
            expected, _ = stream(client, up, None, 0)
            assert len(expected) == NUM_TOKENS
            for kill in range(NUM_KILLS):
                after = draw.randrange(1, LATEST) if kill else 0
                before = losses(log)
                tokens, retries = stream(client, up, victim, after)
                assert tokens == expected
                if after:
                    # A decode node on a busy machine is lost, too, when it answers no ping.
                    assert retries == losses(log) - before, f"killed after {after} tokens"
                    assert retries >= (victim == "decode-0")
                up.wait_line("starting again")
                up.wait_line("ready after")


def test_new_requests_wait_for_the_only_decode_node(tmp_path: Path) -> None:
    """None is refused between the kill and the restart."""
    delay = f"loading:1:delay={START_S * 1000:.0f}"
    with running(tmp_path, ["--no-warm-up"], **{VARIABLE: delay}) as up:
        ready = json.loads(up.wait_line('"ready": true'))
        with Client(ready["grpc"]) as client:
            short = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
            expected = client.generate(PROMPT[:20], short).token_ids
            os.kill(up.child("decode-0"), signal.SIGKILL)
            up.wait_line("starting again")
            assert client.generate(PROMPT[:20], short).token_ids == expected
