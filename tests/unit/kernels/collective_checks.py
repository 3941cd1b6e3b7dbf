"""Checks of the collectives' kernels: every rank gets the same bits, those of the plainest sum in rank order.

The ranks are threads that push before any reads (`peer_ranks`); `tests/gpu/test_collectives.py` has processes that wait.
"""

from __future__ import annotations

import os
import random
from collections.abc import Callable
from unittest import mock

import torch

from engine.kernels import norm
from engine.kernels.collectives import Peers, allocate_inbox, inbox, peers
from engine.kernels.launch import is_compiling_ahead
from engine.model.layers.norm import RmsNorm
from engine.model.ranks import Joined
from engine.model.stream import Stream
from tests.unit.kernels.peer_ranks import Ranks, SteppedPeers
from tests.unit.kernels.references import close
from tests.unit.kernels.triton_checks import Suite

DTYPES = (torch.float32, torch.float16, torch.bfloat16)


def check_one_shot(device: str, large: bool) -> None:
    for size in (2, 4, 8):
        ranks = Ranks(size, device)
        for dtype in DTYPES:
            for shape in [(1, 8), (3, 1371), (5,)]:
                _check_sum(ranks, _messages(size, shape, dtype, device))


def check_two_shot(device: str, large: bool) -> None:
    """A piece of a message is as large as a phase, and the last piece as small as anything."""
    with mock.patch.object(peers, "ONE_SHOT_BYTES", {8: 256}):
        for size, dtype in zip((2, 4, 8), DTYPES, strict=True):
            ranks = Ranks(size, device, phase_bytes=1 << 12)
            for count in (129, 1000, 2049):
                _check_sum(ranks, _messages(size, (count,), dtype, device))


def check_norm(device: str, large: bool) -> None:
    for size, dtype, parts in [(2, torch.float16, 1), (4, torch.float32, 3), (2, torch.float16, 2)]:
        _check_norm(Ranks(size, device), dtype, (4, 200), parts, device)
    with mock.patch.object(peers, "FUSED_BYTES", {8: 256}):
        _check_norm(Ranks(2, device), torch.float16, (4, 200), 2, device)
    if large:
        for size in (2, 4, 8):
            _check_norm(Ranks(size, device, phase_bytes=8 << 20, programs=128), torch.bfloat16, (9, 8192), 1, device)


def _check_norm(ranks: Ranks, dtype: torch.dtype, shape: tuple[int, int], parts: int, device: str) -> None:
    size = len(ranks.peers)
    residual, weight = (torch.randn(each, device=device).to(dtype) for each in (shape, shape[-1:]))
    partial = torch.randn(size, parts, *shape, device=device).to(dtype if parts == 1 else torch.float32)
    messages = partial.sum(dim=1, dtype=torch.float32).to(dtype)
    for plus_one in (False, True):
        found = ranks.run(
            lambda one, plus_one=plus_one: one.all_reduce_norm(
                partial[one.rank] if parts > 1 else partial[one.rank, 0], residual, weight, 1e-5, plus_one=plus_one
            )
        )
        wanted, total = norm.add_and_norm.reference(_sum(messages), residual, weight, 1e-5, plus_one=plus_one)
        for normed, summed in found:
            close(normed, wanted.double())
            close(summed, total.double())
            assert _same_bits([normed, found[0][0]])
    _check_quiet(ranks)


def check_parts(device: str, large: bool) -> None:
    """A rank's parts are added before they are sent: within that launch, or before it where they are large."""
    for shape in [(3, 4, 200), (2, 5, 64), (1, 8)]:
        for dtype, of_parts in [(torch.float16, torch.float32), (torch.bfloat16, torch.bfloat16)]:
            partial = torch.randn(2, *shape, device=device).to(of_parts)
            messages = (partial if partial.dim() == 3 else partial.sum(dim=1, dtype=torch.float32)).to(dtype)
            for most in (1 << 20, 256):
                ranks = Ranks(2, device, phase_bytes=1 << 12)
                with mock.patch.object(peers, "FUSED_BYTES", {8: most}):
                    found = ranks.run(
                        lambda one, partial=partial, dtype=dtype: one.all_reduce_parts(partial[one.rank], dtype)
                    )
                close(found[0], _sum(messages).double())
                assert found[0].dtype == dtype
                assert _same_bits(found)
                _check_quiet(ranks)


class _Given:
    """In place of a product: the rows are its parts."""

    def parts(self, x: torch.Tensor) -> torch.Tensor:
        return x


