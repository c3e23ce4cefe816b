"""OpenAI's /v1/responses: items in, items out; also in the background, and stored."""
