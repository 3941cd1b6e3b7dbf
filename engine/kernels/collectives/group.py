"""The GPUs of one host as a group, whose hosts exchange what they must through memory that they share."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from engine.kernels.collectives.inbox import PHASE_BYTES, allocate_inbox
from engine.kernels.collectives.peers import LONGEST_WAIT_S, Peers
from engine.parallel.shared_memory import SharedMemoryGroup

Exchange = Callable[[bytes], Sequence[bytes]]  # gives every rank's bytes, in rank order
# Maps the inboxes of all ranks, given one's own, its rank and an exchange: their addresses here, in rank order.
Mapped = Callable[[torch.Tensor, int, Exchange], Sequence[int]]


def gpu_group(
    host: SharedMemoryGroup,
    device: torch.device,
    mapped: Mapped,
    *,
    phase_bytes: int = PHASE_BYTES,
    longest_wait_s: float = LONGEST_WAIT_S,
    missing: torch.Tensor | None = None,
) -> Peers:
    """Return a rank's end of the group. Ranks learn of each other's inboxes when they meet first: nothing is launched before.

    `missing`: see `Peers`.
    """
    inbox, nowhere = allocate_inbox(device, phase_bytes), [0] * host.size
    meeting = _Meeting(host, inbox, mapped)
    return Peers(inbox, nowhere, host.rank, longest_wait_s=longest_wait_s, meeting=meeting, missing=missing)


@dataclass(slots=True)
class _Meeting:
    host: SharedMemoryGroup
    inbox: torch.Tensor
    mapped: Mapped | None  # None: that is done

    def __call__(self, addresses: torch.Tensor) -> None:
        """Wait until every rank is here and its device idle; fill in the addresses of their inboxes."""
        self._settle()
        if self.mapped is not None:
            found = self.mapped(self.inbox, self.host.rank, self.host.exchange)
            addresses.copy_(torch.tensor(found, dtype=torch.int64))
            self.mapped = None
            self._settle()
        self.host.meet()

    def _settle(self) -> None:
        if self.inbox.is_cuda:
            torch.cuda.synchronize(self.inbox.device)
