# mypy: allow-untyped-calls
"""A CUDA device that isn't there. Its tensors say that they are on it; their numbers are on the CPU, where torch computes them.

Within `made_up`, torch takes "cuda" for a device and code written for a GPU runs. Kernels are not launched: `Card.kernels` gets
them. A CardError says what a real card would refuse, or what would be wrong there without an error:

- tensors of two devices in one operation, or a tensor of the CPU given to a kernel;
- waiting for the card while a graph is captured, or within `Card.must_not_wait`;
- memory that a graph reads and nobody keeps until its replay;
- pinned memory that is read or written anew before its copy is over.

All streams are one: work begins in the order in which it is launched.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._device import _device_constructors
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

from tests.unit.kernels.card_memory import PinnedMemory
from tests.unit.kernels.card_rules import BY_INDEX, MOVES, ON_CARD, WAITS, CardError

CARD = torch.device("cuda:0")
HOPPER = (9, 0)
aten = torch.ops.aten


class OnCard(torch.Tensor):
    """A tensor of the card."""

    held: torch.Tensor  # its numbers, on the CPU
    card: Card

    @staticmethod
    def __new__(cls, held: torch.Tensor, card: Card) -> OnCard:
        made: OnCard = torch.Tensor._make_wrapper_subclass(
            cls,
            held.size(),
            strides=held.stride(),
            storage_offset=held.storage_offset(),
            dtype=held.dtype,
            device=CARD,
        )
        made.held, made.card = held, card
        return made

    __torch_function__ = torch._C._disabled_torch_function_impl

    @classmethod
    def __torch_dispatch__(cls, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        (first, *_) = (leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, OnCard))
        return first.card.compute(op, args, kwargs or {})

    def __repr__(self, **_: Any) -> str:
        return f"OnCard({list(self.shape)}, {self.dtype})"

    def data_ptr(self) -> int:
        return self.held.data_ptr()

    # What follows is in Python as torch without CUDA can't do it: it lacks a guard of the device.

    def copy_(self, source: torch.Tensor, non_blocking: bool = False) -> torch.Tensor:
        return self.card.copy(self, source, non_blocking)

    def __float__(self) -> float:
        return float(self.item())

    def nonzero(self, **_: Any) -> torch.Tensor:
        self.card.wait("nonzero")
        return OnCard(self.held.nonzero(), self.card)

    def contiguous(self, memory_format: Any = torch.contiguous_format) -> torch.Tensor:
        return self if self.is_contiguous() else self.clone(memory_format=torch.contiguous_format)

    def __getitem__(self, index: Any) -> torch.Tensor:
        return self.card.of_index(self, index, lambda held, where: held[where])

    def __setitem__(self, index: Any, value: Any) -> None:
        if isinstance(value, torch.Tensor) and not isinstance(value, OnCard) and value.dim():
            raise CardError("values of the CPU are written to places on the card")
        self.card.of_index(self, index, lambda held, where: held.__setitem__(where, self.card.held(value)))

    def tolist(self) -> Any:
        self.card.wait("tolist")
        return self.held.tolist()

    def numpy(self, **_: Any) -> Any:
        raise CardError("numpy of a tensor on the card")


@dataclass(slots=True)
class Graph:
    """A captured pass: nothing computes it again, but what it reads must still be there."""

    outside: dict[int, StorageWeakRef] = field(default_factory=dict)  # memory that was there before
    inside: dict[int, StorageWeakRef] = field(default_factory=dict)
    is_captured: bool = False

    def replay(self) -> None:
        if not self.is_captured:
            raise CardError("a graph is replayed that was not captured")
        gone = [ref for ref in self.outside.values() if ref.expired()]
        if gone:
            raise CardError(f"a graph reads or writes {len(gone)} tensors that nobody has kept")

    def pool(self) -> tuple[int, int]:
        return (0, 1)

    def saw(self, held: torch.Tensor, *, is_new: bool) -> None:
        ref = StorageWeakRef(held.untyped_storage())
        if is_new:
            self.inside.setdefault(ref.cdata, ref)
        elif ref.cdata not in self.inside:
            self.outside.setdefault(ref.cdata, ref)


class Card:
    """`kernels(kernel, grid, variant, arguments, options)` is called for each launch, with the tensors' numbers."""

    def __init__(self, kernels: Callable[..., None]) -> None:
        self.kernels = kernels
        self.graph: Graph | None = None
        self.num_ops = 0
        self._may_wait = True
        self.sync_debug_mode: int | str = 0
        self.pinned = PinnedMemory()

    @contextmanager
    def must_not_wait(self) -> Iterator[None]:
        """Within, the host waits for events alone."""
        before, self._may_wait = self._may_wait, False
        try:
            yield
        finally:
            self._may_wait = before

    def wait(self, what: str) -> None:
        """Whatever waits for the card calls this."""
        if self.graph is not None:
            raise CardError(f"{what} waits for the card while a graph is captured")
        if not self._may_wait:
            raise CardError(f"{what} waits for the card")
        if self.sync_debug_mode == "error":
            raise RuntimeError("called a synchronizing CUDA operation")
        self.pinned.finish(self.pinned.begun())

    def launch(self, kernel: Any, grid: tuple[int, ...], variant: object, *arguments: Any, **options: Any) -> None:
        """Takes the place of `Kernel.launch`."""
        name = kernel.function.__name__
        for at, argument in enumerate((*arguments, *options.values())):
            is_here = isinstance(argument, torch.Tensor) and not isinstance(argument, OnCard)
            if is_here and not self.pinned.has(argument):  # a kernel reaches pinned memory
                raise CardError(f"{name}: argument {at} is on the CPU")
        if max((*grid, 1, 1)[1:]) > 65535 or grid[0] >= 1 << 31 or min(grid) < 0:
            raise CardError(f"{name}: a grid of {grid}")
        arguments, options = self.held((arguments, options))
        self.kernels(kernel, grid, variant, arguments, options)

    def compute(self, op: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        """One of torch's operations."""
        self.num_ops += 1
        given = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        packet, everything = op.overloadpacket, [*args, *kwargs.values()]
        to = next((each for each in everything if isinstance(each, torch.device)), None)
        here = [tensor for tensor in given if isinstance(tensor, OnCard)]
        if packet is aten.copy_:
            return self.copy(args[0], args[1], bool([*args, False][2] or kwargs.get("non_blocking")))
        if packet is aten._has_compatible_shallow_copy_type:  # `Module.to` asks
            return False
        if packet in (aten.pin_memory, aten._pin_memory):
            return self.pinned.take(args[0].clone())
        if to is not None and packet in MOVES and {to.type, given[0].device.type} == {"cpu", "cuda"}:
            dtype = next((each for each in everything if isinstance(each, torch.dtype)), args[0].dtype)
            return self._moved(args[0], to, dtype, asks_not_to_wait=bool(kwargs.get("non_blocking")))
        pinned = kwargs.pop("pin_memory", None)
        is_on_card = bool(here) if to is None else to.type == "cuda"
        if not is_on_card:
            found = op(*self.held(args), **self.held(kwargs))
            return self.pinned.take(found) if pinned else found
        self._check(op, given, args)
        args, kwargs = tree_map_only(torch.device, lambda _: torch.device("cpu"), self.held((args, kwargs)))
        return self._results(op, args, kwargs, here)

    def of_index(self, tensor: OnCard, index: Any, act: Callable[[torch.Tensor, Any], Any]) -> Any:
        """Elements of the tensor at an index as in Python."""
        lists = [each for each in (index if isinstance(index, tuple) else (index,)) if isinstance(each, (list, range))]
        for where in tree_leaves(index):
            if isinstance(where, torch.Tensor) and not isinstance(where, OnCard):
                raise CardError("an index of the CPU into a tensor of the card")
            if isinstance(where, torch.Tensor) and (where.dtype in (torch.bool, torch.uint8) or not where.dim()):
                self.wait("an index by a mask, or by a number of the card")
        if lists:
            self.wait("an index by a list")
        return self._wrapped(act(self.held(tensor), self.held(index)), [tensor])

    def _results(self, op: Any, args: Any, kwargs: dict[str, Any], here: list[OnCard]) -> Any:
        found = ON_CARD.get(op, op)(*args, **kwargs)
        if "empty" in str(op):
            found.zero_()  # the same numbers in each run
        return self._wrapped(found, here)

    def _wrapped(self, found: Any, here: list[OnCard]) -> Any:
        if self.graph is not None:
            known = {tensor.held.untyped_storage()._cdata for tensor in here}
            for tensor in (leaf for leaf in tree_leaves(found) if isinstance(leaf, torch.Tensor)):
                if tensor.untyped_storage()._cdata not in known:
                    self.graph.saw(tensor, is_new=True)
        same = {id(tensor.held): tensor for tensor in here}

        def one(tensor: torch.Tensor) -> torch.Tensor:
            return same[id(tensor)] if id(tensor) in same else OnCard(tensor, self)

        return tree_map_only(torch.Tensor, one, found)

    def held(self, tree: Any) -> Any:
        """The tensors' numbers instead of the tensors."""

        def one(tensor: OnCard) -> torch.Tensor:
            if self.graph is not None:
                self.graph.saw(tensor.held, is_new=False)
            return tensor.held

        return tree_map_only(OnCard, one, tree)

    def _check(self, op: Any, given: list[torch.Tensor], args: Any) -> None:
        packet = op.overloadpacket
        wrong = [tensor for tensor in given if not isinstance(tensor, OnCard)]
        if 0 < len(wrong) < len(given):
            raise CardError(f"{op}: {len(wrong)} of {len(given)} tensors are on the CPU")
        by_mask = packet in BY_INDEX and any(
            index is not None and index.dtype in (torch.bool, torch.uint8) for index in args[1]
        )
        by_counts = packet is aten.repeat_interleave and op is not aten.repeat_interleave.self_int
        in_a_loop = packet is aten._grouped_mm and given[0].dtype != torch.bfloat16  # a product for each group
        if packet in WAITS or by_mask or by_counts or in_a_loop:
            self.wait(str(op))

    def copy(self, into: torch.Tensor, source: torch.Tensor, asks_not_to_wait: bool) -> torch.Tensor:
        ends = tuple(isinstance(end, OnCard) for end in (into, source))
        numbers = [self.held(end) for end in (into, source)]
        if ends in ((True, True), (False, False)):
            numbers[0].copy_(numbers[1])
            return into
        host = numbers[ends.index(False)]
        if self.graph is not None:
            raise CardError("a copy between host and card is captured")
        if asks_not_to_wait and ends == (False, True) and not self.pinned.has(host):
            raise CardError("a copy into memory that isn't pinned, without waiting")
        if not (asks_not_to_wait and self.pinned.has(host)):
            self.wait("a copy of memory that isn't pinned" if asks_not_to_wait else "a copy")
            numbers[0].copy_(numbers[1])
        elif ends == (True, False):
            into_card = numbers[0]
            into_card.copy_(host)
            self.pinned.begin(host, host, comes_back=False)
        else:
            self.pinned.begin(host, numbers[1], comes_back=True)
        return into

    def _moved(
        self, source: torch.Tensor, to: torch.device, dtype: torch.dtype, *, asks_not_to_wait: bool
    ) -> torch.Tensor:
        """`Tensor.to` between host and card."""
        if to.type == "cpu":
            return self.copy(torch.empty(source.shape, dtype=source.dtype), source, asks_not_to_wait).to(dtype)
        there = OnCard(torch.empty(source.shape, dtype=source.dtype), self)
        if self.graph is not None:
            self.graph.saw(there.held, is_new=True)
        return self.copy(there, source, asks_not_to_wait).to(dtype)


class _Mode(TorchDispatchMode):
    """Sees what has no tensor of the card among its arguments."""

    def __init__(self, card: Card) -> None:
        super().__init__()
        self._card = card

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return self._card.compute(op, args, dict(kwargs or {}))


class _Event:
    def __init__(self, card: Card) -> None:
        self._card, self._begun = card, 0

    def record(self, stream: object = None) -> None:
        self._begun = self._card.pinned.begun()

    def synchronize(self) -> None:
        if self._card.graph is not None:
            raise CardError("an event is waited for while a graph is captured")
        self._card.pinned.finish(self._begun)

    def query(self) -> bool:
        self._card.pinned.finish(self._begun)
        return True

    def elapsed_time(self, other: object) -> float:
        return 1.0


class _Stream:
    """All are one, but for their numbers."""

    cuda_stream = 0
    device = CARD

    def __init__(self, card: Card) -> None:
        self._card = card

    def wait_stream(self, other: object) -> None: ...

    def wait_event(self, event: object) -> None: ...

    def synchronize(self) -> None:
        self._card.wait("a stream")


class _Generator(torch.Generator):
    """Of whatever device; its numbers come on the CPU."""

    def __new__(cls, device: object = None) -> _Generator:
        return super().__new__(cls)


@contextmanager
def made_up(kernels: Callable[..., None], *, capability: tuple[int, int] = HOPPER) -> Iterator[Card]:
    """Within, torch has a card; threads of pools that begin within have it as well."""
    from engine.kernels import device, launch
    from engine.kernels.attention import dispatch

    card = Card(kernels)
    submit, tensor = ThreadPoolExecutor.submit, torch.tensor

    def with_mode(pool: ThreadPoolExecutor, act: Callable[..., Any], /, *args: Any, **named: Any) -> Any:
        def within() -> Any:
            with torch.inference_mode(), _Mode(card):
                return act(*args, **named)

        return submit(pool, within)

    def a_tensor(data: Any, *, pin_memory: bool = False, device: Any = None, **named: Any) -> torch.Tensor:
        made = tensor(data, **named)
        if pin_memory:
            return card.pinned.take(made)
        return made if device is None else made.to(device)

    @contextmanager
    def captured(graph: Graph, **_: Any) -> Iterator[None]:
        card.graph = graph
        try:
            yield
        finally:
            card.graph = None
        graph.is_captured = True

    def kept_for(tensor: torch.Tensor, stream: object) -> None:
        if not tensor.is_cuda:
            raise CardError(f"record_stream of a tensor on {tensor.device}")

    properties = SimpleNamespace(multi_processor_count=132, major=capability[0], minor=capability[1])
    stream = _Stream(card)
    fakes: dict[str, Any] = {
        "_lazy_init": lambda: None,
        "is_available": lambda: True,
        "device_count": lambda: 1,
        "current_device": lambda: 0,
        "set_device": lambda device: None,
        "device": lambda device: nullcontext(),
        "get_device_name": lambda device=None: "no card",
        "get_device_capability": lambda device=None: capability,
        "get_device_properties": lambda device=None: properties,
        "mem_get_info": lambda device=None: (64 << 20, 64 << 20),
        "empty_cache": lambda: None,
        "_sleep": lambda cycles: None,
        "Event": lambda enable_timing=False, **_: _Event(card),
        "Stream": lambda *_, **named: stream,
        "current_stream": lambda device=None: stream,
        "stream": lambda stream: nullcontext(),
        "get_sync_debug_mode": lambda: card.sync_debug_mode,
        "set_sync_debug_mode": lambda mode: setattr(card, "sync_debug_mode", mode),
        "synchronize": lambda device=None: card.wait("torch.cuda.synchronize"),
        "CUDAGraph": Graph,
        "graph": captured,
        "is_current_stream_capturing": lambda: card.graph is not None,
    }
    _device_constructors()  # torch remembers the functions of its first call
    with ExitStack() as stack:
        for name, fake in fakes.items():
            stack.enter_context(mock.patch.object(torch.cuda, name, fake))
        for owner, name, fake in (
            (ThreadPoolExecutor, "submit", with_mode),
            (torch, "tensor", a_tensor),
            (torch, "Generator", _Generator),
            (torch.Tensor, "record_stream", kept_for),
            (launch.Kernel, "launch", functools.partialmethod(lambda kernel, *g, **n: card.launch(kernel, *g, **n))),
        ):
            stack.enter_context(mock.patch.object(owner, name, fake))
        for cached in (device.describe, dispatch._second_stream):
            cached.cache_clear()
            stack.callback(cached.cache_clear)
        stack.enter_context(torch.inference_mode())  # without, torch lacks a guard of the device
        stack.enter_context(_Mode(card))
        yield card
