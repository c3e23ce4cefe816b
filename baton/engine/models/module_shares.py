"""A tensor-parallel rank's share of transformers' modules: what it keeps of each, how shares are
combined.

    attention   this rank's query heads, and the KV of these; what they attended to is gathered
    MLPs        experts too: gates and ups by outputs, downs by inputs; results are summed
    products    other large Linears (and GPT-2's Conv1D): some of the outputs, which are gathered
    whole       all else: embeddings, norms, routers, and layers with recurrent state but for their
                Linears. Every rank computes it from the same numbers

Names of tensors do not say what a module does with them. So an MLP is cut only if its shares, run
one after the other on what the module got in the self-check, add up to what it returned there. An
MLP that does not is cut like other Linears. Gathered heads and products are right whatever their
module does, as nothing but whole outputs leaves them.
Source: Megatron-LM (arXiv 1909.08053, section 3).
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, Final, Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers.pytorch_utils import Conv1D

from baton.engine.state.place import RankPlace

logger = logging.getLogger(__name__)

# A Linear of fewer weights is read faster than its outputs are gathered.
LEAST_WEIGHTS: Final = 1 << 20
# Gates and ups, then the down behind them: Linears, or the tensors of all experts.
_MLPS: Final = (
    (("gate_proj", "up_proj"), "down_proj"),
    (("gate_up_proj",), "down_proj"),
    (("up_proj",), "down_proj"),
    (("w1", "w3"), "w2"),
    (("input_linear",), "output_linear"),
    (("fc1",), "fc2"),
    (("fc_in",), "fc_out"),
    (("c_fc",), "c_proj"),
    (("dense_h_to_4h",), "dense_4h_to_h"),
)
# Greatest mean error of an MLP's sum over the mean of what the MLP returned. Wrong cuts are off
# by the whole.
_TOLERANCE: Final = {torch.float32: 1e-4, torch.float16: 0.01, torch.bfloat16: 0.05}


class Collectives(Protocol):
    """What shares need of a group of ranks; see parallel/group.py."""

    place: RankPlace

    def all_reduce(self, tensor: Tensor) -> Tensor: ...
    def all_gather(self, tensor: Tensor) -> list[Tensor]: ...


@dataclass(frozen=True, slots=True)
class RankHeads:
    """The heads of one rank."""

    group: Collectives

    def own(self, tensor: Tensor, dim: int = 1) -> Tensor:
        """Return this rank's heads of a tensor whose dimension `dim` counts heads, as a view."""
        heads = self.group.place.heads(tensor.shape[dim])
        return tensor.narrow(dim, heads.start, len(heads))

    def gather(self, attended: Tensor) -> Tensor:
        """Return the outputs of all heads [T, heads, dim] from those of this rank's."""
        return torch.cat(self.group.all_gather(attended), dim=1)


@dataclass(frozen=True, slots=True)
class Call:
    """One call of a module."""

    given: tuple[Any, ...]
    named: dict[str, Any]
    found: Any


@contextmanager
def first_calls(root: nn.Module) -> Iterator[dict[nn.Module, Call]]:
    """Note the first call of each Linear and of each MLP in `root`, within this context."""
    calls: dict[nn.Module, Call] = {}

    def note(module: nn.Module, given: Any, named: Any, found: Any) -> None:
        calls.setdefault(module, Call(given, named, found))

    with ExitStack() as stack:
        for module in root.modules():
            if _is_product(module) or any(_ways(module)):
                hook = module.register_forward_hook(note, with_kwargs=True)
                stack.callback(hook.remove)
        yield calls


def keep_share(
    root: nn.Module, calls: Mapping[nn.Module, Call], group: Collectives, *, mapped: bool
) -> int:
    """Cut the modules of `root` to this rank's share; return how many bytes are left out.

    `calls`: of modules of `root`, from first_calls. `mapped`: the weights lie in memory that all
    ranks map, so parts of them are views. All ranks decide alike, as they have the same weights and
    calls. Mutates the modules: parameters and `forward`.
    """
    cutter = _Cutter(group, mapped)
    for module, call in calls.items():
        cutter.cut_mlp(module, call)
    for module in calls:
        if _is_product(module):
            cutter.cut_product(module)
    left_out = cutter.keep(root)
    logger.info(
        "rank %d of %d: %d MLPs cut, %d products gathered, %.1f MB of weights elsewhere",
        group.place.rank, group.place.size, cutter.num_mlps, cutter.num_products, left_out / 1e6,
    )  # fmt: skip
    return left_out


