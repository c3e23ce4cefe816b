"""Divides a model's text into reasoning, tool calls and content. State machines without I/O."""
