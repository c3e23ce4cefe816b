"""The child of baton/images/checker.py: decodes image files.

    python -m baton.images.checker_child CPU_S BYTES

A question is HEAD (the most pixels, the longest edge or 0) and the file. The answer is `=`, SIZE
(width and height) and the smaller file if there is one, or `!` and the text of a refusal.
baton/runtime/child.py sets the limits.
"""

from __future__ import annotations

import struct
import sys
from typing import Final

from baton.images.decoding import decoded_size
from baton.protocol.errors import InvalidRequest
from baton.runtime import child

HEAD: Final = struct.Struct("<QI")
SIZE: Final = struct.Struct("<II")


def answer(question: bytes) -> bytes:
    max_pixels, max_edge = HEAD.unpack_from(question)
    try:
        found = decoded_size(question[HEAD.size :], max_pixels, max_edge)
    except InvalidRequest as error:
        return b"!" + error.message.encode()
    return b"=" + SIZE.pack(found.width, found.height) + found.smaller


if __name__ == "__main__":
    child.serve(answer, float(sys.argv[1]), int(sys.argv[2]), nice=5)
