"""The language model of a multimodal checkpoint, saved alone so that it can be served:

.venv/bin/python examples/text_model.py MODEL TEXT_MODEL
"""

from __future__ import annotations

import sys
from typing import Any

from transformers import AutoModelForCausalLM, AutoModelForImageTextToText, AutoTokenizer


def save_alone(source: str, target: str) -> None:
    """Write what `source` generates text with, and its tokenizer, to the directory `target`."""
    whole: Any = AutoModelForImageTextToText.from_pretrained(source, dtype="auto")
    text_config = whole.config.get_text_config()
    alone: Any = AutoModelForCausalLM.from_config(text_config, dtype=whole.dtype)
    alone.base_model.load_state_dict(whole.get_decoder().state_dict())
    alone.lm_head.load_state_dict(whole.lm_head.state_dict())
    alone.save_pretrained(target)
    AutoTokenizer.from_pretrained(source).save_pretrained(target)


if __name__ == "__main__":
    save_alone(*sys.argv[1:])
