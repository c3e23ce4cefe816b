"""Random bytes of the system, each used once, in a forked process others."""

from __future__ import annotations

import os

import pytest

from router.request.draws import DRAWS, Draws


def test_each_byte_is_used_once_and_in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[bytes] = []

    def system(num_bytes: int) -> bytes:
        given.append(bytes((len(given) + i) % 256 for i in range(num_bytes)))
        return given[-1]

    monkeypatch.setattr(os, "urandom", system)
    draws = Draws()
    names = "".join(draws.hex(12) for _ in range(341))
    assert names == given[0][:4092].hex()
    assert len(given) == 1
    assert draws.hex(12) == given[1][:12].hex(), "what does not suffice is left"
    assert draws.seed() == int.from_bytes(given[1][12:20], "big")
    assert draws.hex(5000) == given[2].hex()


def test_no_two_are_alike() -> None:
    assert (
        len({DRAWS.hex(12) for _ in range(2000)} | {f"{DRAWS.seed():x}" for _ in range(2000)})
        == 4000
    )
    assert 0 <= DRAWS.seed() < 1 << 64


def test_a_forked_process_draws_its_own() -> None:
    DRAWS.hex(1)
    there, here = os.pipe()
    child = os.fork()
    if child == 0:
        os.write(here, DRAWS.hex(16).encode())
        os._exit(0)
    os.waitpid(child, 0)
    assert os.read(there, 32).decode() != DRAWS.hex(16)
    os.close(there)
    os.close(here)
