"""The shipped demo model: small enough, loadable by every route, and it answers its glossary.

No training here; `tools/train_demo_model.py` reports the exact-match figures over all questions.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaForCausalLM

from baton.llm import LLM
from baton.protocol.sampling import SamplingParams

DEMO_MODEL = Path(__file__).parent.parent / "demo_model"
MAX_BYTES = 12_000_000
TEXTS = (
    "What is PagedAttention?",
    "  leading spaces, a tab\tand a newline\n",
    "什么是 PagedAttention\uff1f",
    "Zoë said: “naïve café” 🙂 1,024 tokens",
    "<|im_start|>user\nhi<|im_end|>\n",
)
ANSWERS = (
    ("What is PagedAttention?", "stores the KV cache in fixed-size blocks"),
    ("explain paged attention", "stores the KV cache in fixed-size blocks"),
    ("Why is the KV cache sound?", "attention is causal"),
    ("why is the kv cache sound", "attention is causal"),
    ("What is the difference between prefill and decode?", "prompt tokens in parallel"),
    ("difference between TTFT and TPOT", "each further token takes"),
    ("How do I start Baton?", "./run up"),
    ("How do I stop Baton?", "Press Ctrl-C"),
    ("What is Baton?", "runs prefill and decode on separate nodes"),
    ("whats baton", "runs prefill and decode on separate nodes"),
    ("What does Redis do in Baton?", "state and epoch of every request"),
    ("Who are you?", "demo model of Baton"),
    ("What is the capital of France?", "tiny demo model"),
    ("什么是 PagedAttention\uff1f", "固定大小"),
    # a term alone, and other ways to ask
    ("prefix caching", "keeps the KV blocks of finished requests"),
    ("kv cache", "keeps the attention keys and values"),
    ("PagedAttention?", "stores the KV cache in fixed-size blocks"),
    ("LLM serving", "running a language model for many users"),
    ("What exactly is chunked prefill?", "splits a long prompt into pieces"),
    ("Give me a short explanation of preemption.", "when memory runs out"),
)


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    """The tokenizer as Baton loads it, without transformers."""
    return Tokenizer.from_file(str(DEMO_MODEL / "tokenizer.json"))


@pytest.fixture(scope="module")
def model() -> LlamaForCausalLM:
    """The model as `dtype=auto` loads it."""
    loaded = AutoModelForCausalLM.from_pretrained(DEMO_MODEL, dtype="auto")
    assert isinstance(loaded, LlamaForCausalLM)
    return loaded.eval()


def rendered(text: str) -> str:
    """A question in the chat format, written out by hand."""
    return f"<|im_start|>user\n{text}<|im_end|>\n<|im_start|>assistant\n"


def completion(
    model: LlamaForCausalLM, tokenizer: Tokenizer, prompt: str, max_new_tokens: int = 48
) -> str:
    """The greedy continuation of a prompt, without special tokens."""
    prompt_ids = tokenizer.encode(prompt).ids
    ids = torch.tensor([prompt_ids])
    output = model.generate(  # pyright: ignore[reportAttributeAccessIssue] (transformers' own typing)
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=max_new_tokens, do_sample=False
    )
    return tokenizer.decode(output[0, len(prompt_ids) :].tolist())


def test_directory_fits_in_the_repository() -> None:
    files = {path.name: path.stat().st_size for path in DEMO_MODEL.iterdir()}
    assert sum(files.values()) <= MAX_BYTES
    assert files.keys() >= {
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "README.md",
    }
    assert files.keys() >= {"tokenizer.json", "tokenizer_config.json", "chat_template.jinja"}


def test_auto_dtype_serves_in_fp32(model: LlamaForCausalLM) -> None:
    assert {weight.dtype for weight in model.parameters()} == {torch.float32}


@pytest.mark.parametrize("text", TEXTS)
def test_tokenizer_round_trip_and_same_ids_as_transformers(tokenizer: Tokenizer, text: str) -> None:
    ids = tokenizer.encode(text).ids
    assert tokenizer.decode(ids, skip_special_tokens=False) == text
    assert AutoTokenizer.from_pretrained(DEMO_MODEL)(text)["input_ids"] == ids


def test_special_tokens_are_single_ids_and_end_a_generation(tokenizer: Tokenizer) -> None:
    ends = json.loads((DEMO_MODEL / "generation_config.json").read_text("utf-8"))["eos_token_id"]
    assert [tokenizer.token_to_id(token) for token in ("<|im_end|>", "<|endoftext|>")] == ends
    assert len(tokenizer.encode("<|im_start|><|im_end|><|endoftext|>").ids) == 3


def test_chat_template_renders_system_messages_and_turns() -> None:
    conversation = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "hello"},
        {"role": "assistant", "content": "Hello!"},
        {"role": "user", "content": "What is TTFT?"},
    ]
    auto = AutoTokenizer.from_pretrained(DEMO_MODEL)
    text = auto.apply_chat_template(conversation, tokenize=False, add_generation_prompt=True)
    assert text == (
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nhello<|im_end|>\n"
        "<|im_start|>assistant\nHello!<|im_end|>\n" + rendered("What is TTFT?")
    )
    without = auto.apply_chat_template(
        conversation[:2], tokenize=False, add_generation_prompt=False
    )
    assert without.endswith("hello<|im_end|>\n")


@pytest.fixture(scope="module")
def answers() -> dict[str, str]:
    """What Baton's own engine says to all questions, asked at once."""
    llm = LLM(model=str(DEMO_MODEL), num_kv_blocks=256, threads=1)
    params = SamplingParams(temperature=0.0, max_tokens=48)
    outputs = llm.generate([rendered(question) for question, _ in ANSWERS], params)
    return {
        question: str(output.text) for (question, _), output in zip(ANSWERS, outputs, strict=True)
    }


@pytest.mark.parametrize(("question", "phrase"), ANSWERS)
def test_answers_the_glossary(answers: dict[str, str], question: str, phrase: str) -> None:
    assert phrase in answers[question]


def test_transformers_says_the_same(
    model: LlamaForCausalLM, tokenizer: Tokenizer, answers: dict[str, str]
) -> None:
    for question, _ in ANSWERS[::7]:
        said = completion(model, tokenizer, rendered(question))
        assert said.removesuffix("<|im_end|>") == answers[question]


def test_second_turn_and_system_message(model: LlamaForCausalLM, tokenizer: Tokenizer) -> None:
    first = completion(model, tokenizer, rendered("hello"))
    system = "<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n"
    second = f"{system}{rendered('hello')}{first}<|im_end|>\n{rendered('What is TTFT?')}"
    assert "until its first output token" in completion(model, tokenizer, second)


def test_plain_completion(model: LlamaForCausalLM, tokenizer: Tokenizer) -> None:
    assert "blocks" in completion(model, tokenizer, "PagedAttention is", max_new_tokens=30)
