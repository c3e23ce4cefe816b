"""AsyncLLM: streams side by side, aborts, refusals, the end."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import aclosing, asynccontextmanager
from typing import Any

import pytest

from baton.async_llm import AsyncLLM
from baton.llm import LLM, GenerationOutput, SamplingParams
from baton.protocol.errors import InvalidRequest, Unavailable
from baton.protocol.request import FinishReason
from tests.engine.driving import PROMPT, assert_all_free
from tests.fakes import expected_output, fake_engine
from tests.tiny_models import make_tiny_model

PATIENCE_S = 30.0
LONG = SamplingParams(seed=3, max_tokens=24, ignore_eos=True)
ENDLESS = SamplingParams(seed=3, max_tokens=200, ignore_eos=True)
HI = [{"role": "user", "content": "hi"}]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(make_tiny_model("llama", tmp_path_factory.mktemp("llama")))


@asynccontextmanager
async def running(model: str = "fake", **options: Any) -> AsyncIterator[AsyncLLM]:
    """Over a fake engine, or a tiny model's; nothing is left in it at the end."""
    if model == "fake":
        options["engine"] = fake_engine()[0]
    else:
        options |= {"dtype": "float32", "block_size": 4, "num_kv_blocks": 200}
    async with asyncio.timeout(PATIENCE_S), AsyncLLM(model, **options) as llm:
        yield llm
        engine = llm._llm.engine
        await llm._streams.thread.call(lambda _: None)  # what was posted before has run
        assert_all_free(engine)


async def read(stream: AsyncIterator[GenerationOutput]) -> list[GenerationOutput]:
    return [output async for output in stream]


async def test_several_at_once_answer_as_one_by_one(model: str) -> None:
    prompts = ["hello there", "on the road", "a"]
    params = [SamplingParams(seed=i, max_tokens=9 + i, n=1 + i) for i in range(3)]
    wanted = LLM(model, "float32", block_size=4, num_kv_blocks=200).generate(prompts, params)
    async with running(model) as llm:
        asked = zip(prompts, params, strict=True)
        streams = await asyncio.gather(*(read(llm.generate(text, each)) for text, each in asked))
        assert [stream[-1] for stream in streams] == wanted
        assert all(not output.finished for stream in streams for output in stream[:-1])
        (chat,) = LLM(model, "float32", num_kv_blocks=32).chat(HI, LONG)
        assert (await read(llm.chat(HI, LONG)))[-1] == chat


async def test_deltas_add_up(model: str) -> None:
    async with running(model) as llm:
        whole = (await read(llm.generate("hello there", LONG)))[-1]
        deltas = await read(llm.generate("hello there", LONG, delta=True))
        assert "".join(delta.text or "" for delta in deltas) == whole.text
        assert sum((delta.token_ids for delta in deltas), ()) == whole.token_ids
        assert deltas[-1].finished


async def test_a_stop_text_ends_one_sample_or_all(model: str) -> None:
    async with running(model) as llm:
        params = {"seed": 3, "max_tokens": 24, "ignore_eos": True, "n": 3}
        plain = (await read(llm.generate("hello there", SamplingParams(**params))))[-1]
        for stop in ((plain.text or "")[9:12], "e", ("e", "a", "o", "t", "1")):
            asked = SamplingParams(**params, stop=stop)
            found = (await read(llm.generate("hello there", asked)))[-1]
            stops = (stop,) if isinstance(stop, str) else stop
            for cut, whole in zip(found.outputs, plain.outputs, strict=True):
                text = whole.text or ""
                ends = [at for at in map(text.find, stops) if at >= 0]
                assert cut.text == text[: min(ends, default=len(text))]
                reason = FinishReason.STOP if ends else FinishReason.LENGTH
                assert cut.finish_reason is reason


async def test_an_aborted_stream_ends_with_what_there_is() -> None:
    async with running() as llm:
        stream = llm.generate(PROMPT, ENDLESS, "mine")
        outputs: list[GenerationOutput] = []
        async with aclosing(stream):
            async for output in stream:
                outputs.append(output)
                if len(outputs) == 3:
                    assert await llm.abort("mine")
        assert len(outputs) == 4
        assert outputs[-1].finish_reason is FinishReason.ABORT
        assert outputs[-1].request_id == "mine"
        known = expected_output(PROMPT, ENDLESS)
        assert list(outputs[-1].token_ids) == known[: len(outputs[-1].token_ids)]
        assert not await llm.abort("mine")


async def test_a_stream_that_is_left_ends_its_request() -> None:
    async with running() as llm:
        stream = llm.generate(PROMPT, ENDLESS, "mine")
        await anext(stream)
        await stream.aclose()
        # The same id is free at once, and the engine with it.
        again = await read(llm.generate(PROMPT, LONG, "other"))
        assert list(again[-1].token_ids) == expected_output(PROMPT, LONG)


async def test_a_bad_request_fails_alone() -> None:
    async with running() as llm:
        good = asyncio.create_task(read(llm.generate(PROMPT, ENDLESS, "good")))
        with pytest.raises(InvalidRequest):
            await anext(llm.generate([5] * 300, LONG))
        first = llm.generate(PROMPT, ENDLESS, "twice")
        await anext(first)
        with pytest.raises(InvalidRequest, match="twice already runs"):
            await anext(llm.generate(PROMPT, LONG, "twice"))
        await first.aclose()
        assert list((await good)[-1].token_ids) == expected_output(PROMPT, ENDLESS)


async def test_closing_ends_who_still_waits() -> None:
    llm = AsyncLLM("fake", engine=fake_engine()[0])
    async with asyncio.timeout(PATIENCE_S):
        stream = llm.generate(PROMPT, ENDLESS)
        await anext(stream)
        await llm.close()
        with pytest.raises(Unavailable):
            await read(stream)
        with pytest.raises(Unavailable):
            await anext(llm.generate(PROMPT, LONG))
        await llm.close()
