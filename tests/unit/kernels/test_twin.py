"""A twin calls the version for its first argument; one description says what kernels know of a device."""

from __future__ import annotations

import sys
from types import ModuleType

import pytest
import torch

from engine.kernels import device
from engine.kernels.device import describe, twin


def test_the_plain_version_computes_on_the_cpu_and_its_description_stays() -> None:
    @twin("nobody.imports.this")
    def double(x: torch.Tensor, *, more: int = 0) -> torch.Tensor:
        """Twice as much."""
        return 2 * x + more

    assert double(torch.ones(1), more=1).tolist() == double.reference(torch.ones(1), more=1).tolist() == [3.0]
    assert (double.__doc__, double.__name__) == ("Twice as much.", "double")


def test_the_function_of_the_same_name_computes_where_triton_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    kernels = ModuleType("kernels_of_this_test")
    kernels.double = lambda x, *, more=0: (x, more)  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, kernels.__name__, kernels)
    monkeypatch.setattr(device, "use_triton", lambda x: x.is_floating_point())

    @twin(kernels.__name__)
    def double(x: torch.Tensor, *, more: int = 0) -> object:
        return "plain"

    x = torch.ones(1)
    assert double(x, more=3) == (x, 3)
    assert double(x.int()) == "plain"


def test_without_a_gpu_work_is_dealt_out_as_for_an_h200() -> None:
    found = describe(torch.device("cpu"))
    assert (found.processors, found.has_tma, found.is_hopper) == (132, False, False)


@pytest.mark.parametrize(
    ("capability", "processors", "has_tma", "is_hopper"),
    [((8, 0), 108, False, False), ((9, 0), 132, True, True), ((10, 0), 148, True, False)],
)
def test_a_gpu_is_described_by_what_it_says_of_itself(
    capability: tuple[int, int], processors: int, has_tma: bool, is_hopper: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    properties = type("Properties", (), {"multi_processor_count": processors})
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capability)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: properties)
    found = describe.__wrapped__(torch.device("cuda"))
    assert (found.processors, found.has_tma, found.is_hopper) == (processors, has_tma, is_hopper)
