"""RankGroup: the collectives of a group of ranks, over gloo (CPU) or NCCL (GPUs).

It is not torch.distributed's default group but an object, so a process may hold several groups
(tests run the ranks as threads). Its life: made (rank and size are known) -> weights are read ->
connect() once every rank is ready -> collectives, each with a deadline -> ends with the process.
After an error the group cannot be used again: ranks may have stopped at different collectives.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, Final, Literal, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import AllgatherOptions, ProcessGroupGloo, Store

from baton.engine.state.place import LEADER, RankPlace
from baton.protocol.errors import InternalError

Backend: TypeAlias = Literal["gloo", "nccl"]

LOOPBACK: Final = "127.0.0.1"
DEADLINE_S: Final = 60.0  # of one collective: far longer than any layer, well below client timeouts
MEETING_S: Final = 300.0  # the deadline until all ranks are connected


class RankGroup:
    """One rank's end of the group. Used by one thread."""

    def __init__(
        self,
        place: RankPlace,
        backend: Backend,
        deadline_s: float = DEADLINE_S,
        kind: str = "tensor-parallel",
    ) -> None:
        """`kind`: what error messages call the group. `deadline_s`: of each collective."""
        self.place = place
        self._kind = kind
        self._backend: Backend = backend
        self._deadline = timedelta(seconds=deadline_s)
        self._store: Store | None = None
        self._process_group: Any = None

    def connect(self, store: Store) -> None:
        """Connect to the other ranks through `store`; they must call this too. Raises
        InternalError."""
        make = _nccl if self._backend == "nccl" else _gloo
        self._store = store  # must live as long as the group
        try:
            self._process_group = make(store, self.place, timedelta(seconds=MEETING_S))
        except (RuntimeError, ValueError) as error:
            raise InternalError(f"no {self._backend} group of ranks: {error}") from error

    def all_reduce(self, tensor: Tensor) -> Tensor:
        """Sum `tensor` over all ranks, in place. The result is the same on all ranks, bit for bit.

        Raises InternalError.
        """
        return self._all_reduce(tensor, dist.AllreduceOptions())

    def all_reduce_max(self, tensor: Tensor) -> Tensor:
        """Replace each number of `tensor` by its maximum over all ranks; see all_reduce."""
        options: Any = dist.AllreduceOptions()
        options.reduceOp = dist.ReduceOp.MAX
        return self._all_reduce(tensor, options)

    def gather(self, tensor: Tensor) -> list[Tensor] | None:
        """Return the tensors of all ranks in rank order on the leader, None on the other ranks. All
        must have the same shape.

        Raises InternalError.
        """
        tensor, place = tensor.contiguous(), self.place
        options = dist.GatherOptions()
        options.rootRank = LEADER
        parts = [torch.empty_like(tensor) for _ in range(place.size)] if place.leads else None
        targets = [] if parts is None else [parts]
        self._run(options, lambda group: group.gather(targets, [tensor], options))
        return parts

    def all_gather(self, tensor: Tensor) -> list[Tensor]:
        """Return the tensors of all ranks in rank order, on every rank. All must have the same
        shape. Raises InternalError."""
        tensor = tensor.contiguous()
        parts = [torch.empty_like(tensor) for _ in range(self.place.size)]
        options = AllgatherOptions()
        self._run(options, lambda group: group.allgather([parts], [tensor], options))
        return parts

    def broadcast(self, tensor: Tensor) -> Tensor:
        """Copy the leader's `tensor` into the other ranks' `tensor`, which must have the same
        shape. Raises InternalError."""
        tensor = tensor.contiguous()
        options = dist.BroadcastOptions()
        options.rootRank = LEADER
        self._run(options, lambda group: group.broadcast([tensor], options))
        return tensor

    def all_to_all(self, tensor: Tensor, sends: Sequence[int], receives: Sequence[int]) -> Tensor:
        """Send the rows of `tensor` [sum(sends), ...] to all ranks: the first sends[0] to rank 0,
        and so on. Return the received rows [sum(receives), ...] in rank order, receives[r] of them
        from rank r. What a rank sends must be what the other rank expects to receive.

        Raises InternalError.
        """
        found = tensor.new_empty(sum(receives), *tensor.shape[1:])
        options = dist.AllToAllOptions()
        splits = list(receives), list(sends)
        self._run(
            options,
            lambda group: group.alltoall_base(found, tensor.contiguous(), *splits, options),
        )
        return found

    def _all_reduce(self, tensor: Tensor, options: Any) -> Tensor:
        tensor = tensor.contiguous()
        self._run(options, lambda group: group.allreduce([tensor], options))
        return tensor

    def _run(self, options: Any, collective: Callable[[Any], Any]) -> None:
        if self._process_group is None:
            raise InternalError("the ranks have not met yet")
        options.timeout = self._deadline
        try:
            collective(self._process_group).wait(self._deadline)
        except RuntimeError as error:
            raise InternalError(f"a collective of the {self._kind} group failed: {error}") from (
                error
            )


def _gloo(store: Store, place: RankPlace, deadline: timedelta) -> Any:
    options: Any = ProcessGroupGloo._Options()  # pyright: ignore[reportAttributeAccessIssue]
    options._timeout = deadline
    options._threads = 1  # one collective at a time
    options._devices = [ProcessGroupGloo.create_device(hostname=LOOPBACK, lazy_init=False)]
    return ProcessGroupGloo(store, place.rank, place.size, options)


def _nccl(store: Store, place: RankPlace, deadline: timedelta) -> Any:
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = deadline
    return dist.ProcessGroupNCCL(store, place.rank, place.size, options)
