"""Trains a draft head for the demo model: `python tools/train_draft_head.py --method mtp --out D`.

It learns for --cpu-seconds, from whole answers of the demo model's text (`tools/demo_corpus/`).
The model stays as it is; the head learns its distribution of the tokens after the next one.

    mtp       DIR is a copy of the model with one more layer:  --model DIR --speculative-method mtp
    eagle3    DIR is the head alone:  --speculative-method eagle3 --speculative-model DIR

The head runs over its own states as often as --passes says, as it does when it drafts several
tokens. `python -m bench.speculation` measures how many of its drafts are accepted.
"""

from __future__ import annotations

import argparse
import json
import logging
import math
import shutil
import time
from pathlib import Path
from typing import Any

import torch
from demo_corpus.corpus import load_topics
from demo_corpus.samples import END_OF_TEXT, IGNORED, answer_batches, padded
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from torch import Tensor, nn
from torch.nn import functional
from transformers import LlamaForCausalLM

logger = logging.getLogger("train_draft_head")

CORPUS = Path(__file__).parent / "demo_corpus"
BATCH_TOKENS, LEARNING_RATE, WARMUP = 512, 4e-3, 0.05
TAPS = (1, 3, 5)  # of an EAGLE-3 head: whose inputs it takes
_PRODUCTS = ("q", "k", "v", "o", "gate", "up", "down")


