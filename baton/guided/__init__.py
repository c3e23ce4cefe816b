"""Guided decoding: masks out tokens that cannot continue a match of the grammar."""
