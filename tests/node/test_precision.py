"""KV out of another precision never answers for KV that was made in this one, nor the reverse."""

from __future__ import annotations

from dataclasses import replace

from baton.protocol.errors import GivenBack
from baton.protocol.handles import KVHandle
from baton.protocol.messages import Migrate
from baton.protocol.request import Request
from tests.fakes import expected_output, model_info, request
from tests.node.fakes import Pair, Setup, running_pair

PROMPT = tuple(range(10, 29))  # 19 tokens: 4 full blocks of 4 and 3 more
WHOLE_BLOCKS = 16
SHORTER = Setup(model_options={"kv_dtype": "bfloat16"})  # D's; P's KV is float32


def asked(name: str, max_tokens: int = 6) -> Request:
    return request(name, PROMPT, max_tokens=max_tokens)


async def fetched_tokens(pair: Pair, one: Request) -> int:
    """Hand `one` over; how many of its tokens D did not have already."""
    shell = pair.d.node.shell
    before = shell.connector.stats.total_received
    await pair.to_p.prefill(one)
    handle: KVHandle = await pair.to_p.handle_of(one.id)
    await pair.to_d.decode(one, handle)
    tokens = await pair.to_d.all_tokens(one.id)
    assert tokens == expected_output(one.prompt_ids, one.params)
    layers = pair.p.engine.info.layers
    token_bytes = sum(layer.token_bytes(pair.p.engine.info.kv_dtype) for layer in layers)
    return (shell.connector.stats.total_received - before) // token_bytes


async def computed_tokens(pair: Pair, one: Request) -> int:
    """Run `one` on D alone; how many tokens of its prompt were computed."""
    stats = pair.d.engine.stats
    before = stats.num_prompt_tokens
    await pair.to_d.decode(one)
    assert await pair.to_d.all_tokens(one.id) == expected_output(one.prompt_ids, one.params)
    return stats.num_prompt_tokens - before


def test_a_node_says_what_it_computes_in_and_how_it_keeps_kv() -> None:
    assert model_info(dtype="bfloat16", kv_dtype="bfloat16").precision == "bfloat16"
    assert model_info(dtype="bfloat16", kv_dtype="int8").precision == "bfloat16, KV int8"
    assert model_info(kv_dtype="float32").precision == "float32"


async def test_exact_kv_is_not_answered_for_by_converted_kv() -> None:
    async with running_pair(None, SHORTER) as pair:
        assert await fetched_tokens(pair, asked("a")) == len(PROMPT)
        assert await computed_tokens(pair, asked("b")) == len(PROMPT), "nothing of a's was found"
        assert await computed_tokens(pair, asked("c")) < len(PROMPT) - WHOLE_BLOCKS + 4
        left = len(PROMPT) - WHOLE_BLOCKS
        assert await fetched_tokens(pair, asked("d")) == left, "a's past is d's"
        await pair.p.until_idle()
        await pair.d.until_idle()


async def test_converted_kv_is_not_answered_for_by_exact_kv() -> None:
    async with running_pair(None, SHORTER) as pair:
        assert await computed_tokens(pair, asked("a")) == len(PROMPT)
        assert await fetched_tokens(pair, asked("b")) == len(PROMPT), "nothing of a's was found"
        await pair.p.until_idle()
        await pair.d.until_idle()


async def test_between_equal_precisions_all_kv_is_one() -> None:
    async with running_pair() as pair:
        assert await computed_tokens(pair, asked("a")) == len(PROMPT)
        assert await fetched_tokens(pair, asked("b")) == len(PROMPT) - WHOLE_BLOCKS
        await pair.p.until_idle()
        await pair.d.until_idle()


async def test_a_request_on_converted_kv_is_not_handed_on_as_exact() -> None:
    """A handle names the pool's dtype, not what its KV went through: it is computed anew."""
    one = asked("r", max_tokens=200)
    one = replace(one, params=replace(one.params, ignore_eos=True))
    roomy = replace(SHORTER, num_blocks=128)
    async with running_pair(None, roomy) as pair:
        pair.d.runner.hold_after(4)
        await pair.to_p.prefill(one)
        await pair.to_d.decode(one, await pair.to_p.handle_of("r"))
        await pair.to_d.until(lambda: len(pair.to_d.tokens("r")) >= 3)
        await pair.d.runner.step_gate.reached()
        await pair.to_d.send(Migrate("r", 1))
        await pair.to_d.heard()
        pair.d.runner.step_gate.open()
        failed = await pair.to_d.failure_of("r")
        assert failed.code == GivenBack.code
        assert pair.d.engine.stats.num_handed_on == 0
        assert pair.d.engine.stats.departures == {"precision": 1}
        await pair.p.until_idle()
        await pair.d.until_idle()
