"""What adoption sees of a lane: pages of a peer's pool that are read where they lie.

No behaviour, as in base.py. The lane `shm` lends; loans.py keeps what is borrowed.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, runtime_checkable

from baton.protocol.handles import LaneAddress


class Loan(Protocol):
    """Pages of an exporter's pool that this node can read in place. Any thread."""

    @property
    def ids(self) -> tuple[int, ...]:
        """The page ids, as the views of our own pool count them."""
        ...

    def orphaned(self) -> bool:
        """Whether the owner of the pages is dead: then nobody will ever write to them again."""
        ...

    def wanted(self) -> bool:
        """Whether the owner of the pages is short of pages and wants these back."""
        ...

    def end(self) -> None:
        """End the loan: the pages are read no more. Idempotent."""
        ...


@runtime_checkable
class LendingLane(Protocol):
    """A lane to pools whose pages can be used in place."""

    def want_back(self, wanted: bool) -> None:
        """Tell users of our own pool's pages whether we are short of pages. Any thread."""
        ...

    def let_go(self) -> None:
        """Unmap the memory of dead peers that nobody uses. Any thread; called now and then."""
        ...

    def lends(self, address: LaneAddress) -> bool:
        """Whether the pages of the pool at `address` are laid out like ours."""
        ...

    def borrow(self, address: LaneAddress, pages: Sequence[int]) -> Loan:
        """Return a loan of these pages.

        Raises KVLost, KVRefused, and KVCorrupt for a page that the pool does not have.
        """
        ...
