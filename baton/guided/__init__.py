"""Guided decoding: tokens that cannot continue a match of the grammar are masked out."""
