"""Benchmarks. Importing Baton first: torch's threads wait as Baton wants only if that is known
before torch is imported."""

import baton  # noqa: F401  # pyright: ignore[reportUnusedImport]
