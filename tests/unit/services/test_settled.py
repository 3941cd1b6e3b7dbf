"""What is loaded is out of the garbage collector's sight; what comes later is collected as ever."""

from __future__ import annotations

import gc
import weakref
from importlib import import_module

import pytest

from services.runtime.memory import importing, keep_what_is_loaded


class Knot:
    """Refers to itself: only the collector ends it."""

    def __init__(self) -> None:
        self.itself = self


def test_a_full_collection_sees_only_what_came_later() -> None:
    old, before = Knot(), len(gc.get_objects())
    try:
        keep_what_is_loaded()
        assert len(gc.get_objects()) < before / 10
        gone = weakref.ref(Knot())
        assert gone() is not None
        gc.collect()
        assert gone() is None
        assert old.itself is old
    finally:
        gc.unfreeze()


def test_what_is_unused_is_absent_while_a_process_imports_and_there_afterwards() -> None:
    try:
        with importing("wave"):
            assert not gc.isenabled()
            with pytest.raises(ModuleNotFoundError):
                import_module("wave")
        assert gc.isenabled()
        assert gc.get_freeze_count() > 0
        assert import_module("wave").__name__ == "wave"
    finally:
        gc.unfreeze()
