# mypy: allow-untyped-calls
"""Obstacles to capturing the passes of a model of `transformers`, found by watching passes.

A graph repeats the launches of one pass, without Python. So a pass must not wait for the GPU's numbers, bring others from the
host, or leave something in the model for the next one.
"""

from __future__ import annotations

import traceback
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

WAITING = "synchronizing"  # a word of the error that torch raises


class Watch(TorchDispatchMode):
    """Sees the operations of passes on the meta device, and what they leave in the modules."""

    def __init__(self, network: torch.nn.Module) -> None:
        super().__init__()
        self._modules = dict(network.named_modules())
        self._after_passes: list[dict[str, dict[str, object]]] = []  # kept alive: ids stay theirs
        self._brought = ""  # the first operation that reads an array of the host

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = op(*args, **(kwargs or {}))
        given = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        is_there = any(leaf.is_meta for leaf in (*given, *tree_leaves(found)) if isinstance(leaf, torch.Tensor))
        # A number of the host is an argument of the kernel; an array has to be copied.
        copies = str(op).startswith(("aten._to_copy", "aten.copy_"))
        if is_there and any(not leaf.is_meta and (leaf.dim() or copies) for leaf in given):
            self._brought = self._brought or str(op)
        return found

    def next(self) -> None:
        """Tell that a pass is over. The first one may leave what it likes."""
        self._after_passes.append({name: _kept_by(module) for name, module in self._modules.items()})

    def obstacle(self) -> str:
        """The reason why no pass can be captured; "": the passes showed none."""
        if self._brought:
            return f"its passes bring numbers from the host ({self._brought})"
        first, last = self._after_passes[0], self._after_passes[-1]
        for name in self._modules:
            before, after = ({key: _mark_of(value) for key, value in at[name].items()} for at in (first, last))
            if changed := sorted(key for key in before.keys() | after.keys() if before.get(key) != after.get(key)):
                return f"its passes change {', '.join(changed)} of {name or 'the model'}"
        return ""


def _kept_by(module: torch.nn.Module) -> dict[str, object]:
    """The attributes of a module besides its parts."""
    own = {key: value for key, value in vars(module).items() if key not in ("_parameters", "_modules", "_buffers")}
    return own | module._buffers


def _mark_of(value: object) -> object:
    """A number or text itself, else which object it is."""
    if isinstance(value, torch.Tensor):  # another view of the same memory is no change
        return value.untyped_storage()._cdata, tuple(value.shape)
    return value if isinstance(value, int | float | str | None) else id(value)


def waiting_in(run: Callable[[], None]) -> str:
    """Run passes on a GPU; return why they can't be captured if the host waits for the GPU within one, else ""."""
    before = torch.cuda.get_sync_debug_mode()
    try:
        with warnings.catch_warnings():  # torch calls the mode a prototype
            warnings.simplefilter("ignore", UserWarning)
            torch.cuda.set_sync_debug_mode("error")
        run()
    except RuntimeError as error:
        if WAITING not in str(error):
            raise
        return f"its passes wait for the GPU: {_place_of(error)}"
    finally:
        torch.cuda.set_sync_debug_mode(before)
    return ""


def _place_of(error: BaseException) -> str:
    """The innermost line of transformers that raised it."""
    lines = [
        f"line {line} of {frame.f_globals['__name__']} in {frame.f_code.co_name}"
        for frame, line in traceback.walk_tb(error.__traceback__)
        if frame.f_globals.get("__name__", "").startswith("transformers.")
    ]
    return lines[-1] if lines else "outside of transformers"