def check_stream(device: str, large: bool) -> None:
    """A layer's terms of the stream are summed over ranks by the next norm, or by whoever reads the stream before."""
    terms, residual = torch.randn(2, 4, 64, device=device).half(), torch.randn(4, 64, device=device).half()
    norm_of_layer, kept = RmsNorm(torch.randn(64, device=device).half(), 1e-5), torch.tensor([2, 0], device=device)

    def read(one: Peers) -> tuple[torch.Tensor, ...]:
        linear = Joined(_Given(), one.all_reduce, one)
        normed, read_before, shorter = Stream(residual), Stream(residual), Stream(residual)
        for stream in (normed, read_before, shorter):
            stream.plus(linear, terms[one.rank])
        shorter.only(kept)
        return normed.normed(norm_of_layer), normed.whole(), read_before.total(), read_before.whole(), shorter.whole()

    total = _sum(terms) + residual
    for normed, *totals, shorter in Ranks(2, device).run(read):
        close(normed, norm.rms_norm.reference(total, norm_of_layer.weight, 1e-5).double())
        assert all(torch.equal(each, total) for each in totals)
        assert torch.equal(shorter, total[kept])


def check_gather(device: str, large: bool) -> None:
    for size, dtype in zip((2, 4, 8), DTYPES, strict=True):
        ranks = Ranks(size, device, phase_bytes=1 << 12)
        for rows, width in [(1, 33), (3, 64), (7, 40)]:
            parts = torch.randn(size, rows, width, device=device).to(dtype)
            for whole in ranks.run(lambda one, parts=parts: one.gather(parts[one.rank])):
                assert torch.equal(whole, torch.cat(parts.unbind(), dim=-1))
        _check_quiet(ranks)


def check_random(device: str, large: bool) -> None:
    """Operations of all kinds and sizes after each other, in the same inboxes."""
    chosen = random.Random(0)
    for size in (2, 3, 4):
        ranks = Ranks(size, device, phase_bytes=1 << 13)
        with mock.patch.object(peers, "ONE_SHOT_BYTES", {8: 1 << 11}):
            for _ in range(12):
                dtype, rows, width = chosen.choice(DTYPES), chosen.randint(1, 5), chosen.randint(1, 700)
                if chosen.random() < 0.7:
                    _check_sum(ranks, _messages(size, (rows, width), dtype, device))
                else:
                    parts = _messages(size, (rows, width), dtype, device)
                    (first, *others) = ranks.run(lambda one, parts=parts: one.gather(parts[one.rank]))
                    assert torch.equal(first, torch.cat(parts.unbind(), dim=-1))
                    assert _same_bits([first, *others])
        _check_quiet(ranks)


