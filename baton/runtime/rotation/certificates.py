"""When certificates end. Python's ssl tells it of a peer's certificate alone, not of a file's.

A certificate is DER: tag, length, content, nested. X.509 (RFC 5280, 4.1) begins like this:

    SEQUENCE { SEQUENCE { [0] version, serial number, algorithm, issuer, validity, ...
    validity: SEQUENCE { notBefore, notAfter }
"""

from __future__ import annotations

import re
import ssl
from datetime import UTC, datetime
from typing import Final

from baton.protocol.errors import ConfigError

_PEM: Final = re.compile(
    "-----BEGIN CERTIFICATE-----.+?-----END CERTIFICATE-----", re.DOTALL | re.ASCII
)
_VERSION: Final = 0xA0
_UTC_TIME: Final = 0x17  # YYMMDDhhmmssZ, the years 1950 to 2049; the other form: YYYYMMDDhhmmssZ


def expires_at(pem: str) -> float:
    """Return when the first certificate of a PEM chain ends, in seconds since 1970.

    Raises ConfigError if there is none, or one that is malformed.
    """
    try:
        return min(_not_after(ssl.PEM_cert_to_DER_cert(each)) for each in _PEM.findall(pem))
    except (ValueError, IndexError) as error:
        raise ConfigError(f"no valid certificate: {error}") from error


def _not_after(der: bytes) -> float:
    _, certificate, _ = _element(der)
    _, rest, _ = _element(certificate)
    if rest[0] == _VERSION:
        _, _, rest = _element(rest)
    for _ in range(3):  # serial number, algorithm, issuer
        _, _, rest = _element(rest)
    _, validity, _ = _element(rest)
    _, _, end = _element(validity)
    tag, text, _ = _element(end)
    time = text.decode("ascii")
    if tag == _UTC_TIME:
        time = ("19" if time[:2] >= "50" else "20") + time
    return datetime.strptime(time, "%Y%m%d%H%M%SZ").replace(tzinfo=UTC).timestamp()


def _element(der: bytes) -> tuple[int, bytes, bytes]:
    """Return the tag and the content of the first element, and what follows it.

    Raises ValueError, or IndexError at the end of the bytes.
    """
    tag, length, start = der[0], der[1], 2
    if length & 0x80:  # the low bits count the bytes of the length
        start += length & 0x7F
        length = int.from_bytes(der[2:start], "big")
    content = der[start : start + length]
    if len(content) != length:
        raise ValueError("it ends too early")
    return tag, content, der[start + length :]
