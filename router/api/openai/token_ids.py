"""vLLM's `return_token_ids`: the ids of the prompt and of the answer, beside the text."""

from __future__ import annotations

from typing import Any

from router.request.completion import Delta


class TokenIds:
    """The ids of one choice as its deltas come; nothing unless `wanted`."""

    def __init__(self, wanted: bool, prompt_ids: tuple[int, ...] = ()) -> None:
        self.wanted = wanted
        self._prompt_ids = prompt_ids
        self._all: list[int] = []
        self._told = 0
        self._began = False

    def take(self, delta: Delta) -> None:
        if self.wanted:
            self._all += delta.token_ids

    @property
    def waiting(self) -> bool:
        """Some were taken and not yet told."""
        return self._told < len(self._all)

    def fields(self) -> dict[str, Any]:
        """For a choice of a stream: the ids not told yet."""
        if not self.wanted:
            return {}
        fresh, self._told = self._all[self._told :], len(self._all)
        return {"token_ids": fresh}

    def prompt_fields(self) -> dict[str, Any]:
        """The prompt's ids the first time, then null."""
        if not self.wanted:
            return {}
        told, self._began = None if self._began else list(self._prompt_ids), True
        return {"prompt_token_ids": told}

    @property
    def whole(self) -> list[int] | None:
        """For a whole answer's choice."""
        return self._all if self.wanted else None

    @property
    def prompt(self) -> list[int] | None:
        return list(self._prompt_ids) if self.wanted else None
