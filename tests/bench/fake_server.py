"""A program that plays another system's server: `python -m tests.bench.fake_server PORT`."""

from __future__ import annotations

import sys

import uvicorn

from tests.bench.test_load import FakeModel

if __name__ == "__main__":
    uvicorn.run(FakeModel().app(), port=int(sys.argv[1]), log_level="warning", ws="none")
