"""Embeddings and reranking by real processes: transformers' numbers, also after a kill -9.

The vectors are the mean of the last hidden states, as transformers computes them in fp32; the
scores its softmax over yes and no. The prefill nodes do it, the decode node nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
import torch
from torch.nn import functional
from transformers import AutoModelForCausalLM

from baton.text.reranking import answer_tokens, rerank_prompts
from baton.text.tokenizer import Tokenizer
from tests.system.processes import Processes, ServerProcess
from tests.tiny_models import make_reranker
from tests.waiting import eventually

pytestmark = pytest.mark.slow

TEXTS = ["the heart of the matter", "on the road", "a", "there is no rest in the north " * 8]
QUERY = "who rests in the north?"
DOCUMENTS = ["the hare", "on the other hand, one is not two", "no one rests in the north", "tea"]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_reranker(tmp_path_factory.mktemp("qwen3"))


@pytest.fixture(scope="module")
def reference(model: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(
        model, dtype=torch.float32, attn_implementation="eager"
    ).eval()


@torch.inference_mode()
def mean_of(reference: Any, ids: Sequence[int]) -> torch.Tensor:
    """The mean hidden state after the last norm, of length 1."""
    out = reference(input_ids=torch.tensor([list(ids)]), output_hidden_states=True)
    return functional.normalize(out.hidden_states[-1][0].mean(0), dim=-1)


@torch.inference_mode()
def yes_probability(reference: Any, ids: Sequence[int], yes: int, no: int) -> float:
    logits = reference(input_ids=torch.tensor([list(ids)])).logits[0, -1]
    return float(logits[[no, yes]].softmax(-1)[1])


async def pooled(node: ServerProcess) -> float:
    """Prompts that the node has turned into vectors."""
    async with httpx.AsyncClient() as client:
        page = await client.get(f"http://127.0.0.1:{node.ready['metrics_port']}/metrics")
    (line,) = [x for x in page.text.splitlines() if x.startswith("baton_pooled_prompts_total")]
    return float(line.rpartition(" ")[2])


@pytest.mark.long
async def test_vectors_and_scores_are_transformers_also_after_a_kill(
    model: Path, reference: Any, tmp_path: Path
) -> None:
    tokenizer = Tokenizer.load(model)
    wanted = [mean_of(reference, tokenizer.encode(text)) for text in TEXTS]
    async with Processes(model, tmp_path, forked=True) as cluster:
        flags = ["--num-kv-blocks", "64", "--threads", "1", "--dtype", "float32"]
        prefill, decode = await cluster.nodes(2, 1, [*flags, "--metrics-port", "0"])
        options = ["--pooling-type", "mean", "--reranker", "qwen3", "--admin-port", "0"]
        options += ["--admin-key", "o"]
        router = await cluster.router(prefill, decode, options)
        base = f"http://{router.address}"
        async with openai.AsyncOpenAI(base_url=f"{base}/v1", api_key="none") as client:
            name = (await client.models.list()).data[0].id
            reply = await client.embeddings.create(model=name, input=TEXTS)  # base64 on the wire
            for row, item in zip(wanted, reply.data, strict=True):
                assert item.embedding == pytest.approx(row.tolist(), abs=1e-4)
            tokens = sum(len(tokenizer.encode(text)) for text in TEXTS)
            assert reply.usage.prompt_tokens == reply.usage.total_tokens == tokens
            ids = tokenizer.encode(TEXTS[1])
            plain = await client.embeddings.create(model=name, input=[ids], encoding_format="float")
            assert plain.data[0].embedding == pytest.approx(wanted[1].tolist(), abs=1e-4)
            await check_scores(base, reference, tokenizer)
            asked = len(TEXTS) + 1 + 2 * len(DOCUMENTS)

            async def counted() -> bool:  # told with a node's next heartbeat
                return sum([await pooled(node) for node in prefill]) == asked

            await eventually(counted)
            async with httpx.AsyncClient(headers={"x-api-key": "o"}) as operator:
                debug = await operator.get(f"http://{router.ready['admin_address']}/debug")
            assert {node["node_id"] for node in debug.json()["nodes"]} == {"p0", "p1", "d0"}
            await prefill[0].kill()
            for _ in range(2):
                again = await client.embeddings.create(model=name, input=TEXTS)
                for row, item in zip(wanted, again.data, strict=True):
                    assert item.embedding == pytest.approx(row.tolist(), abs=1e-4)
            assert await pooled(decode[0]) == 0


async def check_scores(base: str, reference: Any, tokenizer: Tokenizer) -> None:
    yes, no = answer_tokens(tokenizer)
    prompts = rerank_prompts(tokenizer, QUERY, DOCUMENTS, None)
    wanted = [yes_probability(reference, ids, yes, no) for ids in prompts]
    assert len(set(wanted)) == len(wanted)
    async with httpx.AsyncClient(base_url=base) as client:
        body = {"query": QUERY, "documents": DOCUMENTS, "top_n": 3}
        reply = (await client.post("/v1/rerank", json=body)).json()
        order = sorted(range(4), key=lambda index: -wanted[index])[:3]
        assert [result["index"] for result in reply["results"]] == order
        assert [result["document"]["text"] for result in reply["results"]] == [
            DOCUMENTS[index] for index in order
        ]
        told = [result["relevance_score"] for result in reply["results"]]
        assert told == pytest.approx([wanted[index] for index in order], abs=1e-4)
        assert reply["usage"]["total_tokens"] == sum(map(len, prompts))
        pairs = {"text_1": QUERY, "text_2": DOCUMENTS}
        data = (await client.post("/score", json=pairs)).json()["data"]
        assert [item["score"] for item in data] == pytest.approx(wanted, abs=1e-4)
