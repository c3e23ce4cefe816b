"""Fakes of the engine's seams:
a runner whose tokens prove block tables, a clock that tests move."""

from __future__ import annotations

import zlib
from array import array
from collections.abc import Callable, Sequence
from concurrent.futures import Executor, Future
from dataclasses import dataclass, field, replace
from typing import Any

from baton.engine.config import EngineConfig
from baton.engine.core.active_model import ActiveModel
from baton.engine.core.assembly import EngineParts, assemble
from baton.engine.core.engine import Engine
from baton.engine.memory.kv_cache import KVArena
from baton.engine.sampling.proposer import DraftAsk, Proposer
from baton.engine.state.beam import BeamSearch
from baton.engine.state.interface import ChunkResult, EngineHooks, ModelInfo, Sampled, SequenceChunk
from baton.protocol.events import TokenLogprob
from baton.protocol.kv_spec import BlockLists, HeldBlocks, LayerSpec, first_visible
from baton.protocol.request import Request
from baton.protocol.sampling import SamplingParams

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


def next_token(
    history: Sequence[int], params: SamplingParams, position: int, sample: int = 0
) -> int:
    """The fake model: a pure function of all tokens so far and the sampling key."""
    key = array("q", [*history, (params.seed or 0) % 2**62, position, *([sample] * (sample > 0))])
    return zlib.crc32(key.tobytes()) % VOCAB_SIZE


def token_logprob(history: Sequence[int], token: int) -> TokenLogprob:
    """What the fake model tells of a token after `history`: no distribution, but a function."""
    value = zlib.crc32(array("q", [*history, token]).tobytes()) % 4096
    return TokenLogprob(token, -0.01 - value / 512, 0)


def candidates(history: Sequence[int], count: int) -> tuple[TokenLogprob, ...]:
    """The fake model's best continuations of `history`, best first."""
    told = [token_logprob(history, token) for token in range(VOCAB_SIZE)]
    told.sort(key=lambda candidate: (-candidate.logprob, candidate.token_id))
    return tuple(replace(each, rank=rank) for rank, each in enumerate(told[:count], 1))


def expected_output(
    prompt: Sequence[int],
    params: SamplingParams,
    eos_ids: Sequence[int] = (EOS_ID,),
    sample: int = 0,
    window: int | None = None,
) -> list[int]:
    """What one engine with all memory in the world answers, the token that ends it included."""
    tokens = list(prompt)
    for position in range(params.max_tokens):
        seen = tokens if window is None else tokens[-window:]
        token = next_token(seen, params, position, sample)
        tokens.append(token)
        if token in params.stop_token_ids or (not params.ignore_eos and token in eos_ids):
            break
    return tokens[len(prompt) :]


def expected_beams(
    prompt: Sequence[int], params: SamplingParams, window: int | None = None
) -> list[tuple[int, ...]]:
    """The n best beams of a search without an engine: every history is a plain list."""
    stops = frozenset((*params.stop_token_ids, *(() if params.ignore_eos else (EOS_ID,))))
    search = BeamSearch(params, stops, VOCAB_SIZE)
    while not search.done:
        search.advance(
            [
                candidates([*prompt, *beam.token_ids][-(window or 0) :], search.num_candidates)
                for beam in search.running
            ]
        )
    return [beam.token_ids for beam in search.best(params.n)]


