"""Traces of requests for OpenTelemetry: spans, and the child process that exports them."""
