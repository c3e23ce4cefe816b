"""Anthropic's /v1/messages: messages of content blocks in, a message of content blocks out."""
