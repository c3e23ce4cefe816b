"""Layers with recurrent state (linear attention, Mamba, short convolutions) of transformers.

Such a layer's mixer reads and writes one state per sequence through transformers' Cache. It knows
batches of equal lengths only. So its forward is replaced by one that splits the rows of a step:

    rows of the step    [ chunk of A | token of B | chunk of C | token of D ]
    calls of the mixer  [2, 1, H]: B and D together;  [1, A, H];  [1, C, H]

The step's states lie in a StateArena, in the slots that the spans name. A span that begins at token
0 reads no state. Everything else of the model (attention, MLPs, norms) still sees all rows at once.

Some Mamba mixers bound their time step (`time_step_limit`), but not in a call of one token. So in
`generate` the tokens of a prompt are bounded, and those behind it are not. Rows of a step are cut
otherwise: one row may be a prompt's last token, and several may be outputs, computed again or as
drafts. PromptBounds bounds the rows of prompts and no others, however they are cut.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from types import FunctionType, MethodType
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.nn import functional

from baton.engine.models.causal import SERVED_STATES, cache_name
from baton.engine.state.batch import Batch, Span, States
from baton.protocol.errors import InternalError, ModelRefused
from baton.protocol.kv_spec import StateSpec

# How transformers' mixers compute one token, and several; both are given the raw time step `dt`.
_SCANS: Final = ("mamba2_selective_state_update", "mamba2_chunk_scan")


class _LayerStates:
    """What a mixer asks of transformers' Cache, over the states [B, ...] of the rows of one call.

    None = the sequence begins here. A mixer may also change the tensors that it got in place.
    """

    def __init__(self, conv: Tensor | None = None, recurrent: Tensor | None = None) -> None:
        self.conv = conv
        self.recurrent = recurrent

    def get_conv_state(self, layer_idx: int, state_idx: int = 0) -> Tensor | None:
        """Return the last inputs of the convolution, [B, channels, taps]."""
        return self.conv

    def get_recurrent_state(self, layer_idx: int, state_idx: int = 0) -> Tensor | None:
        """Return the matrices of the scan, [B, ...]."""
        return self.recurrent

    def has_previous_state(self, layer_idx: int | None = None, state_idx: int = 0) -> bool:
        """Whether the sequences began before."""
        return self.conv is not None or self.recurrent is not None

    def is_recording_past(self, layer_idx: int) -> bool:
        """Whether inputs before the last ones are kept: never."""
        return False

    def update_conv_state(
        self, conv_states: Tensor, layer_idx: int, state_idx: int = 0, conv_kernel_size: int = 0
    ) -> Tensor:
        """Keep the last inputs. Return `conv_states` [B, channels, T] behind the inputs before."""
        taps = conv_kernel_size or conv_states.shape[-1]
        if self.conv is None:
            missing = max(0, taps - conv_states.shape[-1])
            full = functional.pad(conv_states, (missing, 0))
        else:
            full = torch.cat((self.conv, conv_states), dim=-1)
        self.conv = full[..., -taps:]
        return full

    def update_recurrent_state(
        self, recurrent_states: Tensor, layer_idx: int, state_idx: int = 0
    ) -> Tensor:
        """Keep and return the matrices behind the last token, [B, ...]."""
        self.recurrent = recurrent_states
        return recurrent_states


class StepCache:
    """What the modelling code gets as its cache: the batch for mixers; attention, which pages its
    KV itself, gets back what it gives."""

    is_compileable = False

    def __init__(self, batch: Batch) -> None:
        self.batch = batch
        self.stored: int | None = None  # the layer whose keys came last

    def update(
        self, key: Tensor, value: Tensor, layer_idx: int, *_: Any, **__: Any
    ) -> tuple[Tensor, Tensor]:
        """Return the new keys and values alone."""
        self.stored = layer_idx
        return key, value

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Return 0: positions come with the rows."""
        return 0

    def get_query_offset(self, layer_idx: int = 0) -> int:
        """Return 0, as get_seq_length."""
        return 0

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        """Return the sizes of a mask without a past."""
        return query_length, 0