class Head(nn.Module):
    """A draft head of one Llama layer in plain torch; see baton/engine/models/draft_heads.py.

    `known` [draft vocab]: the target's tokens that an EAGLE-3 head knows; None for MTP.
    """

    def __init__(self, target: LlamaForCausalLM, known: Tensor | None) -> None:
        super().__init__()
        self.config, self.known = target.config, known
        hidden = target.config.hidden_size
        last: Any = target.model.layers[-1]
        weights = {f"{n}_proj": getattr(last.self_attn, f"{n}_proj").weight for n in "qkvo"}
        weights |= {f"{n}_proj": getattr(last.mlp, f"{n}_proj").weight for n in _PRODUCTS[4:]}
        if known is not None:  # attention takes [embedding | state]
            for part in "qkv":
                wide = weights[f"{part}_proj"]
                weights[f"{part}_proj"] = torch.cat((0.5 * wide, 0.5 * wide), 1)
            weights["join"] = torch.cat([torch.eye(hidden) / len(TAPS)] * len(TAPS), 1)
            weights["head"] = target.lm_head.weight[known]
        else:
            weights["join"] = torch.cat((0.5 * torch.eye(hidden), 0.5 * torch.eye(hidden)), 1)
        for norm in ("token_norm", "state_norm", "input_norm", "mlp_norm", "final_norm"):
            weights[norm] = torch.ones(hidden)
        self.weights = nn.ParameterDict(
            {name: nn.Parameter(value.detach().clone()) for name, value in weights.items()}
        )

    def states(self, hidden: tuple[Tensor, ...]) -> Tensor:
        """Return the first states [B, T, H] of the target's hidden states, one per layer and the
        last one normalized."""
        if self.known is None:
            return hidden[-1]
        return torch.cat([hidden[tap] for tap in TAPS], -1) @ self.weights["join"].T

    def forward(self, states: Tensor, tokens: Tensor) -> Tensor:
        """Run states [B, T, H] with the embeddings of the tokens behind them, tokens [B, T, H].
        Return the states behind: of MTP normalized, as the target's hidden states are."""
        w = self.weights
        if self.known is None:
            both = (self._norm(tokens, "token_norm"), self._norm(states, "state_norm"))
            x = torch.cat(both, -1) @ w["join"].T
            inputs = self._norm(x, "input_norm")
        else:
            x = states
            inputs = torch.cat((self._norm(tokens, "input_norm"), self._norm(x, "state_norm")), -1)
        x = x + self._attention(inputs) @ w["o_proj"].T
        normal = self._norm(x, "mlp_norm")
        gate = functional.silu(normal @ w["gate_proj"].T) * (normal @ w["up_proj"].T)
        x = x + gate @ w["down_proj"].T
        return self._norm(x, "final_norm") if self.known is None else x

    def logits(self, states: Tensor, target: LlamaForCausalLM) -> Tensor:
        """Return logits over the tokens that the head knows."""
        if self.known is None:
            return states @ target.lm_head.weight.T
        return self._norm(states, "final_norm") @ self.weights["head"].T

    def tensors(self, prefix: str) -> dict[str, Tensor]:
        """Return the weights under the names of a checkpoint. `prefix`: of the layer's names."""
        names = {f"{n}_proj": f"{prefix}self_attn.{n}_proj" for n in "qkvo"}
        names |= {f"{n}_proj": f"{prefix}mlp.{n}_proj" for n in _PRODUCTS[4:]}
        names |= {"input_norm": f"{prefix}input_layernorm"}
        names |= {"mlp_norm": f"{prefix}post_attention_layernorm"}
        if self.known is None:
            names |= {"token_norm": f"{prefix}enorm", "state_norm": f"{prefix}hnorm"}
            names |= {"join": f"{prefix}eh_proj", "final_norm": f"{prefix}shared_head.norm"}
        else:
            names |= {"state_norm": f"{prefix}hidden_norm", "join": "fc", "final_norm": "norm"}
            names |= {"head": "lm_head"}
        found = {
            f"{name}.weight": self.weights[own].detach().to(torch.bfloat16)
            for own, name in names.items()
        }
        if self.known is not None:
            found["d2t"] = self.known - torch.arange(len(self.known))
        return found

    def _norm(self, x: Tensor, name: str) -> Tensor:
        scale = (x.pow(2).mean(-1, keepdim=True) + self.config.rms_norm_eps).rsqrt()
        return x * scale * self.weights[name]

    def _attention(self, x: Tensor) -> Tensor:
        dim = self.config.head_dim
        base = (self.config.rope_parameters or {}).get("rope_theta")
        assert dim is not None, "a lean config states it"
        assert base is not None, "a lean config states it"
        q, k, v = (
            (x @ self.weights[f"{part}_proj"].T).unflatten(-1, (-1, dim)).transpose(1, 2)
            for part in "qkv"
        )
        frequencies = base ** -(torch.arange(0, dim, 2) / dim)
        angles = torch.arange(x.shape[1])[:, None] * frequencies
        cos, sin = angles.cos().repeat(1, 2), angles.sin().repeat(1, 2)
        q, k = (
            y * cos + torch.cat((-y[..., dim // 2 :], y[..., : dim // 2]), -1) * sin for y in (q, k)
        )
        out = functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return out.transpose(1, 2).flatten(-2)


def pass_losses(
    head: Head, target: LlamaForCausalLM, ids: Tensor, wanted: Tensor, passes: int
) -> list[Tensor]:
    """Return the cross entropy with the target's distribution, of each pass over ids [B, T].

    `wanted` [B, T]: whether the target's distribution behind that position counts.
    """
    with torch.no_grad():
        out: Any = target.model(input_ids=ids, use_cache=False, output_hidden_states=True)
        embedded: Tensor = target.model.embed_tokens(ids)
        hidden = (*out.hidden_states[:-1], out.last_hidden_state)
    losses: list[Tensor] = []
    states = head.states(hidden)[:, :-1]  # row r is of position r, with the token behind it
    for ahead in range(1, passes + 1):
        count = ids.shape[1] - ahead
        states = head(states[:, :count], embedded[:, ahead:])
        chosen = wanted[:, ahead:]
        with torch.no_grad():
            known: Tensor = target.lm_head(out.last_hidden_state[:, ahead:][chosen])
        known = known if head.known is None else known[:, head.known]
        guessed = head.logits(states[chosen], target)
        losses.append(functional.cross_entropy(guessed, known.softmax(-1)))
    return losses


def train(
    head: Head, target: LlamaForCausalLM, stream: Any, seconds: float, passes: int
) -> list[float]:
    """Train for about `seconds` of CPU time; return moving means of the passes' losses."""
    optimizer = torch.optim.AdamW(head.parameters(), lr=LEARNING_RATE, betas=(0.9, 0.98))
    started, step, means = time.process_time(), 0, [0.0] * passes
    while (done := (time.process_time() - started) / seconds) < 1:
        rate = min(1.0, done / WARMUP) * (0.02 + 0.49 * (1 + math.cos(math.pi * done)))
        for group in optimizer.param_groups:
            group["lr"] = LEARNING_RATE * rate
        batch = next(stream)
        ids = padded([sample.token_ids for sample in batch], END_OF_TEXT)
        wanted = padded([sample.labels for sample in batch], IGNORED) != IGNORED
        if ids.shape[1] <= passes or not wanted[:, passes:].any():
            continue
        losses = pass_losses(head, target, ids, wanted, passes)
        optimizer.zero_grad(set_to_none=True)
        torch.stack(losses).mean().backward()
        torch.nn.utils.clip_grad_norm_(head.parameters(), 1.0)
        optimizer.step()
        means = [
            0.95 * m + 0.05 * x.item() if step else x.item()
            for m, x in zip(means, losses, strict=True)
        ]
        step += 1
        if step % 20 == 0:
            logger.info(
                "step %d, %.0f %%, losses %s", step, 100 * done, [round(m, 3) for m in means]
            )
    logger.info("%d steps in %.0f s, losses %s", step, time.process_time() - started, means)
    return means


def save(head: Head, model: Path, out: Path) -> None:
    """Write the checkpoint into `out`, which is made."""
    out.mkdir(parents=True, exist_ok=True)
    values: dict[str, Any] = json.loads((model / "config.json").read_text("utf-8"))
    if head.known is None:
        for file in model.iterdir():
            if file.suffix in (".json", ".jinja"):
                shutil.copy(file, out / file.name)
        own = head.tensors(f"model.layers.{values['num_hidden_layers']}.")
        tensors = {**load_file(model / "model.safetensors"), **own}
        values["num_nextn_predict_layers"] = 1
    else:
        tensors = head.tensors("midlayer.")
        values |= {
            "architectures": ["LlamaForCausalLMEagle3"], "num_hidden_layers": 1,
            "draft_vocab_size": len(head.known), "eagle_aux_hidden_state_layer_ids": TAPS,
            "tie_word_embeddings": False,
        }  # fmt: skip
    save_file(tensors, out / "model.safetensors", {"format": "pt"})
    (out / "config.json").write_text(json.dumps(values, indent=2) + "\n", "utf-8")


def main() -> None:
    """Parse the flags, train, and save."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--method", choices=("mtp", "eagle3"), required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--model", type=Path, default=Path("demo_model"))
    parser.add_argument("--cpu-seconds", type=float, default=120.0)
    parser.add_argument("--passes", type=int, default=2)
    parser.add_argument("--draft-vocab", type=int, default=2048, help="tokens that EAGLE-3 knows")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=2)
    flags = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s")
    torch.set_num_threads(flags.threads)
    torch.manual_seed(flags.seed)
    tokenizer = Tokenizer.from_file(str(flags.model / "tokenizer.json"))
    topics = load_topics(CORPUS, flags.seed)
    target = LlamaForCausalLM.from_pretrained(flags.model, dtype=torch.float32).eval()
    target.requires_grad_(False)
    known = None
    if flags.method == "eagle3":
        counts = torch.zeros(target.config.vocab_size)
        for topic in topics:
            counts += torch.bincount(
                torch.tensor(tokenizer.encode(topic.answer).ids), minlength=len(counts)
            )
        counts[: END_OF_TEXT + 3] += 1e9  # the special tokens end every answer
        known = counts.topk(flags.draft_vocab).indices.sort().values
    head = Head(target, known)
    stream = answer_batches(tokenizer, topics, BATCH_TOKENS, flags.seed)
    train(head, target, stream, flags.cpu_seconds, flags.passes)
    save(head, flags.model, flags.out)


if __name__ == "__main__":
    main()
