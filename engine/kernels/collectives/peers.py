"""The ranks of one host that write into each other's inboxes, seen by one of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from engine.kernels import norm
from engine.kernels.collectives.inbox import PHASES, SLOT_MULTIPLE
from engine.kernels.device import describe
from engine.parallel.group import RankLostError, sent_nothing

PROGRAMS = 128  # all resident at once on an H100 or H200
LONGEST_WAIT_S = 10.0
TILE = 4096  # elements of a loop step that needs no whole row
TILE_WARPS = 16
# The largest message in bytes that each rank sends whole to every other one, by the number of ranks: SGLang's table for H200.
ONE_SHOT_BYTES = {2: 16 << 20, 3: 5 << 18, 4: 384 << 10, 8: 128 << 10}
# The same with the norm in that launch: every rank norms all rows, each by one program.
FUSED_BYTES = {2: 1 << 20, 4: 384 << 10, 8: 128 << 10}


class Norm(NamedTuple):
    """Arguments of `norm.add_and_norm` beside the sum, and where the sum with the residual goes."""

    residual: torch.Tensor
    weight: torch.Tensor
    eps: float
    plus_one: bool
    total: torch.Tensor


class Peers:
    """A group of GPUs of one host.

    All ranks call the same operations with the same shapes in the same order, on one stream each. `addresses` are the ranks'
    inboxes in rank order, as this process has mapped them. A sum is float32, in rank order, and rounded once: every rank has
    the same bits. Nothing here waits for the device; after a pass, `lost_ranks` tells whether it is right.
    """

    def __init__(
        self,
        inbox: torch.Tensor,
        addresses: Sequence[int],
        rank: int,
        *,
        programs: int = PROGRAMS,
        longest_wait_s: float = LONGEST_WAIT_S,
        meeting: Callable[[torch.Tensor], None] = lambda addresses: None,
        missing: torch.Tensor | None = None,
    ) -> None:
        """`meeting`: waits for all ranks, and may fill in their inboxes' addresses.

        `missing`: pinned words [N] int32, where others see, too, which ranks sent nothing in time.
        """
        self.rank, self.size = rank, len(addresses)
        self._inbox = inbox
        self._phase_bytes = inbox.nbytes // PHASES
        self._programs = programs
        self._meeting = meeting
        self._limit_ms = max(1, round(longest_wait_s * 1000))
        self._addresses = torch.tensor(addresses, dtype=torch.int64, device=inbox.device)
        self._rounds = torch.zeros(programs + 1, dtype=torch.int32, device=inbox.device)  # the last: a round gave up
        if missing is None:
            missing = torch.zeros(self.size, dtype=torch.int32, pin_memory=inbox.is_cuda)
        self._lost = missing

    @property
    def lost_ranks(self) -> tuple[int, ...]:
        """Ranks whose message did not come in time. What was computed since is wrong, and this group is of no more use."""
        return tuple(self._lost.numpy().nonzero()[0].tolist())

    def meet(self) -> None:
        """See `Group.meet`: then the devices are idle, too."""
        self._meeting(self._addresses)

    def check(self) -> None:
        """See `Group.check`."""
        if lost := self.lost_ranks:
            raise RankLostError(sent_nothing(", ".join(map(str, lost)), self.rank))

    def all_reduce(self, partial: torch.Tensor) -> torch.Tensor:
        """Return the sum of every rank's `partial`."""
        partial = partial.contiguous()
        if partial.nbytes > self._most_bytes(ONE_SHOT_BYTES):
            return self._two_shot(partial)
        total = torch.empty_like(partial)
        self._one_shot(partial, total, None)
        return total

    def all_reduce_parts(self, partial: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """Return the sum [T, E] of every rank's `partial` [T, E], or of its parts [P, T, E].

        A rank sends the float32 sum of its parts, rounded to `dtype`.
        """
        if partial.dim() == 2:
            return self.all_reduce(partial.to(dtype))
        if partial[0].numel() * dtype.itemsize > self._most_bytes(FUSED_BYTES):
            return self.all_reduce(partial.sum(dim=0).to(dtype))
        total = partial.new_empty(partial.shape[1:], dtype=dtype)
        self._one_shot(partial.contiguous(), total, None)
        return total

    def all_reduce_norm(
        self,
        partial: torch.Tensor,
        residual: torch.Tensor,
        weight: torch.Tensor,
        eps: float,
        *,
        plus_one: bool = False,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return what `norm.add_and_norm` makes of `all_reduce_parts` and the residual [T, E]."""
        if residual.nbytes > self._most_bytes(FUSED_BYTES):
            total = self.all_reduce_parts(partial, residual.dtype)
            return norm.add_and_norm(total, residual, weight, eps, plus_one=plus_one)
        residual = residual.contiguous()
        normed, total = torch.empty_like(residual), torch.empty_like(residual)
        self._one_shot(partial.contiguous(), normed, Norm(residual, weight, eps, plus_one, total))
        return normed, total

    def gather(self, part: torch.Tensor) -> torch.Tensor:
        """Return every rank's columns [R, W] side by side, [R, N W]."""
        part = part.contiguous()
        num_rows, width = part.shape
        whole = part.new_empty(num_rows, self.size * width)
        at_once = max(1, self._most_elements(part) // self.size // width)
        for rows, into in zip(part.split(at_once), whole.split(at_once), strict=True):
            self._gather(rows, into, width)
        return whole

    def _one_shot(self, partial: torch.Tensor, out: torch.Tensor, then: Norm | None) -> None:
        from engine.kernels.collectives import triton_push

        features = TILE if then is None else out.shape[-1]
        width = 1 << (features - 1).bit_length()
        parts = partial.shape[0] if partial.dim() > out.dim() else 1
        residual, weight, eps, plus_one, total = then or Norm(out, out, 0.0, False, out)
        kind = triton_push.SUM.value if then is None else int(plus_one)
        self._launch(
            triton_push.ALL_REDUCE,
            (partial.dtype, out.dtype, features, parts, kind),
            (partial, residual, weight, out, total),
            (-(-out.numel() // features), eps, features, width, parts, kind),
            num_elements=out.numel(),
            unit=_unit(out.numel()),
            num_warps=min(TILE_WARPS, max(4, width // 256)),
        )

    def _two_shot(self, partial: torch.Tensor) -> torch.Tensor:
        """Large sum: every rank adds up its share of the elements, then all gather the shares."""
        from engine.kernels.collectives import triton_push

        multiple = self.size * SLOT_MULTIPLE
        padded = partial.new_empty(-(-partial.numel() // multiple) * multiple)
        at_once = self._most_elements(partial) // multiple * multiple
        for piece, into in zip(partial.view(-1).split(at_once), padded.split(at_once), strict=True):
            share = partial.new_empty(len(into) // self.size)
            self._launch(
                triton_push.REDUCE_SCATTER,
                (share.dtype,),
                (piece, share),
                (TILE,),
                num_elements=len(piece),
                unit=_unit(len(piece)),
            )
            self._gather(share, into, len(share))
        return padded[: partial.numel()].view(partial.shape)

    def _gather(self, part: torch.Tensor, into: torch.Tensor, width: int) -> None:
        from engine.kernels.collectives import triton_push

        unit = _unit(width)
        self._launch(
            triton_push.ALL_GATHER,
            (into.dtype,),
            (part, into),
            (width // unit, TILE),
            num_elements=part.numel(),
            unit=unit,
        )

    def _launch(
        self,
        kernel: Any,
        variant: tuple[object, ...],
        tensors: tuple[torch.Tensor, ...],
        values: tuple[object, ...],
        *,
        num_elements: int,
        unit: int,
        num_warps: int = TILE_WARPS,
        push: bool = True,
        read: bool = True,
    ) -> None:
        """Launch a round. Without a GPU, `push` and `read` are launched apart, so that all ranks can push first."""
        if num_elements == 0:
            return
        device = describe(self._inbox.device)
        own = (self.size, self.rank, unit, self._phase_bytes, device.has_tma, push, read)
        aligned = tuple(tensor.data_ptr() % 16 == 0 for tensor in tensors)
        kernel.launch(
            (self._programs,), (*variant, aligned, num_warps, own), *tensors,
            self._addresses, self._rounds, self._lost, num_elements // unit, self._limit_ms, *values, *own,
            num_warps=num_warps, launch_pdl=device.has_tma,
        )  # fmt: skip

    def _most_elements(self, message: torch.Tensor) -> int:
        """The elements of a phase."""
        return self._phase_bytes // message.itemsize

    def _most_bytes(self, table: dict[int, int]) -> int:
        """The largest message of one shot, by a table's entry for at least so many ranks, and by the room."""
        entry = table[min(size for size in table if size >= self.size)]
        return min(entry, self._phase_bytes // self.size)


def _unit(num_elements: int) -> int:
    """The elements of which a message has a whole number: as many as a wide access takes, where it can."""
    return SLOT_MULTIPLE if num_elements % SLOT_MULTIPLE == 0 else 1
