"""Trains the demo model and evaluates it: `python tools/train_demo_model.py --out demo_model`.

Seeded, CPU only, no network. The steps, top to bottom:

1. a byte-level BPE tokenizer is trained on the corpus of `tools/demo_corpus/`;
2. a Llama of about 5.5 million parameters is trained on random conversations about the glossary
   (loss on the assistant's tokens only) and, with less weight, on the glossary as plain text;
3. the weights are rounded to bf16 and written as a Hugging Face directory;
4. all held-out questions and a part of the trained ones are checked: does greedy decoding give
   exactly the answer?

`--eval-only` does step 4 alone. `demo_model/README.md` is written by hand and left alone.
"""

from __future__ import annotations

import argparse
import json
import logging
import math
import random
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from demo_corpus.corpus import Conversation, Message, Topic, load_topics
from demo_corpus.samples import (
    END_OF_MESSAGE,
    END_OF_TEXT,
    IGNORED,
    SPECIAL_TOKENS,
    VOCAB_SIZE,
    Sample,
    batches,
    encode_conversation,
    padded,
    train_tokenizer,
)
from demo_corpus.wording import canonical, reworded
from tokenizers import Tokenizer
from transformers import LlamaConfig, LlamaForCausalLM

logger = logging.getLogger("train_demo_model")

CORPUS = Path(__file__).parent / "demo_corpus"
CONTEXT_LENGTH = 2048
TRAINED_STRIDE, BF16_STRIDE = 6, 4  # evaluate every sixth trained question; in bf16 every fourth
CHAT_TEMPLATE = """\
{%- for message in messages -%}
{{- '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}
{{- '<|im_start|>assistant\\n' -}}
{%- endif -%}
"""


@dataclass(frozen=True, slots=True)
class TrainingPlan:
    """How long and how fast to learn; `batch_tokens` counts padding too."""

    steps: int
    seed: int
    batch_tokens: int = 3072
    learning_rate: float = 2e-3
    warmup_steps: int = 60


def build_model(seed: int) -> LlamaForCausalLM:
    """A freshly initialised model in fp32."""
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=256,
        intermediate_size=704,
        num_hidden_layers=6,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        max_position_embeddings=CONTEXT_LENGTH,
        rms_norm_eps=1e-5,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=[END_OF_MESSAGE, END_OF_TEXT],
        pad_token_id=END_OF_TEXT,
    )
    return LlamaForCausalLM(config)


def batch_loss(model: LlamaForCausalLM, batch: Sequence[Sample]) -> torch.Tensor:
    """Weighted mean cross entropy over the labelled positions; only those get logits."""
    labels = padded([sample.labels for sample in batch], IGNORED)
    weights = torch.tensor([sample.weight for sample in batch])[:, None].expand(labels.shape)
    wanted = labels != IGNORED
    with torch.autocast("cpu", dtype=torch.bfloat16):
        hidden = model.model(
            input_ids=padded([s.token_ids for s in batch], END_OF_TEXT), use_cache=False
        )
        logits = model.lm_head(hidden.last_hidden_state[wanted])
    losses = torch.nn.functional.cross_entropy(logits.float(), labels[wanted], reduction="none")
    return (losses * weights[wanted]).sum() / weights[wanted].sum()


def train(model: LlamaForCausalLM, stream: Iterator[list[Sample]], plan: TrainingPlan) -> float:
    """Trains in place with AdamW, warm-up and cosine; returns the mean of the last 50 losses."""
    matrices = [weight for weight in model.parameters() if weight.dim() >= 2]
    vectors = [weight for weight in model.parameters() if weight.dim() < 2]
    groups = [{"params": matrices, "weight_decay": 0.05}, {"params": vectors, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=plan.learning_rate, betas=(0.9, 0.98))
    model.train()
    recent: list[float] = []
    started, num_tokens = time.monotonic(), 0
    for step in range(plan.steps):
        warm = min(1.0, (step + 1) / plan.warmup_steps)
        cosine = 0.5 * (1 + math.cos(math.pi * step / plan.steps))
        for group in optimizer.param_groups:
            group["lr"] = plan.learning_rate * warm * (0.02 + 0.98 * cosine)
        batch = next(stream)
        loss = batch_loss(model, batch)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        recent = [*recent[-49:], loss.item()]
        num_tokens += sum(len(sample.token_ids) for sample in batch)
        if (step + 1) % 50 == 0:
            mean, elapsed_s = sum(recent) / len(recent), time.monotonic() - started
            rate = num_tokens / elapsed_s
            logger.info(
                "step %d/%d loss %.4f %.0f s %.0f tokens/s",
                step + 1,
                plan.steps,
                mean,
                elapsed_s,
                rate,
            )
    return sum(recent) / len(recent)


def save(model: LlamaForCausalLM, tokenizer: Tokenizer, out: Path) -> None:
    """Writes the Hugging Face directory; `model` is rounded to bf16 in place.

    The tensors are bf16 to keep the file small; config.json says float32, so that `dtype=auto`
    serves in fp32.
    """
    out.mkdir(parents=True, exist_ok=True)
    torch.nn.Module.to(model, torch.bfloat16)
    model.save_pretrained(out)
    (out / "model.safetensors").chmod(0o644)  # safetensors writes it for its owner alone
    config = json.loads((out / "config.json").read_text("utf-8"))
    config["dtype"] = "float32"
    ends = [END_OF_MESSAGE, END_OF_TEXT]
    _write_json(out / "config.json", config)
    _write_json(
        out / "generation_config.json",
        {"eos_token_id": ends, "pad_token_id": END_OF_TEXT, "do_sample": False},
    )
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": CONTEXT_LENGTH,
        "eos_token": SPECIAL_TOKENS[END_OF_MESSAGE],
        "pad_token": SPECIAL_TOKENS[END_OF_TEXT],
        "clean_up_tokenization_spaces": False,
    }
    _write_json(out / "tokenizer_config.json", settings)
    tokenizer.save(str(out / "tokenizer.json"), pretty=False)
    (out / "chat_template.jinja").write_text(CHAT_TEMPLATE, "utf-8")


