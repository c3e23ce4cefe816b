"""Encoders by real processes: prefill nodes alone, sentence-transformers' numbers, after a kill -9
as well. What an encoder does not do is refused by name.
"""

from __future__ import annotations

import asyncio
import base64
import signal
import struct
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.encoder_models import add_modules, make_encoder
from tests.system.processes import Processes, ServerProcess
from tests.waiting import eventually

pytestmark = pytest.mark.slow
library = pytest.importorskip("sentence_transformers")

TEXTS = ["the heart of the matter", "on the road", "a", "there is no rest in the north"]
QUERY = "who rests in the north?"
PROMPTS = {"query": "seek: ", "document": "text: ", "plain": ""}
NODES = ("--threads", "1", "--dtype", "float32", "--metrics-port", "0")
CLOSE = 1e-5


@asynccontextmanager
async def served(
    model: Path, folder: Path, nodes: int
) -> AsyncIterator[tuple[httpx.AsyncClient, list[ServerProcess]]]:
    """A client of a router with so many prefill nodes of `model`, and these."""
    async with Processes(model, folder, forked=True) as cluster:
        prefill, _ = await cluster.nodes(nodes, 0, NODES)
        router = await cluster.router(prefill, [])
        async with httpx.AsyncClient(base_url=f"http://{router.address}", timeout=60) as client:

            async def ready() -> bool:
                return (await client.get("/ready")).status_code == 200

            await eventually(ready)
            yield client, prefill


async def forwards(node: ServerProcess) -> float:
    """How many texts the node has turned into vectors."""
    async with httpx.AsyncClient() as client:
        page = await client.get(f"http://127.0.0.1:{node.ready['metrics_port']}/metrics")
    (line,) = [x for x in page.text.splitlines() if x.startswith("baton_pooled_prompts_total")]
    return float(line.rpartition(" ")[2])


async def posted(client: httpx.AsyncClient, path: str, body: dict[str, Any]) -> Any:
    reply = await client.post(path, json=body)
    assert reply.status_code == 200, reply.text
    return reply.json()


async def refused(client: httpx.AsyncClient, path: str, body: dict[str, Any]) -> str:
    reply = await client.post(path, json=body)
    assert reply.status_code == 400, reply.text
    return str(reply.json()["error"]["message"])


def vectors_of(reply: Any) -> list[list[float]]:
    return [item["embedding"] for item in reply["data"]]


@pytest.mark.long
async def test_vectors_of_prefill_nodes_alone_also_after_a_kill(tmp_path: Path) -> None:
    model = make_encoder(tmp_path / "bert", "bert")
    add_modules(
        model, "cls", dense=24, normalize=True, prompts=PROMPTS, default_prompt_name="plain"
    )
    reference = library.SentenceTransformer(str(model), device="cpu")
    wanted = reference.encode(TEXTS).tolist()
    async with served(model, tmp_path, 2) as (client, prefill):
        (card,) = (await client.get("/v1/models")).json()["data"]
        assert (card["task"], card["max_model_len"]) == ("embed", 96)
        reply = await posted(client, "/v1/embeddings", {"input": TEXTS})
        for found, row in zip(vectors_of(reply), wanted, strict=True):
            assert found == pytest.approx(row, abs=CLOSE)
        tokens = sum(len(reference.tokenizer(text)["input_ids"]) for text in TEXTS)
        assert reply["usage"] == {"prompt_tokens": tokens, "total_tokens": tokens}
        asked = {"input": TEXTS[0], "encoding_format": "base64", "prompt_name": "query"}
        (coded,) = (await posted(client, "/v1/embeddings", asked))["data"]
        numbers = struct.unpack("<24f", base64.b64decode(coded["embedding"]))
        named = reference.encode(TEXTS[0], prompt_name="query").tolist()
        assert list(numbers) == pytest.approx(named, abs=CLOSE)
        long = ["north " * 200, TEXTS[0]]  # cut, and its special tokens stay
        reply = await posted(
            client, "/v1/embeddings", {"input": long, "truncate_prompt_tokens": -1}
        )
        for found, row in zip(vectors_of(reply), reference.encode(long).tolist(), strict=True):
            assert found == pytest.approx(row, abs=CLOSE)
        await check_cosines(client, reference)
        await check_refusals(client)

        many = [f"{text} {index}" for index in range(8) for text in TEXTS]
        rows = reference.encode(many).tolist()
        prefill[0].signal(signal.SIGSTOP)  # so it holds what it gets until it dies
        calls = [
            asyncio.create_task(posted(client, "/v1/embeddings", {"input": many})) for _ in range(3)
        ]
        await asyncio.wait(calls, return_when=asyncio.FIRST_COMPLETED)
        await prefill[0].kill()
        for reply in await asyncio.gather(*calls):
            for found, row in zip(vectors_of(reply), rows, strict=True):
                assert found == pytest.approx(row, abs=CLOSE)

        async def counted() -> bool:  # told with a node's next heartbeat
            return await forwards(prefill[1]) >= 3 * len(many)

        await eventually(counted)
        page = (await client.get("/metrics")).text
        (retries,) = [x for x in page.splitlines() if x.startswith("baton_request_retries_total")]
        assert float(retries.rpartition(" ")[2]) >= 1