def check_waiting(device: str, large: bool) -> None:
    """Two processes of which each waits for the other, in the interpreter as on a GPU."""
    if device != "cpu" or is_compiling_ahead():
        return
    inboxes = [allocate_inbox(torch.device(device), 1 << 13).share_memory_() for _ in range(2)]
    draws = torch.Generator().manual_seed(0)
    given = [torch.randn(2, 1 + 61 * number, generator=draws).half() for number in range(30)]

    def sums(rank: int) -> bool:
        one = Peers(inboxes[rank], [memory.data_ptr() for memory in inboxes], rank, programs=3, longest_wait_s=100.0)
        found = [one.all_reduce(messages[rank]) for messages in given]  # all of them: the other one waits for each
        return all(torch.equal(total, _sum(messages)) for total, messages in zip(found, given, strict=True))

    with mock.patch.object(peers, "ONE_SHOT_BYTES", {8: 1 << 11}):
        child = os.fork()
        if child == 0:
            try:
                os._exit(0 if sums(1) else 1)
            finally:
                os._exit(2)
        assert sums(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert all(bool((memory == inbox.EMPTY_16).all()) for memory in inboxes)


def check_payloads(device: str, large: bool) -> None:
    """Whatever bits a message has, it arrives: those that mean "empty" as 0."""
    for dtype, empty in (
        (torch.float16, inbox.EMPTY_16),
        (torch.bfloat16, inbox.EMPTY_16),
        (torch.float32, inbox.EMPTY_32),
    ):
        bits = torch.tensor([empty, 0, 1, -1], dtype=torch.int16 if dtype.itemsize == 2 else torch.int32, device=device)
        special = torch.tensor([float("nan"), float("inf"), -float("inf"), -0.0], device=device).to(dtype)
        message = torch.cat((bits.view(dtype), special))
        for whole in Ranks(2, device).run(lambda one, message=message: one.gather(message[None])):
            expected = message.clone()
            expected[message.view(bits.dtype) == empty] = 0.0
            assert _same_bits([whole[0], expected.repeat(2)])


def check_lost(device: str, large: bool) -> None:
    """A rank that does not come is named after a bounded wait, and later rounds do not wait."""
    ranks = Ranks(4, device)
    messages = _messages(4, (2, 50), torch.float16, device)
    _check_sum(ranks, messages)

    def without_the_third(one: Peers) -> None:
        if one.rank == 2:
            ranks.peers[2].everyone.wait()
        else:
            one.all_reduce(messages[one.rank])

    ranks.run(without_the_third)
    if device != "cpu":
        torch.cuda.synchronize()
    for rank in (0, 1, 3):
        assert ranks.peers[rank].lost_ranks == (2,)
        assert bool(ranks.peers[rank]._rounds[-1])
    assert ranks.peers[2].lost_ranks == ()


class _Torn:
    """In place of the ranks' barrier: then half of two ranks' messages are missing, another half of each."""

    def __init__(self, one: SteppedPeers, memory: torch.Tensor, num_bytes: int) -> None:
        self._everyone, self._memory, self._num_bytes = one.everyone, memory, num_bytes

    def wait(self, timeout: float) -> None:
        self._everyone.wait(timeout)
        for phase in self._memory.view(inbox.PHASES, -1):
            slots = phase.view(torch.uint8)[: 3 * self._num_bytes].view(torch.int16).view(3, 2, -1)
            slots[1, 0] = slots[2, 1] = inbox.EMPTY_16


def check_each_lost(device: str, large: bool) -> None:
    """Every rank of which something is missing is named, also where each program misses another one."""
    ranks = Ranks(3, device)
    messages = _messages(3, (1 << 12,), torch.float16, device)
    torn = ranks.peers[0]
    torn.everyone = _Torn(torn, ranks.inboxes[0], messages[0].nbytes)  # type: ignore[assignment]
    ranks.run(lambda one: one.all_reduce(messages[one.rank]))
    if device != "cpu":
        torch.cuda.synchronize()
    assert [one.lost_ranks for one in ranks.peers] == [(1, 2), (), ()]


def _messages(size: int, shape: tuple[int, ...], dtype: torch.dtype, device: str) -> torch.Tensor:
    """Random messages. Triton's interpreter does not round to bfloat16: there its sums are exact."""
    messages = torch.randn(size, *shape, device=device)
    if device == "cpu" and dtype == torch.bfloat16:
        messages = (4 * messages).round().clamp(-15, 15)
    messages.view(-1)[::7] = -0.0
    return messages.to(dtype)


def _sum(messages: torch.Tensor) -> torch.Tensor:
    total = messages[0].float()
    for message in messages[1:]:
        total = total + message.float()
    return total.to(messages.dtype)


def _check_sum(ranks: Ranks, messages: torch.Tensor) -> None:
    found = ranks.run(lambda one: one.all_reduce(messages[one.rank]))
    assert torch.equal(found[0], _sum(messages)), (messages.shape, messages.dtype)
    assert _same_bits(found)
    _check_quiet(ranks)


def _check_quiet(ranks: Ranks) -> None:
    """After a round nothing is in an inbox, all programs have counted alike, and nobody is missing."""
    for memory, one in zip(ranks.inboxes, ranks.peers, strict=True):
        assert bool((memory == inbox.EMPTY_16).all())
        assert len(one._rounds[:-1].unique()) == 1
        assert one.lost_ranks == ()


def _same_bits(tensors: list[torch.Tensor]) -> bool:
    first, *others = (tensor.contiguous().view(torch.uint8) for tensor in tensors)
    return all(torch.equal(first, other) for other in others)


CHECKS: dict[str, Callable[[str, bool], None]] = {
    "one_shot": check_one_shot,
    "two_shot": check_two_shot,
    "norm": check_norm,
    "parts": check_parts,
    "stream": check_stream,
    "gather": check_gather,
    "random": check_random,
    "waiting": check_waiting,
    "payloads": check_payloads,
    "lost": check_lost,
    "each_lost": check_each_lost,
}

SUITE = Suite(CHECKS)
run, interpret = SUITE.run, SUITE.interpret