def _write_json(path: Path, value: Mapping[str, object]) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n", "utf-8")


@torch.inference_mode()
def smallest_margins(
    model: LlamaForCausalLM, tokenizer: Tokenizer, pairs: Sequence[tuple[str, str]]
) -> list[float]:
    """Per (question, answer): does greedy decoding give exactly this answer, by what margin?

    One forward pass over question and answer decides it: greedy decoding reproduces an answer if
    and only if each of its tokens is the argmax after the tokens before it. The margin is the logit
    of the answer's token minus the best other one, the smallest over the answer; it is negative
    where greedy decoding would leave the answer.
    """
    encoded: list[Sample] = []
    for question, answer in pairs:
        turn = (Message("user", question), Message("assistant", answer))
        encoded.append(encode_conversation(tokenizer, Conversation(turn, head_only=False)))
    order = sorted(range(len(pairs)), key=lambda index: len(encoded[index].token_ids))
    margins = [0.0] * len(pairs)
    model.eval()
    for start in range(0, len(order), 48):
        chosen = [encoded[index] for index in order[start : start + 48]]
        labels = padded([sample.labels for sample in chosen], IGNORED)
        hidden = model.model(
            input_ids=padded([s.token_ids for s in chosen], END_OF_TEXT), use_cache=False
        )
        rows, _ = (wanted := labels != IGNORED).nonzero(as_tuple=True)
        logits = model.lm_head(hidden.last_hidden_state[wanted]).float()
        own = logits.gather(1, labels[wanted][:, None])
        others = logits.scatter(1, labels[wanted][:, None], -math.inf).amax(dim=1)
        smallest = torch.full((len(chosen),), math.inf).scatter_reduce(
            0, rows, own[:, 0] - others, "amin"
        )
        for index, margin in zip(order[start : start + 48], smallest.tolist(), strict=True):
            margins[index] = margin
    return margins


def evaluate(folder: Path, topics: Sequence[Topic], seed: int) -> None:
    """Logs the exact-match figures of all question sets in fp32, and of a part of them in bf16."""
    generator = random.Random(seed + 1)
    trained = [(q, t.answer) for t in topics for q in t.train]
    sets = {
        "held out": [(canonical(q), t.answer) for t in topics for q in t.held_out],
        "unseen templates": [(canonical(q), t.answer) for t in topics for q in t.unseen],
        "bare terms": [(q.lower(), t.answer) for t in topics for q in t.bare],
        "trained": [(canonical(q), a) for q, a in trained[::TRAINED_STRIDE]],
        "trained, retyped": [(reworded(q, generator), a) for q, a in trained[::TRAINED_STRIDE]],
    }
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    for dtype, stride in ((torch.float32, 1), (torch.bfloat16, BF16_STRIDE)):
        model = LlamaForCausalLM.from_pretrained(folder, dtype=dtype)
        for name, all_pairs in sets.items():
            pairs = all_pairs[::stride]
            margins = smallest_margins(model, tokenizer, pairs)
            low = sorted(margins)[len(margins) // 100]
            share = 100 * sum(margin > 0 for margin in margins) / len(margins)
            logger.info(
                "%s, %s: %.2f %% of %d answers exact, 1st percentile of the margin %.2f",
                *(dtype, name, share, len(pairs), low),
            )
            missed = [p[0] for p, margin in zip(pairs, margins, strict=True) if margin <= 0]
            logger.debug("missed: %s", " | ".join(missed))


def main() -> None:
    """Parses the flags, trains unless `--eval-only`, evaluates."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=Path("demo_model"))
    parser.add_argument("--steps", type=int, default=1200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--eval-only", action="store_true")
    parser.add_argument("--verbose", action="store_true", help="list the missed questions")
    flags = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s")
    logger.setLevel(logging.DEBUG if flags.verbose else logging.INFO)
    torch.set_num_threads(flags.threads)
    topics = load_topics(CORPUS, flags.seed)
    if not flags.eval_only:
        tokenizer, model = train_tokenizer(topics), build_model(flags.seed)
        num_parameters = sum(weight.numel() for weight in model.parameters())
        logger.info(
            "%d topics, %d trained questions, %d parameters, %d tokens in the vocabulary",
            *(len(topics), sum(len(t.train) for t in topics)),
            *(num_parameters, tokenizer.get_vocab_size()),
        )
        plan = TrainingPlan(flags.steps, flags.seed)
        final_loss = train(model, batches(tokenizer, topics, plan.batch_tokens, plan.seed), plan)
        logger.info("final loss %.4f", final_loss)
        save(model, tokenizer, flags.out)
    evaluate(flags.out, topics, flags.seed)


if __name__ == "__main__":
    main()