async def check_cosines(client: httpx.AsyncClient, reference: Any) -> None:
    """Scores of an encoder of vectors are cosines, with its prompts for both sides."""
    query, documents = reference.encode_query(QUERY), reference.encode_document(TEXTS)
    wanted = (documents @ query).tolist()
    reply = await posted(client, "/v1/score", {"text_1": QUERY, "text_2": TEXTS})
    assert [item["score"] for item in reply["data"]] == pytest.approx(wanted, abs=CLOSE)
    body = {"query": QUERY, "documents": TEXTS, "top_n": 2}
    results = (await posted(client, "/v1/rerank", body))["results"]
    best = sorted(range(len(TEXTS)), key=lambda place: -wanted[place])[:2]
    assert [result["index"] for result in results] == best


async def check_refusals(client: httpx.AsyncClient) -> None:
    chat = {"messages": [{"role": "user", "content": "hi"}]}
    for path, body in (
        ("/v1/chat/completions", chat),
        ("/v1/completions", {"prompt": "hi"}),
        ("/v1/responses", {"input": "hi"}),
        ("/inference/v1/generate", {"token_ids": [5], "sampling_params": {}}),
    ):
        assert "is an encoder and writes no text" in await refused(client, path, body)
    long = {"input": [[5] * 97]}
    message = await refused(client, "/v1/embeddings", long)
    assert "97 tokens" in message
    assert "96 tokens" in message
    cut = await posted(client, "/v1/embeddings", long | {"truncate_prompt_tokens": -1})
    assert cut["usage"]["prompt_tokens"] == 96
    assert "prompt_name" in await refused(
        client, "/v1/embeddings", {"input": "a", "prompt_name": "none"}
    )
    assert "no classifier" in await refused(client, "/classify", {"input": "a"})


async def test_scores_and_classes_of_cross_encoders(tmp_path: Path) -> None:
    model = make_encoder(tmp_path / "one", "bert", labels=1)
    reference = library.CrossEncoder(str(model), device="cpu")
    wanted = reference.predict([(QUERY, text) for text in TEXTS]).tolist()
    async with served(model, tmp_path, 1) as (client, _):
        (card,) = (await client.get("/v1/models")).json()["data"]
        assert card["task"] == "score"
        reply = await posted(client, "/v1/score", {"text_1": QUERY, "text_2": TEXTS})
        assert [item["score"] for item in reply["data"]] == pytest.approx(wanted, abs=CLOSE)
        for path in ("/v1/rerank", "/v2/rerank"):
            body = {"query": QUERY, "documents": TEXTS}
            results = (await posted(client, path, body))["results"]
            assert [each["index"] for each in results] == sorted(
                range(len(TEXTS)), key=lambda place: -wanted[place]
            )
            told = {each["index"]: each["relevance_score"] for each in results}
            assert [told[place] for place in range(len(TEXTS))] == pytest.approx(wanted, abs=CLOSE)
        (found,) = (await posted(client, "/classify", {"input": TEXTS[0]}))["data"]
        assert (found["label"], found["num_classes"]) == ("LABEL_0", 1)
        assert "makes classes" in await refused(client, "/v1/embeddings", {"input": "a"})
        message = await refused(client, "/v1/score", {"text_1": "a " * 90, "text_2": "b " * 90})
        assert "160 tokens" in message
