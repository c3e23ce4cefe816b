"""Anthropic's /v1/messages: blocks in, blocks out."""