class FakeRunner:
    """A Runner whose KV is the token ids themselves, one per slot.

    A row's history is read back through its block tables, never taken from the chunk: a wrong
    table, an overwritten or a recycled block shows up as a wrong token. `windows`: what each layer
    group sees (0 = all); the model sees what the first one does, and every group must agree.
    """

    def __init__(self, num_blocks: int, block_size: int, windows: Sequence[int] = (0,)) -> None:
        self.block_size = block_size
        self.windows = windows
        self.window = windows[0] or None  # tokens that the model sees
        self.memory: list[tuple[int, int] | None] = [None] * (num_blocks * block_size)
        self.batches: list[list[SequenceChunk]] = []
        self.fail_for: set[str] = set()  # ids of requests that break their step
        self.during: Callable[[], None] | None = None  # runs once, in the middle of the next step
        self.late = False  # steps that run ahead do so at the last moment
        self.ahead = False  # it is the step thread that runs: no hooks there
        self.clock: FakeClock | None = None
        self.seconds_per_step = 0.0
        self.seconds_per_copied_block = 0.0

    def run(
        self, chunks: Sequence[SequenceChunk], on_layer: Callable[[int], None] | None = None
    ) -> list[ChunkResult]:
        self.batches.append(list(chunks))
        if self.clock is not None:
            self.clock.advance(self.seconds_per_step)
        written: set[int] = set()
        for chunk in chunks:
            if chunk.request_id in self.fail_for:
                raise RuntimeError(f"the fake model fails for {chunk.request_id}")
            assert len(chunk.blocks) == len(self.windows)
            for index, token in enumerate(chunk.token_ids):
                for group, held in enumerate(chunk.blocks):
                    slot = self.slot(held, chunk.start + index)
                    assert slot not in written, "two rows write one slot"
                    written.add(slot)
                    self.memory[slot] = (group, token)
            self._prove_visible(chunk)
        if on_layer is not None:
            for layer in range(NUM_LAYERS):
                on_layer(layer)
        if self.during is not None and not self.ahead:
            during, self.during = self.during, None
            during()
        return [ChunkResult(self._sample(c), self._prompt_logprobs(c)) for c in chunks]

    def slot(self, held: HeldBlocks, position: int) -> int:
        block, offset = divmod(position, self.block_size)
        assert block >= held.first, "a hole is used"
        return held.ids[block - held.first] * self.block_size + offset

    def read(self, blocks: BlockLists, end: int, start: int = 0) -> list[int]:
        """Tokens whose KV lies at positions [start, end), as far as the first group sees them from
        the last one on; the other groups must hold the same."""
        tokens: list[int] = []
        for group, (window, held) in enumerate(zip(self.windows, blocks, strict=True)):
            first = max(start, end - window) if window else start
            values = [self.memory[self.slot(held, position)] for position in range(first, end)]
            assert None not in values, "KV is read that nobody has written"
            assert {value[0] for value in values if value} <= {group}, "another group's KV"
            mine = [value[1] for value in values if value is not None]
            tokens = tokens or mine
            assert mine == tokens[len(tokens) - len(mine) :], "groups differ"
        return tokens

    def write(self, blocks: BlockLists, start: int, tokens: Sequence[int]) -> None:
        """What a KV transfer does: put KV at positions [start, start + len(tokens)), in a windowed
        group those that are still needed."""
        end = start + len(tokens)
        for group, (window, held) in enumerate(zip(self.windows, blocks, strict=True)):
            for position in range(max(start, first_visible(window, end)), end):
                slot = self.slot(held, position)
                self.memory[slot] = (group, tokens[position - start])

    def _prove_visible(self, chunk: SequenceChunk) -> None:
        """The first row of the chunk finds all it may see; later rows see less of the past."""
        for group, (window, held) in enumerate(zip(self.windows, chunk.blocks, strict=True)):
            first = max(0, chunk.start - window + 1) if window else 0
            for position in range(first, chunk.start):
                value = self.memory[self.slot(held, position)]
                assert value is not None, "KV is read that nobody has written"
                assert value[0] == group, "another group's KV"
                assert not chunk.history or value[1] == chunk.history[position], "a wrong token"

    def _history(self, chunk: SequenceChunk, end: int) -> list[int]:
        start = 0 if self.window is None else max(0, end - self.window)
        return self.read(chunk.blocks, end, start)

    def _sample(self, chunk: SequenceChunk) -> Sampled | None:
        """Draws after the known tokens and after each draft that stands."""
        if chunk.sample is None:
            return None
        known = chunk.start + len(chunk.token_ids) - chunk.num_drafts
        if chunk.history or not self.ahead:
            assert list(chunk.history) == self._all_known(chunk, known)
        if chunk.num_candidates:
            history = self._history(chunk, known)
            return Sampled((), candidates=candidates(history, chunk.num_candidates))
        tokens: list[int] = []
        told: list[tuple[TokenLogprob, ...]] = []
        for sample in chunk.fan_out:
            history = self._history(chunk, known)
            tokens.append(next_token(history, chunk.sample, chunk.position, sample))
            told.append((token_logprob(history, tokens[-1]),))
        for index in range(0 if chunk.fan_out else chunk.num_drafts + 1):
            history = self._history(chunk, known + index)
            position = chunk.position + index
            token = next_token(history, chunk.sample, position, chunk.sample_index)
            tokens.append(token)
            told.append((token_logprob(history, token),))
            if index < chunk.num_drafts and chunk.token_ids[index - chunk.num_drafts] != token:
                break
        return Sampled(tuple(tokens), tuple(told) if chunk.sample.logprobs is not None else ())

    def _all_known(self, chunk: SequenceChunk, known: int) -> list[int]:
        """The tokens that the chunk claims, where the KV that it may see agrees."""
        start = 0 if self.window is None else max(0, known - self.window)
        return [*chunk.history[:start], *self.read(chunk.blocks, known, start)]

    def _prompt_logprobs(self, chunk: SequenceChunk) -> tuple[tuple[TokenLogprob, ...], ...]:
        if chunk.prompt_logprobs is None:
            return ()
        end = min(chunk.start + len(chunk.token_ids), chunk.num_prompt - 1)
        prompt = chunk.history
        return tuple(
            (token_logprob(prompt[: index + 1], prompt[index + 1]),)
            for index in range(chunk.start, end)
        )