class ProbeCache(_LayerStates):
    """Finds the mixers and what they keep, while a forward runs in which no layer has a past."""

    is_compileable = False

    def __init__(self) -> None:
        super().__init__()
        self.stored: int | None = None
        self.specs: dict[int, StateSpec] = {}
        self.mixers: dict[int, nn.Module] = {}
        self.after_attention: set[int] = set()  # layers whose mixer runs after their attention
        self._running: list[nn.Module] = []

    def update(
        self, key: Tensor, value: Tensor, layer_idx: int, *_: Any, **__: Any
    ) -> tuple[Tensor, Tensor]:
        """See StepCache.update."""
        self.stored = layer_idx
        return key, value

    get_seq_length = StepCache.get_seq_length
    get_query_offset = StepCache.get_query_offset
    get_mask_sizes = StepCache.get_mask_sizes

    def watch(self, module: nn.Module) -> ExitStack:
        """Know which module runs, within the result's context."""
        stack = ExitStack()
        for each in module.modules():
            before = each.register_forward_pre_hook(lambda m, _: self._running.append(m))
            after = each.register_forward_hook(lambda *_: self._running.pop() and None)
            stack.callback(before.remove)
            stack.callback(after.remove)
        return stack

    def update_conv_state(
        self, conv_states: Tensor, layer_idx: int, state_idx: int = 0, conv_kernel_size: int = 0
    ) -> Tensor:
        """See Cache.update_conv_state."""
        full = _LayerStates().update_conv_state(conv_states, layer_idx, 0, conv_kernel_size)
        shape = (full.shape[1], conv_kernel_size)
        self._note(layer_idx, state_idx, conv=shape, conv_dtype=_name(full))
        return full

    def update_recurrent_state(
        self, recurrent_states: Tensor, layer_idx: int, state_idx: int = 0
    ) -> Tensor:
        """See Cache.update_recurrent_state."""
        shape = tuple(recurrent_states.shape[1:])
        dtype = _name(recurrent_states)
        self._note(layer_idx, state_idx, recurrent=shape, recurrent_dtype=dtype)
        return recurrent_states

    def _note(self, layer: int, state_idx: int, **found: Any) -> None:
        mixer = self._running[-1]
        if state_idx or self.mixers.setdefault(layer, mixer) is not mixer:
            raise ModelRefused(f"layer {layer} keeps more than one state")
        if self.stored == layer:
            self.after_attention.add(layer)
        self.specs[layer] = replace(self.specs.get(layer, StateSpec()), **found)


class PromptBounds:
    """The time steps of `mixer`, bounded in the rows of prompts alone. `forward` is the mixer's own
    one with scans that do this; `rows` [B, T] bool says which rows of the next call are a prompt's.
    Raises ModelRefused if its forward has other scans.
    """

    def __init__(self, mixer: Any) -> None:
        self._limit: tuple[float, float] = mixer.time_step_limit
        mixer.time_step_limit = (0.0, math.inf)
        own: Any = inspect.unwrap(type(mixer).forward)
        if not set(_SCANS) <= set(own.__code__.co_names):
            raise ModelRefused(f"{type(mixer).__name__} bounds its time step in an unknown way")
        scans = {name: self._bounding(own.__globals__[name]) for name in _SCANS}
        bounding = FunctionType(
            own.__code__, own.__globals__ | scans, own.__name__, own.__defaults__, own.__closure__
        )
        self.forward: Callable[..., Tensor] = MethodType(bounding, mixer)
        self.rows = torch.empty(0, 0, dtype=torch.bool)

    def _bounding(self, scan: Callable[..., Any]) -> Callable[..., Any]:
        place = list(inspect.signature(scan).parameters).index("dt")

        def bounded(*given: Any, dt_bias: Tensor, dt_softplus: bool, **more: Any) -> Any:
            assert dt_softplus, "all mixers ask for it"
            before, dt, behind = given[:place], given[place], given[place + 1 :]
            dt = functional.softplus(dt + dt_bias.to(dt.dtype))
            dt = torch.where(self.rows[..., None], dt.clamp(*self._limit), dt)
            return scan(*before, dt, *behind, **more)

        return bounded


