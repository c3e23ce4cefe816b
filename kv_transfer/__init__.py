"""Moves KV blocks between nodes; see README.md for what enters, what leaves and where to start."""
