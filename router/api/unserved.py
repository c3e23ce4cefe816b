"""Fields that other servers take and this one does not, refused by name: nothing that would change
an answer is passed over in silence.

Each table maps a field to the values that ask for nothing (None never asks) and to why it is
refused. What is taken is in the bodies' structs; every field of vLLM's is in docs/http_api.md.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final, TypeAlias

from baton.protocol.errors import UnsupportedFeature

Unserved: TypeAlias = Mapping[str, tuple[tuple[Any, ...], str]]

_TEXT: Final = ": only text is served"
_OWN_TRANSFERS: Final = ": the router arranges transfers itself"
# Of every body that generates or is rendered.
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
# Of one API only: valid in the other.
COMPLETIONS: Final[Unserved] = {
    "chat_template": ((), ": there are no messages"),
    "documents": (([],), ": there are no messages"),
    "continue_final_message": ((False,), ""),
    "tool_choice": (("none", "auto"), ""),
    "tools": (([],), ""),
    "top_logprobs": ((0,), ": logprobs is a number here"),
}
# Of embeddings, reranking and scores.
POOLING: Final[Unserved] = {
    "chat_template": ((), ": send text or token ids"),
    "embed_dtype": (("float32",), ": numbers are float32"),
    "endianness": (("native", "little"), ": base64 is little-endian"),
    "messages": ((), ": send text or token ids"),
    "padding": (("do_not_pad",), ": prompts are not padded"),
}
# Of Cohere's embeddings.
COHERE: Final[Unserved] = {"images": (([],), _TEXT)}
# Of reranking and scores, whose prompts are one question each.
RERANKING: Final[Unserved] = {
    **POOLING,
    "chat_template_kwargs": (({},), ""),
    "max_tokens_per_doc": ((0,), ": send shorter documents"),
    "max_tokens_per_query": ((0,), ": send a shorter query"),
    "truncate_prompt_tokens": ((), ": send shorter documents"),
    "use_activation": ((True,), ": a score is a probability"),
}


def refuse(given: Mapping[str, Any], unserved: Unserved) -> None:
    """Raise UnsupportedFeature for a field that asks for what is not served."""
    if unserved.keys().isdisjoint(given):
        return
    for name, (harmless, why) in unserved.items():
        value = given.get(name)
        if value is not None and value not in harmless:
            raise UnsupportedFeature(f"{name} is not supported by this server{why}", field=name)
