"""Fakes of the engine's seams: a runner whose tokens prove block tables, a clock that tests
move."""

from __future__ import annotations

import zlib
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from baton.engine.config import EngineConfig
from baton.engine.engine import Engine
from baton.engine.interface import EngineHooks, ModelInfo, SequenceChunk
from baton.engine.kv_cache import KVArena
from baton.kv_spec import LayerSpec
from baton.request import Request
from baton.sampling import SamplingParams

VOCAB_SIZE = 97
EOS_ID = 1  # FakeRunner's tokens reach it now and then
NUM_LAYERS = 2


class FakeClock:
    """Monotonic seconds that stand still until `advance`."""

    def __init__(self, now: float = 1000.0) -> None:
        self.now = now

    def monotonic(self) -> float:
        return self.now

    def advance(self, seconds: float) -> None:
        self.now += seconds


def next_token(history: Sequence[int], params: SamplingParams, position: int) -> int:
    """The fake model: a pure function of all tokens so far and the sampling key."""
    key = array("q", [*history, (params.seed or 0) % 2**62, position])
    return zlib.crc32(key.tobytes()) % VOCAB_SIZE


def expected_output(
    prompt: Sequence[int], params: SamplingParams, eos_ids: Sequence[int] = (EOS_ID,)
) -> list[int]:
    """What one engine with all memory in the world answers, the token that ends it included."""
    tokens = list(prompt)
    for position in range(params.max_tokens):
        token = next_token(tokens, params, position)
        tokens.append(token)
        if token in params.stop_token_ids or (not params.ignore_eos and token in eos_ids):
            break
    return tokens[len(prompt) :]


class FakeRunner:
    """A Runner whose KV is the token ids themselves, one per slot.

    A row's history is read back through its block table, never taken from the chunk: a wrong table,
    an overwritten or a recycled block shows up as a wrong token.
    """

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.block_size = block_size
        self.memory: list[int | None] = [None] * (num_blocks * block_size)
        self.batches: list[list[SequenceChunk]] = []
        self.fail_for: set[str] = set()  # ids of requests that break their step
        self.during: Callable[[], None] | None = None  # runs once, in the middle of the next step
        self.clock: FakeClock | None = None
        self.seconds_per_step = 0.0

    def run(
        self, chunks: Sequence[SequenceChunk], on_layer: Callable[[int], None] | None = None
    ) -> list[int | None]:
        self.batches.append(list(chunks))
        if self.clock is not None:
            self.clock.advance(self.seconds_per_step)
        written: set[int] = set()
        for chunk in chunks:
            if chunk.request_id in self.fail_for:
                raise RuntimeError(f"the fake model fails for {chunk.request_id}")
            for index, token in enumerate(chunk.token_ids):
                slot = self.slot(chunk.blocks, chunk.start + index)
                assert slot not in written, "two rows write one slot"
                written.add(slot)
                self.memory[slot] = token
        if on_layer is not None:
            for layer in range(NUM_LAYERS):
                on_layer(layer)
        if self.during is not None:
            during, self.during = self.during, None
            during()
        return [self._sample(chunk) for chunk in chunks]

    def slot(self, blocks: Sequence[int], position: int) -> int:
        block, offset = divmod(position, self.block_size)
        return blocks[block] * self.block_size + offset

    def read(self, blocks: Sequence[int], end: int, start: int = 0) -> list[int]:
        """Tokens whose KV lies at positions [start, end) of a block table."""
        values = [self.memory[self.slot(blocks, position)] for position in range(start, end)]
        assert None not in values, "KV is read that nobody has written"
        return [value for value in values if value is not None]

    def write(self, blocks: Sequence[int], start: int, tokens: Sequence[int]) -> None:
        """What a KV transfer does: put KV at positions [start, start + len(tokens))."""
        for index, token in enumerate(tokens):
            self.memory[self.slot(blocks, start + index)] = token

    def _sample(self, chunk: SequenceChunk) -> int | None:
        if chunk.sample is None:
            return None
        history = self.read(chunk.blocks, chunk.start + len(chunk.token_ids))
        return next_token(history, chunk.sample, chunk.position)


@dataclass
class FakeHooks:
    """Records what a prefill node would hear. `during_layer` may act in the middle of a step."""

    admissions: list[tuple[Request, tuple[int, ...], int]] = field(default_factory=list)
    layers: list[tuple[int, tuple[tuple[str, int], ...]]] = field(default_factory=list)
    during_layer: Callable[[], None] | None = None
    error: Exception | None = None

    def admitted(self, request: Request, blocks: tuple[int, ...], num_tokens: int) -> None:
        if self.error is not None:
            raise self.error
        self.admissions.append((request, blocks, num_tokens))

    def layer_written(self, layer: int, progress: Sequence[tuple[str, int]]) -> None:
        self.layers.append((layer, tuple(progress)))
        if self.during_layer is not None:
            self.during_layer()


def model_info(max_model_len: int = 256, **changes: object) -> ModelInfo:
    """What FakeRunner's model would say of itself."""
    values: dict[str, object] = {
        "name": "fake",
        "digest": "fake-digest",
        "layers": (LayerSpec(kv_heads=1, k_dim=2, v_dim=2),) * NUM_LAYERS,
        "rope": "none",
        "vocab_size": VOCAB_SIZE,
        "max_model_len": max_model_len,
        "eos_token_ids": (EOS_ID,),
        "kv_dtype": "float32",
        "model_impl": "lean",
    }
    return ModelInfo(**{**values, **changes})  # type: ignore[arg-type]


def fake_engine(
    num_blocks: int = 64,
    block_size: int = 4,
    hooks: EngineHooks | None = None,
    info: ModelInfo | None = None,
    **options: object,
) -> tuple[Engine, FakeRunner]:
    """A real engine over FakeRunner, with invariants proven after every step."""
    values: dict[str, object] = {"model": "fake", "check_invariants": True, **options}
    config = EngineConfig(**values)  # type: ignore[arg-type]
    info = info or model_info()
    arena = KVArena(info.layers, num_blocks, block_size, info.kv_dtype)
    runner = FakeRunner(num_blocks, block_size)
    clock = FakeClock()
    runner.clock = clock
    return Engine(config, runner, arena, info, hooks, clock), runner


def request(
    request_id: str = "r",
    prompt: Sequence[int] = (5, 6, 7, 8, 9),
    *,
    max_tokens: int = 8,
    seed: int = 1,
    outputs: Sequence[int] = (),
    **changes: object,
) -> Request:
    """A sampling request with everything that the engine needs; `ignore_eos` unless changed."""
    ignore_eos = bool(changes.pop("ignore_eos", True))
    params = SamplingParams(max_tokens=max_tokens, seed=seed, ignore_eos=ignore_eos)
    values: dict[str, object] = {
        "id": request_id,
        "prompt_ids": tuple(prompt),
        "params": params,
        "output_ids": (tuple(outputs),),
    }
    return Request(**{**values, **changes})  # type: ignore[arg-type]
