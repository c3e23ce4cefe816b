"""Which addresses only this machine can reach."""

from __future__ import annotations

import pytest

from baton.runtime.addresses import is_loopback


@pytest.mark.parametrize("host", ["localhost", "127.0.0.1", "127.9.9.9", "::1"])
def test_loopback(host: str) -> None:
    assert is_loopback(host)


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "10.0.0.1", "example.org", ""])
def test_not_loopback(host: str) -> None:
    assert not is_loopback(host)
