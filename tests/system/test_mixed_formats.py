"""A node whose weights have another format than the others' does not join them, and says why."""

from __future__ import annotations

from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest

from baton.protocol.errors import ConfigError
from baton.protocol.sampling import SamplingParams
from decode_node.__main__ import PROGRAM as DECODE
from prefill_node.__main__ import PROGRAM as PREFILL
from tests.cluster import Plan, cluster, member_of
from tests.engine.quantized_models import SHAPE
from tests.system.references import one_engine_tokens, prompts
from tests.tiny_models import make_tiny_model

GREEDY = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
PROMPTS = prompts((37, 20))
FORMATS: dict[str, dict[str, Any]] = {
    "int8": {"quantization": "int8"}, "w8a8": {"quantization": "w8a8"},
    "int4": {"quantization": "int4"}, "w4a8": {"quantization": "w4a8"},
    "head alone": {"lm_head_quantization": "int8"},
}  # fmt: skip


@pytest.mark.parametrize("program", [PREFILL, DECODE], ids=["prefill", "decode"])
@pytest.mark.parametrize("name", FORMATS)
async def test_weights_of_another_format_are_another_model(
    name: str, program: Any, tmp_path: Path
) -> None:
    """Its KV would be that of other weights. The router names the reason; in a handshake the
    fingerprints of layouts differ, too."""
    model = make_tiny_model("qwen3", tmp_path / "m", **SHAPE)
    plan = Plan(model)
    async with cluster(plan) as c, AsyncExitStack() as stack:
        other = await member_of(stack, program, plan, FORMATS[name])
        record, known = other.node.shell.record(), c.decode[0].node.shell.record()
        assert record.endpoint.format == known.endpoint.format, "its KV has the same form"
        assert record.endpoint.layout_fingerprint != known.endpoint.layout_fingerprint
        with pytest.raises(ConfigError, match="weights in another format") as refused:
            c.router.registry.admit(record.address, record)
        assert refused.value.field == "model_digest"
        done = await c.generate(PROMPTS, GREEDY)
        assert [each.token_ids for each in done] == one_engine_tokens(model, PROMPTS, GREEDY)
