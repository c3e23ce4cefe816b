"""Secrets, certificates and keys that are replaced while a process runs."""
