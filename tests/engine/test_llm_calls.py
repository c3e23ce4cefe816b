"""LLM as vLLM's users call it: chats, stop texts, streams, adapters, beams, scores, a bar."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path
from types import TracebackType
from typing import Any

import pytest

from baton.client.values import GenerateOptions, generate_request
from baton.llm import LLM, BeamSearchParams, LoRARequest, SamplingParams
from baton.protocol.errors import InvalidRequest, UnsupportedFeature
from baton.protocol.request import FinishReason
from baton.text.chat_template import Chat, ChatTemplate
from baton.text.reranking import rerank_prompts
from tests.engine.driving import PROMPT, assert_all_free
from tests.engine.test_models_lora import linear_layers, make_adapter
from tests.fakes import fake_engine
from tests.tiny_models import make_reranker, make_tiny_model

LONG = SamplingParams(seed=3, max_tokens=24, ignore_eos=True)
HI = [{"role": "user", "content": "hi"}]


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> LLM:
    base = make_tiny_model("llama", tmp_path_factory.mktemp("llama"))
    layers = linear_layers(base, ("q_proj", "v_proj"))
    adapters = [
        f"{name}={make_adapter(tmp_path_factory.mktemp(name), layers, seed)}"
        for seed, name in enumerate(("poet", "clerk"), 1)
    ]
    return LLM(
        str(base), "float32", block_size=4, num_kv_blocks=96, check_invariants=True,
        lora_modules=tuple(adapters),
    )  # fmt: skip


# ---- prompts ----


def test_a_prompt_may_be_text_ids_or_a_mapping(llm: LLM) -> None:
    ids = llm.tokenizer.encode("hello there")
    forms: list[Any] = ["hello there", ids, {"prompt": "hello there"}, {"prompt_token_ids": ids}]
    outputs = [llm.generate(form, LONG)[0] for form in forms]
    assert len({output.token_ids for output in outputs}) == 1
    assert [output.prompt for output in outputs] == ["hello there", None, "hello there", None]
    assert outputs[1].prompt_token_ids == tuple(ids)
    assert len({output.request_id for output in outputs}) == 4
    with pytest.raises(InvalidRequest, match="prompt_token_ids"):
        llm.generate([{"prompt_embeds": 1}], LONG)


# ---- chats ----


def test_a_chat_is_its_rendered_prompt_without_more_special_tokens(llm: LLM) -> None:
    text = ChatTemplate.load(llm.engine.config.model).render(Chat(HI))
    ids = llm.tokenizer.encode(text, add_special_tokens=False)
    (wanted,) = llm.generate([ids], LONG)
    (output,) = llm.chat(HI, LONG)
    assert output.prompt_ids == tuple(ids)
    assert output.token_ids == wanted.token_ids
    assert output.text == llm.tokenizer.decode(output.token_ids)
    parts = [{"role": "user", "content": [{"type": "text", "text": "h"}, "i"]}]
    assert [each.prompt for each in llm.chat([HI, parts], LONG)] == [text, text]


def test_a_chat_has_vllms_options(llm: LLM) -> None:
    template = "{% for m in messages %}{{ m.content }}{% endfor %}{{ tools | length }}{{ mood }}"
    call = {"type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
    messages = [*HI, {"role": "assistant", "content": "!", "tool_calls": [call]}]
    (output,) = llm.chat(
        messages, LONG, chat_template=template, tools=[call], add_generation_prompt=False,
        chat_template_kwargs={"mood": "gay"},
    )  # fmt: skip
    assert output.prompt == "hi!1gay"
    args = "{{ messages[1].tool_calls[0].function.arguments.a }}"
    assert llm.chat(messages, LONG, chat_template=args)[0].prompt == "1"
    (going_on,) = llm.chat(messages, LONG, continue_final_message=True)
    assert going_on.prompt is not None
    assert going_on.prompt.endswith("!")
    with pytest.raises(UnsupportedFeature, match="image_url"):
        llm.chat([{"role": "user", "content": [{"type": "image_url"}]}])
    bad = {"function": {"name": "f", "arguments": "{"}}
    with pytest.raises(InvalidRequest, match="not JSON"):
        llm.chat([{"role": "assistant", "content": "", "tool_calls": [bad]}])


# ---- stop texts ----


def cut(llm: LLM, **more: Any) -> tuple[str, str]:
    """The whole text of LONG, and a part of its middle."""
    (plain,) = llm.generate("hello there", SamplingParams(seed=3, max_tokens=24, ignore_eos=True))
    assert plain.text is not None
    return plain.text, plain.text[9:12]


def test_a_stop_text_ends_a_sample_before_it(llm: LLM) -> None:
    whole, stop = cut(llm)
    base: dict[str, Any] = {"seed": 3, "max_tokens": 24, "ignore_eos": True}
    for given in (stop, [stop], ("zzz", stop)):
        (output,) = llm.generate("hello there", SamplingParams(**base, stop=given))
        assert output.text == whole[: whole.index(stop)]
        assert output.finish_reason is FinishReason.STOP
        assert output.outputs[0].stop_reason == stop
        assert len(output.token_ids) < 24
    params = SamplingParams(**base, stop=stop, include_stop_str_in_output=True)
    (output,) = llm.generate("hello there", params)
    assert output.text == whole[: whole.index(stop) + len(stop)]
    (forced,) = llm.generate("hello there", SamplingParams(**base, min_tokens=24))
    found = (forced.text or "")[9:12]
    (late,) = llm.generate("hello there", SamplingParams(**base, stop=found, min_tokens=24))
    assert late.text == forced.text, "it counts beyond min_tokens only"
    assert late.finish_reason is FinishReason.LENGTH
    assert_all_free(llm.engine)


def test_each_sample_stops_by_its_own_text(llm: LLM) -> None:
    _, stop = cut(llm)
    params = SamplingParams(seed=3, max_tokens=24, ignore_eos=True, n=4, logprobs=0)
    (plain,) = llm.generate("hello there", params)
    (output,) = llm.generate(
        "hello there",
        SamplingParams(seed=3, max_tokens=24, ignore_eos=True, n=4, stop=stop, logprobs=0),
    )
    reasons = set()
    for sample, whole in zip(output.outputs, plain.outputs, strict=True):
        assert sample.text == (whole.text or "").partition(stop)[0]
        assert sample.token_ids == whole.token_ids[: len(sample.token_ids)]
        assert len(sample.logprobs) == len(sample.token_ids)
        reasons.add(sample.finish_reason)
    assert FinishReason.STOP in reasons
    assert_all_free(llm.engine)


def test_a_stop_token_is_the_reason(llm: LLM) -> None:
    (plain,) = llm.generate("hello there", LONG)
    token = plain.token_ids[5]
    first = plain.token_ids.index(token)
    params = SamplingParams(seed=3, max_tokens=24, ignore_eos=True, stop_token_ids=(token,))
    (output,) = llm.generate("hello there", params)
    assert output.token_ids == plain.token_ids[: first + 1]
    assert output.outputs[0].stop_reason == token


@pytest.mark.parametrize("bad", ["", ["a", ""], [1]])
def test_an_empty_stop_text_is_refused(bad: Any) -> None:
    with pytest.raises(InvalidRequest) as caught:
        SamplingParams(stop=bad)
    assert caught.value.field == "stop"


def test_the_client_sends_stop_texts_of_both_kinds() -> None:
    params = SamplingParams(stop="a", skip_special_tokens=False)
    message = generate_request("x", params, GenerateOptions(stop=("b",)))
    assert sorted(message.stop) == ["a", "b"]
    assert not message.skip_special_tokens
    with pytest.raises(UnsupportedFeature, match="gRPC"):
        generate_request("x", SamplingParams(include_stop_str_in_output=True), GenerateOptions())


# ---- streams ----


def test_a_stream_is_the_answer_as_it_grows(llm: LLM) -> None:
    (wanted,) = llm.generate("hello there", LONG)
    outputs = list(llm.stream("hello there", LONG))
    assert len(outputs) > 12
    assert outputs[-1] == wanted
    assert [output.finished for output in outputs].index(True) == len(outputs) - 1
    for earlier, later in pairwise(outputs):
        assert later.token_ids[: len(earlier.token_ids)] == earlier.token_ids
        assert (later.text or "").startswith(earlier.text or "")


def test_a_stream_of_deltas_adds_up(llm: LLM) -> None:
    params = SamplingParams(
        seed=3, max_tokens=24, ignore_eos=True, n=2, logprobs=0, prompt_logprobs=0
    )
    (wanted,) = llm.generate("hello there", params)
    deltas = list(llm.stream("hello there", params, delta=True))
    for index in range(2):
        parts = [delta.outputs[index] for delta in deltas]
        assert "".join(part.text or "" for part in parts) == wanted.outputs[index].text
        assert sum((part.token_ids for part in parts), ()) == wanted.outputs[index].token_ids
        assert sum((part.logprobs for part in parts), ()) == wanted.outputs[index].logprobs
    assert sum((delta.prompt_logprobs for delta in deltas), ()) == wanted.prompt_logprobs
    (end,) = llm.stream("hello there", SamplingParams(seed=3, max_tokens=5, best_of=3))
    assert end.finished


def test_a_stream_that_is_left_ends_its_request_and_others_run_beside_it(llm: LLM) -> None:
    (wanted,) = llm.generate("hello there", LONG)
    stream = llm.stream("hello there", LONG)
    next(stream)
    assert llm.generate("hello there", LONG) == [wanted]
    other = llm.stream("hello there", LONG)
    next(other)
    stream.close()
    assert list(other)[-1] == wanted
    assert_all_free(llm.engine)


# ---- adapters ----


def test_adapters_are_chosen_per_call_and_per_prompt(llm: LLM) -> None:
    plain, poet, clerk = llm.generate(
        ["hello there"] * 3, LONG, lora_request=[None, "poet", LoRARequest("clerk", 2, "ignored")]
    )
    assert len({output.token_ids for output in (plain, poet, clerk)}) == 3
    (alone,) = llm.generate("hello there", LONG, lora_request="poet")
    assert alone == poet
    assert llm.chat(HI, LONG, lora_request="poet") != llm.chat(HI, LONG)
    assert llm.embed("hello", lora_request="poet") != llm.embed("hello")
    with pytest.raises(UnsupportedFeature, match=r"no adapter 'nobody' here .*poet, clerk"):
        llm.generate("hello there", LONG, lora_request="nobody")
    with pytest.raises(InvalidRequest, match="2 lora_request for 1 prompts"):
        llm.generate("hello there", LONG, lora_request=["poet", "clerk"])


# ---- beams, scores ----


def test_a_beam_search_tells_its_beams_best_first(llm: LLM) -> None:
    (output,) = llm.beam_search("hello there", BeamSearchParams(beam_width=3, max_tokens=6))
    sums = [sample.cumulative_logprob for sample in output.outputs]
    assert len(sums) == 3
    assert all(total is not None for total in sums)
    assert len({sample.token_ids for sample in output.outputs}) == 3
    greedy = SamplingParams(temperature=0, max_tokens=6, logprobs=0)
    (alone,) = llm.generate("hello there", greedy)
    best, plain = sums[0], alone.outputs[0].cumulative_logprob
    assert best is not None
    assert plain is not None
    assert best >= plain - 1e-5
    (short,) = llm.beam_search("hello", BeamSearchParams(2, 1))
    assert len(short.outputs) == 2


def test_scores_are_cosines_or_a_rerankers_opinion(llm: LLM, tmp_path: Path) -> None:
    texts = ["the heart of the matter", "on the road"]
    vectors = llm.embed(["the heart", *texts])
    cosines = [sum(a * b for a, b in zip(vectors[0], each, strict=True)) for each in vectors[1:]]
    assert llm.score("the heart", texts) == pytest.approx(cosines, abs=1e-5)
    assert llm.score(["the heart"] * 2, texts) == pytest.approx(cosines, abs=1e-5)
    assert llm.score("the heart", []) == []
    with pytest.raises(InvalidRequest, match="text_1: one, or as many"):
        llm.score(["a", "b"], ["c", "d", "e"])
    model = make_reranker(tmp_path)
    config = json.loads((model / "config.json").read_text()) | {"is_original_qwen3_reranker": True}
    (model / "config.json").write_text(json.dumps(config))
    reranker = LLM(str(model), "float32", num_kv_blocks=64)
    scores = reranker.score("the heart", texts)
    assert scores == reranker.rerank("the heart", texts)
    prompts = rerank_prompts(reranker.tokenizer, "the heart", texts, None)
    assert reranker.classify(prompts) == [[1.0 - score, score] for score in scores]
    assert reranker.classify([]) == []
    with pytest.raises(UnsupportedFeature, match="no classes"):
        llm.classify("the heart")


# ---- a progress bar ----


class Bar:
    """What tqdm is asked for, and told."""

    made: list[Bar]

    def __init__(self, total: int, desc: str) -> None:
        self.total, self.desc, self.told = total, desc, 0
        Bar.made.append(self)

    def update(self, number: int) -> None:
        self.told += number

    def __enter__(self) -> Bar:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.desc += ", closed"


def test_a_bar_counts_prompts_that_have_ended(llm: LLM, capsys: pytest.CaptureFixture[str]) -> None:
    Bar.made = []
    prompts = ["a", "hello there", "on the road"]
    llm.generate(prompts, [SamplingParams(max_tokens=count) for count in (1, 5, 9)], use_tqdm=Bar)
    llm.embed(prompts, use_tqdm=Bar)
    assert [(bar.total, bar.told, bar.desc) for bar in Bar.made] == [(3, 3, "prompts, closed")] * 2
    llm.generate(prompts, LONG)
    assert capsys.readouterr().err == "", "a bar is for terminals"


def test_a_call_without_prompts_is_an_empty_answer() -> None:
    engine, _ = fake_engine()
    llm = LLM("fake", engine=engine)
    assert llm.generate([], LONG) == []
    assert llm.get_default_sampling_params() == SamplingParams()
    assert llm.generate(list(PROMPT), LONG)[0].prompt_ids == PROMPT
