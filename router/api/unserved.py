"""Fields that other servers accept and this one refuses by name, because ignoring them would change
the answer.

Each table maps a field to (values that have no effect and are accepted, end of the error message).
A null is always accepted. The fields that this server reads are in the bodies' structs;
docs/http_api.md lists every field of vLLM's.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final, TypeAlias

from baton.protocol.errors import UnsupportedFeature

Unserved: TypeAlias = Mapping[str, tuple[tuple[Any, ...], str]]

_TEXT: Final = ": only text is served"
_OWN_TRANSFERS: Final = ": the router arranges transfers itself"
# Fields of every body that generates, or that renders a prompt.
GENERATING: Final[Unserved] = {
    "audio": ((), _TEXT),
    "ec_transfer_params": (({},), _OWN_TRANSFERS),
    "function_call": (("none", "auto"), ": say tool_choice"),
    "functions": (([],), ": say tools"),
    "kv_transfer_params": (({},), _OWN_TRANSFERS),
    "logits_processors": (([],), ": no code of clients runs here"),
    "modalities": ((["text"],), _TEXT),
    "prompt_embeds": (([],), ": send text or token ids"),
    "repetition_detection": ((), ": say a penalty"),
    "return_prompt_text": ((False,), ": return_token_ids tells the prompt's ids"),
    "suffix": (("",), ": text is written after the prompt only"),
    "vllm_xargs": (({},), ": there are no extensions that would read them"),
    "watermarking": ((False,), ""),
    "web_search_options": ((), ""),
}
# Fields that /v1/completions refuses; chats have them or name them differently.
COMPLETIONS: Final[Unserved] = {
    "chat_template": ((), ": there are no messages"),
    "documents": (([],), ": there are no messages"),
    "continue_final_message": ((False,), ""),
    "tool_choice": (("none", "auto"), ""),
    "tools": (([],), ""),
    "top_logprobs": ((0,), ": logprobs is a number here"),
}
# Fields that embeddings, reranking and scores refuse.
POOLING: Final[Unserved] = {
    "chat_template": ((), ": send text or token ids"),
    "embed_dtype": (("float32",), ": numbers are float32"),
    "endianness": (("native", "little"), ": base64 is little-endian"),
    "messages": ((), ": send text or token ids"),
    "padding": (("do_not_pad",), ": prompts are not padded"),
}
# Fields that Cohere's /v2/embed refuses.
COHERE: Final[Unserved] = {"images": (([],), _TEXT)}
# Fields that reranking and scores refuse: the server writes their prompts itself.
RERANKING: Final[Unserved] = {
    **POOLING,
    "chat_template_kwargs": (({},), ""),
    "max_tokens_per_doc": ((0,), ": send shorter documents"),
    "max_tokens_per_query": ((0,), ": send a shorter query"),
    "truncate_prompt_tokens": ((), ": send shorter documents"),
    "use_activation": ((True,), ": a score is a probability"),
}


def refuse(given: Mapping[str, Any], unserved: Unserved) -> None:
    """Raise UnsupportedFeature if a field of `unserved` is set to a value that has an effect."""
    if unserved.keys().isdisjoint(given):
        return
    for name, (harmless, why) in unserved.items():
        value = given.get(name)
        if value is not None and value not in harmless:
            raise UnsupportedFeature(f"{name} is not supported by this server{why}", field=name)