@dataclass(frozen=True, slots=True)
class _SplitMixer:
    """The forward of a mixer over the rows of a step. `own`: transformers' forward; `cache`: its
    name for the cache. `last`: nothing else of the layer is stored after it. `bounds`: of a mixer
    that bounds its time step."""

    own: Callable[..., Tensor]
    layer: int
    cache: str
    last: bool
    bounds: PromptBounds | None = None

    def __call__(self, hidden_states: Tensor, *_: Any, **given: Any) -> Tensor:
        """Run hidden_states [1, T, H] -> [1, T, H]; write the states of the step's sequences."""
        batch: Batch = given[self.cache].batch
        states = batch.states
        if states is None:
            raise InternalError("a model with recurrent state got a step without states")
        rows = hidden_states[0]
        singles = [span for span in batch.spans if span.num_rows == 1 and span.start]
        out: Tensor | None = None
        if singles:
            index = torch.tensor([span.first_row for span in singles], device=rows.device)
            found = self._run(rows[index][:, None], singles, states)[:, 0]
            out = found.new_empty(len(rows), found.shape[-1])
            out[index] = found
        for span in batch.spans:
            if span.num_rows > 1 or not span.start:
                place = slice(span.first_row, span.first_row + span.num_rows)
                found = self._run(rows[None, place], [span], states)[0]
                out = found.new_empty(len(rows), found.shape[-1]) if out is None else out
                out[place] = found
        if self.last and batch.on_layer is not None:
            batch.on_layer(self.layer)
        assert out is not None, "a step has rows"
        return out[None]

    def _run(self, rows: Tensor, spans: Sequence[Span], states: States) -> Tensor:
        """Run one call, rows [B, T, H] of `spans`, which all begin or all go on."""
        slots = torch.tensor([span.state_slot for span in spans], device=rows.device)
        if self.bounds is not None:
            left = torch.tensor([[span.num_prompt - span.start] for span in spans])
            self.bounds.rows = (torch.arange(rows.shape[1]) < left).to(rows.device)
        held = _LayerStates(*states.read(self.layer, slots)) if spans[0].start else _LayerStates()
        out = self.own(rows, **{self.cache: held})
        states.write(self.layer, slots, held.conv, held.recurrent)
        return out


def split_mixers(probe: ProbeCache, attending: Sequence[int]) -> None:
    """Let each mixer that `probe` found run over the rows of steps. `attending`: the layers whose
    attention runs after their mixer, if they have one, and announces the layer. Raises ModelRefused
    for a mixer that takes no cache, or bounds its time step in an unknown way."""
    for layer, mixer in probe.mixers.items():
        own = mixer.forward
        name = cache_name(own)
        if name is None:
            raise ModelRefused(f"{type(mixer).__name__} takes no cache")
        bounds = PromptBounds(mixer) if _bounded(mixer) else None
        own = own if bounds is None else bounds.forward
        split = _SplitMixer(own, layer, name, layer not in attending, bounds)
        mixer.forward = split  # pyright: ignore[reportAttributeAccessIssue]


def outputs_differ(probe: ProbeCache) -> bool:
    """Whether a prompt's token has another state, and KV, than the same token as output: some mixer
    that `probe` found bounds its time step."""
    return any(map(_bounded, probe.mixers.values()))


def _bounded(mixer: nn.Module) -> bool:
    limit = getattr(mixer, "time_step_limit", None)
    return limit is not None and tuple(limit) != (0.0, math.inf)


def keeps_state(causal: Any) -> bool:
    """Whether some layers of a served model keep recurrent state, or no KV."""
    return causal.config.get_text_config().model_type in SERVED_STATES


def _name(tensor: Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")
