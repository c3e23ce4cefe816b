"""Token ids in, token ids out, over gRPC. `python examples/grpc_client.py [HOST:PORT]`."""

from __future__ import annotations

import sys

from baton.client import Client
from baton.sampling import SamplingParams

PROMPT_IDS = (5, 17, 42, 99)  # ids of the model's vocabulary; a `str` is tokenized by the server


def main(address: str) -> None:
    with Client(address) as client:
        for event in client.stream(PROMPT_IDS, SamplingParams(temperature=0.0, max_tokens=16)):
            sys.stdout.write(f"{event.position}: {list(event.token_ids)} {event.text!r}\n")
            if event.usage is not None:
                sys.stdout.write(f"{event.finish_reason}, {event.usage}\n")


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "127.0.0.1:50051")
