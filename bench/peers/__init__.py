"""Other engines as peers of bench.engine; each runs in an environment of its own."""
