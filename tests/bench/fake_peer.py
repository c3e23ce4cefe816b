"""A program that plays a peer of bench.engine: a quarter of a second for whatever is asked."""

from __future__ import annotations

import json
import sys


def main() -> None:
    given = sys.argv[1:]
    for line in sys.stdin:
        question = json.loads(line)
        if given == ["--silent"]:
            return
        if given == ["--noise"]:
            answer = "a line of a library"
        elif given == ["--fail"]:
            answer = json.dumps({"error": "OSError: the model is gone"})
        elif "model" in question:
            lacks = {"unsupported": "no int4 weights"} if question["quantization"] == "int4" else {}
            answer = json.dumps({"name": "Fake 1.0", **lacks})
        else:
            got = question["new_tokens"] - (given == ["--short"])
            counts = [got] * len(question["prompts"])
            answer = json.dumps({"seconds": 0.25 * max(counts), "new_tokens": counts})
        sys.stdout.write(answer + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
