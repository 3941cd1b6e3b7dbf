"""Words that streams wait for, with a driver that only notes what it is asked for."""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterator
from types import SimpleNamespace

import pytest
import torch

from kvtransfer.cuda import driver, signals
from kvtransfer.cuda.signals import StreamSignals

ON_DEVICE = 1 << 40
STREAM = 77


class Driver:
    """The calls that were made, as the driver gets them. `refuses`: one that fails."""

    def __init__(self) -> None:
        self.calls: list[tuple[object, ...]] = []
        self.refuses = ""

    def __getattr__(self, name: str) -> object:
        def call(*arguments: object) -> int:
            if name == "cuMemHostGetDevicePointer_v2":
                arguments[0]._obj.value = arguments[1].value + ON_DEVICE  # type: ignore[attr-defined]
            given = tuple(getattr(each, "value", None) for each in arguments)
            self.calls.append((name, *given))
            return 2 if name == self.refuses else 0

        return call


@pytest.fixture
def called(monkeypatch: pytest.MonkeyPatch) -> Iterator[Driver]:
    made = Driver()
    monkeypatch.setattr(driver, "_library", lambda: made)
    monkeypatch.setattr(signals, "use_device", lambda index: made.calls.append(("context", index)))
    monkeypatch.setattr(torch.cuda, "init", lambda: None)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: SimpleNamespace(cuda_stream=STREAM))
    yield made
    gc.collect()


def test_words_are_waited_for_and_written_in_the_current_stream_of_each_thread(called: Driver) -> None:
    memory = torch.zeros(1 << 12, dtype=torch.uint8)
    own, there = StreamSignals(memory, torch.device("cuda:0")), memory.data_ptr() + ON_DEVICE
    called.calls.clear()
    own.wait(64, 5)
    own.write(128, (1 << 32) - 1)
    assert called.calls == [
        ("cuStreamWaitValue32_v2", STREAM, there + 64, 5, 0),
        ("cuStreamWriteValue32_v2", STREAM, there + 128, (1 << 32) - 1, 0),
    ]
    called.calls.clear()
    other = threading.Thread(target=own.wait, args=(0, 1))
    other.start()
    other.join()
    assert called.calls == [("context", 0), ("cuStreamWaitValue32_v2", STREAM, there, 1, 0)]


def test_memory_is_pinned_as_long_as_its_words_are_used(called: Driver) -> None:
    """Later memory may be at the same address, and what is pinned there can't be pinned again."""
    memory = torch.zeros(1 << 12, dtype=torch.uint8)
    address = memory.data_ptr()
    own = StreamSignals(memory, torch.device("cuda"))
    assert ("cuMemHostRegister_v2", address, 1 << 12, 3) in called.calls
    assert ("cuMemHostUnregister", address) not in called.calls
    del own
    gc.collect()
    assert called.calls[-1] == ("cuMemHostUnregister", address)


def test_memory_that_can_t_be_pinned_is_told_with_the_remedy(called: Driver) -> None:
    called.refuses = "cuMemHostRegister_v2"
    with pytest.raises(
        MemoryError, match=r"2 MiB between stages can't be pinned: raise the limit on locked memory \(cuMem"
    ):
        StreamSignals(torch.zeros(2 << 20, dtype=torch.uint8), torch.device("cuda"))