class FakeArena(KVArena):
    """An arena whose blocks hold a FakeRunner's tokens: copies move them too."""

    runner: FakeRunner

    def copy_block(self, source: int, target: int) -> None:
        size = self.block_size
        memory = self.runner.memory
        memory[target * size : (target + 1) * size] = memory[source * size : (source + 1) * size]

    def clear_block(self, block: int) -> None:
        size = self.block_size
        self.runner.memory[block * size : (block + 1) * size] = [None] * size

    def read_blocks(self, blocks: Sequence[int]) -> Any:
        self._take_time(len(blocks))
        size = self.block_size
        return [self.runner.memory[block * size : (block + 1) * size] for block in blocks]

    def write_blocks(self, host: Any, rows: Sequence[int], blocks: Sequence[int]) -> None:
        self._take_time(len(blocks))
        size = self.block_size
        for row, block in zip(rows, blocks, strict=True):
            self.runner.memory[block * size : (block + 1) * size] = host[row]

    def _take_time(self, num_blocks: int) -> None:
        if self.runner.clock is not None:
            self.runner.clock.advance(self.runner.seconds_per_copied_block * num_blocks)


class ScriptedProposer:
    """Drafts from a recipe: the right tokens of the fake model, some of them spoiled."""

    def __init__(self, spoil: Callable[[DraftAsk, int], bool] = lambda ask, index: False) -> None:
        self._spoil = spoil
        self.known: set[str] = set()  # requests that it would keep something for
        self.asks: list[DraftAsk] = []

    def propose(self, asks: Sequence[DraftAsk]) -> list[list[int]]:
        self.asks.extend(asks)
        return [self._drafts(ask) for ask in asks]

    def forget(self, request_id: str) -> None:
        self.known.discard(request_id)

    def _drafts(self, ask: DraftAsk) -> list[int]:
        self.known.add(ask.request_id)
        tokens = list(ask.history)
        for index in range(ask.max_drafts):
            token = next_token(tokens, ask.params, ask.position + index, ask.sample_index)
            tokens.append((token + 1) % VOCAB_SIZE if self._spoil(ask, index) else token)
        return tokens[len(ask.history) :]