def shared_tensors(modules: Iterable[nn.Module]) -> dict[int, Tensor]:
    """Return the tensors, by id, of which each rank gets a part if all MLPs add up and sizes are
    even. `modules`: what the model calls."""
    found: dict[int, Tensor] = {}
    for module in modules:
        cuts = next(_ways(module), [])
        if not cuts and _is_product(module) and _is_large(module):
            cuts = _product_cuts(module)
        found.update((id(cut.tensor), cut.tensor) for cut in cuts if cut.dim is not None)
    return found


@dataclass(frozen=True, slots=True)
class _Cut:
    """How a tensor of a module is cut. `parts`: tensors that lie one behind the other along `dim`,
    each of which is cut by itself. `dim` None: the leader has all of it, the others zeros."""

    owner: nn.Module
    name: str
    dim: int | None
    parts: int = 1

    @property
    def tensor(self) -> Tensor:
        tensor: Tensor = getattr(self.owner, self.name)
        return tensor

    def set(self, tensor: Tensor) -> None:
        """Let the module compute with `tensor` in place of its own."""
        setattr(self.owner, self.name, nn.Parameter(tensor, requires_grad=False))

    def fits(self, size: int) -> bool:
        """Whether `size` ranks can cut the tensor evenly."""
        return self.dim is None or not self.tensor.shape[self.dim] % (self.parts * size)

    def of(self, place: RankPlace) -> Tensor:
        """Return a rank's part, a view where it lies in one piece."""
        whole = self.tensor
        if self.dim is None:
            return whole if place.leads else torch.zeros_like(whole)
        parts = whole.unflatten(self.dim, (self.parts, -1))
        share = place.share(parts.shape[self.dim + 1])
        part = parts.narrow(self.dim + 1, share.start, len(share))
        return part.flatten(self.dim, self.dim + 1)


class _Cutter:
    """Decides how modules are cut to a rank's share, and then cuts them."""

    def __init__(self, group: Collectives, mapped: bool) -> None:
        self._group = group
        self._mapped = mapped
        self._cuts: dict[nn.Module, list[_Cut]] = {}  # by whose tensors they cut
        self.num_mlps = 0
        self.num_products = 0

    def cut_mlp(self, mlp: nn.Module, call: Call) -> None:
        """Cut an MLP in the first way in which its shares add up; leave it whole if there is
        none."""
        size = self._group.place.size
        for cuts in _ways(mlp):
            if all(cut.fits(size) for cut in cuts) and _adds_up(mlp, cuts, call, size):
                self._plan(cuts)
                summed: Any = _Summed(mlp.forward, self._group)
                mlp.forward = summed
                self.num_mlps += 1
                return

    def cut_product(self, product: Any) -> None:
        """Cut the outputs of a product, unless it is small or a part of an MLP that was cut."""
        if product in self._cuts or not _is_large(product):
            return
        cuts = _product_cuts(product)
        if all(cut.fits(self._group.place.size) for cut in cuts):
            self._plan(cuts)
            gathered: Any = _Gathered(product, self._group)
            product.forward = gathered
            self.num_products += 1

    def keep(self, root: nn.Module) -> int:
        """Let all modules compute with this rank's parts; return the bytes that are left out.

        Layers may share a tensor. It is left out if all of its modules are cut, and cut alike;
        otherwise their parts are views.
        """
        holders = Counter(id(each) for m in root.modules() for each in m._parameters.values())
        by_tensor: dict[int, list[_Cut]] = {}
        for cuts in self._cuts.values():
            for cut in cuts:
                by_tensor.setdefault(id(cut.tensor), []).append(cut)
        left_out = 0
        for tensor, cuts in by_tensor.items():
            whole, part = cuts[0].tensor, cuts[0].of(self._group.place)
            alike = len({(cut.dim, cut.parts) for cut in cuts}) == 1
            if alike and len(cuts) == holders[tensor]:
                left_out += whole.nbytes - part.nbytes
                if not (self._mapped and part.is_contiguous()):
                    part = part.clone(memory_format=torch.contiguous_format)
                parts = [part] * len(cuts)
            else:
                parts = [cut.of(self._group.place) for cut in cuts]
            for cut, own in zip(cuts, parts, strict=True):
                cut.set(own)
        return left_out

    def _plan(self, cuts: Sequence[_Cut]) -> None:
        for cut in cuts:
            self._cuts.setdefault(cut.owner, []).append(cut)


def _is_product(module: Any) -> bool:
    """Whether outputs of a module may be gathered. A subclass may compute something else."""
    return type(module) in (nn.Linear, Conv1D)


def _is_large(product: Any) -> bool:
    weights: int = product.weight.numel()
    return weights >= LEAST_WEIGHTS


