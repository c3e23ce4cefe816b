"""Reads rates and times with their units, as people give them to `baton estimate`. Pure."""

from __future__ import annotations

import re
from typing import Final

from baton.protocol.errors import ConfigError

_PREFIXES: Final = {"": 1.0, "K": 1e3, "M": 1e6, "G": 1e9, "T": 1e12, "P": 1e15, "E": 1e18}


def parse_rate(text: str, field: str) -> float:
    """Return the rate per second of "3.3TB/s", "900 GB/s", "990T", "1.98PFLOPS". Raises
    ConfigError.
    """
    match = re.fullmatch(
        r"\s*(\d+(?:\.\d+)?)\s*([KMGTPE]?)(i?)\s*(?:(?:B|FLOPS?|FLOP)?(?:/s)?)\s*",
        text,
        re.IGNORECASE,
    )
    if match is None:
        example = "3.3TB/s" if field == "bandwidth" else "990T"
        raise ConfigError(f"{field}: {text!r} is not a rate such as {example}", field=field)
    number, prefix, binary = match.group(1), match.group(2).upper(), bool(match.group(3))
    power = _PREFIXES[prefix]
    if binary:
        power = 1024.0 ** list(_PREFIXES).index(prefix)
    rate = float(number) * power
    if rate <= 0:
        raise ConfigError(f"{field} must be above 0", field=field)
    return rate


def parse_seconds(text: str, field: str) -> float:
    """Return the seconds of "12ms", "0.5 s", "800us". Raises ConfigError."""
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*(s|ms|us)\s*", text)
    if match is None or float(match.group(1)) <= 0:
        raise ConfigError(f"{field}: {text!r} is not a time such as 12ms", field=field)
    return float(match.group(1)) * {"s": 1.0, "ms": 1e-3, "us": 1e-6}[match.group(2)]
