"""OpenAI's /v1/responses: items in, items out, nothing stored."""