def _product_cuts(product: Any) -> list[_Cut]:
    """Return the cuts of a product by outputs."""
    cuts = [_Cut(product, "weight", 1 if isinstance(product, Conv1D) else 0)]
    if product.bias is not None:
        cuts.append(_Cut(product, "bias", 0))
    return cuts


def _tensors(module: nn.Linear) -> list[str]:
    return ["weight"] if module.bias is None else ["weight", "bias"]


def _ways(mlp: Any) -> Iterator[list[_Cut]]:
    """Yield the ways in which a module may be cut as an MLP; none for other modules."""
    for ups, down in _MLPS:
        parts = [getattr(mlp, name, None) for name in (*ups, down)]
        if all(isinstance(part, nn.Linear) for part in parts):
            yield from _linear_way(parts[:-1], parts[-1])
        elif all(isinstance(part, Tensor) and part.dim() == 3 for part in parts):
            yield from _expert_ways(mlp, ups, down)


def _linear_way(ups: Sequence[Any], down: Any) -> Iterator[list[_Cut]]:
    """Yield the cut of Linears: `ups` by outputs, `down` by inputs."""
    inner = down.weight.shape[1]
    if any(up.weight.shape[0] % inner for up in ups):
        return
    cuts = [_Cut(up, name, 0, up.weight.shape[0] // inner) for up in ups for name in _tensors(up)]
    cuts.append(_Cut(down, "weight", 1))
    if down.bias is not None:
        cuts.append(_Cut(down, "bias", None))
    yield cuts


def _expert_ways(mlp: Any, ups: Sequence[str], down: str) -> Iterator[list[_Cut]]:
    """Yield the cuts of all experts' tensors [experts, outputs, inputs], or the other way round."""
    for outputs, inputs in ((1, 2), (2, 1)):
        inner = getattr(mlp, down).shape[inputs]
        if any(getattr(mlp, up).shape[outputs] % inner for up in ups):
            continue
        cuts = [_Cut(mlp, down, inputs)]
        for up in ups:
            parts = getattr(mlp, up).shape[outputs] // inner
            cuts.append(_Cut(mlp, up, outputs, parts))
            if isinstance(getattr(mlp, f"{up}_bias", None), Tensor):
                cuts.append(_Cut(mlp, f"{up}_bias", 1, parts))
        if isinstance(getattr(mlp, f"{down}_bias", None), Tensor):
            cuts.append(_Cut(mlp, f"{down}_bias", None))
        yield cuts


def _adds_up(mlp: nn.Module, cuts: Sequence[_Cut], call: Call, size: int) -> bool:
    """Whether the results of all ranks' shares of `mlp` sum up to what `call` found."""
    whole, expected = [cut.tensor for cut in cuts], call.found
    if not isinstance(expected, Tensor):
        return False
    total = torch.zeros_like(expected)
    try:
        for rank in range(size):
            for cut, part in zip(
                cuts, [cut.of(RankPlace(rank, size)) for cut in cuts], strict=True
            ):
                cut.set(part)
            total += mlp.forward(*call.given, **call.named)
            _restore(cuts, whole)
    except Exception as error:  # noqa: BLE001 - exotic modelling code fails in exotic ways
        logger.debug("%s is not cut as an MLP: %s", type(mlp).__name__, error)
        return False
    finally:
        _restore(cuts, whole)
    difference = (total - expected).abs().mean() / expected.abs().mean()
    return bool(difference <= _TOLERANCE[expected.dtype])  # False for NaN


def _restore(cuts: Sequence[_Cut], whole: Sequence[Tensor]) -> None:
    for cut, tensor in zip(cuts, whole, strict=True):
        setattr(cut.owner, cut.name, tensor)


@dataclass(frozen=True, slots=True)
class _Summed:
    """The forward of an MLP of which each rank has a share. `own`: of the module."""

    own: Callable[..., Tensor]
    group: Collectives

    def __call__(self, *given: Any, **named: Any) -> Tensor:
        """Return the whole MLP's result."""
        return self.group.all_reduce(self.own(*given, **named))


@dataclass(frozen=True, slots=True)
class _Gathered:
    """The forward of a product of which each rank has some of the outputs."""

    product: Any
    group: Collectives

    def __call__(self, rows: Tensor) -> Tensor:
        """Return all outputs [..., outputs] for `rows` [..., inputs]."""
        weight: Tensor = self.product.weight
        if isinstance(self.product, Conv1D):
            weight = weight.T
        own = functional.linear(rows, weight, self.product.bias)
        return torch.cat(self.group.all_gather(own), dim=-1)
