"""What offline generation is asked, as vLLM's users write it, and the requests that it becomes.

No engine runs here: a prompt of any form, its parameters and its adapter become a CollectedAnswer
(llm_outputs.py), whose request is then added to an engine by LLM or AsyncLLM.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import count
from pathlib import Path
from typing import Any, cast

from baton.engine.checkpoint.checkpoint import open_checkpoint
from baton.engine.state.interface import ModelInfo
from baton.llm_outputs import CollectedAnswer
from baton.protocol.adapters import adapter_name, ids_named
from baton.protocol.errors import InvalidRequest, UnsupportedFeature
from baton.protocol.request import Request
from baton.protocol.sampling import SamplingParams
from baton.text.chat_template import Chat, ChatTemplate
from baton.text.generation_config import sampling_defaults
from baton.text.tokenizer import Tokenizer, read_special_tokens

# A text, token ids, or {"prompt": text}, {"prompt_token_ids": ids} (or both: their text).
Prompt = str | Sequence[int] | Mapping[str, Any]
Message = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class LoRARequest:
    """An adapter, chosen for one call by its name among `lora_modules`. vLLM's number and path are
    taken and not needed."""

    lora_name: str
    lora_int_id: int = 0
    lora_path: str = ""


Adapter = LoRARequest | str | None


@dataclass(frozen=True, slots=True)
class BeamSearchParams:
    """A search for the most probable continuations; its `beam_width` best are the result."""

    beam_width: int
    max_tokens: int
    ignore_eos: bool = False
    length_penalty: float = 1.0

    def sampling(self) -> SamplingParams:
        """Raises InvalidRequest."""
        return SamplingParams(
            n=self.beam_width,
            beam_width=self.beam_width,
            max_tokens=self.max_tokens,
            ignore_eos=self.ignore_eos,
            length_penalty=self.length_penalty,
            temperature=0.0,
            logprobs=0,
        )


@dataclass(frozen=True, slots=True)
class ChatOptions:
    """How a conversation becomes a prompt. `chat_template`: Jinja source, instead of the model's
    own; `chat_template_kwargs`: what it reads besides."""

    chat_template: str | None = None
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    tools: Sequence[Mapping[str, Any]] | None = None
    chat_template_kwargs: Mapping[str, Any] = field(default_factory=dict[str, Any])


class Inputs:
    """Makes requests for one engine. Tokenizer and chat template are read when first needed."""

    def __init__(
        self, model: str, info: ModelInfo, draw_seed: Callable[[], int] | None = None
    ) -> None:
        """`draw_seed`: where seeds come from that params leave open."""
        self._model = model
        self._info = info
        self._draw_seed = draw_seed or (lambda: secrets.randbits(64))
        self._ids = count()

    @cached_property
    def directory(self) -> Path:
        """Raises ModelRefused."""
        return open_checkpoint(self._model).path

    @cached_property
    def tokenizer(self) -> Tokenizer:
        """Raises ModelRefused."""
        return Tokenizer.load(self.directory)

    @cached_property
    def defaults(self) -> SamplingParams:
        """What the model's generation_config.json recommends. Raises ModelRefused."""
        return SamplingParams(**cast("dict[str, Any]", sampling_defaults(self.directory)))

    @cached_property
    def is_reranker(self) -> bool:
        """Whether its config.json says that it judges by a yes or a no."""
        config = open_checkpoint(self._model).config
        return any(map(config.get, ("classifier_from_token", "is_original_qwen3_reranker")))

    def adapter(self, adapter: Adapter) -> str:
        """Its id, "" for none. Raises UnsupportedFeature for one that is not served."""
        name = adapter.lora_name if isinstance(adapter, LoRARequest) else adapter or ""
        if not name:
            return ""
        meant = ids_named(name, self._info.adapters)
        if not meant:
            known = ", ".join(map(adapter_name, self._info.adapters)) or "none"
            message = f"no adapter {name!r} here (lora_modules has {known})"
            raise UnsupportedFeature(message, field="lora_request")
        return meant[0]

    @cached_property
    def _own_template(self) -> ChatTemplate:
        return ChatTemplate.load(self.directory)

    def answer(
        self,
        prompt: Prompt,
        params: SamplingParams,
        adapter: Adapter = None,
        request_id: str | None = None,
    ) -> CollectedAnswer:
        """A request of its own, and the answer to be filled. A seed that is None is drawn;
        max_tokens is cut to what the context leaves. Raises InvalidRequest."""
        ids, text = self.read(prompt)
        room = self._info.max_model_len - len(ids)
        params = replace(
            params,
            seed=self._draw_seed() if params.seed is None else params.seed,
            max_tokens=max(1, min(params.max_tokens, room)),
        )
        request = Request(
            id=request_id or f"llm-{next(self._ids)}",
            prompt_ids=ids,
            params=params,
            adapter=self.adapter(adapter),
        )
        wants_text = text is not None or bool(params.stop)
        return CollectedAnswer(request, self.tokenizer if wants_text else None, text)

    def read(self, prompt: Prompt) -> tuple[tuple[int, ...], str | None]:
        """Token ids, and the text if it was given. Raises InvalidRequest."""
        text, ids = (prompt, None) if isinstance(prompt, str) else (None, prompt)
        if isinstance(prompt, Mapping):
            text, ids = prompt.get("prompt"), prompt.get("prompt_token_ids")
            if prompt.keys() - {"prompt", "prompt_token_ids"} or (text is None and ids is None):
                message = 'a prompt is {"prompt": text} or {"prompt_token_ids": ids}'
                raise InvalidRequest(message, field="prompts")
        if ids is None:
            ids = self.tokenizer.encode(str(text))
        return tuple(cast("Sequence[int]", ids)), text

    def rendered(self, messages: Sequence[Message], options: ChatOptions) -> Prompt:
        """A conversation as a prompt. Raises InvalidRequest, UnsupportedFeature."""
        template, source = None, options.chat_template
        if source is not None:
            template = ChatTemplate(source, read_special_tokens(self.directory))
        chat = Chat(
            [_plain(message) for message in messages],
            tools=options.tools or (),
            add_generation_prompt=options.add_generation_prompt
            and not options.continue_final_message,
            continue_final_message=options.continue_final_message,
            kwargs=options.chat_template_kwargs,
        )
        # Without limits: whoever asks here waits for nobody else's sake.
        text = (template or self._own_template).render(chat)
        # Templates write the special tokens themselves.
        return {"prompt": text, "prompt_token_ids": self.tokenizer.encode(text, False)}


def _plain(message: Message) -> dict[str, Any]:
    """A message as templates want it: its parts one text, its calls' arguments objects."""
    plain = dict(message)
    content: object = plain.get("content")
    if isinstance(content, list):
        parts = cast("list[Mapping[str, Any] | str]", content)
        plain["content"] = "".join(map(_text_of, parts))
    if plain.get("tool_calls"):
        plain["tool_calls"] = [_with_arguments(call) for call in plain["tool_calls"]]
    return plain


def _text_of(part: Mapping[str, Any] | str) -> str:
    if isinstance(part, str):
        return part
    if part.get("type") != "text":
        message = f"messages: only parts of text are served, not {part.get('type')!r}"
        raise UnsupportedFeature(message, field="messages")
    return str(part["text"])


def _with_arguments(call: Mapping[str, Any]) -> dict[str, Any]:
    function = dict(call["function"])
    if isinstance(function.get("arguments"), str):
        try:
            function["arguments"] = json.loads(function["arguments"])
        except ValueError as error:
            message = f"messages: the arguments of {function.get('name')!r} are not JSON"
            raise InvalidRequest(message, field="messages") from error
    return {**call, "function": function}
