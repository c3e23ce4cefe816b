"""Streamed chat with the official client. `python examples/openai_stream.py [BASE_URL]`."""

from __future__ import annotations

import sys

from openai import OpenAI


def main(base_url: str) -> None:
    client = OpenAI(base_url=base_url, api_key="none")
    model = client.models.list().data[0].id
    stream = client.chat.completions.create(
        model=model,
        messages=[{"role": "user", "content": "What is PagedAttention?"}],
        temperature=0.0,
        stream=True,
    )
    for chunk in stream:
        if chunk.choices:
            sys.stdout.write(chunk.choices[0].delta.content or "")
            sys.stdout.flush()
    sys.stdout.write("\n")


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "http://127.0.0.1:8000/v1")