@dataclass
class FakeHooks:
    """Records what a prefill node would hear. `during_layer` may act in the middle of a step."""

    admissions: list[tuple[Request, BlockLists, int]] = field(default_factory=list)
    layers: list[tuple[int, tuple[tuple[str, int], ...]]] = field(default_factory=list)
    during_layer: Callable[[], None] | None = None
    error: Exception | None = None
    most_tokens: int | None = None  # exports of so many at once; the test takes off what it unpins
    num_tokens: int = 0

    def may_admit(self, num_tokens: int, num_pending: int) -> bool:
        others = self.num_tokens + num_pending
        return self.most_tokens is None or not others or others + num_tokens <= self.most_tokens

    def admitted(self, request: Request, blocks: BlockLists, num_tokens: int) -> None:
        if self.error is not None:
            raise self.error
        self.admissions.append((request, blocks, num_tokens))
        self.num_tokens += num_tokens

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


class StepThread(Executor):
    """Steps that run ahead, without a thread: each at once, or (`late`) when somebody waits."""

    def __init__(self, runner: FakeRunner) -> None:
        self._runner = runner

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        future = Lazy(lambda: self._run(fn, args))
        if not self._runner.late:
            future.exception()
        return future

    def _run(self, fn: Callable[..., Any], args: tuple[Any, ...]) -> object:
        self._runner.ahead = True
        try:
            return fn(*args)
        finally:
            self._runner.ahead = False


class Lazy(Future[Any]):
    """Computed when it is first asked for."""

    def __init__(self, compute: Callable[[], object]) -> None:
        super().__init__()
        self._compute = compute

    def result(self, timeout: float | None = None) -> Any:
        self.exception()
        return super().result(timeout)

    def exception(self, timeout: float | None = None) -> BaseException | None:
        if not self.running() and not self.done():
            self.set_running_or_notify_cancel()
            try:
                self.set_result(self._compute())
            except BaseException as error:  # noqa: BLE001 - whoever asks is told
                self.set_exception(error)
        return super().exception(timeout)


def fake_engine(
    num_blocks: int = 64,
    block_size: int = 4,
    hooks: EngineHooks | None = None,
    info: ModelInfo | None = None,
    proposer: Proposer | None = None,
    **options: Any,
) -> tuple[Engine, FakeRunner]:
    """A real engine over FakeRunner, with invariants proven after every step. The option
    `num_slots`: of recurrent states, which the fake model does not use; `num_checkpoints`: of
    them."""
    num_slots, num_checkpoints = options.pop("num_slots", 0), options.pop("num_checkpoints", 0)
    values: dict[str, object] = {"model": "fake", "check_invariants": True, **options}
    config = EngineConfig(**values)  # type: ignore[arg-type]
    info = info or model_info()
    arena = FakeArena(info.layers, num_blocks, block_size, info.kv_dtype)
    arena.keep_states(num_slots, num_checkpoints)
    runner = arena.runner = FakeRunner(num_blocks, block_size, arena.groups.windows)
    clock = FakeClock()
    runner.clock = clock
    active = ActiveModel(runner, proposer=proposer)
    engine = assemble(EngineParts(config, active, arena, info), hooks, clock)
    if engine.steps.ahead is not None:
        engine.steps.ahead.thread = StepThread(runner)
    return engine, runner


def request(
    request_id: str = "r",
    prompt: Sequence[int] = (5, 6, 7, 8, 9),
    *,
    max_tokens: int = 8,
    seed: int = 1,
    ignore_eos: bool = True,
    **changes: Any,
) -> Request:
    """A sampling request with everything that the engine needs.

    `changes`: fields of Request, `outputs` of sample 0, and `sampling`, further params by name.
    """
    outputs, sampling = changes.pop("outputs", ()), changes.pop("sampling", None)
    params = SamplingParams(
        max_tokens=max_tokens, seed=seed, ignore_eos=ignore_eos, **(sampling or {})
    )
    values: dict[str, object] = {
        "id": request_id,
        "prompt_ids": tuple(prompt),
        "params": params,
        "output_ids": (tuple(outputs),),
    }
    return Request(**{**values, **changes})  # type: ignore[arg-type]
