"""Pooling: transformers' hidden states and logits, chunked and batched, and a pool left alone."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from baton.engine.config import EngineConfig
from baton.engine.core.pooling import Pooler, PoolingJob, normalized
from baton.engine.loading.loading import LoadedModel, load_model
from baton.engine.memory.block_pool import BlockPool
from baton.engine.memory.kv_cache import KVArena
from baton.llm import LLM
from baton.protocol.errors import (
    ContextLengthExceeded,
    InvalidRequest,
    Overloaded,
    UnsupportedFeature,
)
from baton.protocol.handles import NodeLoad
from baton.protocol.kv_spec import BlockLists
from baton.protocol.sampling import SamplingParams
from baton.text.reranking import DEFAULT_INSTRUCTION, answer_tokens, rerank_prompts
from baton.text.tokenizer import Tokenizer
from tests.engine.driving import assert_all_free
from tests.fakes import fake_engine
from tests.tiny_models import VOCAB_SIZE, make_tiny_model

BLOCK_SIZE = 4
NUM_BLOCKS = 40
LENGTHS = (1, 23, 4, 57, 9, 16)


class Owner:
    """A pool, its pins, and a number of requests that run beside the job."""

    def __init__(self, num_blocks: int = NUM_BLOCKS, running: int = 0) -> None:
        self.pool = BlockPool(num_blocks, BLOCK_SIZE)
        self.running = running
        self.pins: Counter[int] = Counter()

    def pin(self, blocks: BlockLists) -> None:
        for held in blocks:
            self.pool.ref(held.ids)
            self.pins.update(held.ids)

    def unpin(self, blocks: BlockLists) -> None:
        for held in blocks:
            self.pins -= Counter(held.ids)
            self.pool.unref(held.ids)

    def current_load(self) -> NodeLoad:
        return NodeLoad(self.running, 0, self.pool.num_free, self.pool.num_blocks)

    def check(self) -> None:
        self.pool.check(self.pins)


@pytest.fixture(scope="module", params=["qwen3", "mistral", "gpt2"])
def path(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(request.param, tmp_path_factory.mktemp(request.param))


@pytest.fixture(scope="module")
def model(path: Path) -> LoadedModel:
    return load_model(EngineConfig(model=str(path), dtype="float32"))


@pytest.fixture(scope="module")
def reference(path: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)


def pooler_of(model: LoadedModel, max_num_batched_tokens: int, max_num_seqs: int = 8) -> Pooler:
    arena = KVArena(model.info.layers, NUM_BLOCKS, BLOCK_SIZE, "float32")
    return Pooler(model, arena, max_num_batched_tokens, max_num_seqs)


def prompts() -> list[list[int]]:
    draw = torch.Generator().manual_seed(3)
    return [torch.randint(5, VOCAB_SIZE, (n,), generator=draw).tolist() for n in LENGTHS]


@torch.inference_mode()
def hidden_states(reference: Any, prompt: list[int]) -> torch.Tensor:
    ids = torch.tensor([prompt])
    return reference(input_ids=ids, output_hidden_states=True).hidden_states[-1][0]


@pytest.mark.parametrize("budget", [7, 40, 500])
def test_vectors_are_transformers_hidden_states(
    model: LoadedModel, reference: Any, budget: int
) -> None:
    """7: prompts in many chunks; 40: several per step and some cut; 500: all at once."""
    owner = Owner()
    pooler = pooler_of(model, budget)
    states = [hidden_states(reference, prompt) for prompt in prompts()]
    last = PoolingJob(owner, pooler, prompts(), "last").run()
    mean = PoolingJob(owner, pooler, prompts(), "mean").run()
    torch.testing.assert_close(last, torch.stack([s[-1] for s in states]), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(mean, torch.stack([s.mean(0) for s in states]), rtol=1e-5, atol=1e-5)
    assert torch.allclose(normalized(mean).norm(dim=-1), torch.ones(len(LENGTHS)))
    owner.check()
    assert owner.pool.num_free == NUM_BLOCKS


def test_yes_or_no_is_a_softmax_over_two_logits(model: LoadedModel, reference: Any) -> None:
    pooler = pooler_of(model, 40)
    hidden = PoolingJob(Owner(), pooler, prompts(), "last").run()
    found = pooler.yes_probability(hidden, yes=77, no=30)
    for prompt, score in zip(prompts(), found, strict=True):
        with torch.inference_mode():
            logits = reference(input_ids=torch.tensor([prompt])).logits[0, -1]
        wanted = logits[[30, 77]].softmax(-1)[1]
        assert score == pytest.approx(float(wanted), abs=1e-5)


def test_blocks_are_temporary_and_accounted_for_at_every_step(model: LoadedModel) -> None:
    owner = Owner()
    # A prefix that requests have cached, and a block that one of them writes.
    cached = owner.pool.allocate(2)
    assert cached is not None
    for index, block in enumerate(cached):
        owner.pool.register(block, b"%d" % index, b"")
    owner.pool.unref(cached)
    owner.pool.take_events()
    job = PoolingJob(owner, pooler_of(model, 16), prompts())
    held: list[int] = []
    while not job.done:
        assert job.step()
        owner.check()
        held.append(owner.pool.num_used)
    assert max(held) > 0
    assert owner.pool.num_used == 0
    assert owner.pool.take_events() == []  # nothing registered, nothing evicted
    assert owner.pool.lookup([b"0", b"1"]) == cached


def test_a_job_leaves_a_block_to_each_running_request(model: LoadedModel) -> None:
    needed = 15  # of the prompt of 57 tokens
    blocked = PoolingJob(Owner(needed + 2, running=3), pooler_of(model, 500), [prompts()[3]])
    assert not blocked.step()
    with pytest.raises(Overloaded):
        blocked.run()
    free = PoolingJob(Owner(needed + 2, running=2), pooler_of(model, 500), [prompts()[3]])
    assert free.run().shape[0] == 1


def test_a_job_that_is_given_up_holds_nothing(model: LoadedModel) -> None:
    owner = Owner()
    job = PoolingJob(owner, pooler_of(model, 5), prompts())
    for _ in range(3):
        assert job.step()
    assert owner.pool.num_used > 0
    job.close()
    job.close()
    owner.check()
    assert owner.pool.num_used == 0


def test_prompts_that_cannot_be_pooled(model: LoadedModel) -> None:
    pooler = pooler_of(model, 40)
    for bad in ([], [VOCAB_SIZE], [-1]):
        with pytest.raises(InvalidRequest):
            PoolingJob(Owner(), pooler, [[7], bad])
    with pytest.raises(ContextLengthExceeded, match="the limit is 160"):
        PoolingJob(Owner(), pooler, [[7] * 161])


# ---- the reranker's prompt ----


def add_word(path: Path, word: str, token_id: int) -> None:
    file = path / "tokenizer.json"
    content = json.loads(file.read_text())
    content["added_tokens"].append(
        {
            "id": token_id, "content": word, "single_word": False, "lstrip": False,
            "rstrip": False, "normalized": False, "special": False,
        }
    )  # fmt: skip
    file.write_text(json.dumps(content))


def test_the_prompt_of_a_reranker(tmp_path: Path) -> None:
    path = make_tiny_model("qwen3", tmp_path)
    with pytest.raises(UnsupportedFeature, match="not single tokens"):
        answer_tokens(Tokenizer.load(path))
    add_word(path, "yes", VOCAB_SIZE)
    tokenizer = Tokenizer.load(path)
    yes, no = answer_tokens(tokenizer)
    assert (yes, tokenizer.token(no)) == (VOCAB_SIZE, "no")
    plain, asked = (
        tokenizer.decode(rerank_prompts(tokenizer, "q {x}", ["d {query}"], given)[0], False)
        for given in (None, "Judge.")
    )
    assert plain == (
        "<|im_start|>system\nJudge whether the Document meets the requirements based on the Query "
        'and the Instruct provided. Note that the answer can only be "yes" or "no".<|im_end|>\n'
        f"<|im_start|>user\n<Instruct>: {DEFAULT_INSTRUCTION}\n<Query>: q {{x}}\n"
        "<Document>: d {query}<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"
    )
    assert "<Instruct>: Judge.\n" in asked


# ---- through LLM ----


def test_embeddings_by_an_engine_that_also_generates(path: Path, reference: Any) -> None:
    llm = LLM(
        str(path), "float32", block_size=BLOCK_SIZE, num_kv_blocks=NUM_BLOCKS, max_num_seqs=4,
        max_num_batched_tokens=16, check_invariants=True,
    )  # fmt: skip
    greedy = SamplingParams(temperature=0, max_tokens=5, ignore_eos=True)
    before = llm.generate([prompts()[1]], greedy)
    hits = llm.engine.stats.num_prefix_hit_tokens
    states = [hidden_states(reference, prompt) for prompt in prompts()]
    unit = llm.embed(prompts())
    plain = llm.embed(prompts(), pooling="mean", normalize=False)
    for row, (one, mean) in enumerate(zip(unit, plain, strict=True)):
        wanted = states[row][-1] / states[row][-1].norm()
        assert torch.allclose(torch.tensor(one), wanted, atol=1e-5)
        assert torch.allclose(torch.tensor(mean), states[row].mean(0), atol=1e-5)
    assert llm.generate([prompts()[1]], greedy) == before
    assert llm.engine.stats.num_prefix_hit_tokens > hits  # what was cached still is
    assert llm.embed("hello") == [pytest.approx(llm.embed([llm.tokenizer.encode("hello")])[0])]
    assert llm.embed([]) == []
    assert_all_free(llm.engine)


def test_reranking_is_the_models_yes_against_its_no(tmp_path: Path) -> None:
    path = make_tiny_model(
        "qwen3", tmp_path, vocab_size=VOCAB_SIZE + 1, max_position_embeddings=900
    )
    add_word(path, "yes", VOCAB_SIZE)
    llm = LLM(str(path), "float32", num_kv_blocks=64)
    documents = ["Lyon is a city.", "Paris is the capital of France."]
    scores = llm.rerank("capital of France?", documents)
    yes, no = answer_tokens(llm.tokenizer)
    reference = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    asked = rerank_prompts(llm.tokenizer, "capital of France?", documents, None)
    for ids, score in zip(asked, scores, strict=True):
        with torch.inference_mode():
            logits = reference(input_ids=torch.tensor([ids])).logits[0, -1]
        assert score == pytest.approx(float(logits[[no, yes]].softmax(-1)[1]), abs=1e-5)
    assert llm.rerank("q", []) == []


def test_an_engine_without_a_model_has_no_vectors() -> None:
    engine, _ = fake_engine()
    with pytest.raises(UnsupportedFeature, match="hidden states"):
        LLM("fake", engine=engine).embed([[5, 6]])
